"""Calls of a model: the generation, stream and step of each, and whether all ranks make the same ones."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from numbers import Real
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.checksum.bit_sums import bit_sum, numbers
from thinwire.collectives import MeshExchange
from thinwire.collectives.exchange import words_of
from thinwire.links.mesh import Peer
from thinwire.types import LinkError, PayloadError
from thinwire.uses.pictures.diffusers_names.interfaces import Given
from thinwire.uses.pictures.weight_checksums import WatchedWeights

STREAMS = 16  # of one generation


class ModelCall(NamedTuple):
    """One call of the model: its stream's number, and how many calls of the stream came before it."""

    stream: int
    step: int
    begins: bool  # whether a generation begins with it


class StepCounter:
    """Number generations from 1, and the calls within each.

    A generation begins with the first call, after ``reset``, where the time goes back, where the shapes of
    a stream's inputs change, where a named stream has its first time again (schedulers repeat later ones),
    and where there are more streams than keys can tell apart.
    A stream is the name that the caller gives it, else the call's place among those of one time. Time falls,
    or rises, as Lumina 2 and Z-Image are told it: that is known once it has gone back twice on end.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._fresh, self._place = True, 0
        self._time: float | None = None
        self._first: float | None = None  # the time at which the generation began
        self._rises, self._turned = False, False  # whether time does; whether it went back at the last change
        self._shapes: dict[Hashable, Hashable] = {}
        self._numbers: dict[Hashable, int] = {}
        self._calls: Counter[int] = Counter()

    def reset(self) -> None:
        """Let the next call begin a generation."""
        self._fresh = True

    def call(self, name: str | None, time: float | None, shapes: Hashable) -> ModelCall:
        """Count a call of the stream ``name`` at a time."""
        again = time is not None and time == self._time
        self._place = self._place + 1 if again else 0
        stream: Hashable = self._place if name is None else name
        back = self._back(time)
        over = name is not None and name in self._numbers and time is not None and time == self._first
        full = stream not in self._numbers and len(self._numbers) == STREAMS
        begins = self._fresh or back or over or full or self._shapes.get(stream, shapes) != shapes
        if begins:
            self._forget()
            self._first = time
            self.generation += 1
            stream = 0 if name is None else name
        self._time, self._shapes[stream] = time, shapes
        number = self._numbers.setdefault(stream, len(self._numbers))
        self._calls[number] += 1
        return ModelCall(number, self._calls[number] - 1, begins)

    def _back(self, time: float | None) -> bool:
        """Say whether time has gone back to that of another picture."""
        if time is None or self._time is None or time == self._time:
            return False
        back = (time > self._time) != self._rises
        if back and self._turned and not self._fresh:
            self._rises, back = not self._rises, False
        self._turned = back
        return back

    def _forget(self) -> None:
        self._fresh, self._place = False, 0
        for kept in (self._shapes, self._numbers, self._calls):
            kept.clear()


class CountedCalls:
    """The calls of a model over several ranks: what all modes that exchange something have in common."""

    _ended = True  # whether the last call has
    _interrupted = False  # whether the one before it had not

    def __init__(self, inquiry: Inquiry) -> None:
        self.clock, self._inquiry = StepCounter(), inquiry
        self._call, self._inputs = ModelCall(0, 0, True), 0

    def watch(self, weights: WatchedWeights) -> None:
        """Compare these weights with the other ranks' in each call."""
        self._inquiry.watch(weights)

    def reset(self) -> None:
        """Let the next call of the model begin a generation."""
        self.clock.reset()

    def fail(self, cause: BaseException) -> None:
        """Tell the peers at once that a call of the model has failed."""
        with suppress(LinkError):
            self._abandon(cause)

    def _begin(self, given: Given, shapes: Hashable, time: float | None) -> None:
        """Count a call of the model for a time, and begin a generation where it does."""
        self._interrupted, self._ended = not self._ended, False
        if self._interrupted:  # an error: the ranks may be at different exchanges of the call before
            self._renew()
            self._abandon()
            self.clock.reset()
        self._call = self.clock.call(given.stream, time, shapes)
        if self._call.begins:
            self._forget()
        given.check()

    def _renew(self) -> None:
        """Forget the error of the call before."""
        raise NotImplementedError

    def _abandon(self, cause: BaseException | None = None) -> None:
        """Tell whoever waits for more of this call that no more comes."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Begin a generation without references."""
        raise NotImplementedError


_WAIT = 5.0  # seconds for a cause that the error can do without
_WEIGHTS = " weights"  # no name of an input
_LATENTS = "hidden_states"
PROMPT = "prompt, seed and schedule"


class Inquiry:
    """The inputs of this rank's last calls, of which its messages carry one checksum.

    ``alike``: what of the inputs all ranks must have in common.
    """

    def __init__(self, exchange: MeshExchange, deadline: float, alike: str = PROMPT) -> None:
        self._peers, self._name, self._alike = exchange.peers, exchange.name, alike
        self._wait = min(deadline, _WAIT)
        self._weights: WatchedWeights | None = None
        self._calls: deque[tuple[str, dict[str, int]]] = deque(maxlen=4)
        self._generation, self._number = -1, 0
        self._lock = Lock()
        for peer in self._peers.values():
            peer.mailbox.on(self._tag("inputs"), partial(self._answer, peer))

    def watch(self, weights: WatchedWeights) -> None:
        """Count these weights among the inputs of each call."""
        self._weights = weights

    def leave(self) -> None:
        """Let go of the model: the links, which stay, keep this object."""
        self._weights = None

    def note(self, generation: int, sums: Mapping[str, int]) -> int:
        """Return a checksum of the inputs of a call, given by the ``sums`` of each, and remember those."""
        begins = generation != self._generation
        found = dict(sums)
        if self._weights is not None:
            found[_WEIGHTS] = self._weights.checksum(begins)
        self._generation, self._number = generation, 1 if begins else self._number + 1
        with self._lock:
            self._calls.append((f"{generation}.{self._number}", found))
        return zlib.crc32(json.dumps(found).encode())

    def cause(self, rank: int) -> str:
        """Return in a sentence what a peer, whose checksum is another, has otherwise."""
        told = f"rank {rank} called the model with other inputs; give all ranks one {self._alike}"
        call, own = self._calls[-1]
        theirs = self._asked(rank).get(call)
        if not isinstance(theirs, dict):
            return told
        names = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
        if _WEIGHTS in names:
            return f"rank {rank} now has other weights or adapters than this rank; change them alike on all"
        if names == [_LATENTS] and self._number > 1:
            return (
                f"rank {rank} has other {_LATENTS} in call {self._number} of the picture, not in the first: "
                "noise was drawn there; call torch.manual_seed with one seed on all ranks before the picture"
            )
        return f"{told} ({', '.join(names)} differ)" if names else told

    def _asked(self, rank: int) -> dict[str, object]:
        peer = self._peers[rank]
        with suppress(LinkError, PayloadError):
            peer.mailbox.send(self._tag("inputs"), b"")
            data = peer.mailbox.get(self._tag("said"), self._wait, "what its inputs are")
            return words_of(data, f"rank {rank}")
        return {}

    def _answer(self, peer: Peer, tag: bytes, body: bytes) -> None:
        with self._lock:
            peer.mailbox.send(self._tag("said"), json.dumps(dict(self._calls)).encode())

    def _tag(self, kind: str) -> bytes:
        return f"{self._name}/{kind}/".encode()


def leaves_of(inputs: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield what is in nested arguments, by name."""
    if isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from leaves_of(value, f"{name}.{key}")
    elif isinstance(inputs, list | tuple):
        for i, value in enumerate(inputs):
            yield from leaves_of(value, f"{name}.{i}")
    else:
        yield name, inputs


class CallInputs(NamedTuple):
    """What is read of a call's inputs: the latest time that it is for, and a checksum of each by its name."""

    time: float | None
    sums: dict[str, int]

    @classmethod
    def of(cls, inputs: Mapping[str, object]) -> CallInputs:
        """Read both, in one copy from each device; the checksums are of all bits of tensors too."""
        said, parts = dict[str, list[str]](), dict[str, Tensor]()
        for name, x in leaves_of(inputs):
            words = said.setdefault(name[1:].partition(".")[0], [])
            if isinstance(x, Tensor):
                words.append(f"{name} {x.dtype} {tuple(x.shape)}")
                parts[name] = bit_sum(x)
            elif isinstance(x, Real | str):
                words.append(f"{name} {x}")
        time, *found = numbers([_latest(inputs), *parts.values()])
        for name, n in zip(parts, found, strict=True):
            said[name[1:].partition(".")[0]].append(str(n))
        sums = {name: zlib.crc32("\0".join(words).encode()) for name, words in said.items() if words}
        return cls(None if math.isnan(time) else time, sums)


def shapes_of(inputs: Mapping[str, object]) -> Hashable:
    """Return the tensors' names and shapes."""
    return tuple((name, tuple(x.shape)) for name, x in leaves_of(inputs) if isinstance(x, Tensor))


def time_of(inputs: Mapping[str, object]) -> float | None:
    """Return the latest time that the call is for, None where the model takes none.

    >>> import torch
    >>> time_of({"timesteps": torch.tensor([999.0, 980.0])})  # as HiDream calls it
    999.0
    """
    [time] = numbers([_latest(inputs)])
    return None if math.isnan(time) else time


def _latest(inputs: Mapping[str, object]) -> Tensor:
    """Return the latest time where it is; a NaN where the model takes none. Z-Image's ``t`` goes up."""
    time = next((inputs[name] for name in ("timestep", "timesteps", "t") if name in inputs), None)
    if time is None and isinstance(inputs.get("t"), Tensor):
        time = -inputs["t"]  # type: ignore[operator]  # it is a tensor
    if isinstance(time, Tensor) and time.numel():
        return time.max()
    return torch.tensor(
        float(time) if isinstance(time, Real) else math.nan, dtype=torch.float64, device="cpu"
    )
