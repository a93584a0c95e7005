"""Train, run and share models over slow links by sending compressed changes.

The names in ``__all__`` are stable. Each is imported at first use, so that ``import thinwire`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire import moved

if TYPE_CHECKING:
    from thinwire.channels.channel import Receiver, Scheme, Sender
    from thinwire.links import LinkShape, connect_mesh, read_token
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
    from thinwire.uses.following.callback import publish_callback
    from thinwire.uses.following.pull.retention import Keeping, RetentionPolicy
    from thinwire.uses.following.pull.store_reader import ShelfReader
    from thinwire.uses.following.pull.store_writer import ShelfWriter
    from thinwire.uses.following.push.follower import Follower
    from thinwire.uses.following.push.publisher import Publisher
    from thinwire.uses.following.shards.shard_follower import ShardFollower
    from thinwire.uses.following.shards.shard_publisher import ShardPublisher
    from thinwire.uses.pictures.context_parallel.divided.loading import load_part
    from thinwire.uses.pictures.context_parallel.recipes import parallel
    from thinwire.uses.pictures.expert_parallel.recipes import spread_experts
    from thinwire.uses.pictures.first_rank import on_first
    from thinwire.uses.pictures.workers.over_workers import over_workers
    from thinwire.uses.training.pipeline.compressed_stage import CompressedStage
    from thinwire.uses.training.pipeline.recipes import Recipe, parse_recipe
    from thinwire.uses.training.replicas.loop.lightning_callback import local_steps_lightning
    from thinwire.uses.training.replicas.loop.meeting import meet
    from thinwire.uses.training.replicas.loop.script import local_steps
    from thinwire.uses.training.replicas.loop.trainer_callback import local_steps_callback
    from thinwire.uses.training.replicas.script import replicate

__version__ = "0.1.0"
moved.put_up()

_HOMES = {
    "channels.channel": ("Receiver", "Scheme", "Sender"),
    "uses.training.pipeline.compressed_stage": ("CompressedStage",),
    "uses.following.callback": ("publish_callback",),
    "uses.following.push.follower": ("Follower",),
    "uses.following.push.publisher": ("Publisher",),
    "uses.following.shards.shard_follower": ("ShardFollower",),
    "uses.following.shards.shard_publisher": ("ShardPublisher",),
    "uses.following.pull.retention": ("Keeping", "RetentionPolicy"),
    "uses.following.pull.store_reader": ("ShelfReader",),
    "uses.following.pull.store_writer": ("ShelfWriter",),
    "links": ("LinkShape", "connect_mesh", "read_token"),
    "uses.pictures.context_parallel.divided.loading": ("load_part",),
    "uses.pictures.context_parallel.recipes": ("parallel",),
    "uses.pictures.expert_parallel.recipes": ("spread_experts",),
    "uses.pictures.first_rank": ("on_first",),
    "uses.pictures.workers.over_workers": ("over_workers",),
    "uses.training.replicas.loop.meeting": ("meet",),
    "uses.training.replicas.loop.lightning_callback": ("local_steps_lightning",),
    "uses.training.replicas.loop.script": ("local_steps",),
    "uses.training.replicas.loop.trainer_callback": ("local_steps_callback",),
    "uses.training.replicas.script": ("replicate",),
    "uses.training.pipeline.recipes": ("Recipe", "parse_recipe"),
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
_DOORS = ("federated", "kv", "models", "scenes", "swarm")  # modules, each of a use
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
    "RetentionPolicy",
    "Scheme",
    "Sender",
    "ShardFollower",
    "ShardPublisher",
    "ShelfReader",
    "ShelfWriter",
    "ThinwireError",
    "Version",
    "__version__",
    "connect_mesh",
    "federated",
    "kv",
    "load_part",
    "local_steps",
    "local_steps_callback",
    "local_steps_lightning",
    "meet",
    "models",
    "on_first",
    "over_workers",
    "parallel",
    "parse_recipe",
    "publish_callback",
    "read_token",
    "replicate",
    "scenes",
    "spread_experts",
    "swarm",
]


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        from thinwire.dtypes import TORCH_ABSENT
        from thinwire.types import MissingExtra

        raise MissingExtra(f"thinwire.{name} needs {TORCH_ABSENT}") from e
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
