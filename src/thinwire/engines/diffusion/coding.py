"""How one kind of tensor is sent: a scheme, and how many steps are sent more exactly at first."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.channels.channel import Scheme
from thinwire.codecs import Cast, Codec
from thinwire.spec import Spec
from thinwire.types import InputError, require

MAX_WARMUP = 1000
WARM: Codec = Cast("float16")


@dataclass(frozen=True, repr=False)
class Coding(Spec):
    """Send by ``scheme``; in the first ``warmup`` steps of a generation its codec is float16.

    Warm-up counts the first step, which a scheme with a mirrored memory sends by its keyframe codec.

    >>> Coding(warmup=2)
    Coding(warmup=2)
    """

    scheme: Scheme = field(default_factory=Scheme)
    warmup: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.warmup in range(MAX_WARMUP + 1)
        require(good, InputError, f"warmup={self.warmup} is not a number of steps in 0..{MAX_WARMUP}")

    def codec(self, step: int) -> Codec | None:
        """Return what replaces the scheme's codec in a generation's step, counted from 0."""
        return WARM if step < self.warmup else None
