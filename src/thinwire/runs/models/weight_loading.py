"""Reading single tensors of a safetensors folder, and random weights that do not depend on the cut."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.files.checkpoint import SINGLE, weight_map
from thinwire.files.lfs import check_fetched
from thinwire.runs.models.families import Conversion
from thinwire.seeding import seeded
from thinwire.state.binding import WRAPPED
from thinwire.types import InputError, MissingExtra, require

PIECE = 1 << 14  # bytes
TRAINABLE = ("F64", "F32", "F16", "BF16")
# How names end beside weights that are not numbers by themselves: scales, zero points, blocks of bits.
PACKED = re.compile(r"(scales?|scale_inv|zeros|zero_points?|qweight|g_idx|absmax|quant_\w+|packed|blocks)$")
NAMED = 5  # in one note


class WeightFolder:
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
            raise InputError(_lacking(self.folder, name, self.files))
        with self._open(self.files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        # A copy: a parameter that shares the mapped file would be paged in and out with it.
        return tensor.to(torch.float32, copy=True)

    def kinds(self) -> dict[str, str]:
        """Return the type of every tensor in safetensors' word for it."""
        found: dict[str, str] = {}
        for name in sorted(set(self.files.values())):
            with self._open(name) as file:
                found |= {tensor: file.get_slice(tensor).get_dtype() for tensor in file.keys()}  # noqa: SIM118
        return found

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
        named = weight_map(self.folder)
        if named is not None:
            return named
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
            check_fetched([self.folder / name])
            raise InputError(f"cannot read weights {self.folder / name} ({e}); fetch the model again") from e


class ConvertedWeights:
    """What the files of a folder have for each tensor of a model, under whatever names and forms."""

    def __init__(self, weights: WeightFolder, conversion: Conversion, config: Any) -> None:
        self.weights, self.conversion = weights, conversion
        self.twins = conversion.twins if config.tie_word_embeddings else ()
        self.unexpected: list[str] = []
        self._parts: dict[str, list[tuple[str, str | None]]] = {}
        self._made: dict[str, Tensor] = {}
        for name in sorted(weights.files, key=_in_order):
            targets, pattern = conversion.targets(name)
            if not all(target in conversion.names for target in targets):
                self.unexpected += [] if conversion.ignored(targets[0]) else [name]
                continue
            parts = self._parts.setdefault(targets[0], [])
            parts.append((name, pattern))
            self._parts |= dict.fromkeys(targets, parts)

    def read(self, target: str) -> Tensor:
        """Return a tensor of the model as float32, once; ``InputError`` where the files lack it."""
        parts = self._parts.get(self._source(target), [(target, None)])
        if target not in self._made and parts[0][1] is not None:
            each = [(name, str(pattern), self.weights.read(name)) for name, pattern in parts]
            self._made |= self.conversion.convert(target, each)
        tensor = self._made.pop(target) if target in self._made else self.weights.read(parts[0][0])
        return tensor.to(self.conversion.names.get(target, tensor).dtype)

    def check(self) -> tuple[str, ...]:
        """Return a note if the files have tensors that the model has no place for.

        ``InputError`` if they lack one, or have one that is no weight to train but its bits or its scale.
        """
        kinds = self.weights.kinds()
        for target, parameter in self.conversion.names.items():
            for name, _ in self._parts.get(self._source(target), [(target, None)]):
                require(name in kinds, InputError, _lacking(self.weights.folder, name, kinds))
                trainable = kinds[name] in TRAINABLE or not parameter.is_floating_point()
                require(trainable, InputError, _unfit(self.weights.folder, name, f"is {kinds[name]}"))
        for name in self.unexpected:
            require(
                PACKED.search(name) is None,
                InputError,
                _unfit(self.weights.folder, name, "has no place in the model"),
            )
        n = len(self.unexpected)
        if not n:
            return ()
        some = ", ".join(self.unexpected[:NAMED]) + (f" and {n - NAMED} more" if n > NAMED else "")
        return (f"the config has no place for {n} of the tensors in {self.weights.folder}, left out: {some}",)

    def _source(self, target: str) -> str:
        """Return the tensor to read for ``target``: where files have both of two tied ones, each is its own.

        Whatever the config says of them, as for ``from_pretrained``.
        """
        if target in self._parts or target not in self.twins:
            return target
        return next((twin for twin in self.twins if twin != target), target)


def _in_order(name: str) -> list[tuple[int, str]]:
    """Order names with numbers by those: what is put together of experts needs them from 0 on."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _lacking(folder: Path, name: str, names: Iterable[str]) -> str:
    if all(other.startswith(WRAPPED) for other in names):
        return (
            f"all names in {folder} begin with {WRAPPED!r}: it is the state of a wrapper such as "
            "DistributedDataParallel; save its .module with save_pretrained"
        )
    return f"the weights in {folder} lack tensor {name!r}; fetch the model again"


def _unfit(folder: Path, name: str, what: str) -> str:
    return (
        f"tensor {name!r} in {folder} {what}: scaled or packed weights cannot be trained; "
        "use the unquantised ones"
    )


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
    with seeded(seed_of(seed, part)), torch.no_grad():
        module.apply(model._init_weights)


def seed_of(seed: int, part: str) -> int:
    """Return a seed that depends on another one and on the name of the ``part`` alone."""
    digest = hashlib.sha256(f"{seed}/{part}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
