"""What a model's weights are: compared whole once, and again where they may have changed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checksum.bit_sums import sums_of
from thinwire.codecs.codec import in_a_row

SAMPLES = 4096  # values of a tensor that are read before each picture
_SETTINGS = ("training", "scale", "scaling", "_active_adapter", "_disable_adapters", "merged_adapters")
_OWN = (Tensor, nn.Parameter)  # kinds of tensors that have no others inside
Marks = list[tuple[int, int, int]]  # of each tensor: which it is, where it lies, and how often it was changed
Settings = list[tuple[int, str, bool | str]]  # of each module: which it is, a name, and the value or its text


class WatchedWeights:
    """A checksum of all weights of a model but those whose names are in ``but``, or begin so (``prefixes``).

    All of them are read at first. A call looks at what adapters are set to, and whether torch has counted a
    change or has other tensors; a picture begins with a look at some values as well, since what is changed by
    ``.data`` is not counted. So does a call whose tensors have moved, as offloaded ones do each time.
    """

    def __init__(self, model: nn.Module, but: Collection[str] = ()) -> None:
        self._model, self._but = model, but
        (self._marks, self._settings), self._samples = self._looked_at(), self._sampled()
        self._bits, self._set = bits_checksum(model, but), settings_checksum(model, but)

    def checksum(self, begins: bool) -> int:
        """Return the checksum now; ``begins``: whether a picture does."""
        marks, settings = self._looked_at()
        samples = self._sampled() if begins or marks != self._marks else self._samples
        other = samples != self._samples or _counted(marks) != _counted(self._marks)
        if settings != self._settings:
            self._set = settings_checksum(self._model, self._but)
        self._marks, self._settings, self._samples = marks, settings, samples
        if other:
            self._bits = bits_checksum(self._model, self._but)
        return zlib.crc32(str(self._set).encode(), self._bits)

    def _looked_at(self) -> tuple[Marks, Settings]:
        """Return the marks of all tensors, and the settings: in one walk, since each call waits for it."""
        marks, settings, but = Marks(), Settings(), self._but
        for name, module in _walk(self._model, but):
            own = module.__dict__
            for kept in (own["_parameters"], own["_buffers"]):
                for key, x in kept.items():
                    if x is not None and not (but and f"{name}{key}" in but):
                        _mark(marks, _offloaded(module, key, x) if x.is_meta else x)
            for key in _SETTINGS:
                if key in own and (isinstance(own[key], bool) or is_setting(own[key])):
                    settings.append((id(module), key, _kept(own[key])))
            if "processor" in own:
                settings += [(id(module), key, _kept(value)) for key, value in _set(own)]
        return marks, settings

    def _sampled(self) -> list[int]:
        parts: dict[torch.device, list[Tensor]] = {}
        for _, x in _tensors(self._model, self._but):
            for part in _plain(x):
                if not part.is_meta:
                    parts.setdefault(part.device, []).append(_as_bytes(some_of(part)))
        return sums_of([torch.cat(some) for some in parts.values()])


def weights_checksum(model: nn.Module, but: Collection[str] = ()) -> int:
    """Return a checksum of all bits of all parameters and buffers, and of the settings of adapters.

    Of what lies on no device the shape counts alone. Those whose names are in ``but`` are left out.
    """
    return zlib.crc32(str(settings_checksum(model, but)).encode(), bits_checksum(model, but))


def bits_checksum(model: nn.Module, but: Collection[str] = ()) -> int:
    """Return a checksum of all bits of all parameters and buffers but those whose names are in ``but``."""
    said, parts = list[str](), list[Tensor]()
    for name, x in _tensors(model, but):
        inside = [part for part in _plain(x) if not part.is_meta]
        said.append(f"{name} {x.dtype} {tuple(x.shape)} {len(inside)}")
        parts += inside
    return zlib.crc32(f"{said} {sums_of(parts)}".encode())


def settings_checksum(model: nn.Module, but: Collection[str] = ()) -> int:
    """Return a checksum of what adapters and processors are set to, and whether modules are in training."""
    away = prefixes(but)
    here = [(name, module) for name, module in model.named_modules() if not f"{name}.".startswith(away)]
    found = [(name, *each) for name, module in here for each in _set(vars(module))]
    return zlib.crc32(repr(found).encode())


def _set(own: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return what a module, and the processor in it, are set to, by name."""
    both = (own, vars(own["processor"])) if hasattr(own.get("processor"), "__dict__") else (own,)
    return [(key, each[key]) for each in both for key in _SETTINGS if key in each and is_setting(each[key])]


def _kept(value: Any) -> bool | str:
    """Return a setting as it is now: most are true or false, and texts of all would take half of the time."""
    return value if isinstance(value, bool) else repr(value)


def some_of(x: Tensor) -> Tensor:
    """Return some values of a tensor, from all of its rows and columns."""
    step = max(1, x.numel() // SAMPLES) | 1
    while x.dim() and math.gcd(step, x.shape[-1]) > 1:
        step += 2
    return x.flatten()[::step]


def _as_bytes(x: Tensor) -> Tensor:
    return in_a_row(x).view(torch.uint8)


def _walk(model: nn.Module, but: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules, each once, with what its weights' names begin with; not those that ``but`` names."""
    seen, left = {id(model)}, [("", model)]
    while left:
        name, module = left.pop()
        yield name, module
        for key, child in module._modules.items():
            if child is not None and id(child) not in seen and f"{name}{key}." not in but:
                seen.add(id(child))
                left.append((f"{name}{key}.", child))


def prefixes(but: Collection[str]) -> tuple[str, ...]:
    """Return those of some names that end with a dot: each stands for all below a module.

    >>> prefixes(["proj_out.weight", "blocks."])
    ('blocks.',)
    """
    return tuple(name for name in but if name.endswith("."))


def _mark(marks: Marks, x: Tensor) -> None:
    for p in (x,) if type(x) in _OWN else _plain(x):
        marks.append((id(x), p.data_ptr(), 0 if p.is_inference() else p._version))


def _tensors(model: nn.Module, but: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    away = prefixes(but)
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if name not in but and not name.startswith(away):
            owner, _, own = name.rpartition(".")
            yield name, _offloaded(model.get_submodule(owner), own, x) if x.is_meta else x


def _offloaded(module: nn.Module, own: str, x: Tensor) -> Tensor:
    """Return what is on no device from where accelerate keeps it until a call needs it, if it does."""
    hook: Any = getattr(module, "_hf_hook", None)
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
