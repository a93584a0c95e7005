"""What verl 0.9.1 has for checkpoint engines, where it is not installed: its names and parameters.

``test_verl_engine.py`` compares these with the wheel's own source. ``Ranks`` are verl's processes as far as
an engine sees them: the registry makes the engines, a transfer goes as ``CheckpointEngineManager`` has it.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import metadata
from types import ModuleType
from typing import Any, ClassVar

import pytest
from torch import Tensor

from thinwire.uses.following.hosts import verl_engine

VERSION = "0.9.1"


class CheckpointEngineRegistry:
    _registry: ClassVar[dict[str, Any]] = {}
    _import_errors: ClassVar[dict[str, ImportError]] = {}

    @staticmethod
    def register(backend: str) -> Callable[[type], type]:
        return lambda found: CheckpointEngineRegistry._registry.setdefault(backend, found)

    @classmethod
    def record_import_error(cls, module: str, error: ImportError) -> None:
        cls._import_errors[module] = error

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        if backend not in cls._registry:
            raise ValueError(f"{backend} not registered; {cls._import_errors}")
        return cls._registry[backend](*args, **kwargs)


class CheckpointEngine(ABC):
    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> Any: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]: ...


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this be verl, unless that is installed; a rank's node is its process's here, without Ray."""
    try:
        metadata.version("verl")
    except metadata.PackageNotFoundError:
        module = ModuleType(verl_engine.MODULE)
        module.__dict__.update({c.__name__: c for c in (CheckpointEngine, CheckpointEngineRegistry)})
        monkeypatch.setitem(sys.modules, verl_engine.MODULE, module)
        for name in ("verl", "verl.checkpoint_engine"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(verl_engine, "version", lambda: VERSION)
    registry = verl_engine.base().CheckpointEngineRegistry
    monkeypatch.setattr(registry, "_registry", {})
    monkeypatch.setattr(registry, "_import_errors", {})
    verl_engine.engine.cache_clear()


class Ranks:
    """Ranks of a trainer and of its rollouts, each on the node that is named."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, trainer: list[str], rollouts: list[str], **options: Any
    ) -> None:
        new, nbytes = verl_engine.base().CheckpointEngineRegistry.new, 1 << 20
        self.nodes, self._patch = [*trainer, *rollouts], monkeypatch
        own = {"bucket_size": nbytes, "host": "127.0.0.1", "timeout": 20.0} | options
        self.trainer = [new("thinwire", is_master=not i, **own) for i in range(len(trainer))]
        self.rollouts = [new("thinwire", **own) for _ in rollouts]

    @property
    def all(self) -> list[Any]:
        return [*self.trainer, *self.rollouts]

    def prepare(self) -> list[dict[str, Any]]:
        """Let all meet, and return what each of the rollouts is told."""
        metadata = []
        for engine, node in zip(self.all, self.nodes, strict=True):
            self._patch.setattr(verl_engine, "this_node", lambda node=node: ("127.0.0.1", node))
            metadata.append(engine.prepare())
        sizes = len(self.trainer), len(self.rollouts)
        told = type(self.trainer[0]).build_topology(*sizes, metadata)
        each = [_each(own, size) for own, size in zip(told, sizes, strict=True)]
        for engine, own in zip(self.all, each[0] + each[1], strict=True):
            engine.init_process_group(**own)
        return each[1]

    def transfer(self, tensors: Mapping[str, Tensor], step: int | None = None) -> list[Any]:
        """Return what each rank of the trainer says, and the tensors that came to each of the rollouts."""
        self.prepare()
        try:
            return asyncio.run(self._transfer(tensors, step))
        finally:
            for engine in self.all:
                engine.finalize()

    async def _transfer(self, tensors: Mapping[str, Tensor], step: int | None) -> list[Any]:
        sent = [engine.send_weights(iter(tensors.items()), global_steps=step) for engine in self.trainer]
        return await asyncio.gather(*sent, *(received(engine, step) for engine in self.rollouts))

    def close(self) -> None:
        for engine in self.all:
            engine.close()


async def received(engine: Any, step: int | None = None) -> dict[str, Tensor]:
    """Return copies of what comes, as verl's rollouts take it."""
    return {name: x.clone() async for name, x in engine.receive_weights(global_steps=step)}


def _each(given: dict[str, list[Any]], size: int) -> list[dict[str, Any]]:
    """Return the arguments of each rank, as verl deals out lists of them."""
    assert all(len(values) == size for values in given.values())
    return [{name: values[i] for name, values in given.items()} for i in range(size)]
