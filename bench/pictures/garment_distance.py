"""How far garments that the models make are from real ones: ``make bench-garment-distance``.

Each model makes as many pictures of one garment, of all classes in turn, from the same noise, several times
over. The floor is of as many real garments of these classes. All are held against the same other real ones,
on which neither a model nor the classifier was trained. It goes on where it stopped.
``python -m bench.pictures.garment_distance [--threads N] [--sets N]``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.pictures.garments import read
from bench.study.cells import RESULTS, Cells, made_by
from thinwire.runs.data.images import CLASSES, load_fashion
from thinwire.uses.pictures.run import flux_fashion, flux_fashion_moe
from thinwire.uses.pictures.run.classifier import recognised
from thinwire.uses.pictures.run.distance import garment_distance
from thinwire.uses.pictures.run.sheets import sample_each

RESULT = RESULTS / "distance.json"
MANY, BATCH, STEPS = 2048, 32, 28
SETS = 2  # of pictures by each model
MODELS: dict[str, Callable[[], nn.Module]] = {
    flux_fashion_moe.NAME: flux_fashion_moe.load,
    flux_fashion.NAME: flux_fashion.load,
}
# Sets whose first noise is of the seed ``set * APART``: no two share noise.
APART = 10_000


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
    parts = [range(i, min(i + BATCH, many)) for i in range(0, many, BATCH)]
    return torch.cat(
        [sample_each(model, [kinds[i] for i in p], [which * APART + i for i in p], STEPS) for p in parts]
    )


def told(garments: Tensor, kinds: Tensor, others: Tensor) -> dict[str, float]:
    """Return a set's distance from real garments, and which share of it is taken for its class."""
    right = (recognised(garments) == kinds).float().mean()
    return {"distance": garment_distance(garments, others), "accuracy": float(right)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sets", type=int, default=SETS, help="of pictures by each model")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    some, kinds, others = reals()
    cells = Cells(RESULT, {"many": MANY, "steps": STEPS})

    def measured(load: Callable[[], nn.Module], which: int) -> dict[str, float]:
        return told(made(load(), which), classes(MANY), others)

    rows = dict[str, list[dict[str, float]]]()
    for which in range(asked.sets):
        for name, load in MODELS.items():
            found = cells.of(f"{name} {which}", partial(measured, load, which))
            print(name, which, found, flush=True)
            rows.setdefault(name, []).append(found)
    settings = {"many": MANY, "steps": STEPS, "others": len(others)}
    cells.finish(settings | {"floor": told(some, kinds, others), "models": rows, "made": made_by()})


if __name__ == "__main__":
    main()
