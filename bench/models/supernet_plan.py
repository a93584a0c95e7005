"""What ``supernet`` compares: ways to train, seeds, epochs and budgets, fixed before the first run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from thinwire.uses.models.oneshot.supernet import WIDTHS, Shape
from thinwire.uses.models.oneshot.training import Method

BATCH = 128
BUDGETS = (2.5, 3.0, 3.5, 4.0, 5.0)  # what uniform widths of so many bits would cost
KINDS = ("bitops", "nbytes")
ONESHOT = {
    "both": {},
    "no-scheduler": {"freezing": None},
    "no-mitigation": {"mitigation": 0.0},
    "neither": {"freezing": None, "mitigation": 0.0},
}
ALONE = {f"apart-{bits}": bits for bits in WIDTHS}  # nets of one width, trained apart
VARIANTS = (*ONESHOT, *ALONE)


class Group(NamedTuple):
    epochs: int
    seeds: tuple[int, ...]


# "short" proves the way from end to end in minutes; "full" is the study.
GROUPS = {"short": Group(1, (0,)), "full": Group(3, (0, 1, 2))}


class Cell(NamedTuple):
    group: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.group}-{self.variant}-{self.seed}"

    @property
    def words(self) -> tuple[str, ...]:
        return self.group, self.variant, f"seed={self.seed}"

    def shape(self) -> Shape:
        """Return the network's shape: all widths, or the one of a network trained apart."""
        return Shape(widths=(ALONE[self.variant],)) if self.variant in ALONE else Shape()

    def method(self, samples: int) -> Method:
        """Return how it is trained on so many samples."""
        steps = GROUPS[self.group].epochs * (samples // BATCH)
        return replace(Method(steps), **ONESHOT.get(self.variant, {}))  # type: ignore[arg-type]


def cells() -> Iterator[Cell]:
    """Yield all cells; what is compared runs in turns."""
    for name, group in GROUPS.items():
        for seed in group.seeds:
            yield from (Cell(name, variant, seed) for variant in VARIANTS)
