"""Layout of a state: which tensors it has, the integers they are kept as, and the pieces these come in."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from thinwire.dtypes import dtype_of, name_of
from thinwire.types import WRONG_VALUES, InputError, PayloadError, require

if TYPE_CHECKING:  # what a state is made of may be arrays too
    import torch
    from torch import Tensor

Array = npt.NDArray[Any]
Given = TypeVar("Given")
Dtype: TypeAlias = "torch.dtype | str"  # torch's own, or by one of its names
Dtypes: TypeAlias = "Mapping[str, Dtype] | Dtype | None"  # by name of a tensor, or for all floats
Bounds = Mapping[str, float] | float | None

# What holds the bits of each dtype, which is called as torch calls it.
WORDS: dict[str, np.dtype] = {
    "bfloat16": np.dtype(np.int16),
    "float16": np.dtype(np.int16),
    "float32": np.dtype(np.int32),
    "float64": np.dtype(np.int64),
    "float8_e4m3fn": np.dtype(np.int8),
    "float8_e5m2": np.dtype(np.int8),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "uint64": np.dtype(np.int64),
    "uint32": np.dtype(np.int32),
    "uint16": np.dtype(np.int16),
    "uint8": np.dtype(np.int8),
    "bool": np.dtype(np.int8),
    "float8_e8m0fnu": np.dtype(np.int8),
    "float8_e4m3fnuz": np.dtype(np.int8),
    "float8_e5m2fnuz": np.dtype(np.int8),
    "float4_e2m1fn_x2": np.dtype(np.int8),  # two values an element
}
CASTS = frozenset(list(WORDS)[:6])  # floats whose values are what matters
BITS = frozenset(list(WORDS)[-4:])  # scales, and weights that go with them: carried as they are, never cast
PARTS: dict[str, np.dtype] = {  # two words an element
    "complex32": np.dtype(np.int16),
    "complex64": np.dtype(np.int32),
    "complex128": np.dtype(np.int64),
}
_NARROW = ("bits8", "bits1x8", "bits2x4", "bits4x2", *(f"{u}int{n}" for u in ("", "u") for n in range(1, 8)))
BARE: dict[str, np.dtype] = dict.fromkeys(_NARROW, np.dtype(np.int8))  # with few operations of their own
BARE["bits16"] = np.dtype(np.int16)
BARE |= PARTS
WORDS |= BARE
GRID = np.dtype(np.int32)  # a lossy tensor's words: multiples of its bound
PIECE = 1 << 22  # elements a piece: the longest run of words that is compared, coded and logged at once
ALIGNED = 64  # bytes: a slot begins at a multiple of it, so kernels may read whole vectors
MAX_NBYTES = 1 << 36  # of a state that a peer may declare, unless the caller knows better
MOST_NBYTES = 1 << 50  # of a tensor
MAX_JSON = 1 << 24
MAX_SLOTS = 1 << 18
MAX_NAME = 512
MAX_DIMENSIONS = 8
METADATA = "__metadata__"  # where the header of a safetensors file keeps what is no tensor
SHOWN = 3  # names of tensors in a message
LEAST_BOUND, MOST_BOUND = 2.0**-100, 2.0**100


class TooLarge(PayloadError):
    """A state of ``nbytes`` bytes, where at most ``most`` are taken: no second try mends it."""

    def __init__(self, message: str, nbytes: int = 0, most: int = 0) -> None:
        super().__init__(message)
        self.nbytes, self.most = nbytes, most


@dataclass(frozen=True)
class Slot:
    """One tensor of a state, as followers use it; with a ``bound``, to within that error in its own units.

    ``kind`` is the name of its dtype; torch's own may be given for it.

    >>> Slot("weight", (2, 3), "bfloat16").word
    dtype('int16')
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    bound: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", name_of(self.kind))
        _check_name(self.name)
        require(self.kind in WORDS, InputError, f"{self.name}: {self.kind} cannot be followed; cast it")
        sizes = all(type(d) is int and d >= 0 for d in self.shape) and len(self.shape) <= MAX_DIMENSIONS
        require(sizes, InputError, f"{self.name}: {self.shape} is no shape of up to {MAX_DIMENSIONS} sizes")
        nbytes = math.prod(max(1, d) for d in self.shape) * max(
            8, self.itemsize
        )  # empty tensors could claim any other size
        require(nbytes < MOST_NBYTES, InputError, f"{self.name}: {self.shape} is too large")
        if self.bound is not None:
            floats, ok = self.kind in CASTS, LEAST_BOUND <= self.bound <= MOST_BOUND
            require(floats, InputError, f"{self.name} is {self.kind}, which takes no bound: it needs floats")
            limits = f"{LEAST_BOUND:.3g} to {MOST_BOUND:.3g}"
            require(ok, InputError, f"{self.name}: bound={self.bound} is not in {limits}; give another")

    @property
    def word(self) -> np.dtype:
        """The integers that hold it: its bits, or with a bound the multiples of that."""
        return WORDS[self.kind] if self.bound is None else GRID

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype as torch has it."""
        return _dtype(self.kind)

    @property
    def itemsize(self) -> int:
        """Bytes an element, as followers use it."""
        return itemsize(self.kind)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        """Words: as many as there are values, but two of a complex one."""
        return self.numel * (2 if self.kind in PARTS else 1)

    @property
    def nbytes(self) -> int:
        """Bytes as followers use it."""
        return self.numel * self.itemsize


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a slot; ``at`` is where they begin in the array of that word."""

    slot: int
    start: int
    stop: int
    word: np.dtype
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The tensors of a state in order, and which further names stand for one of them (tied weights).

    >>> import torch
    >>> layout = Layout.of({"w": torch.zeros(4, 2), "n": torch.zeros(3)}, dtype=torch.bfloat16)
    >>> layout.nbytes, [piece.numel for piece in layout.blocks()]
    (22, [8, 3])
    """

    slots: tuple[Slot, ...]
    aliases: tuple[tuple[str, str], ...] = ()  # (further name, name of a slot)

    def __post_init__(self) -> None:
        require(len(self.slots) <= MAX_SLOTS, InputError, f"{len(self.slots)} tensors; at most {MAX_SLOTS}")
        own = {s.name for s in self.slots}
        require(len(own) == len(self.slots), InputError, "two tensors of a state have one name")
        for name, target in self.aliases:
            _check_name(name)
            require(target in own, InputError, f"{name!r} stands for {target!r}, which is no tensor here")
        names = own | {name for name, _ in self.aliases}
        require(len(names) == len(own) + len(self.aliases), InputError, "two names of a state are equal")

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        dtype: Dtypes = None,
        bounds: Bounds = None,
    ) -> Layout:
        """Return the layout of ``tensors`` as followers will use them: floats as ``dtype``, if given.

        ``dtype`` is torch's, or a name of one such as "bfloat16" or "bf16"; it may name the tensors that are
        cast, each with its own. ``bounds`` names the tensors that may be off by so much, or is one bound for
        all floats. Names of one and the same memory are kept once.
        Errors: ``InputError`` for what cannot be followed.
        """
        tensors = dict(tensors)  # all at once: one that is computed at each access would leave its memory
        slots: list[Slot] = []
        aliases: list[tuple[str, str]] = []
        seen: dict[object, str] = {}
        first = {name: seen.setdefault(_memory(name, x), name) for name, x in tensors.items()}
        bounds = _untied(bounds, first, "bounds") if isinstance(bounds, Mapping) else bounds
        kinds: Mapping[str, str] | str | None
        if isinstance(dtype, Mapping):
            kinds = _untied({name: _kind(d) for name, d in dtype.items()}, first, "dtype")
        else:
            kinds = None if dtype is None else _kind(dtype)
        for name, x in tensors.items():
            if first[name] != name:
                aliases.append((name, first[name]))
            else:
                slots.append(_slot(name, x, kinds, bounds))
        return cls(tuple(slots), tuple(aliases))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the state as followers use it."""
        return sum(s.nbytes for s in self.slots)

    @cached_property
    def numel(self) -> int:
        """Elements of the state."""
        return sum(s.count for s in self.slots)

    @cached_property
    def index(self) -> dict[str, int]:
        """Each name, aliases too, and the number of its slot."""
        own = {s.name: i for i, s in enumerate(self.slots)}
        return own | {name: own[target] for name, target in self.aliases}

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits over names, shapes, dtypes, bounds and aliases."""
        return hashlib.blake2b(self.to_json(), digest_size=16).hexdigest()

    @cached_property
    def words(self) -> dict[np.dtype, int]:
        """The word dtypes in use, narrow ones first, and the elements of the array of each."""
        ends: dict[np.dtype, int] = {}
        for slot, at in zip(self.slots, self.places, strict=True):
            if slot.count:
                ends[slot.word] = at + slot.count
        return dict(sorted(ends.items(), key=lambda item: item[0].itemsize))

    @cached_property
    def places(self) -> list[int]:
        """Where each slot begins in the array of its word, in words."""
        ends: dict[np.dtype, int] = {}
        found = []
        for slot in self.slots:
            step = ALIGNED // slot.word.itemsize
            found.append(-(-ends.get(slot.word, 0) // step) * step)
            ends[slot.word] = found[-1] + slot.count
        return found

    @cached_property
    def _blocks(self) -> tuple[Piece, ...]:
        found = []
        for i, (slot, at) in enumerate(zip(self.slots, self.places, strict=True)):
            for start in range(0, slot.count, PIECE):
                found.append(Piece(i, start, min(start + PIECE, slot.count), slot.word, at + start))
        return tuple(found)

    def blocks(self) -> tuple[Piece, ...]:
        """Return the pieces in order: slot by slot, each at most ``PIECE`` elements, none empty."""
        return self._blocks

    def to_json(self) -> bytes:
        """Return the layout as JSON: equal layouts are equal bytes."""
        slots = [[s.name, list(s.shape), s.kind, s.bound] for s in self.slots]
        data = {"format": 1, "slots": slots, "aliases": [list(a) for a in self.aliases]}
        return json.dumps(data, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes | bytearray | memoryview, max_nbytes: int = MAX_NBYTES) -> Layout:
        """Return the layout in ``data``.

        Errors: ``PayloadError`` for anything else, ``TooLarge`` for a state of over ``max_nbytes`` bytes.
        """
        require(len(data) <= MAX_JSON, PayloadError, f"a layout of {len(data)} bytes; at most {MAX_JSON}")
        try:
            found = _parse(json.loads(bytes(data)))
        except InputError as e:
            raise PayloadError(f"a layout that cannot be: {e}") from e
        except WRONG_VALUES as e:
            raise PayloadError(f"not a layout of a state: {str(e)[:100]}") from e
        held = sum(n * word.itemsize for word, n in found.words.items())
        nbytes = max(found.nbytes, held)
        if nbytes > max_nbytes:
            told = f"a state of {nbytes} bytes is over the limit of {max_nbytes} (max_nbytes)"
            raise TooLarge(told, nbytes, max_nbytes)
        return found


def _parse(data: Any) -> Layout:
    require(
        data["format"] == 1, PayloadError, f"layout format {data['format']!r} is not 1; update the older end"
    )
    slots = []
    for name, shape, dtype, bound in data["slots"]:
        require(bound is None or type(bound) is float, InputError, f"{name!r:.99}: bound={bound!r:.99}")
        require(dtype in WORDS, InputError, f"{name!r:.99}: {dtype!r:.99} is no dtype")
        slots.append(Slot(name, tuple(shape), dtype, bound))
    return Layout(tuple(slots), tuple((name, target) for name, target in data["aliases"]))


def _check_name(name: object) -> None:
    ok = isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()
    require(ok, InputError, f"{name!r:.99} is no name of up to {MAX_NAME} printable characters")
    require(name != METADATA, InputError, f"{name} is no tensor's name in safetensors files; rename it")


def _memory(name: str, x: Tensor) -> object:
    """Return what two names of one tensor share."""
    from thinwire.state.tensor_kinds import check_dense

    check_dense(name, x)
    place = x.data_ptr()
    return (x.device, place, *form_of(x)) if place and x.numel() else name


def form_of(x: Tensor) -> tuple[object, ...]:
    """Return how a tensor reads the memory where it begins."""
    return x.dtype, tuple(x.shape), x.stride(), x.is_conj(), x.is_neg()


def _untied(by_name: Mapping[str, Given], first: Mapping[str, str], what: str) -> dict[str, Given]:
    """Return ``by_name`` by the first name of each tensor, whichever of its names was given."""
    unknown = set(by_name) - set(first)
    if unknown:  # not by require: the message takes longer than all the rest
        raise InputError(_no_tensor(unknown, first, what))
    found: dict[str, Given] = {}
    given: dict[str, str] = {}
    for name, value in by_name.items():
        other = given.setdefault(first[name], name)
        same = found.setdefault(first[name], value) == value
        require(
            same, InputError, f"{name} and {other} are one tensor, and {what} gives it two; leave one out"
        )
    return found


def _no_tensor(unknown: Iterable[object], tensors: Iterable[object], what: str) -> str:
    wrong, known = min(unknown, key=str), [str(name) for name in tensors]  # keys may be anything
    shown = difflib.get_close_matches(str(wrong), known, SHOWN) or known[:SHOWN]
    verb = "name" if what.endswith("s") else "names"
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return f"{what} {verb} {wrong!r}, which is no tensor here; there are {', '.join(shown)}{more}"


def itemsize(kind: str) -> int:
    """Return the bytes of an element of the dtype ``kind``, which is one of ``WORDS``.

    >>> itemsize("bfloat16"), itemsize("complex64")
    (2, 8)
    """
    return WORDS[kind].itemsize * (2 if kind in PARTS else 1)


def takes_casts(dtype: object) -> bool:
    """Return whether values are what matters in a dtype, torch's or a name: it may be cast and bounded."""
    return name_of(dtype) in CASTS


@lru_cache
def _dtype(kind: str) -> torch.dtype:
    return dtype_of(kind)


def _kind(dtype: Dtype) -> str:
    return name_of(dtype_of(dtype))


def _slot(name: str, x: Tensor, kinds: Mapping[str, str] | str | None, bounds: Bounds) -> Slot:
    own = name_of(x.dtype)
    floats = own in CASTS
    bound = bounds.get(name) if isinstance(bounds, Mapping) else bounds if floats else None
    used = kinds.get(name) if isinstance(kinds, Mapping) else kinds if floats else None
    castable = floats or used in (None, own)
    require(castable, InputError, f"{name} is {x.dtype}, which is not cast: leave it out of dtype")
    cast_to_bits = used not in (None, own) and used not in CASTS
    require(not cast_to_bits, InputError, f"{name} cannot be cast to {used}, which is carried as bits only")
    return Slot(name, tuple(x.shape), used or own, None if bound is None else float(bound))
