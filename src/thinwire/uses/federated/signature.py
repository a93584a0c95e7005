"""What a model is made of: so that two that only count alike are told apart before they train together."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.types import InputError, PayloadError, require

CHUNK = 1 << 20  # values that are mixed at a time
NEAR = 1e-3  # by which the mixes of equal values differ at most, on any processor
MOST = 1e140  # larger values, whose squares have no room, count as this
COMPILED = "_orig_mod."  # what torch.compile puts into names


class Signature(NamedTuple):
    """``digest``: of names, shapes, types, and what is trained. ``sizes``, ``mix``: of what stays as it is.

    That is frozen parameters and buffers: other processors may make them with other last bits, so these two
    numbers are compared within ``NEAR``.
    """

    digest: int
    sizes: float = 0.0
    mix: float = 0.0

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        """Return the signature of a model."""
        trained, fixed = _trained(model), dict(_fixed(model))
        words = [*trained, *([n, *_kind(x)] for n, x in fixed.items())]
        digest = hashlib.blake2b(json.dumps(words).encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest, "little") or 1, *_mixed(fixed.values()))

    @classmethod
    def read(cls, value: Any) -> Signature | None:
        """Read what ``list`` made of one, as it came in a message. Errors: ``PayloadError``."""
        if value is None:
            return None
        good = isinstance(value, list) and len(value) == 3 and isinstance(value[0], int)
        good = good and 0 < value[0] < 1 << 64 and all(isinstance(x, float) and x == x for x in value[1:])
        require(good, PayloadError, f"a model is described as {ascii(value)[:60]}, which is no signature")
        return cls(*value)

    def check(self, other: Signature | None, whose: str) -> None:
        """Raise ``InputError`` where another model is not of this make, and say in what it differs."""
        if other is None:
            return
        wrong = f"{whose} has other parameters by name, shape, type or order, or others are trained"
        require(self.digest == other.digest, InputError, f"{wrong}; take one model at all ends")
        near = max(abs(self.sizes - other.sizes), abs(self.mix - other.mix)) <= NEAR
        wrong = f"{whose} has other values in what is not trained, its frozen parameters and buffers"
        require(near, InputError, f"{wrong}; load these from one file at all ends")


def _trained(model: nn.Module) -> list[list[Any]]:
    """Return what parameters are, each also under the names that it is tied to."""
    first: dict[int, int] = {}
    return [
        [_name(n), *_kind(p), p.requires_grad, first.setdefault(id(p), i)]
        for i, (n, p) in enumerate(model.named_parameters(remove_duplicate=False))
    ]


def _fixed(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what training leaves as it is: frozen parameters, and buffers that are part of a saved model."""
    yield from ((_name(n), p) for n, p in model.named_parameters() if not p.requires_grad)
    saved = model.state_dict(keep_vars=True)
    yield from ((_name(n), b) for n, b in model.named_buffers() if n in saved)


def _name(name: str) -> str:
    return name.replace(COMPILED, "")


def _kind(x: Tensor) -> tuple[list[int], str]:
    return list(x.shape), str(x.dtype)


def plain(x: Tensor) -> Tensor:
    """Return a tensor's values as a dense one that takes arithmetic: sparse and quantised ones are copied."""
    dense = x.detach() if x.layout == torch.strided else x.detach().to_dense()
    return dense.dequantize() if dense.is_quantized else dense


def _mixed(tensors: Iterable[Tensor]) -> tuple[float, float]:
    """Return two numbers that change with any of the tensors' values, but hardly with their last bits."""
    sizes = mix = 0.0
    for number, x in enumerate(map(plain, tensors)):
        flat = (torch.view_as_real(x) if x.is_complex() else x).detach().reshape(-1)
        size = dot = 0.0
        for at, part in enumerate(flat.split(CHUNK)):
            values = torch.nan_to_num(part.double().cpu(), 0.0, 1.0, -1.0).clamp(-MOST, MOST)
            order = torch.arange(len(values), dtype=torch.int64) + at * CHUNK + 7 * number
            dot += float(values @ ((order * 2654435761 % (1 << 32)).double() / (1 << 31) - 1))
            size += float(values.square().sum())
        sizes += (1 + number % 5) * math.log1p(math.sqrt(size))
        mix += dot / math.sqrt(size) if size else 0.0
    return sizes, mix
