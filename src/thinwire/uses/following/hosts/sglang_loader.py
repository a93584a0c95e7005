"""SGLang's end: a custom weight loader that follows a trainer, as tested with version 0.5.23's interface.

The server: ``--custom-weight-loader thinwire.uses.following.hosts.sglang_loader.load``, THINWIRE_TOKEN in its
environment. Then, for each version, from whoever drives it::

    engine.update_weights_from_tensor(wanted("192.0.2.7:7200", version), load_format=LOADER)

What SGLang calls tensors here is a few bytes, which say whom to follow and up to which version; the weights
come from the trainer, and what changed is written into the model in place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from thinwire.types import InputError
from thinwire.uses.following.hosts.rollout_weights import RolloutWeights, TrainerAddress, VersionWanted

TESTED = "0.5.23"
LOADER = f"{__name__}.load"
PREFIX = "thinwire:"
_followed: dict[str, RolloutWeights] = {}  # by address, in this worker: SGLang keeps no state of a loader's


def wanted(address: str, version: int = 0) -> list[tuple[str, Tensor]]:
    """Return what SGLang is to be given: whom to follow, and the version that is wanted (0: the newest).

    >>> wanted("192.0.2.7:7200", 3)
    [('thinwire:192.0.2.7:7200', tensor([3]))]
    """
    return [(PREFIX + TrainerAddress(address).address, torch.tensor([VersionWanted(version).version]))]


def load(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Bring a worker's model up to what is wanted, as ``wanted`` says it; SGLang calls this.

    Errors: ``InputError`` for anything else; as ``RolloutWeights.update``.
    """
    for name, version in named_tensors:
        if not name.startswith(PREFIX) or version.numel() != 1:
            told = f"{name} [{', '.join(map(str, version.shape))}] is not what wanted() of this module makes"
            raise InputError(f"{told}; pass that to update_weights_from_tensor")
        address = name.removeprefix(PREFIX)
        if address not in _followed:
            close()  # one trainer at a time
            _followed[address] = RolloutWeights(TrainerAddress(address))
        loads = model.load_weights  # any model of SGLang's has it
        _followed[address].update(model, loads, VersionWanted(int(version.item())))  # type: ignore[arg-type]


def close() -> None:
    """Stop following. Safe to call twice."""
    while _followed:
        _followed.popitem()[1].close()
