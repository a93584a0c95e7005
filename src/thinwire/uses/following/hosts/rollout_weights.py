"""The rollout's end of any host: follow a trainer's state, and bring the host's own model up to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from torch import nn

from thinwire.files.checkpoint import read_checkpoint
from thinwire.links.address import Address
from thinwire.links.security import read_token
from thinwire.state.loaded.loader_recording import Load
from thinwire.types import InputError, LinkError, require
from thinwire.uses.following.follower_base import TIMEOUT, Applied
from thinwire.uses.following.mirror import Base
from thinwire.uses.following.pull.store_reader import ShelfReader
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.shards.shard_follower import ShardFollower, shard_addresses

PAUSES = 4096  # that are remembered


@dataclass(frozen=True)
class TrainerAddress:
    """Where a trainer publishes: what a host's ``init_info`` has.

    ``address``: "host:port", "host:7200-7207" for a sharded trainer (several hosts with commas), or the
    folder or URL of a store. ``token`` or ``token_file`` proves that this end may follow; without either,
    THINWIRE_TOKEN does where it is set. ``base``: a folder or file of safetensors that is already here and
    that the publisher knows, such as the checkpoint that the host has loaded: then the first version need
    not cross whole. ``state``: a file to go on from. ``kept``: the host's
    parameters that may stay as they are. ``timeout``: seconds for the first version.
    """

    address: str
    token: str = ""
    token_file: str = ""
    base: str = ""
    state: str = ""
    kept: tuple[str, ...] = ()
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        require(self.timeout > 0, InputError, f"timeout={self.timeout} is not above 0 seconds; give more")
        two = bool(self.token) and bool(self.token_file)
        require(not two, InputError, "both token and token_file are given; give one")
        object.__setattr__(self, "kept", tuple(self.kept))
        self.place  # noqa: B018 -- says what is no address

    @property
    def place(self) -> list[Address] | str:
        """The publishers' addresses, or the store's folder or URL. Errors: ``InputError`` for neither."""
        store = "/" in self.address or Path(self.address).is_dir()
        return self.address if store else shard_addresses(self.address, "the trainer's address")

    def shared_token(self) -> bytes | None:
        """Return the token that both ends share, if any. Errors: ``InputError`` for a file that is none."""
        return self.token.encode() if self.token else read_token(self.token_file or None)


@dataclass(frozen=True)
class VersionWanted:
    """What an update is to bring: at least ``version``, within ``timeout`` seconds; 0: the newest here."""

    version: int = 0
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        good = type(self.version) is int and self.version >= 0
        require(
            good, InputError, f"version={self.version!r} is no version; give a number, or 0 for the newest"
        )
        require(self.timeout > 0, InputError, f"timeout={self.timeout} is not above 0 seconds; give more")


class Pause(NamedTuple):
    """How long an engine stood still for a version: until it was here, then until it was in the model."""

    version: int
    waited: float  # seconds; none where the trainer asks once the version is here
    seconds: float


class RolloutWeights:
    """A host's model that follows a trainer's state.

    ``update`` belongs to the thread that runs the model, between two of its steps: no step sees two versions.
    ``pauses`` says how long each one took. ``relay``: an address at which to serve others, as ``Follower``
    does; ``held``: tensors that are here, in place of a base's. Errors: as ``Follower``.
    """

    def __init__(
        self, trainer: TrainerAddress, relay: tuple[str, int] | None = None, held: Base | None = None
    ) -> None:
        place, token = trainer.place, trainer.shared_token()
        saved = bool(trainer.state) and Path(trainer.state).is_file()
        read = bool(trainer.base) and not saved and held is None
        base = read_checkpoint(Path(trainer.base)) if read else held
        state = trainer.state or None
        self._kept, self._first = trainer.kept, trainer.timeout
        self.pauses: deque[Pause] = deque(maxlen=PAUSES)
        self.follower: Follower | ShardFollower | ShelfReader
        if isinstance(place, str):
            self.follower = ShelfReader(place, token, base=base, state=state)
        elif len(place) == 1:
            self.follower = Follower(*place[0], token, None, relay, base=base, state=state)
        else:
            one = state or (None if relay is None else relay[0])
            told = f"{one} is of one part, and a sharded trainer has several; give a base, no state or relay"
            require(one is None, InputError, told)
            self.follower = ShardFollower(trainer.address, token, base=base)

    def update(self, model: nn.Module, load: Load, wanted: VersionWanted = VersionWanted()) -> Applied:
        """Bring ``model``, which ``load`` fills from a checkpoint, to what is wanted; return what that did.

        Errors: ``LinkError`` naming the trainer where the version does not come in time; then the model has
        the version that it had. ``InputError`` for a state that does not fill the model.
        """
        least, first, began = max(1, wanted.version), not self.follower.held.number, monotonic()
        limit = max(wanted.timeout, self._first) if first else wanted.timeout
        self.follower.wait(least, limit, current=wanted.version > 0)
        here = monotonic()
        while (applied := self.follower.load_into(model, load, self._kept)).version.number < least:
            if monotonic() - began > limit:
                raise LinkError(
                    f"version {least} is still being written here after {limit:g} s; update again"
                )
        self.pauses.append(Pause(applied.version.number, here - began, monotonic() - here))
        return applied

    def close(self) -> None:
        """Stop following. Safe to call twice."""
        self.follower.close()
