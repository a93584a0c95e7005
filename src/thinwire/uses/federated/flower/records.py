"""What crosses inside Flower: a model as an ``ArrayRecord`` and as our row of float32; plans for nodes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import parse_codec
from thinwire.rounds.update_messages import VersionForm, VersionMessage
from thinwire.types import WRONG_VALUES, InputError, PayloadError, require
from thinwire.uses.federated.flower import flwr_names

FLOAT32, BYTES = "float32", "thinwire"  # the dtype of what is compressed; the stype of payloads
WHOLE = ("*running_mean", "*running_var", "*moving_mean", "*moving_var*")  # as normalisations keep them
Shape = tuple[int, ...]
PREFIX = "thinwire."
UPDATE = f"{PREFIX}update"  # the name of a reply's payload
CLIPPED = (
    "the strategy clips what a client sends, and feedback would add to it what earlier updates left, beyond "
    "the clipping norm; give feedback=False"
)
NUMBERS = ("number", "sequence", "confirmed", "check", "form", "steps", "rate")


def payload(data: bytes | memoryview) -> Any:
    """Return bytes as an ``Array`` of uint8."""
    return flwr_names.app().Array(dtype="uint8", shape=(len(data),), stype=BYTES, data=bytes(data))


def only(records: Mapping[str, Any], what: str, whose: str) -> tuple[str, Any]:
    """Return the one record of a kind and its key. Errors: ``InputError`` where there is none, or another."""
    found = list(records.items())
    wrong = f"{whose} has {len(found)} {what} records, and one is expected; put all into one"
    require(len(found) == 1, InputError, wrong)
    return found[0]


def replaced(content: Any, records: Mapping[str, Any]) -> Any:
    """Return a ``RecordDict`` like ``content`` but for these records; others are shared, not copied."""
    return flwr_names.app().RecordDict({**content, **records})


@dataclass(frozen=True)
class ArrayLayout:
    """The arrays of a record, in order: name, shape, and whether it is part of the row.

    float32 arrays make up the row, but for those whose names are like one of ``whole``: what is no gradient
    step, as a running variance, and must not be rounded, cut or added to. Such arrays and those of other
    types, as counters, travel whole.

    >>> ArrayLayout.unpack('[["w", [2, 3], true], ["steps", [], false]]').values
    6
    """

    arrays: tuple[tuple[str, Shape, bool], ...]

    @classmethod
    def of(cls, record: Mapping[str, Any], whole: Sequence[str] = WHOLE) -> ArrayLayout:
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
        flwr, at, found = flwr_names.app(), 0, {}
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
    def unpack(cls, text: str) -> ArrayLayout:
        """Read what ``pack`` wrote; ``PayloadError`` for anything else."""
        try:
            found = [(str(n), tuple(int(i) for i in shape), bool(c)) for n, shape, c in json.loads(text)]
        except WRONG_VALUES as e:
            raise PayloadError(f"a layout that does not read: {text[:80]!r}") from e
        return cls(tuple(found))


@dataclass(frozen=True)
class VersionPlan:
    """A version for a node. ``layout`` is left out where the node holds it already.

    ``client``: the node's id at the server; ``feedback``: whether what is not sent goes with the next update;
    ``weighted_by``: the metric that says how many samples a node has.
    """

    version: VersionMessage
    client: int
    feedback: bool
    weighted_by: str
    layout: ArrayLayout | None

    def put(self, content: Any, rest: dict[str, Any]) -> Any:
        """Return the ``RecordDict`` that asks as ``content`` does, with the version in place of arrays."""
        flwr, version = flwr_names.app(), self.version
        values: dict[str, Any] = {name: getattr(version, name) for name in NUMBERS}
        values |= {"form": int(version.form), "codec": repr(version.codec), "packets": len(version.packets)}
        values |= {"client": self.client, "feedback": self.feedback, "weighted-by": self.weighted_by}
        if self.layout is not None:
            values["layout"] = self.layout.pack()
        key, _ = only(content.array_records, "array", "a message of the strategy")
        name, config = only(content.config_records, "config", "a message of the strategy")
        arrays = {f"{PREFIX}{i}": payload(p) for i, p in enumerate(version.packets)}
        config = flwr.ConfigRecord({**config, **{f"{PREFIX}{n}": v for n, v in values.items()}})
        return replaced(content, {key: flwr.ArrayRecord({**rest, **arrays}), name: config})

    @classmethod
    def find(cls, content: Any) -> VersionPlan | None:
        """Return the plan in what a node was sent; None where there is none.

        Errors: ``PayloadError`` for a plan that makes no sense.
        """
        planned = [c for c in content.config_records.values() if f"{PREFIX}number" in c]
        if not planned:
            return None
        _, arrays = only(content.array_records, "array", "a message with a plan")
        given = {n.removeprefix(PREFIX): v for n, v in planned[0].items() if n.startswith(PREFIX)}
        try:
            return cls._read(given, [arrays[f"{PREFIX}{i}"].data for i in range(given["packets"])])
        except (*WRONG_VALUES, struct.error) as e:
            raise PayloadError(f"a plan that does not read: {type(e).__name__}: {e}") from e

    @classmethod
    def _read(cls, given: dict[str, Any], packets: list[bytes]) -> VersionPlan:
        number, sequence, confirmed, check, form, steps, rate = (given[name] for name in NUMBERS)
        codec, form = parse_codec(given["codec"]), VersionForm(form)
        made = VersionMessage(number, sequence, confirmed, check, form, tuple(packets), steps, rate, codec)
        layout = ArrayLayout.unpack(given["layout"]) if "layout" in given else None
        version = VersionMessage.unpack(made.pack())  # which checks it
        return cls(version, int(given["client"]), bool(given["feedback"]), str(given["weighted-by"]), layout)
