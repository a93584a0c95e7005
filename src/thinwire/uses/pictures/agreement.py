"""What all ranks say of their model before it is taken apart: that it is the same, and draws alike."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from thinwire.collectives import MeshExchange
from thinwire.collectives.exchange import words_of
from thinwire.links.mailbox import Mailbox
from thinwire.links.mesh import Peer
from thinwire.types import InputError, LinkError, PayloadError, require
from thinwire.uses.pictures.arrivals import is_last
from thinwire.uses.pictures.diffusers_names.tested_version import version
from thinwire.uses.pictures.messages import ExchangeTally
from thinwire.uses.pictures.model_calls import StepCounter
from thinwire.uses.pictures.rank_message import RankMessage
from thinwire.uses.pictures.weight_checksums import is_setting, prefixes


class Parallel:
    """A model that runs over several ranks: what it exchanged so far."""

    def __init__(self, mode: str, session: ModelOverRanks | None = None) -> None:
        self.mode, self._session = mode, session
        self.tally = ExchangeTally() if session is None else session.tally

    @property
    def generation(self) -> int:
        """Number of the picture, from 1: a new one begins by itself where time or shapes jump."""
        return 0 if self._session is None else self._session.clock.generation

    def reset(self) -> None:
        """Let the next call of the model begin a new picture; all ranks call this at the same place."""
        if self._session is not None:
            self._session.reset()


class ModelOverRanks(Protocol):
    """What runs a model over several ranks for as long as it is taken apart."""

    tally: ExchangeTally
    clock: StepCounter

    def reset(self) -> None:
        """Let the next call of the model begin a generation."""
        ...


_ENDED: WeakKeyDictionary[Mailbox, list[str]] = WeakKeyDictionary()  # uses, since all ranks last agreed


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
            exchange.post(0, RankMessage.stop(e).pack())
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
    check_deadline(deadline)


def check_deadline(deadline: object) -> None:
    """Raise ``InputError`` for what would wait for ever, or not at all."""
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


def facts(
    model: nn.Module, recipe: Mapping[str, object], weights: int, but: Collection[str] = ()
) -> dict[str, str]:
    """Return what all ranks must have in common: a model, and ``recipe`` in its parts by name.

    ``weights`` is a checksum of all below none of ``but``.
    """
    config = getattr(model, "config", None)
    settings = config if isinstance(config, Mapping) else {}
    weighed = [p for name, p in model.named_parameters() if not name.startswith(prefixes(but))]
    return {
        "diffusers": version(),
        "torch": torch.__version__.partition("+")[0],
        "the model": type(model).__name__,
        **{f"the recipe's {part}": str(value) for part, value in recipe.items()},
        "the type of its weights": ", ".join(sorted({str(p.dtype) for p in weighed})),
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
    said = RankMessage(packets=packets).pack()
    for rank in exchange.peers:
        with suppress(LinkError):  # one that has left may have said why, which is read below
            exchange.scatter(0, {rank: said})
    first = drawn if exchange.rank == min(exchange.ranks) else None
    for rank, data in exchange.collect(0, deadline, "what its model is", is_last).items():
        message = RankMessage.unpack(data)
        message.check_sender(rank)
        words, *rest = message.data or [b""]
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


_LENGTH = struct.Struct("<I")


def state_of(model: nn.Module) -> bytes:
    """Return the states of the generators of the CPU and of the model's device."""
    parts = [bytes(state.numpy()) for state in _states(_device(model))]
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


@contextmanager
def drawing_alike(model: nn.Module, own: bytes | None, first: bytes | None) -> Iterator[None]:
    """Draw from the states ``first`` inside the block where ``own`` are others; go on from those after it.

    Some schedulers draw noise in each step, and take no generator. On one device that is one noise; here each
    rank draws it from torch's own generators, and all have to draw the same.
    """
    if own is None or first is None or own == first:
        yield
        return
    device = _device(model)
    before = _states(device)
    _set(device, _read(first, len(before)))
    try:
        yield
    finally:
        _set(device, before)


def _device(model: nn.Module) -> Any:
    """Return the module of torch for the device of a model, None for the CPU."""
    kind = next((p.device.type for p in model.parameters()), "cpu")
    found = None if kind in ("cpu", "meta") else torch.get_device_module(kind)
    return found if hasattr(found, "get_rng_state") else None


def _states(device: Any) -> list[Tensor]:
    return [torch.get_rng_state(), *([] if device is None else [device.get_rng_state().cpu()])]


def _set(device: Any, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device is not None and len(states) > 1:
        device.set_rng_state(states[1])


def _read(data: bytes, most: int) -> list[Tensor]:
    """Return up to ``most`` states that the first rank sent. Errors: ``PayloadError``."""
    found = list[Tensor]()
    while data and len(found) < most:
        size = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else -1
        body = data[_LENGTH.size : _LENGTH.size + size]
        require(size == len(body) > 0, PayloadError, "the first rank's state of its generator cannot be read")
        found.append(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        data = data[_LENGTH.size + size :]
    return found
