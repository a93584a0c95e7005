"""What the experts last made of each token, by slot: slot 0 is the best expert of the token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """Of each of T tokens its k experts [T, k], and what they made of it [T, k, width], not yet weighted."""

    experts: Tensor
    outputs: Tensor

    def reused(self, chosen: Tensor) -> Slots:
        """Return what there is for the experts ``chosen`` [T, k] now.

        That is what the same expert made of the token. A new expert of a token takes what the slot's last one
        made, as in DICE (arXiv 2411.16786, conditional communication).
        """
        same = chosen[:, :, None] == self.experts[:, None, :]
        slot = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
        source = torch.where(same.any(2), same.int().argmax(2), slot)
        index = source[:, :, None].expand(-1, -1, self.outputs.shape[2])
        return Slots(self.experts.gather(1, source), self.outputs.gather(1, index))

    def with_fresh(self, chosen: Tensor, fresh: Tensor, made: Tensor) -> Slots:
        """Return these for ``chosen``, with what was ``made`` [n, width] at the n slots ``fresh`` [T, k]."""
        kept = self.reused(chosen)
        outputs = kept.outputs.clone()
        outputs[fresh] = made.to(outputs.dtype)
        return Slots(torch.where(fresh, chosen, kept.experts), outputs)
