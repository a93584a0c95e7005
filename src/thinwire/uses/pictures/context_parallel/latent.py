"""Mode latent: each rank computes a part of the video as if it were all, and the axis of the parts rotates.

Parts overlap, and are joined by weights that fall towards their edges (Latent Parallelism, arXiv 2512.07350).
So only the model's output travels. A part does not see the rest in its step, and its positions begin anew, so
the video is another one than one device makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.collectives import MeshExchange
from thinwire.types import InputError, require
from thinwire.uses.pictures.coding import Coding
from thinwire.uses.pictures.context_parallel.modes import Division
from thinwire.uses.pictures.context_parallel.whole_outputs import WholeOutputs
from thinwire.uses.pictures.diffusers_names.hooks import intercepted
from thinwire.uses.pictures.diffusers_names.interfaces import Given
from thinwire.uses.pictures.diffusers_names.latent_grids import WIDTH, grid_of
from thinwire.uses.pictures.diffusers_names.plans import SplitPlan
from thinwire.uses.pictures.model_calls import CallInputs, shapes_of
from thinwire.uses.pictures.rank_message import Key, TensorKind

_AXES = ("frames", "rows", "columns")


class LatentParallel(WholeOutputs):
    """The outputs of one model, of which this rank computes a part in each call; a ``WholeForward``."""

    def __init__(
        self, exchange: MeshExchange, attention: Coding, output: Coding, division: Division, deadline: float
    ) -> None:
        super().__init__(exchange, output, deadline)
        self._overlap = division.overlap / 100

    def attached(self, model: nn.Module, plan: SplitPlan | None = None) -> AbstractContextManager[None]:
        """Let the calls of ``model`` be of parts inside the block."""
        self._model, self._grid = model, grid_of(model)
        return intercepted(model, self)

    def run(self, given: Given, compute: Callable[..., Any]) -> Any:
        """Return the model's output for these inputs, the same bits on all ranks."""
        inputs, seen = given.inputs, CallInputs.of(given.inputs)
        self._begin(given, shapes_of(inputs), seen.time)
        check = self._inquiry.note(self.clock.generation, seen.sums)
        shape = self._grid.shape(self._model, inputs)
        axis = axis_of(self._call.step, shape, len(self._ranks))
        parts = overlapping(shape[axis], len(self._ranks), self._overlap)
        own = parts[self._ranks.index(self._rank)]
        made = compute(self._grid.cropped(self._model, inputs, axis, own))
        mine = made[0] if isinstance(made, tuple) else made.sample
        joined = self._joined(self._exchanged(mine, check, axis, parts), shape, axis, parts)
        self._exchange.end()
        self._ended = True
        if isinstance(made, tuple):
            return (joined, *made[1:])
        made.sample = joined
        return made

    def _exchanged(self, mine: Tensor, check: int, axis: int, parts: list[slice]) -> list[Tensor]:
        """Return the outputs of all ranks for their parts, as all of them have them."""
        key = Key(self._call.stream, axis, TensorKind.OUTPUT, self._rank)
        flat = mine.reshape(1, mine.shape[0], -1)
        with self._exchange.coding():
            packet, own = self._ends.encode(flat, [key.pack()], self._call.step)
        posted = self._exchange.post("an output", key, check, [packet])
        found = {self._rank: own.reshape(mine.shape).to(mine.dtype)}
        lengths = {rank: part.stop - part.start for rank, part in zip(self._ranks, parts, strict=True)}
        for rank, packets in self._exchange.collect(posted, mine.device).items():
            sizes = self._scaled(mine, axis, lengths[self._rank], lengths[rank])
            due = (1, mine.shape[0], math.prod(sizes[1:]))
            keys = [key._replace(source=rank).pack()]
            got = self._exchange.decode(posted, self._ends, rank, packets[0], keys, [due], mine)
            found[rank] = got.reshape(sizes).to(mine.dtype)
        self._exchange.settle()
        return [found[rank] for rank in self._ranks]

    def _scaled(self, x: Tensor, axis: int, length: int, other: int) -> list[int]:
        """Return the shape of a part of ``other`` patches along the axis, where ``x`` has ``length``."""
        sizes, at = list(x.shape), 1 if self._grid.packed else self._grid.axes[axis]
        sizes[at] = sizes[at] // length * other
        return sizes

    def _joined(
        self, outputs: list[Tensor], shape: tuple[int, int, int], axis: int, parts: list[slice]
    ) -> Tensor:
        """Return the whole output: where parts overlap, their mean by weights."""
        ramps = weights(parts, shape[axis])
        sizes = self._scaled(outputs[0], axis, parts[0].stop - parts[0].start, shape[axis])
        whole = torch.zeros(sizes, dtype=torch.float32, device=outputs[0].device)
        grid, packed = self._grid, self._grid.packed
        for out, part, ramp in zip(outputs, parts, ramps, strict=True):
            size = 1 if packed else grid.patch(self._model)[axis]
            along = ramp.repeat_interleave(size).to(out.device)
            if packed:
                here = [part.stop - part.start if i == axis else n for i, n in enumerate(shape)]
                view = whole.unflatten(1, shape).narrow(1 + axis, part.start, part.stop - part.start)
                view += out.float().unflatten(1, here) * _along(along, view.dim(), 1 + axis)
            else:
                view = grid.of_latent(self._model, whole, axis, part)
                view += out.float() * _along(along, view.dim(), grid.axes[axis])
        return whole.to(outputs[0].dtype)


def axis_of(step: int, shape: tuple[int, int, int], ranks: int) -> int:
    """Return along which axis a step is cut: time, height and width in turn, where they are long enough.

    >>> [axis_of(step, (4, 8, 8), 2) for step in range(4)]
    [0, 1, 2, 0]
    """
    fit = [axis for axis in range(WIDTH + 1) if shape[axis] >= 2 * ranks]
    said = ", ".join(f"{n} {name}" for n, name in zip(shape, _AXES, strict=True))
    text = f"a video of {said} of patches is too small for {ranks} ranks in mode latent; use mode gather"
    require(bool(fit), InputError, text)
    return fit[step % len(fit)]


def overlapping(length: int, ranks: int, overlap: float) -> list[slice]:
    """Return the part of each rank, which reaches over its neighbours by a share of its own length.

    >>> overlapping(8, 2, 0.25)
    [slice(0, 5, None), slice(3, 8, None)]
    """
    ends = [length * k // ranks for k in range(ranks + 1)]
    found = []
    for start, stop in pairwise(ends):
        more = round((stop - start) * overlap)
        found.append(slice(max(0, start - more), min(length, stop + more)))
    return found


def weights(parts: list[slice], length: int) -> list[Tensor]:
    """Return each part's weights along the axis, which fall towards its inner edges and are one in sum.

    >>> weights([slice(0, 3), slice(1, 4)], 4)
    [tensor([1.0000, 0.6667, 0.3333]), tensor([0.3333, 0.6667, 1.0000])]
    """
    raw = torch.zeros(len(parts), length)
    for row, part in zip(raw, parts, strict=True):
        n = part.stop - part.start
        up = torch.arange(1, n + 1, dtype=torch.float32)
        left = up if part.start else torch.full((n,), float(n + 1))
        right = up.flip(0) if part.stop < length else torch.full((n,), float(n + 1))
        row[part] = torch.minimum(left, right)
    raw /= raw.sum(0)
    return [row[part] for row, part in zip(raw, parts, strict=True)]


def _along(x: Tensor, dims: int, dim: int) -> Tensor:
    return x.view([-1 if i == dim else 1 for i in range(dims)])
