"""The turn that a position gives to keys, undone and done again.

Rotary embeddings turn pairs of a key's values by the position times a frequency. What is left without the
turn lies in far fewer directions, the same ones at every position, so components are made of that.
Source: RoFormer (Su et al. 2021, arXiv 2104.09864), equation 34; halves as pairs: GPT-NeoX [from memory].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.types import InputError, require

STYLES = NONE, HALVES, PAIRS = "none", "halves", "pairs"
MOST = 1024  # frequencies of a head


@dataclass(frozen=True)
class Rotation:
    """How keys are turned: which values are a pair, and its ``frequencies`` in radians a token.

    The first two times ``len(frequencies)`` values of a head are turned, the others are left. A pair is
    value i and the one half of those behind it (``halves``), or two neighbours (``pairs``).

    >>> turn = Rotation("halves", (1.0, 0.01))
    >>> x = torch.arange(8.0).view(1, 2, 4)
    >>> torch.allclose(turn.turned(turn.turned(x, 7), 7, back=True), x, atol=1e-5)
    True
    """

    style: str = NONE
    frequencies: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(self.style in STYLES, InputError, f"style={self.style!r} is not one of {', '.join(STYLES)}")
        n = len(self.frequencies)
        require(n <= MOST, InputError, f"{n} frequencies of a head, at most {MOST}")
        told = f"{n} frequencies for keys that are turned by style {self.style!r}"
        require((self.style == NONE) == (not n), InputError, told)

    @property
    def width(self) -> int:
        """Values of a head that are turned."""
        return 2 * len(self.frequencies)

    def turned(self, x: Tensor, begin: int, back: bool = False) -> Tensor:
        """Return keys [heads, tokens, width] of the positions from ``begin`` on, turned, or turned back."""
        if self.style == NONE:
            return x
        cos, sin = _table(self.frequencies, begin, x.shape[1], x.dtype, x.device)
        found = torch.empty_like(x)
        found[..., self.width :] = x[..., self.width :]
        (first, second), (one, two) = self._pairs(x), self._pairs(found)
        turn = 1 if back else -1
        torch.mul(first, cos, out=one).addcmul_(second, sin, value=turn)
        torch.mul(second, cos, out=two).addcmul_(first, sin, value=-turn)
        return found

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second of each pair."""
        inner, n = x[..., : self.width], len(self.frequencies)
        return (
            (inner[..., :n], inner[..., n:]) if self.style == HALVES else (inner[..., ::2], inner[..., 1::2])
        )


STILL = Rotation()  # of values, and of models without such positions


@lru_cache(maxsize=16)  # the same for all layers of a cache
def _table(
    frequencies: tuple[float, ...], begin: int, n: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [n, frequencies] of the positions from ``begin`` on."""
    places = torch.arange(begin, begin + n, dtype=torch.float64)
    angles = places[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)
