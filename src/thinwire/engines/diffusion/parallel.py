"""Take a transformer apart over the ranks of a mesh, once all of them have said that theirs is the same."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary

import torch
from torch import nn

from thinwire.engines.diffusion import host
from thinwire.engines.diffusion.batch import Batch
from thinwire.engines.diffusion.coding import Coding
from thinwire.engines.diffusion.displaced import Displaced
from thinwire.engines.diffusion.division import Division, Mode, Session
from thinwire.engines.diffusion.gather import Gather
from thinwire.engines.diffusion.guidance import Guidance
from thinwire.engines.diffusion.inputs import weights_checksum
from thinwire.engines.diffusion.message import Message, is_last
from thinwire.engines.diffusion.pipe import Pipe
from thinwire.engines.diffusion.tally import Tally
from thinwire.engines.diffusion.ulysses import Ulysses
from thinwire.exchange import MeshExchange
from thinwire.exchange.framing import words_of
from thinwire.links.mailbox import Mailbox
from thinwire.links.mesh import Peer
from thinwire.types import InputError, LinkError, require

ONE = "one"  # each rank computes everything
MODES: dict[str, type[Mode]] = {
    "gather": Gather,
    "displaced": Displaced,
    "ulysses": Ulysses,
    "guidance": Guidance,
    "batch": Batch,
    "pipe": Pipe,
}
_USES: WeakKeyDictionary[Mailbox, Counter[str]] = WeakKeyDictionary()


class Parallel:
    """A model that runs over several ranks: what it exchanged so far."""

    def __init__(self, mode: str, session: Session | None = None) -> None:
        self.mode, self._session = mode, session
        self.tally = Tally() if session is None else session.tally

    @property
    def generation(self) -> int:
        """Number of the picture, from 1: a new one begins by itself where time or shapes jump."""
        return 0 if self._session is None else self._session.clock.generation

    def reset(self) -> None:
        """Let the next call of the model begin a new picture; all ranks call this at the same place."""
        if self._session is not None:
            self._session.reset()


@contextmanager
def over_ranks(
    model: nn.Module,
    peers: Mapping[int, Peer],
    attention: Coding,
    output: Coding,
    division: Division | None = None,
    deadline: float = 60.0,
) -> Iterator[Parallel]:
    """Run ``model`` over this rank and ``peers`` inside the block; see ``thinwire.parallel``."""
    division = division or Division()
    mode, known = division.mode, (*MODES, ONE)
    text = f"there is no mode {mode!r}; choose {', '.join(known[:-1])} or {ONE}"
    require(mode in known, InputError, text)
    if mode == ONE or not peers:
        yield Parallel(ONE)
        return
    exchange = MeshExchange(own_rank(peers), peers, name=f"diffusion{uses_of(peers)}")
    try:
        with told(exchange):
            check_whole(model)
            session = MODES[mode](exchange, attention, output, division, deadline)
        try:
            with session.attached(model):
                own = facts(model, f"{attention!r}, {output!r}, {division!r}", weights_checksum(model))
                agree(exchange, own, deadline)
                yield Parallel(mode, session)
        finally:
            session.leave()
    finally:
        exchange.close()


@contextmanager
def told(exchange: MeshExchange) -> Iterator[None]:
    """Tell the other ranks of an error in the block, who would else wait for what this rank has."""
    try:
        yield
    except BaseException:
        with suppress(LinkError):
            exchange.post(0, Message(stopped=True).pack())
        raise


def check_given(model: object, recipe: object, deadline: object) -> None:
    """Raise ``InputError`` for what cannot be spread over ranks, or would wait for ever."""
    kind = type(model).__name__
    text = f"a {kind} is no model that can be spread over ranks; give the pipeline's transformer"
    require(isinstance(model, nn.Module), InputError, text)
    require(isinstance(recipe, str), InputError, f"{recipe!r:.40} is no recipe; give its name")
    seconds = isinstance(deadline, int | float) and 0 < deadline < math.inf
    require(seconds, InputError, f"a deadline of {deadline!r:.40} is no number of seconds; give one above 0")


def check_whole(model: nn.Module) -> None:
    """Raise ``InputError`` for a model that was compiled."""
    text = "a compiled model cannot be taken apart; give it as it was, and compile its layers if at all"
    require(not hasattr(model, "_orig_mod"), InputError, text)


def own_rank(peers: Mapping[int, Peer]) -> int:
    """Return the rank that the links of a mesh are of; ``InputError`` where others are missing."""
    missing = set(range(len(peers) + 1)) - peers.keys()
    text = f"peers {sorted(peers)} are not all but one of the ranks from 0; connect all of them"
    require(len(missing) == 1, InputError, text)
    return missing.pop()


def uses_of(peers: Mapping[int, Peer]) -> int:
    """Number the uses of a mesh, so that none takes what an aborted one before it has left."""
    mailbox = peers[min(peers)].mailbox
    uses = _USES.setdefault(mailbox, Counter())
    uses["parallel"] += 1
    return uses["parallel"]


def facts(model: nn.Module, recipe: str, weights: int) -> dict[str, str]:
    """Return what all ranks must have in common; ``weights`` is a checksum."""
    return {
        "diffusers": host.version(),
        "torch": torch.__version__.partition("+")[0],
        "the model": type(model).__name__,
        "the recipe": recipe,
        "its weights (a checksum)": str(weights),
    }


def agree(
    exchange: MeshExchange, own: Mapping[str, str], deadline: float, held: Mapping[str, str] | None = None
) -> None:
    """Compare with all ranks what they must have in common; ``held``: where two ranks have it at all.

    Errors: ``InputError`` naming a rank; ``LinkError`` for one that is silent or has left.
    """
    exchange.post(0, Message(packets=[json.dumps({**own, **(held or {})}).encode()]).pack())
    for rank, data in exchange.collect(0, deadline, "what its model is", is_last).items():
        message = Message.unpack(data)
        message.check_sender(rank)
        theirs = words_of(b"".join(message.packets), f"rank {rank}")
        both = {what: value for what, value in (held or {}).items() if what in theirs}
        for what, value in {**own, **both}.items():
            other = str(theirs.get(what))[:200]
            text = f"rank {rank} has {what} {other!r}, and this rank {value!r}; make them alike"
            require(theirs.get(what) == value, InputError, text)
