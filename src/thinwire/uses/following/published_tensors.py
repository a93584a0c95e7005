"""What is published: the tensors of a module or a mapping, and the notes that go with a version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from thinwire.state.binding import owned
from thinwire.types import InputError, require

Source = nn.Module | Mapping[str, Tensor]
Names = Callable[[str], str | None]


def tensors_of(source: Source, names: Names | None = None) -> Mapping[str, Tensor]:
    """Return the tensors of a module, or of a mapping, by the names that they are published by; not copied.

    What a module keeps besides tensors is left out, and what torch.compile adds to names. ``names`` makes
    the name of a tensor's own, None for one to leave out. Errors: ``InputError`` where two tensors get one
    name, none is left, one has no shape yet, or the source is anything else.

    >>> import torch
    >>> layers = {"base.w": torch.zeros(1), "lora.w": torch.ones(1)}
    >>> list(tensors_of(layers, lambda name: name if name.startswith("lora.") else None))
    ['lora.w']
    """
    if isinstance(source, nn.Module):
        found: Mapping[str, Tensor] = owned(source)
    else:
        found = source
        known = isinstance(source, Mapping)
        told = "a module or a mapping of names to tensors is published, not a"
        require(known, InputError, f"{told} {type(source).__name__}; give a model or its state_dict()")
    if names is None:
        return found
    chosen: dict[str, Tensor] = {}
    for own, x in found.items():
        name = names(own)
        if name is not None:
            require(name not in chosen, InputError, f"two tensors would be published as {name}, one is {own}")
            chosen[name] = x
    require(bool(chosen), InputError, "names leaves no tensor to publish; let it return a name for some")
    return chosen


def notes_of(step: object, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a version's meta data; scalars of numpy and torch become plain numbers.

    >>> import torch
    >>> notes_of(torch.tensor(3), {"loss": torch.tensor(0.5)})
    {'step': 3, 'loss': 0.5}
    """
    found = dict(meta) if step is None else {"step": step} | dict(meta)
    return {key: _plain(value) for key, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, Tensor | np.ndarray) and value.ndim == 0):
        return value.item()
    return value
