"""The policy contract: what was measured where something is sent, in; how to send it, out. And ladders.

A ladder is the ways to send that a policy chooses among, from the coarsest to the exact one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar, runtime_checkable

import torch

from thinwire.codecs import Cast, Codec, Raw

Site = TypeVar("Site", contravariant=True)
Choice = TypeVar("Choice", covariant=True)
SHAPE = (4, 64, 256)  # of the Gaussian values by which a rung's bits are foretold


@runtime_checkable
class Policy(Protocol[Site, Choice]):
    """A pure map from an engine's sites to choices, one a site, in order; one call weighs all of a run."""

    def choose(self, sites: Sequence[Site]) -> Sequence[Choice]:
        """Return a choice for each site."""
        ...


@dataclass(frozen=True)
class Rung:
    """One way to send, and the bits a value it should take.

    ``first`` counts for first visits, where ``keyframe`` codes, ``bits`` for all others. A ``direct`` rung
    passes by any memory.
    """

    codec: Codec
    keyframe: Codec | None
    bits: float
    first: float
    direct: bool = False

    @classmethod
    def of(cls, codec: Codec, keyframe: Codec | None = None, direct: bool = False) -> Rung:
        """Make a rung, its bits those of Gaussian values; entropy coding makes real ones differ."""
        return cls(codec, keyframe, gaussian_bits(codec), gaussian_bits(keyframe or codec), direct)

    def expected(self, fresh: float) -> float:
        """Return bits a value where a share ``fresh`` of the values are first visits."""
        return fresh * self.first + (1 - fresh) * self.bits


BF16, EXACT = Rung(Cast("bfloat16"), None, 16, 16, True), Rung(Raw(), None, 32, 32, True)


def gaussian_bits(codec: Codec) -> float:
    """Return the bits a value that ``codec`` takes for Gaussian values: always the same on one machine.

    >>> gaussian_bits(Cast("bfloat16"))
    16.0
    """
    return _gaussian_bits(codec)  # type: ignore[arg-type]  # every codec is frozen, so it hashes


@lru_cache(maxsize=128)
def _gaussian_bits(codec: Codec) -> float:
    generator = torch.Generator("cpu").manual_seed(0)  # whatever torch's defaults are
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float32, device="cpu")
    return 8 * codec.encode(x).nbytes / x.numel()
