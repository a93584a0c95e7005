"""Sheets of garments: a grid of pictures of 32 x 32 that one sample makes together, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.runs.data.fashion import CLASSES
from thinwire.runs.machine.compute import Compute
from thinwire.staging import to_host
from thinwire.types import InputError, require

if TYPE_CHECKING:
    from torch import nn


SIDE, PATCH = 32, 4  # pixels of a garment, padded, and of a token
GRID = SIDE // PATCH  # tokens along a garment's side
CHANNELS = PATCH * PATCH
WORDS = 16  # channels of a text token: one a class, one for "anything", the rest unused
ANYTHING = CLASSES
MOST = 8  # garments along a side
NAMES = ("top", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


@dataclass(frozen=True)
class Sheet:
    """``rows`` x ``columns`` garments of these classes, by rows; without ``classes`` 0 to 9 in turn.

    >>> Sheet(2, 3).classes, Sheet(2, 3).tokens
    ((0, 1, 2, 3, 4, 5), 384)
    """

    rows: int
    columns: int
    classes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            many = getattr(self, name)
            wrong = f"a sheet of {many} {name} is not made here; give 1 to {MOST}"
            require(1 <= many <= MOST, InputError, wrong)
        if not self.classes:
            object.__setattr__(self, "classes", tuple(i % CLASSES for i in range(self.garments)))
        wrong = f"{len(self.classes)} garments are named for a sheet of {self.rows}x{self.columns}"
        require(len(self.classes) == self.garments, InputError, f"{wrong}; name {self.garments}")
        bad = [c for c in self.classes if c not in range(CLASSES)]
        require(not bad, InputError, f"there is no class {bad[:1]}; give numbers from 0 to {CLASSES - 1}")

    @classmethod
    def parse(cls, size: str, classes: str = "") -> Sheet:
        """Read ``4x8`` and ``0,1,...``; ``InputError`` for anything else.

        >>> Sheet.parse("1x2", "3,4")
        Sheet(rows=1, columns=2, classes=(3, 4))
        """
        sides = two_numbers(size, f"--sheet {size} is no grid; give rows and columns, as in 4x8")
        return cls(*sides, class_numbers(classes))

    @property
    def garments(self) -> int:
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        """Tokens of one sample."""
        return self.garments * GRID * GRID

    def noise(self, seed: int) -> Tensor:
        """Return the noise [1, tokens, channels] of a picture: the same on every machine."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(1, self.tokens, CHANNELS, generator=generator)

    def inputs(self, time: float, keep_text: bool = True) -> dict[str, Any]:
        """Return the transformer's arguments beside ``hidden_states``; without text, "anything"."""
        words = torch.tensor(self.classes if keep_text else [ANYTHING] * self.garments)[None]
        return conditions(self, words, torch.tensor([time]))

    def image(self, latents: Tensor) -> Tensor:
        """Return the picture [32 rows, 32 columns] in 0..1 of ``latents`` [1, tokens, channels]."""
        tokens = latents.view(self.rows * GRID, self.columns * GRID, PATCH, PATCH)
        pixels = tokens.transpose(1, 2).reshape(self.rows * SIDE, self.columns * SIDE)
        return ((pixels + 1) / 2).clamp(0, 1)

    def latents(self, image: Tensor) -> Tensor:
        """Return the latents [1, tokens, channels] of a picture [32 rows, 32 columns] in 0..1."""
        patches = image.view(self.rows * GRID, PATCH, self.columns * GRID, PATCH).transpose(1, 2)
        return (patches.reshape(1, -1, CHANNELS) * 2 - 1).contiguous()

    def positions(self) -> tuple[Tensor, Tensor]:
        """Return where the tokens of the picture and of the text are, [n, 3]: kind, row, column."""
        rows, columns = self.rows * GRID, self.columns * GRID
        middle = (GRID - 1) / 2
        return _grid(0.0, rows, columns, 1, 0.0), _grid(1.0, self.rows, self.columns, GRID, middle)


def two_numbers(text: str, wrong: str) -> tuple[int, int]:
    """Read ``4x8``; ``InputError`` with the sentence ``wrong`` for anything else."""
    first, cross, second = text.partition("x")
    require(bool(cross) and first.isdecimal() and second.isdecimal(), InputError, wrong)
    return int(first), int(second)


def class_numbers(text: str) -> tuple[int, ...]:
    """Read ``0,1,...``, or nothing; ``InputError`` for anything else."""
    words = [word.strip() for word in text.split(",")] if text else []
    wrong = f"--classes {text} are no numbers; give one a garment, as in 0,1,2"
    require(all(word.isdecimal() for word in words), InputError, wrong)
    return tuple(map(int, words))


def conditions(sheet: Sheet, words: Tensor, times: Tensor) -> dict[str, Any]:
    """Return the arguments for classes ``words`` [B, garments] at ``times`` [B]."""
    text = functional.one_hot(words, WORDS).float()
    picture, named = sheet.positions()
    return {
        "encoder_hidden_states": text,
        "pooled_projections": text.mean(1),
        "timestep": times,
        "img_ids": picture,
        "txt_ids": named,
        "return_dict": False,
    }


def padded(images: Tensor) -> Tensor:
    """Return images uint8 [N, 28, 28] as floats [N, 32, 32] in 0..1, black around."""
    edge = (SIDE - images.shape[-1]) // 2
    return functional.pad(images.float() / 255, (edge,) * 4)


def joined(garments: Tensor, sheet: Sheet) -> Tensor:
    """Return garments [rows * columns, 32, 32] as one picture."""
    grid = garments.view(sheet.rows, sheet.columns, SIDE, SIDE)
    return grid.transpose(1, 2).reshape(sheet.rows * SIDE, sheet.columns * SIDE)


def parted(image: Tensor, sheet: Sheet) -> Tensor:
    """Return the garments [rows * columns, 32, 32] of a picture."""
    grid = image.view(sheet.rows, SIDE, sheet.columns, SIDE).transpose(1, 2)
    return grid.reshape(sheet.garments, SIDE, SIDE)


def _grid(kind: float, rows: int, columns: int, pitch: int, first: float) -> Tensor:
    places: Sequence[Tensor] = torch.meshgrid(
        torch.arange(rows) * pitch + first, torch.arange(columns) * pitch + first, indexing="ij"
    )
    where = torch.stack(tuple(places), -1).view(-1, 2)
    return torch.cat((torch.full((len(where), 1), kind), where), 1)


OnStep = Callable[[int], None]


def sample(
    model: nn.Module,
    sheet: Sheet,
    steps: int,
    seed: int,
    guidance: float = 1.0,
    on_step: OnStep | None = None,
) -> Tensor:
    """Return the latents [1, tokens, channels] of a picture after ``steps``.

    ``guidance`` 1 takes one forward pass a step. Else there are two, named ``cond`` and ``uncond`` in
    diffusers' ``cache_context``, and the step goes that many times as far from the second to the first
    (classifier-free guidance, arXiv 2207.12598 [memory]). ``on_step`` gets the number of each finished step.
    """
    require(steps >= 1, InputError, f"--steps {steps} is below 1; give a number of denoising steps")
    return sample_batch(model, sheet, [sheet.classes], [seed], steps, guidance, on_step)


def sample_each(model: Any, classes: Sequence[int], seeds: Sequence[int], steps: int) -> Tensor:
    """Return pictures [N, 32, 32] in 0..1 of one garment each, made as one batch without guidance.

    Each is of a class and of the noise of a seed, as ``sample`` draws it for a sheet of 1 x 1.
    """
    sheet = Sheet(1, 1)
    made = sample_batch(model, sheet, [[c] for c in classes], seeds, steps)
    return torch.stack([sheet.image(one) for one in made[:, None]])


def sample_batch(
    model: Any,
    sheet: Sheet,
    classes: Sequence[Sequence[int]],
    seeds: Sequence[int],
    steps: int,
    guidance: float = 1.0,
    on_step: OnStep | None = None,
) -> Tensor:
    """Return the latents [N, tokens, channels] of N pictures that are made together; see ``sample``.

    ``classes``: those of the garments of each; ``seeds``: of the noise of each, which the CPU draws. The
    model computes where its weights are, in their type; steps are added up in float32, and come to the CPU.
    """
    weights = next(model.parameters())
    words, x = torch.tensor(classes), torch.cat([sheet.noise(seed) for seed in seeds]).to(weights.device)
    times = torch.linspace(1, 0, steps + 1).tolist()

    def velocity(name: str, kept: Tensor, now: float) -> Tensor:
        with model.cache_context(name) if guidance != 1 else nullcontext():
            given = conditions(sheet, kept, torch.full((len(x),), now)) | {"hidden_states": x}
            made: Tensor = model(**_placed(given, weights))[0]
            return made.to(x.dtype)

    for step, (now, then) in enumerate(pairwise(times), 1):
        with torch.no_grad():
            toward = velocity("cond", words, now)
            if guidance != 1:
                away = velocity("uncond", torch.full_like(words, ANYTHING), now)
                toward = away + guidance * (toward - away)
            x = x + (then - now) * toward
        if on_step is not None:
            Compute(x.device).wait()  # what is not done yet would count as the next step's
            on_step(step)
    return to_host([x]).tensors()[0]


def _placed(given: dict[str, Any], like: Tensor) -> dict[str, Any]:
    """Return arguments where ``like`` is, and in its type, but for times and places: they are float32."""
    typed = ("hidden_states", "encoder_hidden_states", "pooled_projections")
    return {
        name: x.to(like.device, like.dtype if name in typed else None) if isinstance(x, Tensor) else x
        for name, x in given.items()
    }
