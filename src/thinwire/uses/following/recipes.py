"""Recipes of the state engine: how exactly the values of a state are published.

``Publisher(model, **STATE.parse("cast:dtype=bf16").schemes["values"].options)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from thinwire.choosing.registry import Parameter, Registry
from thinwire.dtypes import among
from thinwire.spec import Spec
from thinwire.state.layout import LEAST_BOUND, MOST_BOUND
from thinwire.types import InputError, require

VALUES = "values"  # the one role
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, repr=False)
class Values(Spec):
    """Floats as they are, or cast to ``dtype``, or off by at most ``bound`` in their own units."""

    dtype: str | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dtype", among(self.dtype, DTYPES))
        good = self.dtype is None or self.dtype in DTYPES
        require(good, InputError, f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        good = self.bound is None or LEAST_BOUND <= self.bound <= MOST_BOUND
        require(good, InputError, f"bound={self.bound} is not in {LEAST_BOUND:.3g}..{MOST_BOUND:.3g}")

    @property
    def options(self) -> dict[str, Any]:
        """What ``Publisher``, ``ShelfWriter`` and ``Layout.of`` take."""
        return {"dtype": self.dtype and DTYPES[self.dtype], "bounds": self.bound}


STATE = Registry[Values, None]("state", (VALUES,), (Values,))
DTYPE = Parameter("what floats are cast to", choices=tuple(DTYPES))
ERROR = Parameter("how far off a float may be, in its own units", LEAST_BOUND, MOST_BOUND, whole=False)


@STATE.register("exact", "Every value as the trainer has it, bit for bit.", "none")
def exact() -> dict[str, Values]:
    """Publish values as they are."""
    return {VALUES: Values()}


@STATE.register("cast", "Floats cast to what followers use.", "common practice")
def cast(dtype: Annotated[str, DTYPE] = "bf16") -> dict[str, Values]:
    """Publish floats in ``dtype``, rounded to nearest."""
    return {VALUES: Values(dtype)}


@STATE.register("bounded", "Floats off by at most a bound, so that small changes wait.", "docs/state.md")
def bounded(
    error: Annotated[float, ERROR] = 1e-4, dtype: Annotated[str | None, DTYPE] = None
) -> dict[str, Values]:
    """Publish floats off by at most ``error``, and besides by what ``dtype`` rounds."""
    return {VALUES: Values(dtype, error)}
