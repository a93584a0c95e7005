"""What a model's weights are: compared whole once, and again where they may have changed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs.codec import in_a_row

SAMPLES = 4096  # values of a tensor that are read before each picture
_PIECE = 1 << 24  # bytes that are copied from a device at a time
_SETTINGS = ("training", "scale", "scaling", "_active_adapter", "_disable_adapters", "merged_adapters")


class WatchedWeights:
    """A checksum of all weights of a model but those whose names are in ``but``.

    All of them are read at first. A call looks at what adapters are set to, and whether torch has counted a
    change or has other tensors; a picture begins with a look at some values as well, since what is changed by
    ``.data`` is not counted. So does a call whose tensors have moved, as offloaded ones do each time.
    """

    def __init__(self, model: nn.Module, but: Collection[str] = ()) -> None:
        self._model, self._but = model, but
        self._marks, self._samples = self._marked(), self._sampled()
        self._bits = bits_checksum(model, but)

    def checksum(self, begins: bool) -> int:
        """Return the checksum now; ``begins``: whether a picture does."""
        marks = self._marked()
        samples = self._sampled() if begins or marks != self._marks else self._samples
        other = samples != self._samples or _counted(marks) != _counted(self._marks)
        self._marks, self._samples = marks, samples
        if other:
            self._bits = bits_checksum(self._model, self._but)
        return zlib.crc32(str(settings_checksum(self._model)).encode(), self._bits)

    def _marked(self) -> list[tuple[int, int, int]]:
        parts = ((x, part) for _, x in _tensors(self._model, self._but) for part in _plain(x))
        return [(id(x), p.data_ptr(), 0 if p.is_inference() else p._version) for x, p in parts]

    def _sampled(self) -> int:
        crc = 0
        for _, x in _tensors(self._model, self._but):
            for part in _plain(x):
                crc = _added(crc, some_of(part))
        return crc


def weights_checksum(model: nn.Module, but: Collection[str] = ()) -> int:
    """Return a checksum of all bits of all parameters and buffers, and of the settings of adapters.

    Of what lies on no device the shape counts alone. Those whose names are in ``but`` are left out.
    """
    return zlib.crc32(str(settings_checksum(model)).encode(), bits_checksum(model, but))


def bits_checksum(model: nn.Module, but: Collection[str] = ()) -> int:
    """Return a checksum of all bits of all parameters and buffers but those whose names are in ``but``."""
    crc = 0
    for name, x in _tensors(model, but):
        crc = zlib.crc32(f"{name} {x.dtype} {tuple(x.shape)}".encode(), crc)
        for part in _plain(x):
            crc = _added(crc, part)
    return crc


def settings_checksum(model: nn.Module) -> int:
    """Return a checksum of what adapters and processors are set to, and whether modules are in training."""
    found = [
        (name, key, own[key])
        for name, module in model.named_modules()
        for own in (vars(module), getattr(vars(module).get("processor"), "__dict__", {}))
        for key in _SETTINGS
        if key in own and is_setting(own[key])
    ]
    return zlib.crc32(repr(found).encode())


def some_of(x: Tensor) -> Tensor:
    """Return some values of a tensor, from all of its rows and columns."""
    step = max(1, x.numel() // SAMPLES) | 1
    while x.dim() and math.gcd(step, x.shape[-1]) > 1:
        step += 2
    return x.flatten()[::step]


def bytes_of(x: Tensor) -> memoryview:
    """Return the bytes of a tensor, on the CPU."""
    return in_a_row(x).cpu().view(torch.uint8).numpy().data


def _added(crc: int, x: Tensor) -> int:
    if x.is_meta:
        return crc
    flat = x.flatten()
    for piece in flat.split(max(1, _PIECE // x.element_size())):
        crc = zlib.crc32(bytes_of(piece), crc)
    return crc


def _tensors(model: nn.Module, but: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if name not in but:
            yield name, _offloaded(model, name, x) if x.is_meta else x


def _offloaded(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """Return what is on no device from where accelerate keeps it until a call needs it, if it does."""
    owner, _, own = name.rpartition(".")
    hook: Any = getattr(model.get_submodule(owner), "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        kept = getattr(one, "weights_map", None)
        if kept is not None and own in kept:
            found: Tensor = kept[own]
            return found
    return x


def _counted(marks: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return what of the marks says that values may be others, not just in another place."""
    return [(own, version) for own, _, version in marks]


def _plain(x: Tensor) -> Iterable[Tensor]:
    """Return what a tensor is made of: those inside one of another kind, such as quantised weights."""
    flatten = getattr(x, "__tensor_flatten__", None)
    if flatten is None:
        with torch._C.DisableTorchFunctionSubclass():
            return (x.detach().as_subclass(Tensor),)  # whose changes are counted with those of ``x``
    return tuple(part for name in flatten()[0] for part in _plain(getattr(x, name)))


def is_setting(value: object) -> bool:
    """Return whether a value is made of numbers and texts alone, and may be compared as such."""
    if isinstance(value, dict):
        return all(is_setting(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(is_setting(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)
