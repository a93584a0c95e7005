"""When a layer of experts waits for the other ranks, and what it sends to them."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.spec import Spec
from thinwire.types import InputError, require
from thinwire.uses.pictures.context_parallel.coding import MAX_WARMUP

ONE, BATCH = "one", "batch"  # without exchange: every rank computes everything, or pictures of its own
SYNC, DISPLACED, INTERWEAVED = "sync", "displaced", "interweaved"
EXCHANGING = (SYNC, DISPLACED, INTERWEAVED)
MODES = (*EXCHANGING, ONE, BATCH)
SYNCED = ("none", "shallow", "deep", "alternate", "all")


@dataclass(frozen=True, repr=False)
class Schedule(Spec):
    """How stale what a layer uses may be; the same on all ranks.

    - ``mode``: ``sync`` waits; ``displaced`` uses what was sent two steps ago; ``interweaved`` one step ago;
    - ``synced``: which layers wait all the same: the first half, the second half, or every other one;
    - ``stride``: at all but every so many steps a token goes to the best of its two experts alone, unless the
      other is on its own rank; 1 sends always;
    - ``warmup``: how many steps at first wait and send everything, whatever the mode.

    Source: DICE (arXiv 2411.16786); names are ours.

    >>> Schedule("interweaved", stride=2)
    Schedule(mode='interweaved', stride=2)
    """

    mode: str = SYNC
    synced: str = "none"
    stride: int = 1
    warmup: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("mode", MODES), ("synced", SYNCED)):
            value = getattr(self, name)
            text = f"{name}={value!r} is not one of {', '.join(known)}"
            require(value in known, InputError, text)
        for name in ("stride", "warmup"):
            value = getattr(self, name)
            text = f"{name}={value} is not a number of steps in 1..{MAX_WARMUP}"
            require(1 <= value <= MAX_WARMUP, InputError, text)

    @property
    def chosen_alone(self) -> bool:
        """Whether it makes sense of nothing but tokens that choose two experts, or so many at each step."""
        return self.mode in (DISPLACED, INTERWEAVED) or self.stride > 1

    def waits(self, layer: int, layers: int, step: int) -> bool:
        """Return whether a layer, of so many, uses what the experts make of this very step's tokens."""
        if self.mode == SYNC or step < self.warmup:
            return True
        shallow = 2 * layer < layers
        found = {"shallow": shallow, "deep": not shallow, "alternate": layer % 2 == 0, "all": True}
        return found.get(self.synced, False)

    def sends_all(self, step: int) -> bool:
        """Return whether tokens go to all of their experts in a step."""
        return step < self.warmup or step % self.stride == 0
