"""A model as one row of its trained parameters: read, written, packed, and told apart from others."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from thinwire.channels import wire
from thinwire.channels.channel import Receiver
from thinwire.channels.memory import parse_memory
from thinwire.codecs.matrices.factors import Cut, matrices_of
from thinwire.staging import to_host
from thinwire.types import ByteCursor, InputError, PayloadError, TensorSpec, require

ROOM = 4096  # bytes of framing that a packet may add to its values
PIECE = 1 << 16  # values that are summed at a time
CHUNK = 1 << 20  # values that are mixed at a time
NEAR = 1e-3  # by which the mixes of equal values differ at most, on any processor
MOST = 1e140  # larger values, whose squares have no room, count as this
JOINED, LENGTH = b"TJ", struct.Struct("<I")  # what begins a message of several packets; bytes of each
MOST_PARTS = 16  # packets of a message
COMPILED = "_orig_mod."  # what torch.compile puts into names


class Parameters:
    """Read the trained parameters of a model as a row [1, N], float32, in the model's own order; write them.

    Nothing else of a model is shared: what is frozen and what it keeps in buffers stays as it is.
    Errors: ``InputError`` where nothing is trained, a parameter is not float32 or has no shape yet, or the
    model keeps running means, as batch norm does: those of clients would not be averaged.

    >>> Parameters(nn.Linear(2, 1)).read().shape
    torch.Size([1, 3])
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        for name, p in model.named_parameters():
            require(not is_lazy(p), InputError, f"parameter {name} has no shape yet; call the model once")
            fits = p.dtype == torch.float32 or not p.requires_grad
            require(fits, InputError, f"parameter {name} is {p.dtype}; cast what is trained to float32")
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        require(len(self._parameters) > 0, InputError, "the model has no parameter to train; unfreeze some")
        for name, b in model.named_buffers():
            wrong = f"the model keeps {name}, which clients would not share; use group norm, or no norm"
            require(not name.endswith(("running_mean", "running_var")) or b is None, InputError, wrong)
        self.numel = sum(p.numel() for p in self._parameters)
        self.device = self._parameters[0].device  # where rows of this model are coded
        self._buffers = {n: b.detach().clone() for n, b in model.named_buffers()}

    @cached_property
    def matrices(self) -> Cut:
        """Where each matrix begins in the row, its rows and its width."""
        return matrices_of(p.shape for p in self._parameters)

    @cached_property
    def signature(self) -> Signature:
        """What the model is made of."""
        return Signature.of(self._model)

    def stands(self) -> dict[str, tuple[int, int, float]]:
        """Return how frozen parameters stand, to be given to ``check_kept`` once the model was trained."""
        frozen = {n: p.detach() for n, p in self._model.named_parameters() if not p.requires_grad}
        sums = self._read([_sum(plain(p)) for p in frozen.values()])
        return {n: (_place(p), p._version, x) for (n, p), x in zip(frozen.items(), sums, strict=True)}

    def check_kept(self, stood: Mapping[str, tuple[int, int, float]]) -> None:
        """Raise ``InputError`` where training moved what clients do not share, and name it.

        A buffer that is no part of a saved model may take another shape: it is a cache.
        """
        same = [p for p in self._model.parameters() if p.requires_grad]
        kept = len(same) == len(self._parameters) and all(map(operator.is_, same, self._parameters))
        require(kept, InputError, "other parameters are trained than at the start; choose them before")
        moved = [n for n, stand in self.stands().items() if stood.get(n) != stand]
        saved, now = self._model.state_dict(keep_vars=True).keys(), dict(self._model.named_buffers())
        compared: dict[str, Tensor] = {}
        for name in {**self._buffers, **now}:
            before, after = self._buffers.get(name), now.get(name)
            cache = name not in saved and (before is None or after is None or before.shape != after.shape)
            if not cache:
                compared[name] = _differ(before, after)
        differ = self._read(list(compared.values()))
        moved += [name for name, found in zip(compared, differ, strict=True) if found]
        wrong = "which clients would not share, so that the server's stays as it was"
        wrong = (
            f"training moves {', '.join(moved[:3])} of the model, {wrong}; use group norm, or leave it out"
        )
        require(not moved, InputError, wrong)

    def _read(self, values: list[Tensor]) -> list[float]:
        """Return numbers of the device, by one copy and one wait."""
        if not values:
            return []
        (found,) = to_host([torch.stack([x.to(self.device) for x in values])]).tensors()
        return [float(x) for x in found]

    def row(self) -> Tensor:
        """Return the values [1, N], a copy on the model's device."""
        return torch.cat([p.detach().reshape(1, -1).to(self.device) for p in self._parameters], 1)

    def read(self) -> Tensor:
        """Return the values [1, N], a copy on the CPU."""
        (found,) = to_host([self.row()]).tensors()
        return found

    def write(self, row: Tensor) -> None:
        """Copy [1, N] of any device into the parameters, which do not share its memory.

        Errors: ``InputError``.
        """
        wrong = f"a row of shape {list(row.shape)} for a model of {self.numel} values; give [1, {self.numel}]"
        require(row.shape == (1, self.numel), InputError, wrong)
        parts = row.to(self.device).reshape(-1).split([p.numel() for p in self._parameters])
        with torch.no_grad():
            for p, part in zip(self._parameters, parts, strict=True):
                p.copy_(part.view(p.shape))


def _place(x: Tensor) -> int:
    return x.data_ptr() if x.layout == torch.strided else 0  # a sparse one has none


def _sum(x: Tensor) -> Tensor:
    return (torch.view_as_real(x) if x.is_complex() else x).sum(dtype=torch.float64)


def _differ(a: Tensor | None, b: Tensor | None) -> Tensor:
    """Return whether a buffer is another one now, as a number."""
    if a is not None and b is not None:
        a, b = plain(a), plain(b)
        if (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device):
            return torch.isclose(a, b, 0, 0, equal_nan=True).all().logical_not().double()
    return torch.ones((), dtype=torch.float64, device="cpu")


def pieces(row: Tensor) -> Iterator[slice]:
    """Yield parts of a row [N] to go through one by one, so that what is made of each stays in the caches.

    On another device than the CPU the row is one part.
    """
    size = PIECE if row.device.type == "cpu" else max(1, row.numel())
    return (slice(i, i + size) for i in range(0, row.numel(), size))


def most_nbytes(values: int) -> int:
    """Return the bytes that a packet of a row of ``values`` may have: raw, and a quarter for codes."""
    return 5 * values + ROOM


def join_rows(packets: Sequence[bytes]) -> bytes:
    """Return packets of rows as one message, of the rows one after another, for ``unpack_row``."""
    return JOINED + b"".join(b for p in packets for b in (LENGTH.pack(len(p)), p))


def unpack_row(data: bytes | memoryview, values: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the row [1, ``values``], float32, in a packet of one entry named ``key`` that leaves no state.

    It is decoded on ``device``, to the same bits on each. ``data`` may be what ``join_rows`` made of several.

    Errors: ``PayloadError`` for anything else, before anything larger than such a row is allocated.
    """
    if len(data) > (most := most_nbytes(values)):
        raise PayloadError(f"{len(data)} bytes for {values} values, at most {most} may be")
    if data[: len(JOINED)] != JOINED:
        return _row_in(data, values, key, device)
    cursor, parts, left = ByteCursor(memoryview(data)[len(JOINED) :], "joined rows"), list[Tensor](), values
    while left:
        require(len(parts) < MOST_PARTS, PayloadError, f"a row of over {MOST_PARTS} parts")
        parts.append(_row_in(cursor.take(*cursor.unpack(LENGTH)), left, key, device, parts=True))
        left -= parts[-1].numel()
    cursor.close()
    return torch.cat(parts, 1)


def _row_in(
    data: bytes | memoryview, values: int, key: int, device: torch.device | str, parts: bool = False
) -> Tensor:
    """Return the row in one packet, of ``values``; as one of several ``parts``, of 1 to so many."""
    packet = wire.unpack(data, max_nbytes=4 * values, device=device)
    own = packet.spec.shape[-1] if parts and len(packet.spec.shape) == 2 else values
    spec = TensorSpec((1, own if 0 < own < values else values))
    if len(packet.entries) != 1 or packet.entries[0].key != key:
        keys = [e.key for e in packet.entries[:4]]
        raise PayloadError(f"a packet of the keys {keys} where {key} is expected")
    if packet.spec != spec:
        found = f"{packet.spec.dtype} and shape {packet.spec.shape}"
        raise PayloadError(f"a packet of {found} where {spec.shape} is expected")
    if parse_memory(packet.memory).mirrored:
        under = f"under {packet.memory[:40]}, which would leave state"
        raise PayloadError(f"a packet {under}; such updates are not taken")
    return Receiver().decode(packet, expect=spec)


class Signature(NamedTuple):
    """``digest``: of names, shapes, types, and what is trained. ``sizes``, ``mix``: of what stays as it is.

    That is frozen parameters and buffers: other processors may make them with other last bits, so these two
    numbers are compared within ``NEAR``.
    """

    digest: int
    sizes: float = 0.0
    mix: float = 0.0

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        """Return the signature of a model."""
        return cls(cls.of_kinds(model), *_mixed(dict(_fixed(model)).values()))

    @staticmethod
    def of_kinds(model: nn.Module) -> int:
        """Return the digest alone, of a model that may have no values."""
        words = [*_trained(model), *([n, *_kind(x)] for n, x in dict(_fixed(model)).items())]
        digest = hashlib.blake2b(json.dumps(words).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1

    @classmethod
    def read(cls, value: Any) -> Signature | None:
        """Read what ``list`` made of one, as it came in a message. Errors: ``PayloadError``."""
        if value is None:
            return None
        good = isinstance(value, list) and len(value) == 3 and isinstance(value[0], int)
        good = good and 0 < value[0] < 1 << 64 and all(isinstance(x, float) and x == x for x in value[1:])
        require(good, PayloadError, f"a model is described as {ascii(value)[:60]}, which is no signature")
        return cls(*value)

    def check(self, other: Signature | None, whose: str) -> None:
        """Raise ``InputError`` where another model is not of this make, and say in what it differs."""
        if other is None:
            return
        wrong = f"{whose} has other parameters by name, shape, type or order, or others are trained"
        require(self.digest == other.digest, InputError, f"{wrong}; take one model at all ends")
        near = max(abs(self.sizes - other.sizes), abs(self.mix - other.mix)) <= NEAR
        wrong = f"{whose} has other values in what is not trained, its frozen parameters and buffers"
        require(near, InputError, f"{wrong}; load these from one file at all ends")


def _trained(model: nn.Module) -> list[list[Any]]:
    """Return what parameters are, each also under the names that it is tied to."""
    first: dict[int, int] = {}
    return [
        [_name(n), *_kind(p), p.requires_grad, first.setdefault(id(p), i)]
        for i, (n, p) in enumerate(model.named_parameters(remove_duplicate=False))
    ]


def _fixed(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what training leaves as it is: frozen parameters, and buffers that are part of a saved model."""
    yield from ((_name(n), p) for n, p in model.named_parameters() if not p.requires_grad)
    saved = model.state_dict(keep_vars=True)
    yield from ((_name(n), b) for n, b in model.named_buffers() if n in saved)


def _name(name: str) -> str:
    return name.replace(COMPILED, "")


def _kind(x: Tensor) -> tuple[list[int], str]:
    return list(x.shape), str(x.dtype)


def plain(x: Tensor) -> Tensor:
    """Return a tensor's values as a dense one that takes arithmetic: sparse and quantised ones are copied."""
    dense = x.detach() if x.layout == torch.strided else x.detach().to_dense()
    return dense.dequantize() if dense.is_quantized else dense


def _mixed(tensors: Iterable[Tensor]) -> tuple[float, float]:
    """Return two numbers that change with any of the tensors' values, but hardly with their last bits."""
    sizes = mix = 0.0
    for number, x in enumerate(map(plain, tensors)):
        flat = (torch.view_as_real(x) if x.is_complex() else x).detach().reshape(-1)
        size = dot = 0.0
        for at, part in enumerate(flat.split(CHUNK)):
            values = torch.nan_to_num(part.double().cpu(), 0.0, 1.0, -1.0).clamp(-MOST, MOST)
            order = torch.arange(len(values), dtype=torch.int64) + at * CHUNK + 7 * number
            dot += float(values @ ((order * 2654435761 % (1 << 32)).double() / (1 << 31) - 1))
            size += float(values.square().sum())
        sizes += (1 + number % 5) * math.log1p(math.sqrt(size))
        mix += dot / math.sqrt(size) if size else 0.0
    return sizes, mix


def here(row: Tensor) -> Tensor:
    """Return a copy on the CPU, to be saved."""
    return row.to("cpu", copy=True)


def byte_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor, as a ``state_dict`` holds them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
