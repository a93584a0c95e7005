"""Train flux-fashion on sheets of Fashion-MNIST: ``make train-flux-fashion``.

Flow matching: between a sheet x and noise e the model learns e - x at (1 - t) x + t e. The mean of weights
over the last steps is what the package has. A run that was stopped goes on, bit for bit: every step draws
from its own seed (on a GPU up to its rounding). ``python -m bench.pictures.flux_fashion [--steps N] [--tokens
N] [--device cuda] [--threads N]``; the batch is of so many tokens, whatever the sheets. On a GPU products are
in TF32.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bench.study.cells import RESULTS, made_by
from thinwire.runs.data.fashion import PIXELS, load_fashion
from thinwire.runs.data.fashion import SIDE as PIXELS_SIDE
from thinwire.runs.records.writer import read_json, write_json
from thinwire.uses.pictures.run.flux_fashion import WEIGHTS, build
from thinwire.uses.pictures.run.sheets import ANYTHING, Sheet, conditions, joined, padded

STEPS, TOKENS, WARMUP, RATE, DECAY = 2800, 2048, 100, 1e-3, 0.01
MEAN = 0.998  # of the averaged weights: what stays of them in a step
DROPPED = 0.1  # share of the sheets whose text says "anything"
# Rows and columns of a batch's sheets, and how often they are drawn.
Sizes = tuple[tuple[tuple[int, int], float], ...]
SIZES: Sizes = (((1, 1), 0.15), ((2, 2), 0.2), ((2, 4), 0.15), ((4, 4), 0.2), ((4, 8), 0.3))
SAVED = 100  # steps between checkpoints


class Training:
    """The model, the mean of its weights, and the optimiser, after so many steps."""

    sizes: ClassVar[Sizes] = SIZES
    unfinished: ClassVar[Path] = RESULTS / ".flux_fashion"

    def __init__(
        self, images: Tensor, classes: Tensor, steps: int, tokens: int = TOKENS, rate: float = RATE
    ) -> None:
        self.device = images.device
        self.model, self.mean = self.made().to(self.device).train(), self.made().to(self.device)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=DECAY)
        self.images, self.classes, self.steps = images, classes, steps
        self.tokens, self.rate = tokens, rate
        self.step, self.losses = 0, list[float]()
        self.planned = [[0, steps]]  # from which step on the rate was planned for how many

    @property
    def last(self) -> int:
        """Steps in all."""
        return self.steps

    def curve(self) -> list[dict[str, float]]:
        """Return the mean loss of each hundred steps."""
        parts = [self.losses[i : i + SAVED] for i in range(0, self.step, SAVED)]
        return [{"step": SAVED * (i + 1), "loss": sum(p) / len(p)} for i, p in enumerate(parts)]

    def finish(self) -> None:
        """Put the mean weights into the package, and the loss curve beside the other results."""
        save_file({name: p.half().cpu() for name, p in self.mean.state_dict().items()}, WEIGHTS)
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        told = {"steps": self.step, "tokens": self.tokens, "rate": self.rate, "device": device}
        write_json(
            RESULTS / "fashion.json", told | {"sizes": SIZES, "curve": self.curve(), "made": made_by()}
        )

    def made(self) -> nn.Module:
        """Return the model before the first step."""
        return build(0)

    def loss(self, draw: torch.Generator) -> Tensor:
        """Return the loss of the next step's batch."""
        return flow_loss(self.model, *self.batch(draw), draw)

    def rate_now(self) -> float:
        """Return the learning rate of the next step."""
        return self.rate * share(self.step, self.steps)

    def advance(self) -> float:
        """Take a step; return its loss."""
        draw = torch.Generator().manual_seed(self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate_now()
        loss = self.loss(draw)
        self.optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        keep = min(MEAN, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for mean, p in zip(self.mean.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(p, 1 - keep)
        self.step += 1
        self.losses.append(loss.item())
        return self.losses[-1]

    def batch(self, draw: torch.Generator) -> tuple[Sheet, Tensor, Tensor]:
        """Return sheets of one size, as latents [B, tokens, channels], and their words [B, garments]."""
        which = int(torch.multinomial(torch.tensor([often for _, often in self.sizes]), 1, generator=draw))
        sheet = Sheet(*self.sizes[which][0])
        many = max(1, self.tokens // sheet.tokens)
        chosen = torch.randint(len(self.images), (many, sheet.garments), generator=draw)
        images = padded(self.images[chosen.to(self.device)])
        sheets = torch.vmap(lambda garments: sheet.latents(joined(garments, sheet))[0])(images)
        words = self.classes[chosen.to(self.device)].cpu()
        words[torch.rand(many, generator=draw) < DROPPED] = ANYTHING
        return sheet, sheets, words

    def save(self, folder: Path) -> None:
        """Write all that a later process needs."""
        folder.mkdir(parents=True, exist_ok=True)
        parts = {"model": self.model.state_dict(), "mean": self.mean.state_dict()}
        state = self.optimiser.state_dict()["state"]
        parts |= {f"state{k}": values for k, values in state.items()}
        flat = {f"{part}/{name}": x for part, values in parts.items() for name, x in values.items()}
        save_file({name: x.clone() for name, x in flat.items()}, folder / f"{self.step}.safetensors")
        write_json(folder / "state.json", {"step": self.step, "losses": self.losses, "planned": self.planned})
        for old in folder.glob("*.safetensors"):
            if old.stem != str(self.step):
                old.unlink()

    def load(self, folder: Path) -> None:
        """Go on from what ``save`` wrote."""
        known = read_json(folder / "state.json")
        parts: dict[str, dict[str, Tensor]] = {}
        for name, x in load_file(folder / f"{known['step']}.safetensors").items():
            part, _, rest = name.partition("/")
            parts.setdefault(part, {})[rest] = x
        self.model.load_state_dict(parts.pop("model"))
        self.mean.load_state_dict(parts.pop("mean"))
        whole = self.optimiser.state_dict()
        whole["state"] = {int(part.removeprefix("state")): values for part, values in parts.items()}
        self.optimiser.load_state_dict(whole)
        self.step, self.losses = known["step"], list(known["losses"])
        self.planned = known.get("planned", self.planned)
        if self.planned[-1][1] != self.steps:
            self.planned.append([self.step, self.steps])


def share(step: int, steps: int) -> float:
    """Return the share of the full learning rate: a ramp, then half a cosine."""
    return min(1.0, (step + 1) / WARMUP) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)


def flow_loss(model: nn.Module, sheet: Sheet, x: Tensor, words: Tensor, draw: torch.Generator) -> Tensor:
    """Return the mean squared error of the velocity at a time and a noise drawn for each sheet."""
    noise = torch.randn(x.shape, generator=draw).to(x.device)
    times = torch.sigmoid(torch.randn(len(x), generator=draw))
    t = times.to(x.device)[:, None, None]
    given = conditions(sheet, words, times)
    given = {k: v.to(x.device) if isinstance(v, Tensor) else v for k, v in given.items()}
    velocity = model(hidden_states=(1 - t) * x + t * noise, **given)[0]
    loss: Tensor = (velocity - (noise - x)).square().mean()
    return loss


def garments() -> tuple[Tensor, Tensor]:
    """Return the images to train on, uint8 [N, 28, 28], and their classes."""
    rows, _ = load_fashion()
    return rows[:, :PIXELS].view(-1, PIXELS_SIDE, PIXELS_SIDE), rows[:, PIXELS].long()


def main(kind: type[Training], steps: int, rate: float) -> None:
    """Train as the command line asks, going on where an earlier process stopped."""
    parser = argparse.ArgumentParser(description=kind.__doc__)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a batch")
    parser.add_argument("--rate", type=float, default=rate, help="of learning, at its most")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    images, classes = (x.to(asked.device) for x in garments())
    training = kind(images, classes, asked.steps, asked.tokens, asked.rate)
    if (kind.unfinished / "state.json").exists():
        training.load(kind.unfinished)
    while training.step < training.last:
        training.advance()
        if training.step % SAVED == 0 or training.step == training.last:
            training.save(kind.unfinished)
            print(training.step, round(training.curve()[-1]["loss"], 4), flush=True)
    training.finish()


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main(Training, STEPS, RATE)
