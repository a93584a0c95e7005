"""A model of a user's own that raises in the midst of a run: in the 31st batch that it trains on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

LAST = 30


class Wayward(nn.Sequential):
    trained = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) > 2:  # not the look that is taken at a model before a run
            self.trained += 1
            if self.trained > LAST:
                raise RuntimeError("out of ideas")
        return super().forward(x)


def model(shape: Sequence[int], classes: int) -> nn.Module:
    return Wayward(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes))
