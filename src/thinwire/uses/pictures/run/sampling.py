"""From noise to a picture: Euler's steps along the flow that the model was trained to follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.types import InputError, require
from thinwire.uses.pictures.run.sheets import ANYTHING, Sheet, conditions

if TYPE_CHECKING:
    from torch import nn

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

    ``classes``: those of the garments of each; ``seeds``: of the noise of each.
    """
    words, x = torch.tensor(classes), torch.cat([sheet.noise(seed) for seed in seeds])
    times = torch.linspace(1, 0, steps + 1).tolist()

    def velocity(name: str, kept: Tensor, now: float) -> Tensor:
        with model.cache_context(name) if guidance != 1 else nullcontext():
            given = conditions(sheet, kept, torch.full((len(x),), now))
            made: Tensor = model(hidden_states=x, **given)[0]
            return made

    for step, (now, then) in enumerate(pairwise(times), 1):
        with torch.no_grad():
            toward = velocity("cond", words, now)
            if guidance != 1:
                away = velocity("uncond", torch.full_like(words, ANYTHING), now)
                toward = away + guidance * (toward - away)
            x = x + (then - now) * toward
        if on_step is not None:
            on_step(step)
    return x
