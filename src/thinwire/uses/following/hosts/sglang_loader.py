"""SGLang's end: a custom weight loader that follows a trainer, as tested with version 0.5.23's interface.

The server: ``--custom-weight-loader thinwire.uses.following.hosts.sglang_loader.load``, THINWIRE_TOKEN in its
environment. Then, for each version, from whoever drives it, ``bring_up(engine, "192.0.2.7:7200", version)``.

What SGLang calls tensors here is a few bytes, which say whom to follow and up to which version; the weights
come from the trainer, and what changed is written into the model in place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.types import WRONG_VALUES, InputError, LinkError, require
from thinwire.uses.following.follower_base import TIMEOUT
from thinwire.uses.following.hosts.rollout_weights import RolloutWeights, TrainerAddress, VersionWanted

TESTED = "0.5.23"
LOADER = f"{__name__}.load"
PREFIX = "thinwire:"
LEAST = 1e-3  # seconds for the first version, where as long as the version may take counts
# What ``bring_up`` calls, and who calls ``load``: the parameters behind ``self``.
CALLED: dict[str, dict[str, tuple[str, ...]]] = {
    "Engine": {
        "begin_weight_update": ("selector",),
        "update_weights_from_tensor": ("named_tensors", "load_format", "flush_cache"),
        "end_weight_update": (),
        "update_weights_from_disk": ("model_path", "load_format"),
    },
    "WeightUpdater": {"update_weights_from_tensor": ("named_tensors", "load_format")},
}
_followed: dict[TrainerAddress, RolloutWeights] = {}  # in this worker: SGLang keeps no state of a loader's


def bring_up(engine: Any, address: str, version: int = 0, timeout: float = TIMEOUT, **trainer: Any) -> None:
    """Bring all workers of SGLang's ``engine`` up to ``version`` (0: the newest that is there).

    SGLang lets running requests end first, and refuses where it has data-parallel replicas. ``trainer``:
    more of what ``TrainerAddress`` has, such as ``base``. Errors: ``LinkError`` with what SGLang says. A
    loader that fails ends SGLang's scheduler, which has no other way in 0.5.23: give a ``timeout`` [s] that
    the line keeps.
    """
    tensors = wanted(address, version, timeout, **trainer)
    _done(engine.begin_weight_update(), "begin_weight_update")
    try:
        _done(engine.update_weights_from_tensor(tensors, load_format=LOADER), "update_weights_from_tensor")
    finally:
        ended = engine.end_weight_update()
    _done(ended, "end_weight_update")


def wanted(
    address: str, version: int = 0, timeout: float = TIMEOUT, **trainer: Any
) -> list[tuple[str, Tensor]]:
    """Return what SGLang is to be given: whom to follow, and the version that is wanted (0: the newest).

    >>> wanted("192.0.2.7:7200", 3, base="out")
    [('thinwire:{"address": "192.0.2.7:7200", "timeout": 60.0, "base": "out"}', tensor([3]))]
    """
    told: dict[str, Any] = {"address": address, "timeout": timeout} | trainer
    TrainerAddress(**told)  # says what is none
    return [(PREFIX + json.dumps(told), torch.tensor([VersionWanted(version, timeout).version]))]


def load(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Bring a worker's model up to what is wanted, as ``wanted`` says it; SGLang calls this.

    Errors: ``InputError`` for anything else; as ``RolloutWeights.update``.
    """
    for name, version in named_tensors:
        if not name.startswith(PREFIX) or version.numel() != 1:
            told = f"{name} [{', '.join(map(str, version.shape))}] is not what wanted() of this module makes"
            raise InputError(f"{told}; pass that to update_weights_from_tensor")
        trainer, timeout = _trainer(name.removeprefix(PREFIX))
        if trainer not in _followed:
            close()  # one trainer at a time
            _followed[trainer] = RolloutWeights(trainer)
        loads = model.load_weights  # any model of SGLang's has it
        _followed[trainer].update(model, loads, VersionWanted(int(version.item()), timeout))  # type: ignore[arg-type]


def close() -> None:
    """Stop following. Safe to call twice."""
    while _followed:
        _followed.popitem()[1].close()


def _trainer(text: str) -> tuple[TrainerAddress, float]:
    """Return whom to follow, and seconds for this version."""
    try:
        told = TrainerAddress(**json.loads(text))
    except WRONG_VALUES as e:
        raise InputError(f"{text!r} names no trainer ({e}); pass what wanted() of this module makes") from e
    return replace(told, timeout=LEAST), told.timeout  # the same trainer, however long one waits for it


def _done(answer: tuple[bool, str], what: str) -> None:
    """Raise ``LinkError`` where SGLang says that a call of its own did not do what it should."""
    require(answer[0], LinkError, f"SGLang's {what} says: {answer[1]}; see its log")
