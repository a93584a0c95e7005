"""How one kind of tensor is sent: a scheme, and which steps are sent more exactly at first."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.channels.channel import Scheme
from thinwire.codecs import Cast, Codec, Raw
from thinwire.spec import Spec
from thinwire.types import InputError, require

MAX_WARMUP = 1000
WARM: Codec = Cast("float16")
_LEAST, _MOST = torch.finfo(torch.float16).tiny, torch.finfo(torch.float16).max


def wide(codec: Codec, x: Tensor) -> Codec:
    """Return what sends ``x`` [kinds, ...] in place of float16: bfloat16 as it is, and other values raw.

    That is where float16 has no room for the values of a kind: it ends at 65,504, and has fewer bits below
    6e-5.

    >>> x = torch.ones(1, 2)
    >>> wide(WARM, x), wide(WARM, 1e5 * x), wide(WARM, x.bfloat16())
    (Cast(), Raw(), Cast(dtype='bfloat16'))
    """
    if codec != WARM or x.dtype == torch.float16:
        return codec
    if x.dtype == torch.bfloat16:
        return Cast("bfloat16")
    peaks = x.abs().flatten(1).amax(1).tolist() if x.numel() else []
    return codec if all(peak == 0 or _LEAST <= peak <= _MOST for peak in peaks) else Raw()


@dataclass(frozen=True, repr=False)
class Coding(Spec):
    """Send by ``scheme``; in the first steps of a generation another codec is in place of its own.

    In ``warmup`` steps that is float16, counting the first one, which a scheme with a mirrored memory sends
    by its keyframe codec; in ``early`` steps after them it is ``finer``. What the first steps get wrong
    weighs most in the picture [measured].

    >>> Coding(warmup=2)
    Coding(warmup=2)
    """

    scheme: Scheme = field(default_factory=Scheme)
    warmup: int = 0
    finer: Codec | None = None
    early: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("warmup", "early"):
            steps = getattr(self, name)
            wrong = f"{name}={steps} is not a number of steps in 0..{MAX_WARMUP}"
            require(steps in range(MAX_WARMUP + 1), InputError, wrong)

    def codec(self, step: int) -> Codec | None:
        """Return what replaces the scheme's codec in a generation's step, counted from 0."""
        if step < self.warmup:
            return WARM
        return self.finer if step < self.warmup + self.early else None
