"""A place where one patch at a time is made: which versions are to be kept for its sake."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

LATELY = 5.0  # seconds within which who has a patch says what it uses


class Ends(NamedTuple):
    """Where a patch starts and where it leads; 0: from nothing, or nowhere."""

    base: int = 0
    version: int = 0


class Lane:
    """``lock`` is held while a patch is made; ``under_way`` are its ends; ``wanted``: it will be sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.under_way = Ends()
        self.wanted = False  # else it is made just to see how large it is
        self._last, self._until = Ends(), 0.0

    def hand_over(self, base: int, version: int) -> None:
        """Say that a patch was made for somebody, who will soon say what it uses."""
        self._last, self._until = Ends(base, version), time.monotonic() + LATELY

    @property
    def lately(self) -> Ends:
        """The ends of the patch that was handed over within ``LATELY``."""
        return self._last if time.monotonic() < self._until else Ends()


def in_use(lanes: list[Lane], used: list[int]) -> list[int]:
    """Return the versions to keep, the most important first, given those that followers use, in that order.

    Where a patch leads comes before where it starts: that is of use again only if the patch does not arrive,
    while the next one starts from where this one leads, or else is a keyframe.
    """
    wanted = [ends for lane in lanes for ends in (lane.lately, lane.under_way if lane.wanted else Ends())]
    others = [number for lane in lanes if not lane.wanted for number in lane.under_way]
    numbers = [*(ends.version for ends in wanted), *used, *(ends.base for ends in wanted), *others]
    return [number for number in numbers if number]
