"""Occupied cells as an octree: a byte a node says which of its eighths hold something.

A node is coded among those that have neighbours on the same sides, but for turns and mirrors of the cube: its
byte is turned with them. That makes 10 lists. A level's nodes are known before any of its bytes. Source:
neighbour contexts as in MPEG's G-PCC [from memory].
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from thinwire.codecs.symbols import Bytes, pack_bytes, unpack_bytes
from thinwire.types import ByteCursor, PayloadError, require
from thinwire.uses.scenes.code.morton import Codes

ROOT = np.zeros(1, np.uint64)
CONTEXTS = 10  # of three axes with no neighbour, one or two
_AXES = [np.uint64(0o111111111111111111111 << 2 - axis) for axis in range(3)]  # the bits of x, y and z
_COUNT = np.array([bin(i).count("1") for i in range(256)], np.int64)


def pack_cells(codes: Codes, depth: int, known: int = 0) -> bytes:
    """Return rising places on Morton's curve, no two alike, as bytes; ``known`` levels are left out."""
    lists: list[list[Bytes]] = [[] for _ in range(CONTEXTS)]
    for nodes, children in _levels(codes, depth - known):
        context, turn = _surroundings(nodes)
        turned = _TURN[turn, children]
        for i in range(CONTEXTS):
            lists[i].append(turned[context == i])
    joined = [np.concatenate([np.zeros(0, np.uint8), *parts]) for parts in lists]
    sizes = np.array([len(part) for part in joined], "<u4").tobytes()
    return sizes + b"".join(pack_bytes(part) for part in joined if len(part))


def unpack_cells(cursor: ByteCursor, n: int, depth: int, above: Codes = ROOT) -> Codes:
    """Return the ``n`` places that come next, ``depth`` levels below rising ones that are known.

    Errors: ``PayloadError``.
    """
    sizes = np.frombuffer(cursor.take(4 * CONTEXTS), "<u4").tolist()
    fits = all(size <= n * depth for size in sizes)
    require(fits, PayloadError, f"{sum(sizes)} nodes of {n} cells at depth {depth}")
    lists = [unpack_bytes(cursor, size) if size else np.zeros(0, np.uint8) for size in sizes]
    nodes, taken = above, np.zeros(CONTEXTS, np.int64)
    for _ in range(depth):
        context, turn = _surroundings(nodes)
        children = np.zeros(len(nodes), np.uint8)
        for i in range(CONTEXTS):
            at = np.flatnonzero(context == i)
            end = taken[i] + len(at)
            require(end <= sizes[i], PayloadError, "fewer nodes than the tree has")
            children[at] = _BACK[turn[at], lists[i][taken[i] : end]]
            taken[i] = end
        counts = _COUNT[children]
        good = bool(counts.all()) and int(counts.sum()) <= n
        require(good, PayloadError, f"a tree with an empty node, or of more than {n} cells")
        nodes = _below(nodes, children)
    whole = len(nodes) == n and taken.tolist() == sizes
    require(whole, PayloadError, f"a tree of {len(nodes)} cells, expected {n}")
    return nodes


def _levels(codes: Codes, depth: int) -> list[tuple[Codes, Bytes]]:
    """Return nodes and their bytes, the root's first."""
    levels = []
    for _ in range(depth):
        parents = codes >> np.uint64(3)
        begin = np.flatnonzero(np.concatenate([[True], parents[1:] != parents[:-1]]))
        bits = np.left_shift(1, (codes & np.uint64(7)).astype(np.int64)).astype(np.uint8)
        levels.append((parents[begin], np.bitwise_or.reduceat(bits, begin)))
        codes = parents[begin]
    return levels[::-1]


def _below(nodes: Codes, children: Bytes) -> Codes:
    parent, child = np.nonzero(np.unpackbits(children[:, None], axis=1, bitorder="little"))
    return nodes[parent] << np.uint64(3) | child.astype(np.uint64)


def _surroundings(nodes: Codes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the list of each node of a level, and how its byte is turned for it."""
    sides = np.zeros(len(nodes), np.int64)
    for axis, mask in enumerate(_AXES):
        beside = nodes & ~mask | (
            (nodes | ~mask) + np.uint64(1) & mask
        )  # a step on: beyond the last, there is none
        at = np.minimum(np.searchsorted(nodes, beside), len(nodes) - 1)
        below = np.flatnonzero(nodes[at] == beside)
        sides[below] |= 2 << 2 * axis
        sides[at[below]] |= 1 << 2 * axis
    return _CONTEXT[sides], sides


def _turns() -> tuple[npt.NDArray[np.int64], Bytes, Bytes]:
    """Return, by the sides with neighbours: the list, each byte turned for it, and each back."""
    context, turned = np.zeros(64, np.int64), np.zeros((64, 256), np.uint8)
    kinds = {kind: i for i, kind in enumerate(itertools.combinations_with_replacement(range(3), 3))}
    for sides in range(64):
        pairs = [sides >> 2 * axis & 3 for axis in range(3)]  # bit 0: below, bit 1: above
        order = sorted(range(3), key=lambda axis: bin(pairs[axis]).count("1"))
        a, b, c = (bin(pairs[axis]).count("1") for axis in order)
        context[sides] = kinds[a, b, c]
        for child in range(8):
            bits = [child >> 2 - axis & 1 ^ (pairs[axis] == 2) for axis in order]
            to = bits[0] << 2 | bits[1] << 1 | bits[2]
            turned[sides] |= ((np.arange(256) >> child & 1) << to).astype(np.uint8)
    return context, turned, np.argsort(turned, axis=1).astype(np.uint8)


_CONTEXT, _TURN, _BACK = _turns()
