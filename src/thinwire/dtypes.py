"""Dtypes by name: one reading of them, wherever one is asked for. Torch is imported where it is needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from thinwire.types import InputError, MissingExtra

if TYPE_CHECKING:
    import torch

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # as users of command lines write them
FLOATS = {*SHORT, *SHORT.values()}
NAMES = SHORT | {"f16": "float16", "f32": "float32", "f64": "float64", "fp64": "float64"}  # safetensors' too
NAMES |= {"half": "float16", "float": "float32", "double": "float64"}  # torch's own second names
TORCH_ABSENT = "torch, which is absent; pip install 'thinwire[torch]'"  # behind what needs it


def name_of(given: object) -> str:
    """Return torch's name of a dtype, which is given as such, or by that name or another one.

    >>> [name_of(x) for x in ("bf16", "torch.int8", "float32", "F16", "half")]
    ['bfloat16', 'int8', 'float32', 'float16', 'float16']
    """
    text = str(given).strip().lower().removeprefix("torch.")
    return NAMES.get(text, text)


def among(given: Any, names: Iterable[str]) -> Any:
    """Return that of ``names`` which means the dtype ``given``; what none of them means comes as it is.

    >>> among("bfloat16", ("bf16", "fp32")), among("int4", ("bf16",))
    ('bf16', 'int4')
    """
    return next((name for name in names if name_of(name) == name_of(given)), given)


def torch_is_there() -> bool:
    """Return whether torch can be imported."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def check_torch(needs: str) -> None:
    """Raise ``MissingExtra`` where there is no torch; ``needs`` says what needs it."""
    if not torch_is_there():
        raise MissingExtra(f"{needs} {TORCH_ABSENT}")


def dtype_of(given: str | torch.dtype) -> torch.dtype:
    """Return a dtype that is given as such or by name. Errors: ``InputError``.

    >>> dtype_of("bf16"), dtype_of("torch.int8")
    (torch.bfloat16, torch.int8)
    """
    check_torch(f"the dtype {given!r} needs")
    import torch

    found = getattr(torch, name_of(given), None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"dtype {given!r} is none of torch's; give one like torch.bfloat16 or 'bf16'")
    return found
