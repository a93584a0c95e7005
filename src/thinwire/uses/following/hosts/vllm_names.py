"""The seam with vLLM: all that is asked of it, by name, as tested with version 0.33.

Its interface: ``vllm.distributed.weight_transfer``, a base class and a factory for each end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module, metadata
from types import ModuleType

from thinwire.types import InputError, MissingExtra, require
from thinwire.uses.following.hosts import host_signatures

TESTED = ("0.33",)
BASE, FACTORY = "vllm.distributed.weight_transfer.base", "vllm.distributed.weight_transfer.factory"
WORKER, TRAINER = "WeightTransferEngine", "TrainerWeightTransferEngine"
# What this end overrides or calls, and the parameters behind ``self`` or ``cls``.
CALLED: dict[str, dict[str, tuple[str, ...]]] = {
    WORKER: {
        "__init__": ("config", "vllm_config", "device", "model"),
        "init_transfer_engine": ("init_info",),
        "start_weight_update": (),
        "finish_weight_update": (),
        "receive_weights": ("update_info",),
        "update_weights": ("update_info",),
        "parse_init_info": ("init_dict",),
        "parse_update_info": ("update_dict",),
        "shutdown": (),
    },
    TRAINER: {
        "__init__": ("client", "source", "is_sender", "rank"),
        "trainer_init": ("init_info", "client", "source"),
        "send_weights": (),
        "shutdown": (),
    },
    "WeightSource": {"iter_full": ()},
    "VLLMWeightSyncClient": {
        "init_weight_transfer_engine": ("init_info",),
        "start_weight_update": (),
        "update_weights": ("update_info",),
        "finish_weight_update": ("weight_version",),
    },
    "WeightTransferEngineFactory": {"register_engine": ("name", "module_path_or_cls", "class_name")},
    "WeightTransferTrainerFactory": {"register_engine": ("name", "module_path_or_cls", "class_name")},
}


def version() -> str:
    """Return the version of vLLM. Errors: ``MissingExtra``."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError as e:
        raise MissingExtra("this needs vLLM: pip install vllm, beside a GPU that it runs on") from e


def base() -> ModuleType:
    """Return vLLM's module of base classes. Errors: ``MissingExtra``; ``InputError`` where it has none."""
    return _module(BASE)


def factory() -> ModuleType:
    """Return vLLM's module of factories. Errors: as ``base``."""
    return _module(FACTORY)


def check_host() -> None:
    """Raise ``InputError`` unless vLLM has all that this end relies on, with these parameters."""
    lacks = ", ".join(lacking(signatures()))
    tested = " or ".join(TESTED)
    told = f"vllm {version()} has changed: {lacks} is not as in {tested}, which this was written for"
    require(not lacks, InputError, f"{told}; install {tested}")


def lacking(found: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[str]:
    """Yield the methods that are not there, or take other parameters."""
    return host_signatures.lacking(CALLED, found)


def signatures() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the parameters of all methods in ``CALLED`` that the installed vLLM has."""
    return host_signatures.signatures(
        CALLED, lambda name: getattr(base(), name, None) or getattr(factory(), name, None)
    )


def _module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as e:
        raise InputError(f"vllm {version()} has no {name} ({e}); install {' or '.join(TESTED)}") from e
