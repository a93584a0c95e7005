"""Take a transformer apart over the ranks of a mesh, once all of them have said that theirs is the same."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from weakref import WeakKeyDictionary

import torch
from torch import nn

from thinwire.collectives import MeshExchange
from thinwire.collectives.framing import words_of
from thinwire.links.mailbox import Mailbox
from thinwire.links.mesh import Peer
from thinwire.types import InputError, LinkError, require
from thinwire.uses.pictures.context_parallel import host
from thinwire.uses.pictures.context_parallel.batch import Batch
from thinwire.uses.pictures.context_parallel.coding import Coding
from thinwire.uses.pictures.context_parallel.displaced import Displaced
from thinwire.uses.pictures.context_parallel.division import Division, Mode, Session
from thinwire.uses.pictures.context_parallel.drawing import drawing_alike, state_of
from thinwire.uses.pictures.context_parallel.gather import Gather
from thinwire.uses.pictures.context_parallel.guidance import Guidance
from thinwire.uses.pictures.context_parallel.host_plan import Plan
from thinwire.uses.pictures.context_parallel.message import Message, is_last
from thinwire.uses.pictures.context_parallel.pipe import Pipe
from thinwire.uses.pictures.context_parallel.tally import Tally
from thinwire.uses.pictures.context_parallel.ulysses import Ulysses
from thinwire.uses.pictures.context_parallel.weights import Weights, is_setting

ONE, BATCH = "one", "batch"  # each rank computes everything, or pictures of its own
MODES: dict[str, type[Mode]] = {
    "gather": Gather,
    "displaced": Displaced,
    "ulysses": Ulysses,
    "guidance": Guidance,
    BATCH: Batch,
    "pipe": Pipe,
}
_ENDED: WeakKeyDictionary[Mailbox, list[str]] = WeakKeyDictionary()  # uses, since all ranks last agreed


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
    plan: Plan | None = None,
) -> Iterator[Parallel]:
    """Run ``model`` over this rank and ``peers`` inside the block; see ``thinwire.parallel``."""
    division = division or Division()
    mode, known = division.mode, (*MODES, ONE)
    with refused(peers, "diffusion"):
        text = f"there is no mode {mode!r}; choose {', '.join(known[:-1])} or {ONE}"
        require(mode in known, InputError, text)
    if mode == ONE or not peers:
        yield Parallel(ONE)
        return
    with used(peers, "diffusion") as exchange, ExitStack() as undo:
        with told(exchange):
            check_whole(model)
            session = MODES[mode](exchange, attention, output, division, deadline)
            undo.push(lambda kind, error, trace: session.leave(error))
            undo.enter_context(session.attached(model, plan))
            weights = Weights(model)
            own = facts(model, f"{attention!r}, {output!r}, {division!r}", weights.checksum(False))
            own["its plan (a checksum)"] = str(zlib.crc32(repr(plan).encode()))
            drawn = None if mode == BATCH else state_of(model)
            first = agree(exchange, own, deadline, drawn=drawn)
            session.watch(weights)
        undo.enter_context(drawing_alike(model, drawn, first))
        yield Parallel(mode, session)


@contextmanager
def used(peers: Mapping[int, Peer], what: str) -> Iterator[MeshExchange]:
    """Use a mesh under a name of its own, so that nothing is taken that an aborted use before it has left."""
    exchange = MeshExchange(own_rank(peers), peers, name=what)
    try:
        yield exchange
    finally:
        _ENDED.setdefault(peers[min(peers)].mailbox, []).append(exchange.name)
        exchange.close()


@contextmanager
def told(exchange: MeshExchange) -> Iterator[None]:
    """Tell the other ranks of an error in the block, who would else wait for what this rank has."""
    try:
        yield
    except BaseException as e:
        with suppress(LinkError):
            exchange.post(0, Message.stop(e).pack())
        raise


@contextmanager
def refused(peers: Mapping[int, Peer], what: str) -> Iterator[None]:
    """Tell the other ranks of what cannot be, before anything is compared: they count this use, and wait."""
    try:
        yield
    except InputError:
        if isinstance(peers, Mapping) and peers and all(isinstance(peer, Peer) for peer in peers.values()):
            with used(peers, what) as exchange, told(exchange):
                raise
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
    """Raise ``InputError`` for a model that was compiled, by ``torch.compile`` or its own ``compile``."""
    text = "a compiled model cannot be taken apart; give it as it was, and compile its layers if at all"
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    require(not compiled, InputError, text)


def own_rank(peers: Mapping[int, Peer]) -> int:
    """Return the rank that the links of a mesh are of; ``InputError`` where others are missing."""
    missing = set(range(len(peers) + 1)) - peers.keys()
    text = f"peers {sorted(peers)} are not all but one of the ranks from 0; connect all of them"
    require(len(missing) == 1, InputError, text)
    return missing.pop()


def facts(model: nn.Module, recipe: str, weights: int) -> dict[str, str]:
    """Return what all ranks must have in common; ``weights`` is a checksum."""
    config = getattr(model, "config", None)
    settings = config if isinstance(config, Mapping) else {}
    return {
        "diffusers": host.version(),
        "torch": torch.__version__.partition("+")[0],
        "the model": type(model).__name__,
        "the recipe": recipe,
        "its weights (a checksum)": str(weights),
        **{
            f"the setting {name}": json.dumps(value)
            for name, value in settings.items()
            if not name.startswith("_") and is_setting(value)
        },
    }


def agree(
    exchange: MeshExchange,
    own: Mapping[str, str],
    deadline: float,
    held: Mapping[str, str] | None = None,
    drawn: bytes | None = None,
) -> bytes | None:
    """Compare with all ranks what they must have in common; ``held``: where two ranks have it at all.

    Returns what the first rank gave as ``drawn``. Errors: ``InputError`` naming a rank; ``LinkError`` for one
    that is silent or has left.
    """
    mailboxes = [peer.mailbox for peer in exchange.peers.values()]
    ended = list(_ENDED.get(mailboxes[0], []))
    packets = [json.dumps({**own, **(held or {})}).encode(), *([] if drawn is None else [drawn])]
    exchange.post(0, Message(packets=packets).pack())
    first = drawn if exchange.rank == min(exchange.ranks) else None
    for rank, data in exchange.collect(0, deadline, "what its model is", is_last).items():
        message = Message.unpack(data)
        message.check_sender(rank)
        words, *rest = message.packets or [b""]
        theirs = words_of(bytes(words), f"rank {rank}")
        both = {what: value for what, value in (held or {}).items() if what in theirs}
        for what, value in {**own, **both}.items():
            other = str(theirs.get(what))[:200]
            text = f"rank {rank} has {what} {other!r}, and this rank {value!r}; make them alike"
            require(theirs.get(what) == value, InputError, text)
        if rank == min(exchange.ranks) and rest:
            first = bytes(rest[0])
    for name in ended:  # all ranks have left these: nothing more comes
        _ENDED[mailboxes[0]].remove(name)
        for mailbox in mailboxes:
            mailbox.forget(f"{name}/".encode())
    return first
