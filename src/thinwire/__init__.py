"""Train, run and share models over slow links by sending compressed changes.

The names in ``__all__`` are stable. Each is imported at first use, so that ``import thinwire`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.channels.channel import Receiver, Scheme, Sender
    from thinwire.engines.pipeline.stage import CompressedStage
    from thinwire.engines.sync.callback import publish_callback
    from thinwire.engines.sync.pull.keeping import Keeping
    from thinwire.engines.sync.pull.reader import ShelfReader
    from thinwire.engines.sync.pull.writer import ShelfWriter
    from thinwire.engines.sync.push.follower import Follower
    from thinwire.engines.sync.push.publisher import Publisher
    from thinwire.links import LinkShape, connect_mesh, read_token
    from thinwire.recipes.diffusion import parallel
    from thinwire.recipes.experts import spread_experts
    from thinwire.recipes.hook import replicate
    from thinwire.recipes.pipeline import Recipe, parse_recipe
    from thinwire.state.patches.patch import Version
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
    "channels.channel": ("Receiver", "Scheme", "Sender"),
    "engines.pipeline.stage": ("CompressedStage",),
    "engines.sync.callback": ("publish_callback",),
    "engines.sync.push.follower": ("Follower",),
    "engines.sync.push.publisher": ("Publisher",),
    "engines.sync.pull.keeping": ("Keeping",),
    "engines.sync.pull.reader": ("ShelfReader",),
    "engines.sync.pull.writer": ("ShelfWriter",),
    "links": ("LinkShape", "connect_mesh", "read_token"),
    "recipes.diffusion": ("parallel",),
    "recipes.experts": ("spread_experts",),
    "recipes.hook": ("replicate",),
    "recipes.pipeline": ("Recipe", "parse_recipe"),
    "state.patches.patch": ("Version",),
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
_DOORS = ("federated", "models", "scenes")  # modules, each of a use
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
    "federated",
    "models",
    "parallel",
    "parse_recipe",
    "publish_callback",
    "read_token",
    "replicate",
    "scenes",
    "spread_experts",
]


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
