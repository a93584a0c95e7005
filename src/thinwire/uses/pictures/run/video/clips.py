"""Clips: some garments that move across a canvas, made by one sample, and how it is made."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from thinwire.runs.data.fashion import CLASSES
from thinwire.runs.machine.compute import Compute
from thinwire.staging import to_host
from thinwire.types import InputError, require
from thinwire.uses.pictures.run.sheets import ANYTHING, WORDS, OnStep, class_numbers, two_numbers
from thinwire.uses.pictures.run.video.moving import MOTIONS, moving

GARMENTS = Path(__file__).parent / "mean-garments.safetensors"
PATCH = (2, 4, 4)  # frames, rows and columns of a token
MOST_GARMENTS, MOST_FRAMES, LEAST_SIDE, MOST_SIDE = 3, 64, 32, 128
FIRST_MOTION = ANYTHING + 1  # the channel of a word that says "slide"
START = 0.6  # the share of noise that a sample begins with, over its storyboard
TICKS = 1000  # what the model calls time 1


@dataclass(frozen=True)
class Clip:
    """Garments of these classes that move in these ways, ``frames`` long, on ``height`` x ``width`` pixels.

    Without ``motions`` they slide, bounce and sway in turn.

    >>> Clip(16, 64, 64, (2, 7)).motions, Clip(16, 64, 64).tokens
    ((0, 1), 2048)
    """

    frames: int
    height: int
    width: int
    classes: tuple[int, ...] = (8, 7)
    motions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.motions:
            object.__setattr__(self, "motions", tuple(i % len(MOTIONS) for i in range(len(self.classes))))
        pace, *sides = PATCH
        wrong = f"--frames {self.frames} is no clip; give an even number from {pace} to {MOST_FRAMES}"
        require(self.frames % pace == 0 and pace <= self.frames <= MOST_FRAMES, InputError, wrong)
        for side, step in zip((self.height, self.width), sides, strict=True):
            wrong = f"--canvas {self.height}x{self.width} is not made here; give multiples of {step} from"
            fits = side % step == 0 and LEAST_SIDE <= side <= MOST_SIDE
            require(fits, InputError, f"{wrong} {LEAST_SIDE} to {MOST_SIDE}")
        many = len(self.classes)
        wrong = f"--classes names {many} garments for a clip; name 1 to {MOST_GARMENTS}"
        require(1 <= many <= MOST_GARMENTS, InputError, wrong)
        bad = [c for c in self.classes if c not in range(CLASSES)]
        require(not bad, InputError, f"there is no class {bad[:1]}; give numbers from 0 to {CLASSES - 1}")
        matching = len(self.motions) == many and all(m in range(len(MOTIONS)) for m in self.motions)
        wrong = (
            f"{self.motions} are no motions of {many} garments; give one from 0 to {len(MOTIONS) - 1} each"
        )
        require(matching, InputError, wrong)

    @classmethod
    def parse(cls, frames: int, canvas: str, classes: str = "") -> Clip:
        """Read ``64x64`` and ``8,7``; ``InputError`` for anything else.

        >>> Clip.parse(8, "32x48", "3")
        Clip(frames=8, height=32, width=48, classes=(3,), motions=(0,))
        """
        sides = two_numbers(canvas, f"--canvas {canvas} is no size; give height and width, as in 64x64")
        named = class_numbers(classes)
        return cls(frames, *sides, named) if named else cls(frames, *sides)

    @property
    def tokens(self) -> int:
        """Tokens of one sample."""
        pace, down, right = PATCH
        return self.frames // pace * (self.height // down) * (self.width // right)

    def storyboard(self, draw: torch.Generator) -> Tensor:
        """Return the frames [frames, height, width] in 0..1 of mean garments on paths that are drawn."""
        garments, motions = mean_garments()[list(self.classes)], torch.tensor(self.motions)
        return moving(garments[None], motions[None], self.frames, (self.height, self.width), draw)[0]

    def start(self, seed: int) -> Tensor:
        """Return the latents [1, 1, frames, height, width] that a sample begins with, alike on all machines.

        They are a storyboard under noise (SDEdit, arXiv 2108.01073): so the seed says how garments move.
        """
        draw = torch.Generator().manual_seed(seed)
        board = self.storyboard(draw)[None, None] * 2 - 1
        return (1 - START) * board + START * torch.randn(board.shape, generator=draw)

    def image(self, latents: Tensor) -> Tensor:
        """Return the frames [frames, height, width] in 0..1 of ``latents`` [1, 1, frames, height, width]."""
        return ((latents[0, 0] + 1) / 2).clamp(0, 1)

    def words(self, keep_text: bool = True) -> Tensor:
        """Return the text [1, garments, channels]; without it, one word that says "anything"."""
        if keep_text:
            return words(torch.tensor([self.classes]), torch.tensor([self.motions]))
        return anything(1)


@cache
def mean_garments() -> Tensor:
    """Return the mean garment uint8 [10, 28, 28] of each class, as the training images have it."""
    text = f"{GARMENTS.name} is not in this package; install thinwire anew"
    require(GARMENTS.exists(), InputError, text)
    return load_file(GARMENTS)["garments"]


def words(classes: Tensor, motions: Tensor) -> Tensor:
    """Return the text [B, N, channels] of garments of ``classes`` and ``motions`` [B, N]: a word each."""
    return (functional.one_hot(classes, WORDS) + functional.one_hot(motions + FIRST_MOTION, WORDS)).float()


def anything(batch: int) -> Tensor:
    """Return the text [B, 1, channels] that says nothing."""
    return functional.one_hot(torch.full((batch, 1), ANYTHING), WORDS).float()


def shifted(times: Tensor, shift: float) -> Tensor:
    """Return times in 0..1 moved towards noise, as a flow's scheduler with this ``shift`` moves them."""
    return shift * times / (1 + (shift - 1) * times)


def sample_clip(
    model: Any, clip: Clip, steps: int, seed: int, guidance: float = 1.0, on_step: OnStep | None = None
) -> Tensor:
    """Return the latents [1, 1, frames, height, width] of a clip after ``steps``; see ``sheets.sample``.

    The model computes where its weights are, in their type; steps are added up in float32, and come to the
    CPU.
    """
    require(steps >= 1, InputError, f"--steps {steps} is below 1; give a number of denoising steps")
    weights = model.patch_embedding.weight
    x = clip.start(seed).to(weights.device)
    times: Sequence[float] = torch.linspace(START, 0, steps + 1, dtype=torch.float64).tolist()

    def velocity(name: str, text: Tensor, now: float) -> Tensor:
        with model.cache_context(name) if guidance != 1 else nullcontext():
            tick = torch.full((1,), TICKS * now, device=x.device)
            made: Tensor = model(x.to(weights.dtype), tick, text.to(weights), return_dict=False)[0]
            return made.to(x.dtype)

    for step, (now, then) in enumerate(pairwise(times), 1):
        with torch.no_grad():
            toward = velocity("cond", clip.words(), now)
            if guidance != 1:
                away = velocity("uncond", clip.words(keep_text=False), now)
                toward = away + guidance * (toward - away)
            x = x + (then - now) * toward
        if on_step is not None:
            Compute(x.device).wait()  # what is not done yet would count as the next step's
            on_step(step)
    return to_host([x]).tensors()[0]
