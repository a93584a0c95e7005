"""Train wan-fashion on clips of moving garments: ``make train-wan-fashion``.

Flow matching, as flux-fashion's: between a clip x and noise e the model learns e - x at (1 - t) x + t e.
Clips are short and small at first, whole ones at the end. Products are in bfloat16, weights in float32. The
mean of weights over the last steps is what the package has. A run that was stopped goes on, bit for bit.
``python -m bench.pictures.wan_fashion [--steps N] [--tokens N] [--rate R] [--device cuda]``; the
batch is of so many tokens, whatever the clips.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bench.pictures.flux_fashion import DROPPED, Training, main
from bench.study.cells import RESULTS, made_by
from thinwire.runs.data.fashion import CLASSES
from thinwire.runs.records.writer import write_json
from thinwire.uses.pictures.run.video.clips import (
    GARMENTS,
    MOST_GARMENTS,
    TICKS,
    Clip,
    anything,
    shifted,
    words,
)
from thinwire.uses.pictures.run.video.moving import MOTIONS, moving
from thinwire.uses.pictures.run.video.wan_fashion import FOLDER, WEIGHTS, build

STEPS, RATE = 8500, 1.2e-3
NOISIEST = 0.8  # of the times of the last steps; a sample begins below it
WIDE = 3.0  # the shift of times at first: the whole of a flow
WHOLE, SHIFTS = 4100, (0.5, 2.0)  # after so many steps only lower times: for details, for shapes
# Frames, height and width of a batch's clips, most garments in one, and how often they are drawn at the
# first step and at the last.
SIZES = (
    ((8, 32, 32), 1, 0.45, 0.05),
    ((8, 48, 48), 2, 0.35, 0.1),
    ((16, 48, 48), 2, 0.1, 0.2),
    ((16, 64, 64), 3, 0.1, 0.65),
)
GOLDEN = (math.sqrt(5) - 1) / 2


class WanTraining(Training):
    """wan-fashion after so many steps."""

    unfinished: ClassVar[Path] = RESULTS / ".wan_fashion"

    def made(self) -> nn.Module:
        return build(0)

    def loss(self, draw: torch.Generator) -> Tensor:
        """Return the mean squared error of the velocity, at times that lie evenly over many steps."""
        x, text = self.batch_of_clips(draw)
        noise = torch.randn(x.shape, generator=draw).to(self.device)
        times = spread_times(self.step, len(x)).to(self.device)
        t = times[:, None, None, None, None]
        with torch.autocast(self.device.type, torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a norm in mixed types
            made = self.model((1 - t) * x + t * noise, TICKS * times, text, return_dict=False)[0]
        loss: Tensor = (made.float() - (noise - x)).square().mean()
        return loss

    def batch_of_clips(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return clips of one size, as latents [B, 1, frames, height, width], and their text [B, N, 16]."""
        done = self.step / self.steps
        shares = torch.tensor([first + (last - first) * done for _, _, first, last in SIZES])
        (frames, *size), most, *_ = SIZES[int(torch.multinomial(shares, 1, generator=draw))]
        many = int(torch.randint(1, min(most, MOST_GARMENTS) + 1, (), generator=draw))
        batch = max(1, self.tokens // Clip(frames, *size).tokens)
        chosen = torch.randint(len(self.images), (batch, many), generator=draw)
        motions = torch.randint(len(MOTIONS), (batch, many), generator=draw)
        where = chosen.to(self.device)
        clips = moving(self.images[where].cpu(), motions, frames, (size[0], size[1]), draw)
        text = words(self.classes[where].cpu(), motions)
        unsaid = torch.rand(batch, generator=draw) < DROPPED
        text[unsaid] = anything(1)
        return (clips[:, None] * 2 - 1).to(self.device), text.to(self.device)

    def finish(self) -> None:
        """Put the mean weights into the package, and the loss curve beside the other results."""
        kinds = [self.images[self.classes == k].float().mean(0) for k in range(CLASSES)]
        save_file({"garments": torch.stack(kinds).round().to(torch.uint8).cpu()}, GARMENTS)
        mean: Any = self.mean
        mean.save_config(FOLDER)
        save_file({name: p.bfloat16().cpu() for name, p in mean.state_dict().items()}, WEIGHTS)
        told = {"planned": self.planned, "steps": self.step, "tokens": self.tokens, "rate": self.rate}
        write_json(RESULTS / "wan.json", told | {"sizes": SIZES, "curve": self.curve(), "made": made_by()})


def spread_times(step: int, batch: int) -> Tensor:
    """Return the times [batch] of a step: normal ones through a sigmoid, towards noise, evenly spread."""
    even = (torch.arange(step * batch, (step + 1) * batch, dtype=torch.float64) * GOLDEN + 0.5 / 997) % 1
    normal = math.sqrt(2) * torch.erfinv(2 * even.clamp(1e-4, 1 - 1e-4) - 1)
    if step < WHOLE:
        return shifted(torch.sigmoid(normal), WIDE).float()
    return NOISIEST * shifted(torch.sigmoid(normal), SHIFTS[step % len(SHIFTS)]).float()


if __name__ == "__main__":
    main(WanTraining, STEPS, RATE)
