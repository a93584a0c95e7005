"""Calls of the compiled passes in ``kernels.c``: faster than numpy's, and beside other threads.

They are there where a C compiler was when thinwire was installed; elsewhere ``there()`` is False, and callers
do the same with numpy. Words are signed or unsigned integers of any width, positions are int32, and arrays
are checked: ``InputError`` for another size or width, or a position out of range. What others may write to
meanwhile, a trainer's tensors and live words, can make a result wrong, but reaches no other memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thinwire import compiled
from thinwire.state.layout import Array
from thinwire.state.threads import room
from thinwire.types import InputError, require

MOST = 16  # classes
ROW = 1 << 12  # factors of the content hash that repeat
_FAR = 1 << 31  # positions are below it
_START = ctypes.c_char * 0  # the beginning of an array
_NAMES = (
    "differing",
    "compared",
    "nonzero",
    "marked",
    "larger",
    "signs",
    "beyond",
    "exceeding",
    "planes",
    "take",
    "put",
    "sort",
    "unsort",
    "outside",
    "merge",
)
_PLAIN = ("most", "row", "where", "within", "bits", "symbols", "lows", "pack", "unpack", "summed")
_HASHES = ("moved", "whole")  # of words of up to 4 bytes


def _load() -> compiled.Passes:
    """Return the functions of the library beside this file; none where there is none, or of other limits."""
    names = [f"{name}_uint{8 * size}_t" for name in _NAMES for size in (1, 2, 4, 8)]
    hashes = [f"{name}_uint{8 * size}_t" for name in _HASHES for size in (1, 2, 4)]
    found = compiled.functions(Path(__file__).parent, [*_PLAIN, *names, *hashes])
    for name in hashes if found else []:
        found[name].restype = ctypes.c_uint64
    return found if found and (found["most"](), found["row"]()) == (MOST, ROW) else compiled.Passes()


_FUNCTIONS = _load()
without = _FUNCTIONS.without


def there(*arrays: Array) -> bool:
    """Return whether there are compiled passes, and each of ``arrays`` is one aligned piece of memory."""
    return bool(_FUNCTIONS) and all(a.flags.c_contiguous and a.flags.aligned for a in arrays)


def where(mask: Array) -> Array:
    """Return the positions of bool [n] that are set: intp, increasing."""
    at = np.empty(int(np.count_nonzero(mask)), dtype=np.int64)
    _same(_FUNCTIONS["where"](_at(mask, mask.size, 1), _size(mask), _at(at, at.size, 8), _size(at)), at.size)
    return at


def differing(now: Array, held: Array) -> int:
    """Return how many words [n] of two arrays differ."""
    n, width = held.size, held.itemsize
    return _call("differing", width, _at(now, n, width), _at(held, n, width), _size(held))


def compared(now: Array, held: Array, start: int, most: int) -> tuple[Array, Array, Array] | None:
    """Return where words [n] differ, from ``start`` on, what ``held`` has there, and what ``now`` has.

    None where more than ``most`` do.
    """
    require(start + now.size <= _FAR, InputError, f"{start + now.size} elements, at most {_FAR}")
    room = [np.empty(most, dtype=dtype) for dtype in (np.dtype(np.int32), held.dtype, held.dtype)]
    n, width = held.size, held.itemsize
    both = _at(now, n, width), _at(held, n, width), _size(held), ctypes.c_int32(start)
    k = _call("compared", width, *both, *(_at(x, most, x.itemsize) for x in room), _size(room[0]))
    return None if k < 0 else (room[0][:k].copy(), room[1][:k].copy(), room[2][:k].copy())


def nonzero(diffs: Array, count: int) -> tuple[Array, Array]:
    """Return where ``diffs`` [n] are not 0, int32 [count], and these [count]."""
    at = np.empty(count, dtype=np.int32)
    found = np.empty(count, dtype=diffs.dtype)
    _same(_list("nonzero", diffs, at, found), count)
    return at, found


def marked(diffs: Array, found: Array) -> Array:
    """Return where ``diffs`` [n] are not 0, a bit each as numpy packs them; list these in ``found`` [k]."""
    bits = np.empty(-(-diffs.size // 8), dtype=np.uint8)
    _same(_list("marked", diffs, bits, found), found.size)
    return bits


def larger(diffs: Array) -> int:
    """Return how many of ``diffs`` [n] are beyond 1, or -1 if any is 0."""
    n, width = diffs.size, diffs.itemsize
    return _call("larger", width, _at(diffs, n, width), _size(diffs))


def signs(diffs: Array) -> Array:
    """Return which of ``diffs`` [n] are negative, a bit each as numpy packs them."""
    n, width = diffs.size, diffs.itemsize
    bits = np.empty(-(-n // 8), dtype=np.uint8)
    _call("signs", width, _at(diffs, n, width), _size(diffs), _at(bits, bits.size, 1))
    return bits


def beyond(diffs: Array, count: int, many: bool) -> tuple[Array, Array]:
    """Return which of ``diffs`` [n] are beyond 1, as ``count`` are, and their sizes less 2, unsigned.

    Which are, comes as positions int32 [count]; where they are ``many``, as a bit each as numpy packs them.
    """
    found = np.empty(count, dtype=f"u{diffs.itemsize}")
    which = np.empty(-(-diffs.size // 8) if many else count, dtype=np.uint8 if many else np.int32)
    _same(_list("exceeding" if many else "beyond", diffs, which, found), count)
    return which, found


def bits(positions: Array, size: int) -> Array:
    """Return ``positions`` [n], below ``size``, as a bit for each element, as numpy packs them."""
    found = np.zeros(-(-size // 8), dtype=np.uint8)
    _FUNCTIONS["bits"](_positions(positions, size), _size(positions), _at(found, found.size, 1))
    return found


def pack_numbers(numbers: Array) -> tuple[Array, Array]:
    """Return the symbols of uint32 [n], each at most 2**32 - 9, and the low bits: uint8 [n] and [...]."""
    symbols = np.empty(numbers.size, dtype=np.uint8)
    given, into = _at(numbers, numbers.size, 4), _at(symbols, symbols.size, 1)
    nbytes = _FUNCTIONS["symbols"](given, _size(numbers), into)
    require(nbytes >= 0, InputError, "numbers over 2**32 - 9, for which there are no symbols")
    low = np.zeros(nbytes, dtype=np.uint8)
    _FUNCTIONS["pack"](given, into, _size(numbers), _at(low, low.size, 1))
    return symbols, low


def low_nbytes(symbols: Array) -> int:
    """Return how many bytes the low bits take of numbers with these symbols; -1 if one stands for none."""
    found: int = _FUNCTIONS["lows"](_at(symbols, symbols.size, 1), _size(symbols))
    return found


def unpack_numbers(symbols: Array, low: Array) -> Array:
    """Return the numbers uint32 [n] with these symbols and low bits."""
    require(low_nbytes(symbols) == low.size, InputError, f"{low.size} bytes of low bits, expected others")
    numbers = np.empty(symbols.size, dtype=np.uint32)
    given = _at(symbols, symbols.size, 1), _size(symbols), _at(low, low.size, 1)
    _FUNCTIONS["unpack"](*given, _at(numbers, numbers.size, 4))
    return numbers


def summed(gaps: Array, size: int) -> Array | None:
    """Return the positions int32 [n] that ``gaps`` uint32 [n] tell of; None where one is not below ``size``.

    numpy's own sum keeps all other threads waiting.
    """
    require(size <= _FAR, InputError, f"positions of {size} elements, at most {_FAR}")
    at = np.empty(gaps.size, dtype=np.int32)
    given = _at(gaps, gaps.size, 4), _size(gaps), ctypes.c_size_t(size)
    return at if _FUNCTIONS["summed"](*given, _at(at, at.size, 4)) == 0 else None


def planes(words: Array, zigzag: bool) -> Array:
    """Return the bytes of ``words`` [n], or of as many zigzag numbers: uint8 [width, n], lowest first.

    They are there until this thread asks for others.
    """
    n, width = words.size, words.itemsize
    found = room("planes", width * n, np.dtype(np.uint8))
    _call("planes", width, _at(words, n, width), _size(words), ctypes.c_int(zigzag), _at(found, width * n, 1))
    return found.reshape(width, n)


def take(words: Array, positions: Array) -> Array:
    """Return the words at ``positions`` [n]."""
    n, width = positions.size, words.itemsize
    found = np.empty(n, dtype=words.dtype)
    at = _positions(positions, words.size)
    _call("take", width, _at(words, words.size, width), at, _size(positions), _at(found, n, width))
    return found


def put(words: Array, positions: Array, values: Array) -> None:
    """Write ``values`` [n] into ``words`` at ``positions`` [n]."""
    require(words.flags.writeable, InputError, "words that cannot be written to; copy them")
    n, width = positions.size, words.itemsize
    at = _positions(positions, words.size)
    _call("put", width, _at(words, words.size, width), at, _size(positions), _at(values, n, width))


def moved(positions: Array, old: Array, new: Array, low: Array, high: Array) -> int:
    """Return the sum of new - old, each times its factors of ``low`` and ``high``, modulo 2**64."""
    n, width = positions.size, old.itemsize
    at = _positions(positions, low.size * high.size)
    words = _at(old, n, width), _at(new, n, width), _size(positions)
    return _call("moved", width, at, *words, *_factors(low, high))


def whole(new: Array, old: Array | None, low: Array, high: Array) -> int:
    """Return the sum of new - old (None: zeros) [n], each times its factors of ``low`` and ``high``."""
    n, width = new.size, new.itemsize
    require(n <= low.size * high.size, InputError, f"{n} elements, factors for {low.size * high.size}")
    before = ctypes.c_void_p() if old is None else _at(old, n, width)
    return _call("whole", width, _at(new, n, width), before, _size(new), *_factors(low, high))


def sort(words: Array, least: Array, at: Array, diffs: Array) -> tuple[list[Array], Array, Array]:
    """Return the differences of the elements of each class, and positions and differences of no class.

    ``words`` [n] are those before changes ``at`` rising positions, by ``diffs`` [k]; elsewhere nothing does.
    Class c is of the words that without their sign, doubled, are below ``least[c]`` and not below
    ``least[c - 1]``. All that is below the highest byte of ``least`` is 0.
    """
    n, k, width = words.size, at.size, words.itemsize
    parts = [room(f"class {c}", n, diffs.dtype) for c in range(least.size)]
    others, by = np.empty(k, dtype=np.int32), np.empty(k, dtype=diffs.dtype)
    about = _at(words, n, width), _size(words), _at(least, least.size, width), _size(least)
    changes = _int32(at), _at(diffs, k, width), _size(at)
    starts, stops = _addresses(parts, width), _addresses(parts, width)
    found = _call("sort", width, *about, *changes, stops, _at(others, k, 4), _at(by, k, width))
    require(found >= 0, InputError, f"positions not of {n} elements; they must rise")
    counts = [(stop - start) // width for start, stop in zip(starts, stops, strict=True)]
    listed = [part[:count].copy() for part, count in zip(parts, counts, strict=True)]
    return listed, others[:found], by[:found]


def unsort(
    words: Array, least: Array, classes: Sequence[Array], taken: list[int]
) -> tuple[Array, Array] | None:
    """Return positions int32 and differences [k] of those that are not 0; None where a class has too few.

    ``taken``, one a class, is how many of each were taken before, and is moved on.
    """
    n, width = words.size, words.itemsize
    at, diffs = room("at", n, np.dtype(np.int32)), room("diffs", n, words.dtype)
    heads = _addresses(classes, width)
    next_ones = type(heads)(*(head + k * width for head, k in zip(heads, taken, strict=True)))
    stops = type(heads)(*(head + c.nbytes for head, c in zip(heads, classes, strict=True)))
    about = _at(words, n, width), _size(words), _at(least, len(classes), width), _size(least)
    found = _call("unsort", width, *about, next_ones, stops, _at(at, n, 4), _at(diffs, n, width))
    if found < 0:
        return None
    taken[:] = [(after - head) // width for after, head in zip(next_ones, heads, strict=True)]
    return at[:found].copy(), diffs[:found].copy()


def outside(words: Array, most: int, positions: Array, diffs: Array) -> tuple[Array, Array]:
    """Return those changes whose words, without their sign and doubled, are not below ``most``."""
    n, width = positions.size, words.itemsize
    at, found = np.empty(n, dtype=np.int32), np.empty(n, dtype=diffs.dtype)
    limit = getattr(ctypes, f"c_uint{8 * width}")(most)
    given = _positions(positions, words.size), _at(diffs, n, width), _size(positions)
    k = _call(
        "outside", width, _at(words, words.size, width), limit, *given, _at(at, n, 4), _at(found, n, width)
    )
    return at[:k], found[:k]


def merge(at: Array, diffs: Array, at2: Array, diffs2: Array) -> tuple[Array, Array]:
    """Return changes at two lists of rising positions as one; of two at one position, the first list's."""
    n, n2, width = at.size, at2.size, diffs.itemsize
    positions, found = np.empty(n + n2, dtype=np.int32), np.empty(n + n2, dtype=diffs.dtype)
    first = _int32(at), _at(diffs, n, width), _size(at)
    second = _int32(at2), _at(diffs2, n2, width), _size(at2)
    k = _call("merge", width, *first, *second, _at(positions, n + n2, 4), _at(found, n + n2, width))
    return (positions, found) if k == n + n2 else (positions[:k].copy(), found[:k].copy())


def _call(name: str, width: int, *arguments: Any) -> int:
    found: int = _FUNCTIONS[f"{name}_uint{8 * width}_t"](*arguments)
    return found


def _list(name: str, diffs: Array, which: Array, found: Array) -> int:
    """Call a pass that tells which of ``diffs`` count, and lists as many as ``found`` has room for."""
    n, width = diffs.size, diffs.itemsize
    require(n <= _FAR and found.flags.writeable, InputError, f"{n} differences, or no room to list them")
    into = _at(which, which.size, which.itemsize), _at(found, found.size, width), _size(found)
    return _call(name, width, _at(diffs, n, width), _size(diffs), *into)


def _same(found: int, counted: int) -> None:
    if found != counted:
        raise InputError(f"not {counted} differences, as were counted: somebody wrote to them meanwhile")


def _size(array: Array) -> ctypes.c_size_t:
    return ctypes.c_size_t(array.size)


def _at(array: Array, n: int, width: int) -> Any:
    """Return where an array of ``n`` elements of ``width`` bytes lies."""
    if array.size != n or array.itemsize != width or not array.flags.c_contiguous:
        raise InputError(f"{array.size} of {array.dtype}, expected {n} of {width} bytes next to each other")
    if array.flags.writeable:
        return _START.from_buffer(array.data)  # several times as fast
    return ctypes.c_void_p(array.__array_interface__["data"][0])


def _positions(positions: Array, size: int) -> Any:
    """Return where positions lie, in any order, if all are of an array of ``size`` elements."""
    at = _int32(positions)
    if not _FUNCTIONS["within"](at, _size(positions), ctypes.c_size_t(min(size, _FAR))):
        raise InputError(f"positions from {positions.min()} to {positions.max()} of {size} elements")
    return at


def _int32(positions: Array) -> Any:
    if positions.dtype != np.int32:  # not by require: to name a dtype takes longer than most passes
        raise InputError(f"positions of {positions.dtype}, expected int32")
    return _at(positions, positions.size, 4)


def _factors(low: Array, high: Array) -> tuple[Any, Any]:
    require(low.size == ROW, InputError, f"{low.size} factors, expected {ROW}")
    return _at(low, low.size, 8), _at(high, high.size, 8)


def _addresses(arrays: Sequence[Array], width: int) -> Any:
    """Return where the arrays of classes lie, as a table that a pass may move on."""
    require(0 < len(arrays) <= MOST, InputError, f"{len(arrays)} classes; there are 1 to {MOST}")
    starts = [_at(a, a.size, width) for a in arrays]
    return (ctypes.c_uint64 * len(arrays))(*map(_address, starts))


def _address(start: Any) -> int:
    return (start.value or 0) if isinstance(start, ctypes.c_void_p) else ctypes.addressof(start)
