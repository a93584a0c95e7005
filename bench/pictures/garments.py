"""Train the classifier of garments, count what it recognises, and say how far made ones are from real.

``make train-classifier`` (``python -m bench.pictures.garments train [--epochs N] [--keep]``): weights go into
the package, both figures into the results. The network, its batches and their shifts are by fixed seeds.

``make bench-garment-distance`` (``... distance [--sets N]``): each model makes as many pictures of one
garment, of all classes in turn, from the same noise, several times over. The floor is of as many real ones of
these classes. All are held against the same other real ones, on which neither a model nor the classifier was
trained. It goes on where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from bench.study.cells import RESULTS, Cells, made_by
from thinwire.runs.data.fashion import CLASSES, PIXELS, load_fashion
from thinwire.runs.data.fashion import SIDE as WITHOUT_EDGE
from thinwire.runs.models.cnn import CnnConfig, build_cnn
from thinwire.runs.records.writer import write_json
from thinwire.uses.pictures.run import flux_fashion, flux_fashion_moe
from thinwire.uses.pictures.run.classifier import WEIGHTS, accuracy, load_classifier, recognised, seen
from thinwire.uses.pictures.run.distance import garment_distance
from thinwire.uses.pictures.run.sheets import Sheet, padded, sample, sample_each

EPOCHS, BATCH, RATE, DECAY = 8, 128, 2e-3, 0.05
SHIFT = 1  # pixels that a garment is moved by, at most, along each side
STEPS = 28
# Rows, columns, guidance, and sheets of each; a sheet of one garment is made of every class in turn.
SHEETS = ((1, 1, 1.0, 40), (2, 2, 1.0, 20), (4, 8, 1.0, 4), (4, 8, 3.0, 4))
MANY, AT_ONCE = 2048, 32  # pictures of a set, and of a batch
SETS = 2  # of pictures by each model
MODELS: dict[str, Callable[[], nn.Module]] = {
    flux_fashion_moe.NAME: flux_fashion_moe.load,
    flux_fashion.NAME: flux_fashion.load,
}
# Sets whose first noise is of the seed ``set * APART``: no two share noise.
APART = 10_000


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


def reals() -> tuple[Tensor, Tensor, Tensor]:
    """Return held-out garments in 0..1: ``MANY``, their classes, and all others, which distances are from."""
    _, (garments, kinds) = map(read, load_fashion())
    order = torch.randperm(len(garments), generator=torch.Generator().manual_seed(0))
    quota = classes(MANY).bincount(minlength=CLASSES)
    place = functional.one_hot(kinds[order], CLASSES).cumsum(0).gather(1, kinds[order][:, None])[:, 0]
    taken = place <= quota[kinds[order]]
    some = order[taken]
    return garments[some], kinds[some], garments[order[~taken]]


def classes(many: int) -> Tensor:
    """Return the class of each picture of a set: all in turn."""
    return torch.arange(many) % CLASSES


def made(model: nn.Module, which: int, many: int = MANY) -> Tensor:
    """Return the pictures [many, 32, 32] of a set."""
    kinds = classes(many).tolist()
    parts = [range(i, min(i + AT_ONCE, many)) for i in range(0, many, AT_ONCE)]
    return torch.cat(
        [sample_each(model, [kinds[i] for i in p], [which * APART + i for i in p], STEPS) for p in parts]
    )


def told(garments: Tensor, kinds: Tensor, others: Tensor) -> dict[str, float]:
    """Return a set's distance from real garments, and which share of it is taken for its class."""
    right = (recognised(garments) == kinds).float().mean()
    return {"distance": garment_distance(garments, others), "accuracy": float(right)}


def trained(epochs: int, keep: bool) -> None:
    """Train the classifier, unless the weights that are there are to be kept, and count by it."""
    known, held_out = map(read, load_fashion())
    if not keep:
        network = train(*known, epochs)
        save_file({name: p.half().contiguous() for name, p in network.state_dict().items()}, WEIGHTS)
        load_classifier.cache_clear()
    right = (recognised(held_out[0]) == held_out[1]).float().mean().item()
    print("held out", right, flush=True)
    model = flux_fashion.load()
    found = [made_sheets(model, *sheets) for sheets in SHEETS]
    about = {"held_out": right, "steps": STEPS, "sheets": found, "made": made_by()}
    write_json(RESULTS / "garments.json", about)


def distances(sets: int) -> None:
    """Say how far so many sets of pictures of each model are from real garments."""
    some, kinds, others = reals()
    cells = Cells(RESULTS / "distance.json", {"many": MANY, "steps": STEPS})

    def measured(load: Callable[[], nn.Module], which: int) -> dict[str, float]:
        return told(made(load(), which), classes(MANY), others)

    rows = dict[str, list[dict[str, float]]]()
    for which in range(sets):
        for name, load in MODELS.items():
            found = cells.of(f"{name} {which}", partial(measured, load, which))
            print(name, which, found, flush=True)
            rows.setdefault(name, []).append(found)
    settings = {"many": MANY, "steps": STEPS, "others": len(others)}
    cells.finish(settings | {"floor": told(some, kinds, others), "models": rows, "made": made_by()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("train", "distance"))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--keep", action="store_true", help="count with the weights that are there")
    parser.add_argument("--sets", type=int, default=SETS, help="of pictures by each model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.what == "train":
        trained(asked.epochs, asked.keep)
    else:
        distances(asked.sets)
