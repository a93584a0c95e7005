"""Follow a sharded trainer: all of its parts as one state, of which a version is used once all have it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.links.address import Address
from thinwire.links.hub.station import SILENCE
from thinwire.state.layout import MAX_NBYTES
from thinwire.state.patches.patch import Version
from thinwire.state.replica import CHECK_EVERY
from thinwire.types import InputError, require
from thinwire.uses.following.follower_base import PATIENCE, AnyFollower
from thinwire.uses.following.mirror import Base
from thinwire.uses.following.push.follower import Follower, FollowingStatus
from thinwire.uses.following.shards.common_version import CommonVersion
from thinwire.uses.following.shards.joint_copy import JointCopy, PartMirror

if TYPE_CHECKING:  # models; a copy of arrays needs no torch
    from torch import nn

    from thinwire.state.loaded.loader_recording import Load

MOST = 1 << 12  # parts


def shard_addresses(text: str | Sequence[str], named: str = "a part's address") -> list[Address]:
    """Return the addresses of all parts: a range of ports a host, several with commas or as a list.

    Errors: ``InputError`` with the name of what was given for anything else.

    >>> [str(a) for a in shard_addresses("10.0.0.7:7200-7201, 10.0.0.8:7202")]
    ['10.0.0.7:7200', '10.0.0.7:7201', '10.0.0.8:7202']
    """
    found: list[Address] = []
    for one in text.split(",") if isinstance(text, str) else text:
        first, dash, last = one.strip().rpartition("-")
        ranged = bool(dash) and last.isdecimal() and ":" in first
        start = Address.parse(first if ranged else one, named, like=7200)
        end = int(last) if ranged else start.port
        right = start.port <= end < 1 << 16 and end - start.port < MOST
        require(right, InputError, f"{one.strip()!r} is no range of ports; write it like 192.0.2.7:7200-7207")
        found += [Address(start.host, port) for port in range(start.port, end + 1)]
    twice = next((a for a in found if found.count(a) > 1), None)
    require(twice is None, InputError, f"{twice} is given twice; give each part's address once")
    return found


class PartFollower(Follower):
    """Follow one part, whose patches wait for those of the others."""

    def __init__(self, of: ShardFollower, index: int, address: Address, *given: Any, **options: Any) -> None:
        self._of, self._index, self._address = of, index, address
        super().__init__(*address, *given, **options)

    @property
    def mirror(self) -> PartMirror:
        """What holds this part."""
        return self._mirror  # type: ignore[return-value]

    def _held_in(self, *given: Any) -> PartMirror:
        return PartMirror(self._of.common, self._index, str(self._address), *given)

    def _arrived(self, version: Version, nbytes: int, seconds: float) -> None:
        super()._arrived(version, nbytes, seconds)
        self._of.heard()

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        self._of.failed(error)


class ShardFollower(AnyFollower):
    """Keep a copy of what a ``ShardPublisher`` on each process of a trainer publishes.

    ``addresses``: those of all parts, in the trainer's order, as ``shard_addresses`` takes them:
    "10.0.0.7:7200-7207", several hosts with commas. Everything else is as for ``Follower``: ``wait``,
    ``apply_to``, ``load_into``, ``arrays``, ``write``, ``status``. ``base`` holds whole tensors; ``write``
    makes a file of them, to go on from. ``max_nbytes`` is of a part.

    A version counts once all parts have it. ``apply_to`` and ``load_into`` write each part's values into the
    model's own memory; whole tensors are put together for ``arrays``, ``tensors`` and ``write`` alone.

    Errors: as ``Follower``; ``InputError`` where the trainer has other parts than there are addresses. A
    ``LinkError`` of ``wait`` names a part that is behind.

    Use: ``ShardFollower("10.0.0.7:7200-7207", token)``.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        token: bytes | None = None,
        *,
        base: Base | None = None,
        patience: float = PATIENCE,
        silence: float = SILENCE,
        max_nbytes: int = MAX_NBYTES,
        check_every: int = CHECK_EVERY,
        name: str | None = None,
    ) -> None:
        super().__init__(patience)
        found = shard_addresses(addresses)
        self._newest = Version()
        self.common = CommonVersion([str(address) for address in found], self._met)
        options: Any = {"silence": silence, "max_nbytes": max_nbytes, "name": name}
        options |= {"base": base, "check_every": check_every}
        self.parts: list[PartFollower] = []
        try:
            with self.common.lock:  # no part moves before all are there
                for index, address in enumerate(found):
                    self.parts.append(PartFollower(self, index, address, token, **options))
                self._joint = JointCopy([part.mirror for part in self.parts], self.common)
        except BaseException:
            self._end()
            raise

    @property
    def held(self) -> Version:
        return self._newest

    @property
    def current(self) -> bool:
        return all(part.current for part in self.parts)

    @property
    def silence(self) -> float:
        return max(part.silence for part in self.parts)

    @property
    def clock(self) -> float:
        """The clock of the first part's publisher now, in seconds since the epoch."""
        return self.parts[0].clock

    @property
    def status(self) -> FollowingStatus:
        """Where it stands: bytes and rates of all parts, the longest round trip, the first part's clock."""
        each = [part.status for part in self.parts]
        first, newest = each[0], self._newest
        nbytes, trips, rates = sum(s.nbytes for s in each), [s.trip for s in each], [s.rate for s in each]
        whole = sum(s.ratio * s.nbytes for s in each)
        return FollowingStatus(
            version=self._joint.shown.number if newest.number else 0,
            held=newest.number,
            age=max(0.0, self.clock - newest.published) if newest.published else None,
            nbytes=nbytes,
            ratio=whole / nbytes if nbytes else 0.0,
            trip=max((t for t in trips if t is not None), default=None),
            rate=sum(r for r in rates if r is not None) or None,
            connected=all(s.connected for s in each),
            ahead=first.ahead,
            doubt=max(s.doubt for s in each),
            abandoned=sum(s.abandoned for s in each),
            restarts=max(s.restarts for s in each),
            error=str(self._fatal) if self._fatal is not None else None,
        )

    def heard(self) -> None:
        """Let whoever waits look again: a part has a version, or knows that it is the newest."""
        with self._changed:
            self._changed.notify_all()

    def failed(self, error: Exception) -> None:
        """Take what ended the following of a part: no more versions come of all."""
        with self._changed:
            self._fatal = self._fatal or (None if self._closing else error)
            self._changed.notify_all()

    def _met(self) -> None:
        """Note that all parts hold the same version."""
        self._joint.meet()
        with self._changed:
            self._newest = self._joint.held
            self._changed.notify_all()

    def _copy(self) -> JointCopy:
        return self._joint

    def _show(self, model: nn.Module, kept: Collection[str]) -> bool:
        return self._joint.show(model, kept)

    def _fill(self, model: nn.Module, load: Load, kept: Collection[str]) -> bool:
        return self._joint.fill(model, load, kept)

    def _end(self) -> None:
        self.common.close()
        for part in self.parts:
            part.close()

    def _missed(self, version: int, timeout: float) -> str:
        if self._closing:
            return "this end stopped following"
        return f"waited {timeout:g} s for version {version} of all parts: {self._late()}"

    def _lost(self) -> str:
        return f"no sign of a part for {self._patience:g} s: {self._late()}"

    def _late(self) -> str:
        """Return which part is behind, and the likely cause."""
        behind = self.common.behind() or [max(range(len(self.parts)), key=lambda i: self.parts[i].silence)]
        part = self.parts[behind[0]]
        more = f" (and {len(behind) - 1} more)" if len(behind) > 1 else ""
        return f"{part.peer}{more} is behind the others; {part.diagnosis()}"
