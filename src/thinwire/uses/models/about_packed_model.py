"""What is in a packed model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.files.checkpoint import read_checkpoint
from thinwire.types import InputError, PayloadError
from thinwire.uses.models.codes import from_code_tensors
from thinwire.uses.models.entry import PackedTensor, unpack_entry
from thinwire.uses.models.packed_model import PackedModel, is_model, read_model
from thinwire.uses.models.tensors import Tied

KIND = "packed model"
MANIFEST = "thinwire-model.json"


def knows(_: str, head: bytes) -> bool:
    """Return whether a file begins as a packed model."""
    return is_model(head)


def describe(place: object, check: bool) -> dict[str, Any]:
    """Return what a packed model holds: bytes and bits by tensor. Errors: ``InputError``, ``PayloadError``.

    With ``check`` every tensor is unpacked.
    """
    if not isinstance(place, Path):
        raise InputError("a packed model is one file; give its path")
    data = place.read_bytes()
    try:
        model = read_model(data)
        for name, entry in model.entries.items() if check else ():
            unpack_entry(entry, name)
    except PayloadError as e:
        raise PayloadError(f"{place}: {e}") from e
    found: dict[str, Any] = {"kind": "packed model", "where": str(place), "nbytes": len(data)}
    return found | _about(model) | ({"checked": True} if check else {})


def describe_codes(path: Path) -> dict[str, Any]:
    """Return what a checkpoint of codes holds: bytes and bits by tensor, entropy-coded. Errors: as above."""
    try:
        return _about(from_code_tensors(read_checkpoint(path)))
    except PayloadError as e:
        raise PayloadError(f"{path}: {e}") from e


def _about(model: PackedModel) -> dict[str, Any]:
    of = {name: str(e.about["name"]) if e.kind == Tied.kind else name for name, e in model.entries.items()}
    weights = sum(model.entries[other].numel for other in of.values())  # twins count as in the model's files
    sent = sum(len(entry.data) for entry in model.entries.values())
    found: dict[str, Any] = {"weights": weights, "bits_a_weight": round(8 * sent / max(weights, 1), 3)}
    found["files"] = [{"name": name, "nbytes": len(own)} for name, own in model.files.items()]
    return found | {"tensors": [_row(name, entry) for name, entry in model.entries.items()]}


def _row(name: str, entry: PackedTensor) -> dict[str, Any]:
    bits = round(8 * len(entry.data) / entry.numel, 3) if entry.numel else None
    about = {"name": name, "coded": entry.kind, "shape": list(entry.shape), "nbytes": len(entry.data)}
    return about | {"bits": bits}
