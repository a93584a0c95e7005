"""A call of a model as one message: its inputs, of which one that was there lately is sent by name alone.

A message is a ``Framing``: a JSON packet that says what the arguments are, then the bytes of each new tensor.
A tensor's name is a checksum of its bits, its dtype and its shape. Both ends forget it after the same calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.checksum.bit_sums import sums_of
from thinwire.collectives.exchange import Framing, words_of
from thinwire.staging import to_host
from thinwire.types import WRONG_VALUES, InputError, PayloadError, require

MOST = 1 << 30  # bytes of the inputs of a call
MOST_DIMS, MOST_DEPTH = 16, 16
KEPT = 4  # calls after its last one for which a tensor stays: more than a step has passes
CALLS = Framing(version=1, states=3, fields="")
_FLOATS = ("float64", "float32", "float16", "bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2")
_DTYPES = (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")
_HERE = " cpu"
_PLAIN = (bool, int, float, str, type(None))


class HostTurn(IntEnum):
    """What a message asks for."""

    CALL = 0  # of the model
    RESET = 1  # the next call begins a picture
    END = 2  # no more comes


class HostCall(NamedTuple):
    """A call of a model: the name of its stream, as ``cache_context`` gives it, and its arguments."""

    stream: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RecentNames:
    """Which tensors both ends have: those of the last calls."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._call = 0

    def __contains__(self, name: str) -> bool:
        return name in self._used

    def use(self, names: Iterable[str]) -> list[str]:
        """Count a call with tensors of these names; return those that are forgotten with it."""
        self._call += 1
        self._used.update(dict.fromkeys(names, self._call))
        gone = [name for name, call in self._used.items() if call <= self._call - KEPT]
        for name in gone:
            del self._used[name]
        return gone


class CallWriter:
    """Write calls for the workers, all of which get the same messages; ``what`` these are, in an error."""

    def __init__(self, what: str = "the input") -> None:
        self._recent, self._what = RecentNames(), what

    def pack(self, call: HostCall) -> bytes:
        """Return the message of a call. Errors: ``InputError`` for what cannot be sent, or is too large."""
        given = dict(enumerate(call.args)) | call.kwargs
        said = [(f"{self._what} {name}", x) for name, x in given.items()]
        tensors = [_checked(*each) for name, x in said for each in _tensors(x, name)]
        names = _names_of(tensors)
        by_name = {names[id(x)]: x for x in tensors}
        new = {name: x for name, x in by_name.items() if name not in self._recent}
        nbytes = sum(x.numel() * x.element_size() for x in new.values())
        text = f"{self._what} has {nbytes} bytes in all, and {MOST} can be sent; make a smaller picture"
        require(nbytes <= MOST, InputError, text)
        words = {
            "stream": call.stream,
            "args": [_described(x, f"{self._what} {i}", names) for i, x in enumerate(call.args)],
            "kwargs": {name: _described(x, f"{self._what} {name}", names) for name, x in call.kwargs.items()},
            "new": [[name, _dtype(x), list(x.shape)] for name, x in new.items()],
        }
        self._recent.use(by_name)
        return CALLS.pack(HostTurn.CALL, [json.dumps(words).encode(), *_bytes_of(list(new.values()))])


class CallReader:
    """Read the calls of a host, and put their tensors on ``device``: all that were on the host's own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._recent = device, RecentNames()
        self._kept: dict[str, Tensor] = {}

    def unpack(self, data: bytes) -> tuple[HostTurn, HostCall | None]:
        """Return what a message asks for, and the call. Errors: ``PayloadError``."""
        require(len(data) <= 2 * MOST, PayloadError, f"a call of {len(data)} bytes, where {MOST} are sent")
        state, packets, _ = CALLS.unpack(data)
        if state != HostTurn.CALL:
            return HostTurn(state), None
        require(bool(packets), PayloadError, "a call without arguments")
        try:
            return HostTurn.CALL, self._call(words_of(bytes(packets[0]), "the host"), packets[1:])
        except WRONG_VALUES as e:
            raise PayloadError(f"the host's call cannot be read: {type(e).__name__} {e}"[:200]) from e

    def _call(self, words: dict[str, Any], parts: list[memoryview]) -> HostCall:
        for (name, dtype, shape), part in zip(words["new"], parts, strict=True):
            self._kept[name] = _tensor(part, dtype, shape).to("cpu" if name.endswith(_HERE) else self._device)
        used = set[str]()
        args = tuple(self._made(x, used) for x in words["args"])
        kwargs = {str(name): self._made(x, used) for name, x in words["kwargs"].items()}
        for name in self._recent.use(used):
            del self._kept[name]
        return HostCall(None if words["stream"] is None else str(words["stream"]), args, kwargs)

    def _made(self, said: Any, used: set[str]) -> Any:
        """Return what ``_described`` was given; ``used``: the tensors in it, by name."""
        if isinstance(said, _PLAIN):
            return said
        [(kind, value)] = said.items()
        if kind == "tensor":
            used.add(value)
            return self._kept[value]
        if kind == "mapping":
            return {str(name): self._made(x, used) for name, x in value.items()}
        found = [self._made(x, used) for x in value]
        return tuple(found) if kind == "tuple" else found


def _tensors(x: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested arguments, by place. Errors: ``InputError`` for what is nested too deep."""
    require(depth <= MOST_DEPTH, InputError, f"{name} is nested deeper than {MOST_DEPTH}; give it plainly")
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, Mapping):
        for key, value in x.items():
            yield from _tensors(value, f"{name}.{key}", depth + 1)
    elif isinstance(x, list | tuple):
        for i, value in enumerate(x):
            yield from _tensors(value, f"{name}.{i}", depth + 1)


def _checked(name: str, x: Tensor) -> Tensor:
    known = _dtype(x) in _DTYPES and x.dim() <= MOST_DIMS and x.layout is torch.strided and not x.is_meta
    text = f"{name} is a tensor of {x.dtype} in {x.dim()} dimensions on {x.device}, which cannot be sent"
    require(known, InputError, f"{text}; give it as floats")
    return x


def _names_of(tensors: Sequence[Tensor]) -> dict[int, str]:
    """Return names by ``id``; beside tensors of a card, one of the CPU's has another, by which it stays."""
    beside = any(not x.is_cpu for x in tensors)
    found = dict[int, str]()
    for x, bits in zip(tensors, sums_of(tensors), strict=True):
        name = f"{bits & (1 << 64) - 1:x} {_dtype(x)} {list(x.shape)}"
        found[id(x)] = f"{name}{_HERE}" if beside and x.is_cpu else name
    return found


def _described(x: Any, where: str, names: Mapping[int, str]) -> Any:
    """Return an argument in JSON. Errors: ``InputError``."""
    if isinstance(x, Tensor):
        return {"tensor": names[id(x)]}
    if isinstance(x, _PLAIN):
        return x
    if isinstance(x, Mapping):
        named = all(isinstance(key, str) for key in x)
        require(named, InputError, f"{where} has keys that are no text, and cannot be sent so")
        return {"mapping": {key: _described(value, f"{where}.{key}", names) for key, value in x.items()}}
    if isinstance(x, list | tuple):
        kind = "tuple" if isinstance(x, tuple) else "list"
        return {kind: [_described(value, f"{where}.{i}", names) for i, value in enumerate(x)]}
    raise InputError(f"{where} is of type {type(x).__name__}, which cannot be sent; leave it out")


def _bytes_of(parts: Sequence[Tensor]) -> list[memoryview]:
    found = dict[int, memoryview]()
    for device in dict.fromkeys(x.device for x in parts):
        here = [i for i, x in enumerate(parts) if x.device == device]
        views = to_host([parts[i] for i in here]).views()
        found |= dict(zip(here, views, strict=True))
    return [found[i] for i in range(len(parts))]


def _tensor(part: memoryview, dtype: Any, shape: Any) -> Tensor:
    """Return the tensor in a packet. Errors: ``PayloadError``."""
    good = dtype in _DTYPES and isinstance(shape, list) and len(shape) <= MOST_DIMS
    good = good and all(isinstance(n, int) and 0 <= n <= MOST for n in shape)
    kind: torch.dtype = getattr(torch, dtype) if good else torch.uint8
    fits = good and math.prod(shape) * kind.itemsize == len(part)
    require(fits, PayloadError, f"the host sent {len(part)} bytes for a tensor of {dtype} {shape}"[:200])
    values = torch.frombuffer(bytearray(part), dtype=kind) if len(part) else torch.empty(0, dtype=kind)
    return values.reshape(shape)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
