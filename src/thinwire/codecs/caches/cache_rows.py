"""Rows of a cache to bytes and back: some tokens exactly, the others by components, in levels of one step.

Body: the exact rows, then the levels of components, ``RUN`` or more together, from the largest deviation on.
Each is one or more parts, which the entropy coder wrote, behind their lengths (u32, little-endian).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire import staging
from thinwire.codecs import tagged
from thinwire.codecs.caches.components import Basis
from thinwire.codecs.caches.rotations import Rotation
from thinwire.codecs.deadzone import DeadZone
from thinwire.codecs.entropy import Entropy
from thinwire.spec import Spec
from thinwire.types import ByteCursor, InputError, Payload, PayloadError, TensorSpec, require

RUN = 1 << 16  # levels that share odds, about: fewer would not pay for the table of their odds
SMALL = 0.3  # deviations of so many steps become nothing but zeros, nearly: such components are left out
_LENGTH = struct.Struct("<I")
_PARTS = 3  # of a run: codes, large levels, step
_MEANS = 2  # rows or columns of a product that are there for the mean
Data = bytes | memoryview


@dataclass(frozen=True, repr=False)
class CacheRows(Spec):
    """Code the ``first`` and ``last`` tokens exactly and the others by components, as multiples of ``step``.

    ``step`` is of weighted rows (``Components.step``); ``offset`` as in ``DeadZone``. The first tokens of a
    text take most of all attention, and the last ones what is written next. Where a cache does not begin with
    its text, as that of a sliding window, none counts as first.

    Encoded again, a cache gives the same bytes on the same machine. What others decode differs in the last
    bits: products of matrices round as the machine does.
    """

    step: float
    first: int = 4
    last: int = 64
    offset: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.step > 0, InputError, f"step={self.step} is not above 0")
        require(0 <= self.offset <= 0.5, InputError, f"offset={self.offset} is not in 0..0.5")
        for name, n in (("first", self.first), ("last", self.last)):
            require(n >= 0, InputError, f"{name}={n} exact tokens, expected 0 or more")

    def encode(self, basis: Basis, turns: Sequence[Rotation], held: Sequence[Tensor], begin: int) -> bytes:
        """Return what a cache holds of the tokens from ``begin`` on, in the ``columns`` of ``basis``.

        ``held``: of each column [heads, tokens, width], of one dtype; ``turns``: that of each.
        Errors: ``InputError`` for a NaN or an infinity.
        """
        n = held[0].shape[1]
        start, stop = self.coded(n, begin)
        exact = _rows([torch.cat([x[:, :start], x[:, stop:]], 1) for x in held])
        parts = [*tagged.compressed([tagged.Symbols.of(exact.flatten())], 1)] if exact.numel() else []
        if stop > start and self.rank(basis):
            levels = self._levels(basis, turns, [x[:, start:stop] for x in held], begin + start)
            for run in levels.split(self.run(stop - start)):
                parts += self._code.encode(run).parts
        return b"".join(_LENGTH.pack(p.numel()) + bytes(staging.memory(p)) for p in parts)

    def decode(
        self, basis: Basis, turns: Sequence[Rotation], data: Data, shape: tuple[int, int], dtype: torch.dtype
    ) -> list[Tensor]:
        """Return what ``encode`` was given as ``held``; ``shape``: its tokens, and where they begin.

        Errors: ``PayloadError``.
        """
        cursor, (n, begin) = ByteCursor(data, "a part of a cache"), shape
        start, stop = self.coded(n, begin)
        exact = _exact(cursor, n - (stop - start), basis.mean.numel(), dtype) if n > stop - start else None
        sizes = _sizes(self.rank(basis), self.run(stop - start)) if stop > start else []
        runs = [self._run(cursor, k, stop - start) for k in sizes]
        cursor.close()
        found = [torch.empty(w.shape[0], n, w.shape[1], dtype=dtype) for w in basis.weights]
        if exact is not None:
            for x, few in zip(found, _columns(basis, exact), strict=True):
                x[:, :start], x[:, stop:] = few[:, :start], few[:, start:]
        if stop > start:
            middle = _columns(basis, self._values(basis, runs, stop - start, dtype))
            for turn, x, own in zip(turns, found, middle, strict=True):
                x[:, start:stop] = turn.turned(own.float(), begin + start) if turn.frequencies else own
        return found

    def coded(self, n: int, begin: int) -> tuple[int, int]:
        """Return which of ``n`` tokens from ``begin`` on are coded: from where to where."""
        start = self.first if begin == 0 else 0
        return (start, n - self.last) if n > start + self.last else (n, n)

    def rank(self, basis: Basis) -> int:
        """Return how many components are coded: those that do not become zeros."""
        return int((basis.deviations >= SMALL * self.step).sum())

    def run(self, tokens: int) -> int:
        """Return how many components share odds."""
        return max(4, -(-RUN // max(tokens, 1)) // 4 * 4)

    @cached_property
    def _code(self) -> Entropy:
        return Entropy(DeadZone(step=1.0, offset=self.offset, unit="one"))

    def _levels(self, basis: Basis, turns: Sequence[Rotation], held: Sequence[Tensor], begin: int) -> Tensor:
        """Return components in steps, float32 [rank, tokens], of columns [heads, tokens, width]."""
        kind, tokens, width = _kind_of_product(held[0].dtype), held[0].shape[1], basis.mean.numel()
        rows = torch.ones(tokens, width + _MEANS, dtype=kind)
        for turn, x, out in zip(turns, held, _columns(basis, rows[:, :width]), strict=True):
            out.copy_(turn.turned(x.float(), begin, back=True) if turn.frequencies else x)
        analysis = (basis.analysis[:, : self.rank(basis)].T / self.step).to(kind)
        means = _apart(-(analysis.float() @ basis.mean), kind)  # of what is multiplied, so that none is left
        return (torch.cat([analysis, means.T], 1) @ rows.T).float()

    def _values(self, basis: Basis, runs: Sequence[Tensor], tokens: int, dtype: torch.dtype) -> Tensor:
        """Return the rows [tokens, width] that levels stand for. The mean is a component, of level one."""
        kind, rank = _kind_of_product(dtype), sum(map(len, runs))
        levels = torch.ones(rank + _MEANS, tokens, dtype=kind)
        for run, to in zip(runs, levels[:rank].split([len(run) for run in runs]), strict=True):
            to.copy_(run)
        synthesis = (basis.synthesis[:rank] * self.step).to(kind)
        return levels.T @ torch.cat([synthesis, _apart(basis.mean, kind)])

    def _run(self, cursor: ByteCursor, components: int, tokens: int) -> Tensor:
        parts = tuple(_next(cursor) for _ in range(_PARTS))
        return self._code.decode(Payload(TensorSpec((components, tokens)), parts))


def _kind_of_product(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which matrices are multiplied for a cache of ``dtype``, which is on the CPU.

    A cache of bfloat16 is no finer, and the levels are whole numbers; the sums are float32 in any case.
    """
    asked = (
        getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    quick = any(has() for has in asked if has is not None)
    return torch.bfloat16 if dtype == torch.bfloat16 and quick else torch.float32


def _apart(means: Tensor, kind: torch.dtype) -> Tensor:
    """Return means [n] as ``_MEANS`` rows, which sum to them: rounded, and what rounding left."""
    rounded = means.to(kind)
    return torch.stack([rounded, (means - rounded.float()).to(kind)])


def _sizes(rank: int, run: int) -> list[int]:
    return [min(run, rank - at) for at in range(0, rank, run)]


def _next(cursor: ByteCursor) -> Tensor:
    (n,) = cursor.unpack(_LENGTH)
    part = bytearray(cursor.take(n))
    return torch.frombuffer(part, dtype=torch.uint8) if n else torch.empty(0, dtype=torch.uint8)


def _exact(cursor: ByteCursor, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return the exact rows [tokens, width]."""
    (arrived,) = tagged.arrived((_next(cursor),))
    found = tagged.expand(arrived, tokens * width * dtype.itemsize)
    fits = found.dtype == dtype and found.numel() == tokens * width
    told = f"{found.numel()} exact numbers of {found.dtype}, expected {tokens * width} of {dtype}"
    require(fits, PayloadError, told)
    return found.view(tokens, width)


def _rows(held: Sequence[Tensor]) -> Tensor:
    """Return columns [heads, tokens, width] as rows [tokens, all widths]."""
    return torch.cat([x.transpose(0, 1).flatten(1) for x in held], 1)


def _columns(basis: Basis, rows: Tensor) -> list[Tensor]:
    """Return rows as columns, a view of them each."""
    parts = rows.split([w.shape[0] * w.shape[1] for w in basis.weights], 1)
    return [
        p.unflatten(1, (w.shape[0], -1)).transpose(0, 1) for p, w in zip(parts, basis.weights, strict=True)
    ]
