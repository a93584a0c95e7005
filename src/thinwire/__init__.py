"""thinwire: train and fine-tune models across slow networks by sending compressed changes.

What is named here stays; everything is imported at first use, so that ``import thinwire`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.channel import Receiver, Scheme, Sender
    from thinwire.engines.pipeline import CompressedStage
    from thinwire.links import LinkShape, connect_mesh, read_token
    from thinwire.recipes import Recipe, parse_recipe
    from thinwire.types import (
        AuthError,
        DesyncError,
        InputError,
        LinkError,
        MeasurementError,
        MissingExtra,
        PayloadError,
        ThinwireError,
    )

__version__ = "0.1.0"

_HOMES = {
    "channel": ("Receiver", "Scheme", "Sender"),
    "engines.pipeline": ("CompressedStage",),
    "links": ("LinkShape", "connect_mesh", "read_token"),
    "recipes": ("Recipe", "parse_recipe"),
    "types": (
        "AuthError",
        "DesyncError",
        "InputError",
        "LinkError",
        "MeasurementError",
        "MissingExtra",
        "PayloadError",
        "ThinwireError",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AuthError",
    "CompressedStage",
    "DesyncError",
    "InputError",
    "LinkError",
    "LinkShape",
    "MeasurementError",
    "MissingExtra",
    "PayloadError",
    "Receiver",
    "Recipe",
    "Scheme",
    "Sender",
    "ThinwireError",
    "__version__",
    "connect_mesh",
    "parse_recipe",
    "read_token",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
