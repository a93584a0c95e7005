"""Where a video's frames, rows and columns are in the inputs of a transformer: an entry a family.

As tested with version 0.42.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.diffusers_names.plan_entries import entry_of

TIME, HEIGHT, WIDTH = range(3)
Inputs = Mapping[str, Any]
_HIDDEN = "hidden_states"


@dataclass(frozen=True)
class LatentGrid:
    """A video of a family: ``axes`` of the hidden states for time, height and width, and the model's patches.

    ``size``: three settings of the model, each a number, or one setting with three. ``packed``: names of the
    inputs that say how many frames, rows and columns the tokens [B, N, C] are, which have no axes then.
    ``tables``: inputs with one entry a token, and the axis of these.
    """

    axes: tuple[int, int, int] = (2, 3, 4)
    size: tuple[str, ...] = ("patch_size",)
    packed: tuple[str, ...] = ()
    tables: tuple[tuple[str, int], ...] = ()

    def shape(self, model: Any, inputs: Inputs) -> tuple[int, int, int]:
        """Return how many patches there are along time, height and width."""
        if self.packed:
            a, b, c = (int(inputs[name]) for name in self.packed)
            return a, b, c
        x, sizes = inputs[_HIDDEN], self.patch(model)
        for axis, size in zip(self.axes, sizes, strict=True):
            text = f"{_HIDDEN} has {x.shape[axis]} places along axis {axis}, no multiple of {size}"
            require(x.shape[axis] % size == 0, InputError, f"{text}; give another size, or use mode gather")
        a, b, c = (x.shape[axis] // size for axis, size in zip(self.axes, sizes, strict=True))
        return a, b, c

    def patch(self, model: Any) -> tuple[int, int, int]:
        """Return how many places of the latents a patch has along time, height and width."""
        if self.packed:
            return 1, 1, 1
        found: list[Any] = [getattr(model.config, name) or 1 for name in self.size]
        a, b, c = found[0] if len(found) == 1 else found
        return a, b, c

    def cropped(self, model: Any, inputs: Inputs, axis: int, part: slice) -> dict[str, Any]:
        """Return the inputs that change where a part of the patches along one axis is all there is."""
        shape = self.shape(model, inputs)
        made: dict[str, Any] = {
            name: _each(inputs[name], partial(of_grid, dim=dim, shape=shape, axis=axis, part=part))
            for name, dim in self.tables
            if _is_table(inputs.get(name), dim, shape)
        }
        x = inputs[_HIDDEN]
        if self.packed:
            sides = dict(zip(self.packed, shape, strict=True))
            sides[self.packed[axis]] = part.stop - part.start
            return made | sides | {_HIDDEN: of_grid(x, 1, shape, axis, part)}
        return made | {_HIDDEN: self.of_latent(model, x, axis, part)}

    def of_latent(self, model: Any, x: Tensor, axis: int, part: slice) -> Tensor:
        """Return a part of what has the form of the hidden states, a view where it can be."""
        size = self.patch(model)[axis]
        return x.narrow(self.axes[axis], part.start * size, (part.stop - part.start) * size)


def of_grid(x: Tensor, dim: int, shape: tuple[int, int, int], axis: int, part: slice) -> Tensor:
    """Return the entries along ``dim`` of tokens in a part of the patches along one axis."""
    dim %= x.dim()
    grid = x.unflatten(dim, shape).narrow(dim + axis, part.start, part.stop - part.start)
    return grid.flatten(dim, dim + 2)


def grid_of(model: nn.Module) -> LatentGrid:
    """Return where a model's videos have their axes. Errors: ``InputError`` for another family."""
    kind, found = type(model), entry_of(GRIDS, model)
    text = f"mode latent does not know the axes of a {kind.__name__}; use mode batch"
    require(found is not None, InputError, text)
    return found  # type: ignore[return-value]  # require has checked it


def _each(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return type(x)(change(one) for one in x) if isinstance(x, list | tuple) else change(x)


def _is_table(x: Any, dim: int, shape: tuple[int, int, int]) -> bool:
    first = x[0] if isinstance(x, list | tuple) else x
    tokens = shape[0] * shape[1] * shape[2]
    return isinstance(first, Tensor) and first.dim() > max(dim, 0) and first.shape[dim] == tokens


_TIMES = (("timestep", 1),)  # where each token has a time of its own
_WAN = LatentGrid(tables=_TIMES)
GRIDS: dict[str, LatentGrid] = {
    "WanTransformer3DModel": _WAN,
    "SkyReelsV2Transformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": _WAN,
    "HunyuanVideoTransformer3DModel": LatentGrid(size=("patch_size_t", "patch_size", "patch_size")),
    "CogVideoXTransformer3DModel": LatentGrid(
        (1, 3, 4), ("patch_size_t", "patch_size", "patch_size"), tables=(("image_rotary_emb", 0),)
    ),
    "LTXVideoTransformer3DModel": LatentGrid(
        packed=("num_frames", "height", "width"), tables=(*_TIMES, ("video_coords", 2))
    ),
}
