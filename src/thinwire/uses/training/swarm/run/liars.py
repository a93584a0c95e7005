"""Members that lie, to see that they are found: what they send instead of what they learnt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.rounds.update_messages import VersionMessage
from thinwire.types import InputError, require
from thinwire.uses.training.swarm.member import SwarmMember

LIES = ("turned", "grown", "noise", "nothing", "old")


class Liar(SwarmMember):
    """Train, and then send something else.

    The change with its sign ``turned``, ``grown`` 1,000 times, ``noise`` of its norm, ``nothing``, or always
    the ``old`` one of the first round.
    """

    lie: str = LIES[0]
    _first: Tensor | None = None

    def change(self, version: VersionMessage, start: Tensor) -> Tensor:
        """Return what is sent for what the local steps changed, [1, N]."""
        true = super().change(version, start)
        if self._first is None:
            self._first = true
        return told(self.lie, true, self._first, version.sequence)


def told(lie: str, true: Tensor, first: Tensor, seed: int) -> Tensor:
    """Return what a liar says instead of ``true`` [1, N]. Errors: ``InputError`` for a lie that is unknown.

    >>> told("turned", torch.ones(1, 2), torch.ones(1, 2), 0)
    tensor([[-1., -1.]])
    """
    known = ", ".join(LIES)
    require(lie in LIES, InputError, f"the lie {lie!r} is unknown; tell one of {known}")

    def noise() -> Tensor:
        drawn = torch.randn(true.shape, generator=torch.Generator().manual_seed(seed)).to(true.device)
        return drawn * (true.norm() / drawn.norm())

    ways: dict[str, Callable[[], Tensor]] = {
        "turned": lambda: -true,
        "grown": lambda: true * 1000,
        "noise": noise,
        "nothing": lambda: torch.zeros_like(true),
        "old": lambda: first,
    }
    return ways[lie]()
