"""What vLLM 0.33 has for weight transfer, where it is not installed: its base classes' names and parameters.

``test_vllm_engine.py`` compares these with the wheel's own source. The worker is vLLM's process as far as an
engine sees it: it makes the engine, passes dictionaries on, and generates with the model.
"""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Iterator
from importlib import import_module, metadata
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

import pytest
from torch import Tensor, nn

from thinwire.uses.following.hosts import vllm_names

VERSION = "0.33.0"
Init, Update = TypeVar("Init"), TypeVar("Update")


class WeightTransferEngine(ABC, Generic[Init, Update]):
    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return self.init_info_cls(**init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return self.update_info_cls(**update_dict)

    def init_transfer_engine(self, init_info: Any) -> None:
        raise NotImplementedError

    def start_weight_update(self) -> None:
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        raise NotImplementedError

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError


class TrainerWeightTransferEngine(ABC, Generic[Init]):
    init_info_cls: Any

    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        raise NotImplementedError

    def send_weights(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        """Do nothing."""


class WeightSource:
    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError


class VLLMWeightSyncClient:
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class _Factory:
    _registry: ClassVar[dict[str, Any]]

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: Any, class_name: str | None = None) -> None:
        if name in cls._registry:
            raise ValueError(name)
        cls._registry[name] = lambda: getattr(import_module(module_path_or_cls), str(class_name))


class WeightTransferEngineFactory(_Factory):
    _registry: ClassVar = {}


class WeightTransferTrainerFactory(_Factory):
    _registry: ClassVar = {}


BASES = (WeightTransferEngine, TrainerWeightTransferEngine, WeightSource, VLLMWeightSyncClient)
FACTORIES = (WeightTransferEngineFactory, WeightTransferTrainerFactory)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this be vLLM, unless that is installed."""
    from thinwire.uses.following.hosts import vllm_engine

    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        for name, classes in ((vllm_names.BASE, BASES), (vllm_names.FACTORY, FACTORIES)):
            module = ModuleType(name)
            module.__dict__.update({c.__name__: c for c in classes})
            monkeypatch.setitem(sys.modules, name, module)
        parts = vllm_names.BASE.split(".")[:-1]
        for i in range(len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), ModuleType(parts[i]))
        monkeypatch.setattr(vllm_names, "version", lambda: VERSION)
    vllm_engine.worker_engine.cache_clear()
    vllm_engine.trainer_engine.cache_clear()


class Worker:
    """A worker process: an engine of the backend for a model that it has loaded."""

    def __init__(self, model: nn.Module) -> None:
        factory = vllm_names.factory().WeightTransferEngineFactory
        config: Any = type("Config", (), {"parallel_config": None, "model_config": None})()
        self.model, self.updating = model, False
        self.engine = factory._registry["thinwire"]()(config, config, None, model)
        self.versions: list[str | None] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()
        self.updating = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.engine.receive_weights(self.engine.parse_update_info(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()
        self.updating = False
        self.versions.append(weight_version)


class Workers:
    """The client that vLLM's trainer engines talk to, of several workers."""

    def __init__(self, *workers: Worker) -> None:
        self.all = workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for worker in self.all:
            worker.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        for worker in self.all:
            worker.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for worker in self.all:
            worker.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        for worker in self.all:
            worker.finish_weight_update(weight_version)
