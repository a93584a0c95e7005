"""Noise that nobody gave a generator for: every rank draws the first rank's, from torch's own generators.

Some schedulers draw noise in each step, and take no generator. On one device that is one noise; here each
rank draws it, and all have to draw the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.types import PayloadError, require

_LENGTH = struct.Struct("<I")


def state_of(model: nn.Module) -> bytes:
    """Return the states of the generators of the CPU and of the model's device."""
    parts = [bytes(state.numpy()) for state in _states(_device(model))]
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


@contextmanager
def drawing_alike(model: nn.Module, own: bytes | None, first: bytes | None) -> Iterator[None]:
    """Draw from the states ``first`` inside the block where ``own`` are others; go on from those after it."""
    if own is None or first is None or own == first:
        yield
        return
    device = _device(model)
    before = _states(device)
    _set(device, _read(first, len(before)))
    try:
        yield
    finally:
        _set(device, before)


def _device(model: nn.Module) -> Any:
    """Return the module of torch for the device of a model, None for the CPU."""
    kind = next((p.device.type for p in model.parameters()), "cpu")
    found = None if kind in ("cpu", "meta") else torch.get_device_module(kind)
    return found if hasattr(found, "get_rng_state") else None


def _states(device: Any) -> list[Tensor]:
    return [torch.get_rng_state(), *([] if device is None else [device.get_rng_state().cpu()])]


def _set(device: Any, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device is not None and len(states) > 1:
        device.set_rng_state(states[1])


def _read(data: bytes, most: int) -> list[Tensor]:
    """Return up to ``most`` states that the first rank sent. Errors: ``PayloadError``."""
    found = list[Tensor]()
    while data and len(found) < most:
        size = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else -1
        body = data[_LENGTH.size : _LENGTH.size + size]
        require(size == len(body) > 0, PayloadError, "the first rank's state of its generator cannot be read")
        found.append(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        data = data[_LENGTH.size + size :]
    return found
