"""Dtypes by name: one reading of them, wherever one is asked for. Torch is imported where it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.types import InputError, require

if TYPE_CHECKING:
    import torch

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # as users of command lines write them
FLOATS = {*SHORT, *SHORT.values()}


def dtype_of(given: str | torch.dtype) -> torch.dtype:
    """Return a dtype that is given as such, or by torch's name or a short one. Errors: ``InputError``.

    >>> dtype_of("bf16"), dtype_of("torch.int8")
    (torch.bfloat16, torch.int8)
    """
    import torch

    if isinstance(given, torch.dtype):
        return given
    text = given.strip().removeprefix("torch.") if isinstance(given, str) else ""
    found = getattr(torch, SHORT.get(text, text), None) if text.isidentifier() else None
    told = f"dtype {given!r} is none of torch's; give one like torch.bfloat16, bfloat16 or bf16"
    require(isinstance(found, torch.dtype), InputError, told)
    return found  # type: ignore[return-value]
