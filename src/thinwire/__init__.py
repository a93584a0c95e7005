"""thinwire: train, fine-tune and share models across slow networks by sending compressed changes.

What is named here stays; everything is imported at first use, so that ``import thinwire`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.channel import Receiver, Scheme, Sender
    from thinwire.engines.pipeline import CompressedStage
    from thinwire.engines.sync.callback import publish_callback
    from thinwire.engines.sync.follower import Follower
    from thinwire.engines.sync.publisher import Publisher
    from thinwire.engines.sync.shelf import Keeping, ShelfReader, ShelfWriter
    from thinwire.links import LinkShape, connect_mesh, read_token
    from thinwire.recipes import Recipe, parse_recipe
    from thinwire.state.patch import Version
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
    "engines.sync.callback": ("publish_callback",),
    "engines.sync.follower": ("Follower",),
    "engines.sync.publisher": ("Publisher",),
    "engines.sync.shelf": ("Keeping", "ShelfReader", "ShelfWriter"),
    "links": ("LinkShape", "connect_mesh", "read_token"),
    "recipes": ("Recipe", "parse_recipe"),
    "state.patch": ("Version",),
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
    "Follower",
    "InputError",
    "Keeping",
    "LinkError",
    "LinkShape",
    "MeasurementError",
    "MissingExtra",
    "PayloadError",
    "Publisher",
    "Receiver",
    "Recipe",
    "Scheme",
    "Sender",
    "ShelfReader",
    "ShelfWriter",
    "ThinwireError",
    "Version",
    "__version__",
    "connect_mesh",
    "parse_recipe",
    "publish_callback",
    "read_token",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
