"""Blocks that other ranks have: what stands in their place, and what a model that has such is a part of."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.weight_checksums import is_setting

PIPE = "pipe"
_NUMBERS = (bool, int, float)
EACH, DISK = "the blocks of each rank", "its checkpoint (a checksum of samples)"


@dataclass(frozen=True)
class DividedModel:
    """What of a model is here: ``ranges`` are the blocks of all ranks, numbered over all ``lists`` of them.

    ``checkpoint``: a checksum of samples of all that the files have which the model was loaded from.
    """

    rank: int
    ranges: tuple[range, ...]
    lists: tuple[str, ...]
    checkpoint: int

    def __str__(self) -> str:
        own = self.ranges[self.rank]
        return f"block{'s' * (len(own) > 1)} {_words(own)} of {self.ranges[-1].stop}"

    @property
    def under(self) -> tuple[str, ...]:
        """What the names of all tensors of blocks begin with."""
        return tuple(f"{path}." for path in self.lists)

    def facts(self) -> dict[str, str]:
        """Return what all ranks must have in common before anything else."""
        return {EACH: ", ".join(map(_words, self.ranges)), DISK: str(self.checkpoint)}


class AbsentBlock(nn.Module):
    """Stands where another rank has a block of class ``kind``: it has its settings, and no weights.

    Errors: ``InputError`` where it is called.
    """

    def __init__(self, path: str, block: nn.Module, part: DividedModel) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and is_setting(value):
                setattr(self, name, value)
        self.path, self.kind, self.part = path, type(block), part

    def extra_repr(self) -> str:
        """Return which block is absent."""
        return f"{self.path}, {self.kind.__name__}"

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse the call."""
        text = f"{self.path} is on another rank; call the model inside thinwire.parallel, in mode {PIPE}"
        raise InputError(text)


def refuse_saving(part: DividedModel, *args: Any, **kwargs: Any) -> NoReturn:
    """Stand in for ``save_pretrained``, whose folder would lack what the model lacks."""
    raise InputError(f"this model has {part} alone; save it where it is whole")


def part_of(model: nn.Module) -> DividedModel | None:
    """Return what of a model is here, if some of its blocks are absent."""
    return next((m.part for m in model.modules() if isinstance(m, AbsentBlock)), None)


def under_of(model: nn.Module) -> Collection[str]:
    """Return what the names of weights begin with that are not on all ranks."""
    part = part_of(model)
    return () if part is None else part.under


def facts_of(model: nn.Module) -> dict[str, str]:
    """Return how a model's blocks are divided, for the other ranks."""
    part = part_of(model)
    return {EACH: "all"} if part is None else part.facts() | {"its adapters": _adapters(model)}


def check_part(model: nn.Module, mode: str, rank: int = 0, world: int = 1) -> None:
    """Raise ``InputError`` for a model with absent blocks in another mode or place than it was loaded for."""
    part = part_of(model)
    if part is None:
        return
    require(mode == PIPE and world > 1, InputError, f"this model has {part} alone; use mode {PIPE}")
    there = f"rank {part.rank} of {len(part.ranges)}"
    text = f"this model has {part}, those of {there}, and this is rank {rank} of {world}; load it here"
    require((part.rank, len(part.ranges)) == (rank, world), InputError, text)
    adapted = [name for name, m in model.named_modules() if "IPAdapter" in type(m).__name__]
    adapted += [name for name, m in model.named_modules() if "IPAdapter" in _processor(m)]
    text = f"an IP-Adapter counts blocks, and this model has {part} alone; load it whole, or without one"
    require(not adapted, InputError, text)


def _adapters(model: nn.Module) -> str:
    """Return the adapters that are loaded by name, with their numbers: those of blocks cannot be compared."""
    said = list[str]()
    for name, own in getattr(model, "peft_config", {}).items():
        numbers = sorted((key, value) for key, value in vars(own).items() if type(value) in _NUMBERS)
        said.append(f"{name} ({zlib.crc32(repr(numbers).encode())})")
    return ", ".join(said)


def _processor(module: nn.Module) -> str:
    return type(getattr(module, "processor", None)).__name__


def _words(own: range) -> str:
    return f"{own.start} to {own.stop - 1}" if len(own) > 1 else str(own.start)
