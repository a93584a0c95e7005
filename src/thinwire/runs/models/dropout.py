"""Dropout by sample: a sample's masks are the same at each visit, so that its activations stay comparable.

Fresh masks at each visit would make the difference between two visits of a sample as large as its
activations; nothing would be left for a delta to save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinwire.runs.models.stage import ModelStage
from thinwire.types import InputError, ThinwireError, require


class SampleIds:
    """The ids of the samples that pass through a stage just now; one holder for all of its dropouts."""

    def __init__(self) -> None:
        self.now: tuple[int, ...] = ()

    def set(self, ids: Sequence[int]) -> None:
        """Name the samples of the coming forward pass, by row."""
        self.now = tuple(int(i) for i in ids)


class SampleDropout(nn.Module):
    """Zero each value with probability ``p``, by a mask that depends on ``key`` and the sample's id alone.

    Input and output are [B, ...], a sample a row; what is kept is scaled by 1 / (1 - p), as ``nn.Dropout``
    does. In evaluation nothing happens. Errors: ``ThinwireError`` where ``ids`` do not name the rows.

    >>> ids = SampleIds()
    >>> drop = SampleDropout(0.5, "layer 0, seed 0", ids)
    >>> ids.set([7, 8])
    >>> first = drop(torch.ones(2, 64))
    >>> ids.set([8, 7])
    >>> torch.equal(drop(torch.ones(2, 64)), first.flip(0)), torch.equal(first[0], first[1])
    (True, False)
    """

    def __init__(self, p: float, key: str, ids: SampleIds) -> None:
        super().__init__()
        self.p, self.key, self.ids = p, key, ids

    def extra_repr(self) -> str:
        return f"p={self.p}, key={self.key!r}"

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        ids = self.ids.now
        require(
            len(ids) == len(x),
            ThinwireError,
            f"dropout by sample was told {len(ids)} sample ids for {len(x)} rows; call SampleIds.set first",
        )
        return x * self._kept(x, ids) * (1.0 / (1.0 - self.p))

    def _kept(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        generator = torch.Generator(x.device)
        for row, sample in zip(kept, ids, strict=True):
            row.bernoulli_(1.0 - self.p, generator=generator.manual_seed(self._seed(sample)))
        return kept

    def _seed(self, sample: int) -> int:
        digest = hashlib.blake2b(f"{self.key}/{sample}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


def seed_dropout(stage: nn.Module, seed: int, place: str = "") -> SampleIds:
    """Draw all dropout of a stage by sample; return the holder to be told the ids before each forward pass.

    The masks depend on ``seed``, the layer's name and the sample. In a ``ModelStage`` that is the name in the
    unsplit model, so they do not depend on the cut. The names in other modules may be the same from stage to
    stage, so for them ``place`` must say which one this is. Errors: ``InputError`` where it does not.

    >>> stage = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    >>> ids = seed_dropout(stage, seed=0, place="stage 0")
    >>> stage[1]
    SampleDropout(p=0.5, key='0/stage 0/1')
    """
    require(
        bool(place) or isinstance(stage, ModelStage),
        InputError,
        "layers of two stages can have one name, and then would drop the same; give each stage its own place",
    )
    ids = SampleIds()
    found = {n: m for n, m in stage.named_modules() if isinstance(m, nn.Dropout) and m.p > 0.0}
    for name, module in found.items():
        known = stage.original_name(name) if isinstance(stage, ModelStage) else f"{place}/{name}"
        own = SampleDropout(module.p, f"{seed}/{known}", ids).train(module.training)
        stage.set_submodule(name, own)
    return ids
