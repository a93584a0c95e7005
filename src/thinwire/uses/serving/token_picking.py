"""Which token comes next: the likeliest, or one drawn; and how many drafted tokens stand.

A draw is the Gumbel-max trick with noise that depends on seed and position alone. So what is drawn at a
position is the same whether its token was drafted or not, and a draft is right where it is equal to the draw:
the text is, token for token, that of the model without drafts, at any temperature. A draft model that draws
with the same noise is right more often than by a draw of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from thinwire.types import InputError, PayloadError, require

MIX = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: neighbouring positions get seeds far apart
MIXER = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)  # shifts and factors
WORD = 1 << 64
MOST = 1 << 63


@dataclass(frozen=True)
class Picking:
    """How tokens are chosen: at ``temperature`` 0 the likeliest, else drawn by ``seed``.

    ``top_k``: from the k likeliest alone (0: all). ``top_p``: from the likeliest that have this share.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, what in (
            ("temperature", 0 <= self.temperature <= 100, "0 to 100"),
            ("top_p", 0 < self.top_p <= 1, "above 0, up to 1"),
            ("top_k", 0 <= self.top_k < 1 << 31, "0 or more"),
            ("seed", 0 <= self.seed < MOST, "0 or more, below 2**63"),
        ):
            require(good, InputError, f"{name}={getattr(self, name)} is not {what}; give another")

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """Read what ``asdict`` made. Errors: ``PayloadError``."""
        try:
            return cls(**values)
        except (TypeError, InputError) as e:
            raise PayloadError(f"no way to pick tokens: {e}") from e

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    def with_seed(self, seed: int) -> Self:
        """Return it with another seed, of which the low 62 bits count."""
        return replace(self, seed=seed % (1 << 62))

    def pick(self, logits: Tensor, position: int) -> int:
        """Return the token behind logits [V], whose own position is ``position``."""
        if self.temperature == 0:
            return int(logits.argmax())
        scores = self._kept(logits.float().cpu() / self.temperature)
        return int((scores + _noise(self.seed, position, len(scores))).argmax())

    def ranked(self, logits: Tensor, position: int, many: int, among: Tensor, total: int) -> list[int]:
        """Return the ``many`` likeliest tokens to be drawn at a position, by logits [C] of ``among``.

        ``total``: of how many tokens all logits would be, as ``pick`` has them.
        """
        scores = logits
        if self.temperature > 0:
            scores = self._kept(logits.float().cpu() / self.temperature)
            scores = scores + _noise(self.seed, position, total)[among]
        return [int(among[place]) for place in scores.topk(min(many, len(scores))).indices]

    def _kept(self, scores: Tensor) -> Tensor:
        """Return scores in which what ``top_k`` and ``top_p`` leave out is minus infinity."""
        if 0 < self.top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[-1], -torch.inf)
        if self.top_p < 1:
            ordered, places = scores.softmax(0).sort(descending=True)
            out = ordered.cumsum(0) - ordered >= self.top_p  # the first one stays
            scores = scores.masked_fill(torch.zeros_like(out).scatter(0, places, out), -torch.inf)
        return scores


@lru_cache(maxsize=64)  # a position is drawn twice: as a draft, and by the model
def _noise(seed: int, position: int, many: int) -> Tensor:
    """Return Gumbel noise of all tokens [V] at a position.

    By a counter and a mixer (SplitMix64: Steele, Lea and Flood, 2014, figure 15) [from memory], which takes a
    quarter of the time of a generator that is made anew for each position.
    """
    z = torch.arange(1, many + 1) * _signed(MIX) + _signed(_mixed(_mixed(seed) + position))
    for shift, factor in MIXER:
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    uniform = ((z >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_().float()


def _mixed(value: int) -> int:
    """Return 64 bits that all depend on each bit of a value."""
    z = (value + MIX) % WORD
    for shift, factor in MIXER:
        z = ((z ^ (z >> shift)) * factor) % WORD
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    """Return 64 bits as a signed number."""
    return value - WORD if value >= WORD >> 1 else value


def agreed(
    logits: Tensor, drafted: Sequence[int], at: int, picking: Picking, parents: Sequence[int] = ()
) -> tuple[list[int], list[int]]:
    """Return the tokens that a model says, given logits [k + 1, V] behind a token and its k drafts.

    ``at``: position of the first of them. As many drafts as are right, and one token more; and the drafts
    that were, by their numbers. ``parents``: of each draft, -1 for the token; else each stands behind the
    one before.
    """
    behind: dict[int, list[int]] = {}
    for i in range(len(drafted)):
        behind.setdefault(parents[i] if parents else i - 1, []).append(i)
    found, way, node = list[int](), list[int](), -1
    while True:
        found.append(picking.pick(logits[node + 1], at + len(way)))
        node = next((i for i in behind.get(node, ()) if drafted[i] == found[-1]), -1)
        if node < 0:
            return found, way
        way.append(node)
