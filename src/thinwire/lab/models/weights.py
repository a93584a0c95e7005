"""Reading single tensors of a safetensors folder, and random weights that do not depend on the cut."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.types import InputError, MissingExtra

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PIECE = 1 << 14  # bytes


class Weights:
    """The tensors of a Hugging Face folder, read by name one at a time, so that a stage opens only its own.

    ``InputError`` for a folder without safetensors, or with a broken or missing file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = self._index()

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str) -> Tensor:
        """Return a copy of one tensor as float32."""
        if name not in self.files:
            raise InputError(f"the weights in {self.folder} lack tensor {name!r}; fetch the model again")
        with self._open(self.files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        # A copy: a parameter that shares the mapped file would be paged in and out with it.
        return tensor.to(torch.float32, copy=True)

    def digest(self) -> str:
        """Return a digest of every tensor's name, shape and type and of a piece from its middle.

        Not of all bytes: a rank opens the tensors of its own stages alone, and a large model takes long to
        read. Training changes a tensor all over, and its middle with it.
        """
        found: dict[str, tuple[list[int], str, bytes]] = {}
        for name in sorted(set(self.files.values())):
            with self._open(name) as file:
                found |= {tensor: _piece(file, tensor) for tensor in file.keys()}  # noqa: SIM118
        return hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=16).hexdigest()

    def _index(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as e:
                raise InputError(f"{index} is not a safetensors index; fetch the model again") from e
        if not (self.folder / SINGLE).is_file():
            raise InputError(
                f"{self.folder} has no safetensors weights; convert it with save_pretrained, "
                "or use --init random"
            )
        with self._open(SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)

    def _open(self, name: str) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as e:
            raise MissingExtra("reading weights needs safetensors; run pip install 'thinwire[lm]'") from e
        try:
            return safe_open(self.folder / name, framework="pt")
        except (OSError, SafetensorError) as e:
            raise InputError(f"cannot read weights {self.folder / name} ({e}); fetch the model again") from e


def _piece(file: Any, name: str) -> tuple[list[int], str, bytes]:
    """Return a tensor's shape, its type, and the hash of about ``PIECE`` bytes of its middle."""
    part = file.get_slice(name)
    shape = part.get_shape()
    if 0 in shape or not shape:
        middle = file.get_tensor(name).flatten()
    else:
        rows = max(1, PIECE * shape[0] // (4 * math.prod(shape)))
        start = max(0, (shape[0] - rows) // 2)
        middle = part[start : start + rows].contiguous().flatten()
    return shape, part.get_dtype(), hashlib.blake2b(middle.view(torch.uint8).numpy()).digest()


def initialise(model: Any, module: nn.Module, seed: int, part: str) -> None:
    """Give ``module`` (on the meta device) random values by the model's own rules, in place.

    The generator is seeded by ``seed`` and the name of the part, so a layer gets the same values whatever
    stage it is in; the caller's random state is left as it was.
    """
    module.to_empty(device="cpu")
    with seeded(seed, part), torch.no_grad():
        module.apply(model._init_weights)


@contextmanager
def seeded(seed: int, part: str) -> Iterator[None]:
    """Let random numbers depend on ``seed`` and the name of the ``part`` alone, and nothing later on them."""
    digest = hashlib.sha256(f"{seed}/{part}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        yield
