"""Train the classifier of garments, and count what it recognises of flux-fashion's sheets.

``make train-classifier``: weights go into the package, both figures into the results. The network, its
batches and their shifts are by fixed seeds. ``python -m bench.pictures.garments [--epochs N] [--threads N]``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from bench.study.cells import RESULTS, made_by
from thinwire.runs.data.images import CLASSES, PIXELS, load_fashion
from thinwire.runs.data.images import SIDE as WITHOUT_EDGE
from thinwire.runs.models.cnn import CnnConfig, build_cnn
from thinwire.runs.records.writer import write_json
from thinwire.uses.pictures.run import flux_fashion
from thinwire.uses.pictures.run.classifier import WEIGHTS, accuracy, load_classifier, recognised, seen
from thinwire.uses.pictures.run.sheets import Sheet, padded, sample

RESULT = RESULTS / "garments.json"
EPOCHS, BATCH, RATE, DECAY = 8, 128, 2e-3, 0.05
SHIFT = 1  # pixels that a garment is moved by, at most, along each side
STEPS = 28
# Rows, columns, guidance, and sheets of each; a sheet of one garment is made of every class in turn.
SHEETS = ((1, 1, 1.0, 40), (2, 2, 1.0, 20), (4, 8, 1.0, 4), (4, 8, 3.0, 4))


def train(garments: Tensor, classes: Tensor, epochs: int) -> nn.Module:
    """Return the network after so many passes over garments [N, 32, 32]: Adam, a rate along a cosine."""
    network, draw = build_cnn(CnnConfig()), torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=DECAY)
    batches = len(garments) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=epochs * batches)
    for epoch in range(epochs):
        for chosen in torch.randperm(len(garments), generator=draw)[: batches * BATCH].view(-1, BATCH):
            loss = functional.cross_entropy(network(seen(_varied(garments[chosen], draw))), classes[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        print(epoch + 1, round(loss.item(), 4), flush=True)
    return network


def _varied(garments: Tensor, draw: torch.Generator) -> Tensor:
    """Return a batch moved by some pixels, half of the batches mirrored."""
    down, right = torch.randint(-SHIFT, SHIFT + 1, (2,), generator=draw).tolist()
    moved = garments.roll((down, right), (1, 2))
    return moved.flip(2) if torch.rand((), generator=draw) < 0.5 else moved


def made_sheets(model: nn.Module, rows: int, columns: int, guidance: float, many: int) -> dict[str, Any]:
    """Return which share of the garments of ``many`` sheets is taken for the class named for it."""
    shares = []
    for seed in range(many):
        first = seed * rows * columns
        classes = tuple((first + i) % CLASSES for i in range(rows * columns))
        sheet = Sheet(rows, columns, classes)
        shares.append(accuracy(sheet.image(sample(model, sheet, STEPS, seed, guidance)), sheet))
    share = sum(shares) / many
    print(f"{rows}x{columns}", guidance, share, flush=True)
    return {"sheet": f"{rows}x{columns}", "guidance": guidance, "sheets": many, "accuracy": share}


def read(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return garments [N, 32, 32] in 0..1 and their classes."""
    return padded(rows[:, :PIXELS].view(-1, WITHOUT_EDGE, WITHOUT_EDGE)), rows[:, PIXELS].long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--keep", action="store_true", help="count with the weights that are there")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    known, held_out = map(read, load_fashion())
    if not asked.keep:
        network = train(*known, asked.epochs)
        save_file({name: p.half().contiguous() for name, p in network.state_dict().items()}, WEIGHTS)
        load_classifier.cache_clear()
    right = (recognised(held_out[0]) == held_out[1]).float().mean().item()
    print("held out", right, flush=True)
    model = flux_fashion.load()
    found = [made_sheets(model, *sheets) for sheets in SHEETS]
    write_json(RESULT, {"held_out": right, "steps": STEPS, "sheets": found, "made": made_by()})


if __name__ == "__main__":
    main()
