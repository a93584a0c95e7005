"""What the formats of delta folders share: the versions in a folder, and what is checked in each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from thinwire.files.base import Folder
from thinwire.state.disk.tensor_header import NAMES
from thinwire.state.layout import Array
from thinwire.state.values import Bits
from thinwire.types import InputError, require

PICKLED = {".pt", ".pth", ".bin", ".pkl", ".ckpt"}  # how files that torch.save writes are called
DELTA = "delta"  # in a published version's notes: its number in the folder that it was read from
Stamp = tuple[tuple[str, int | None], ...]  # of a version's files: name and bytes
Held = Mapping[str, Bits]
Pieces = tuple[bytes | Array, ...]  # a file, part by part


class DeltaEntry(NamedTuple):
    """A version that lies in a folder: its number, that of its base (None: it is whole), and its name there.

    ``stamp`` tells one writing of it from another; ``lacks`` says which file is still missing.
    """

    number: int
    base: int | None
    name: str
    stamp: Stamp
    lacks: str = ""


class DeltaFormat(Protocol):
    """How a host lays out versions in a folder."""

    name: str

    def names(self, folder: Folder) -> dict[int, list[str]]:
        """Return what there is of each version by number, whole or not: folders or files."""
        ...

    def entries(self, folder: Folder, above: int) -> list[DeltaEntry]:
        """Return the versions that are there; of those up to ``above`` nothing is read.

        Errors: ``InputError`` for what is no such folder, ``OSError``.
        """
        ...

    def read(self, folder: Folder, entry: DeltaEntry, held: Held, limit: int) -> dict[str, Bits]:
        """Return the tensors that a version changes, in memory of their own; ``held`` is its base.

        No file may have more than ``limit`` bytes. Errors: ``InputError`` naming the tensor that does not
        fit, ``PayloadError`` for a damaged file, ``OSError``.
        """
        ...

    def files(self, number: int, before: Held | None, after: Held) -> list[tuple[str, Pieces]]:
        """Return the files of a version by name, in the order to write them; whole without a ``before``.

        Errors: ``InputError`` for what the format does not hold.
        """
        ...

    def place(self, number: int, whole: bool) -> str:
        """Return the name of the folder or file that a version is in."""
        ...


def refuse_pickles(names: Iterable[str], where: str) -> None:
    """Raise ``InputError`` for a file that torch.save writes."""
    for name in names:
        pickled = PurePosixPath(name).suffix in PICKLED
        told = f"{where}/{name} is a file of torch.save, which is not read"
        require(not pickled, InputError, f"{told}; let the trainer write safetensors")


def check_whole(found: Held, held: Held, where: str) -> None:
    """Raise ``InputError`` naming a parameter that a whole version omits, or that the base has otherwise."""
    missing, more = [n for n in held if n not in found], [n for n in found if n not in held]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"{where} is whole and omits {missing[0]}{others}: whoever reads it would keep old weights in "
            "silence; let the trainer write all parameters"
        )
    told = f"{where} has {more[0] if more else ''}, which the base does not have"
    require(not more, InputError, f"{told}; give the checkpoint that the run began with")
    for name, bits in found.items():
        check_same(name, bits, held[name], where)


def check_same(name: str, bits: Bits, held: Bits, where: str) -> None:
    """Raise ``InputError`` where a tensor has another dtype or shape than in the base."""
    here, there = (f"{b.kind} {list(b.shape)}" for b in (held, bits))
    told = f"{name} is {there} in {where} and {here} in the base; give the base as the run has it"
    require(here == there, InputError, told)


def known(name: str, held: Held, where: str) -> Bits:
    """Return the tensor of the base that a delta changes; ``InputError`` where there is none."""
    told = f"{where} changes {name}, which the base does not have"
    require(name in held, InputError, f"{told}; give the checkpoint that the run began with")
    return held[name]


def code_of(name: str, bits: Bits) -> str:
    """Return how safetensors files call a tensor's dtype; ``InputError`` where they do not hold it."""
    told = f"{name} is {bits.kind}, which safetensors files do not hold; publish it in another dtype"
    require(bits.kind in NAMES, InputError, told)
    return NAMES[bits.kind]


def octets(words: Array) -> npt.NDArray[np.uint8]:
    """Return words as their bytes, in the same memory."""
    return words.reshape(-1).view(np.uint8)
