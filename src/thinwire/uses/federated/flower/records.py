"""A model as Flower has it, an ``ArrayRecord`` of named arrays, and as we have it, one row of float32."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.types import WRONG_VALUES, InputError, PayloadError, require
from thinwire.uses.federated.flower import host

FLOAT32, BYTES = "float32", "thinwire"  # the dtype of what is compressed; the stype of payloads
WHOLE = ("*running_mean", "*running_var", "*moving_mean", "*moving_var*")  # as normalisations keep them
Shape = tuple[int, ...]


def payload(data: bytes | memoryview) -> Any:
    """Return bytes as an ``Array`` of uint8."""
    return host.app().Array(dtype="uint8", shape=(len(data),), stype=BYTES, data=bytes(data))


def only(records: Mapping[str, Any], what: str, whose: str) -> tuple[str, Any]:
    """Return the one record of a kind and its key. Errors: ``InputError`` where there is none, or another."""
    found = list(records.items())
    wrong = f"{whose} has {len(found)} {what} records, and one is expected; put all into one"
    require(len(found) == 1, InputError, wrong)
    return found[0]


def replaced(content: Any, records: Mapping[str, Any]) -> Any:
    """Return a ``RecordDict`` like ``content`` but for these records; others are shared, not copied."""
    return host.app().RecordDict({**content, **records})


@dataclass(frozen=True)
class Layout:
    """The arrays of a record, in order: name, shape, and whether it is part of the row.

    float32 arrays make up the row, but for those whose names are like one of ``whole``: what is no gradient
    step, as a running variance, and must not be rounded, cut or added to. Such arrays and those of other
    types, as counters, travel whole.

    >>> Layout.unpack('[["w", [2, 3], true], ["steps", [], false]]').values
    6
    """

    arrays: tuple[tuple[str, Shape, bool], ...]

    @classmethod
    def of(cls, record: Mapping[str, Any], whole: Sequence[str] = WHOLE) -> Layout:
        """Return the layout of a record. Errors: ``InputError`` where nothing in it is to be compressed."""

        def coded(name: str) -> bool:
            return record[name].dtype == FLOAT32 and not any(fnmatchcase(name, like) for like in whole)

        found = [(n, tuple(a.shape), coded(n)) for n, a in record.items()]
        require(any(c for *_, c in found), InputError, "the model has no float32 array to compress")
        return cls(tuple(found))

    @property
    def values(self) -> int:
        """How long the row is."""
        return sum(math.prod(shape) for _, shape, coded in self.arrays if coded)

    def row(self, record: Mapping[str, Any], whose: str) -> Tensor:
        """Return the row of a record, [1, values], a copy. Errors: ``InputError`` for other arrays."""
        row = [n for n, _, coded in self.arrays if coded]
        fits = set(record) == {n for n, *_ in self.arrays}
        fits = fits and all(tuple(record[n].shape) == shape for n, shape, _ in self.arrays)
        fits = fits and all(record[n].dtype.startswith("float") for n in row)
        wrong = f"{whose} has other arrays than the model; give names, shapes and types as they came"
        require(fits, InputError, wrong)
        parts = [record[n].numpy().reshape(-1).astype(np.float32, copy=False) for n in row]
        return torch.from_numpy(np.concatenate(parts))[None]

    def rest(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays of a record that are not part of the row."""
        return {n: record[n] for n, _, coded in self.arrays if not coded and n in record}

    def record(self, row: Tensor, rest: Mapping[str, Any]) -> Any:
        """Return the ``ArrayRecord`` of a row [1, values] and the arrays beside it."""
        flwr, at, found = host.app(), 0, {}
        values = row.reshape(-1).numpy()
        for name, shape, coded in self.arrays:
            if not coded:
                found[name] = rest[name]
            else:
                n = math.prod(shape)
                found[name] = flwr.Array(values[at : at + n].reshape(shape))
                at += n
        return flwr.ArrayRecord(found)

    def pack(self) -> str:
        """Return the layout as text."""
        return json.dumps(self.arrays)

    @classmethod
    def unpack(cls, text: str) -> Layout:
        """Read what ``pack`` wrote; ``PayloadError`` for anything else."""
        try:
            found = [(str(n), tuple(int(i) for i in shape), bool(c)) for n, shape, c in json.loads(text)]
        except WRONG_VALUES as e:
            raise PayloadError(f"a layout that does not read: {text[:80]!r}") from e
        return cls(tuple(found))
