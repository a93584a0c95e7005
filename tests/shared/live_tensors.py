"""Bytes of tensors that are alive: those made while the count is on, by their storages."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class LiveTensors(TorchDispatchMode):
    """``now`` and ``peak``: bytes, without those of ``before``, which were there."""

    def __init__(self, before: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {x.untyped_storage()._cdata: 0 for x in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_flatten(made)[0]:
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._sizes:
                storage = x.untyped_storage()
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata)
        self.peak = max(self.peak, self.now)
        return made

    def _gone(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)
