"""Train flux-fashion-moe on single garments of Fashion-MNIST: ``make train-flux-fashion-moe``.

It begins as flux-fashion. Its experts are of another form than the feed-forward they replace, so first they
alone learn, in every double block, what that one returns for the same input (mean squared error). Then all
weights learn as flux-fashion's did. The gates' own auxiliary loss, diffusers', keeps experts in use.

A run that was stopped goes on, bit for bit. ``python -m bench.pictures.flux_fashion_moe [--steps N] [--device
cuda] [--threads N]``; steps are after the ``DISTILLED`` first ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bench.pictures.flux_fashion import SIZES, TOKENS, Sizes, Training, flow_loss, main, share
from bench.study.cells import RESULTS, made_by
from thinwire.runs.records.writer import write_json
from thinwire.uses.pictures.run import flux_fashion
from thinwire.uses.pictures.run.flux_fashion_moe import EXPERTS, WEIGHTS, build, packed, unpacked
from thinwire.uses.pictures.run.sheets import Sheet

DISTILLED, STEPS = 400, 600
DISTIL_RATE, RATE = 2e-3, 5e-4
ONE_GARMENT: Sizes = (((1, 1), 1.0),)
assert ONE_GARMENT[0][0] in [size for size, _ in SIZES]  # flux-fashion knows such sheets
HELD = 8  # batches by which the use of experts is told


class MoeTraining(Training):
    """flux-fashion with untrained experts at first; ``steps`` are those in which all weights learn."""

    sizes: ClassVar[Sizes] = ONE_GARMENT
    unfinished: ClassVar[Path] = RESULTS / ".flux_fashion_moe"

    def __init__(
        self, images: Tensor, classes: Tensor, steps: int, tokens: int = TOKENS, rate: float = RATE
    ) -> None:
        self.teacher: Any = flux_fashion.load().to(images.device)
        super().__init__(images, classes, steps, tokens, rate)
        self.auxiliary, self.seen = list[Tensor](), list[tuple[Tensor, Tensor]]()
        learner: Any = self.model
        taught: Any = self.teacher.transformer_blocks
        for block in learner.transformer_blocks:
            block.ff.gate.register_forward_hook(lambda gate, given, made: self.auxiliary.append(made[2]))
        for block in taught:
            block.ff.register_forward_hook(lambda ff, given, made: self.seen.append((given[0], made)))

    def made(self) -> nn.Module:
        model = build(0)
        known = {name: p for name, p in self.teacher.state_dict().items() if ".ff." not in name}
        model.load_state_dict(known, strict=False)
        return model

    @property
    def last(self) -> int:
        return DISTILLED + self.steps

    def finish(self) -> None:
        """Put the mean weights into the package, loss curve and use of experts beside the other results."""
        kept = packed({name: p.cpu() for name, p in self.mean.state_dict().items()})
        save_file(kept, WEIGHTS)
        self.mean.load_state_dict(unpacked(kept))
        told = {"distilled": DISTILLED, "planned": self.planned, "tokens": self.tokens}
        told |= {"steps": self.steps, "rate": self.rate, "curve": self.curve()}
        write_json(RESULTS / "moe.json", told | {"experts": used(self.mean, self), "made": made_by()})

    def rate_now(self) -> float:
        done = self.step - DISTILLED
        return DISTIL_RATE * share(self.step, DISTILLED) if done < 0 else self.rate * share(done, self.steps)

    def loss(self, draw: torch.Generator) -> Tensor:
        self.auxiliary.clear()
        batch = self.batch(draw)
        if self.step < DISTILLED:
            found = self._distilled(batch, draw)
        else:
            found = flow_loss(self.model, *batch, draw)
        return found + torch.stack(self.auxiliary).sum()

    def _distilled(self, batch: tuple[Sheet, Tensor, Tensor], draw: torch.Generator) -> Tensor:
        self.seen.clear()
        with torch.no_grad():
            flow_loss(self.teacher, *batch, draw)
        blocks: Any = self.model.transformer_blocks
        off = [(b.ff(x) - y).square().mean() for b, (x, y) in zip(blocks, self.seen, strict=True)]
        return torch.stack(off).sum()


def used(model: nn.Module, images: MoeTraining) -> list[list[float]]:
    """Return for each layer which share of its slots goes to each expert, over ``HELD`` batches."""
    counts = list[Tensor]()
    blocks: Any = model.transformer_blocks
    hooks = [
        block.ff.gate.register_forward_hook(
            lambda gate, given, made: counts.append(made[0].flatten().bincount(minlength=EXPERTS))
        )
        for block in blocks
    ]
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(HELD):
            flow_loss(model, *images.batch(draw), draw)
    for hook in hooks:
        hook.remove()
    per_layer = torch.stack(counts).view(HELD, len(blocks), EXPERTS).sum(0).float()
    shares: list[list[float]] = (per_layer / per_layer.sum(1, keepdim=True)).tolist()
    return shares


if __name__ == "__main__":
    main(MoeTraining, STEPS, RATE)
