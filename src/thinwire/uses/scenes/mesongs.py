"""MesonGS from its description, arXiv 2409.09756; no code of it was used.

Importance from views times volume, pruning, voxels, Euler's angles, a Haar transform by regions of opacity,
angles and colours, 8 bits in blocks, a book of vectors for harmonics, DEFLATE. Its fine-tuning, straight
through transform and rounding with places fixed, is by whoever calls, on synthetic views of the scene itself.
With ``coder="own"`` the same numbers go through our octree and entropy coder; with ``voxels="middle"`` splats
come back at the middle of their voxels, not at the lower corner.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.codecs.symbols import pack_bytes, unpack_bytes
from thinwire.spec import Spec
from thinwire.types import WRONG_VALUES, ByteCursor, InputError, PayloadError, require
from thinwire.uses.scenes.code import orientations, vq
from thinwire.uses.scenes.code.morton import Codes, PositionGrid, cells_of, morton
from thinwire.uses.scenes.code.octree import pack_cells, unpack_cells
from thinwire.uses.scenes.code.raht import HaarPlan
from thinwire.uses.scenes.part import Part
from thinwire.uses.scenes.scene import COEFFICIENTS, Array, Splats
from thinwire.uses.scenes.view.render import Seen

LOGIT, FLOOR = 12.0, -23.0  # what infinite opacities and scales of zero become
REFERENCE = 0.9  # the splat whose volume is the unit
NAME, LEVELS = "mesongs", 255
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.integer[Any]]
# From splats, and a function that returns them as they come back, to splats.
Tuning = Callable[[Splats, Callable[[Splats], Splats]], Splats]


@dataclass(frozen=True, repr=False)
class MesonGS(Spec):
    """How MesonGS codes a scene: the parameters of its first configuration."""

    prune: float = 0.2
    depth: int = 14
    blocks: int = 66
    book: int = 2048
    steps: int = 100
    beta: float = 0.1
    coder: str = "deflate"
    voxels: str = "corner"
    refine: int = 0  # steps of fine-tuning

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.prune < 1, InputError, f"prune={self.prune} is not in 0..1")
        require(self.coder in ("deflate", "own"), InputError, f"coder={self.coder!r} is not deflate or own")
        require(
            self.voxels in ("corner", "middle"), InputError, f"voxels={self.voxels!r} is not corner or middle"
        )
        good = self.blocks > 0 and 0 < self.book <= 65536 and self.steps >= 0
        require(self.refine >= 0, InputError, f"refine={self.refine} steps are fewer than none")
        require(
            good, InputError, f"blocks={self.blocks}, book={self.book} or steps={self.steps} is out of range"
        )

    def importance(self, splats: Splats, seen: Seen) -> Floats:
        """Return what each splat adds to the views, times its volume to the power of ``beta``."""
        with np.errstate(over="ignore"):
            volume = np.exp(splats.log_scales.astype(np.float64).sum(1))
        unit = np.sort(volume)[::-1][int(REFERENCE * (splats.count - 1))]
        powered: Floats = (volume / max(unit, 1e-300)) ** self.beta
        return seen.weights * powered

    def encode(self, splats: Splats, seen: Seen, tuned: Tuning | None = None) -> Part:
        """Return a scene as one part; ``seen`` is what views see of its splats.

        ``tuned`` returns splats nearer to the views, once they come back as it is told.
        """
        voxels = self._voxels(splats, seen)
        vectors, at = voxels.rows.harmonics.reshape(voxels.rows.count, -1), None
        book = np.zeros((0, vectors.shape[1]), np.float32)
        if splats.bands:
            book = vq.learn(vectors, voxels.weights, self.book, self.steps)
            at = vq.nearest(vectors, book)
        if tuned is not None:
            rows = replace(voxels.rows, positions=voxels.grid.positions(cells_of(voxels.codes), self._within))
            voxels = replace(voxels, rows=tuned(rows, partial(self._back, voxels, book, at)))
            book = _tied(voxels.rows.harmonics, voxels.weights, book, at)
        return self._part(voxels, book, at)

    def _voxels(self, splats: Splats, seen: Seen) -> Voxels:
        importance = self.importance(splats, seen)
        kept = np.sort(np.argsort(importance, kind="stable")[int(self.prune * splats.count) :])
        grid = PositionGrid.fitted(splats.positions[kept], self.depth)
        places = morton(grid.cells(splats.positions[kept]))
        codes, rows, weights = _merged(splats.take(kept), importance[kept], places)
        return Voxels(grid, codes, rows, weights, HaarPlan.of(codes, self.depth))

    def _back(self, voxels: Voxels, book: Array, at: Indices | None, rows: Splats) -> Splats:
        """Return splats as they come back: in 8 bits, and with harmonics of the book that they would have."""
        seven = voxels.plan.forward(_seven(rows))
        rest = np.delete(seven, voxels.plan.root, axis=0)
        ranges, own = block_codes(rest, self.blocks)
        found = np.insert(
            block_values(own, ranges.astype(np.float64)), voxels.plan.root, seven[voxels.plan.root], axis=0
        )
        ranges, own = block_codes(rows.log_scales.astype(np.float64), self.blocks)
        scales = block_values(own, ranges.astype(np.float64))
        tied = _tied(rows.harmonics, voxels.weights, book, at)
        harmonics = rows.harmonics if at is None else tied[at].reshape(rows.harmonics.shape)
        return _splats_of(voxels.plan.inverse(found), rows.positions, scales, harmonics)

    def _part(self, voxels: Voxels, book: Array, at: Indices | None) -> Part:
        grid, rows, plan = voxels.grid, voxels.rows, voxels.plan
        seven = plan.forward(_seven(rows))
        root, rest = seven[plan.root], np.delete(seven, plan.root, axis=0)
        streams = {"positions": self._pack_positions(voxels.codes)}
        ranges, own = block_codes(rest, self.blocks)
        ranges2, scales = block_codes(rows.log_scales.astype(np.float64), self.blocks)
        streams |= {"attributes": self._pack(own), "log_scales": self._pack(scales)}
        streams["ranges"] = self._pack(_planes(np.concatenate([ranges.ravel(), ranges2.ravel()])))
        about = {"grid": [list(grid.origin), list(grid.step)], "root": root.tolist(), "spec": repr(self)}
        if at is not None:
            streams |= {
                "codebook": self._pack(_planes(book.ravel())),
                "indices": self._pack(_planes(at.astype("<i4"))),
            }
            about["book"] = len(book)
        return Part(NAME, rows.count, rows.bands, about, streams)

    @property
    def _within(self) -> float:
        return 0.0 if self.voxels == "corner" else 0.5

    def _pack(self, columns: npt.NDArray[np.uint8]) -> bytes:
        """Return bytes [n, channels], channel by channel."""
        flat = np.ascontiguousarray(columns.T)
        if self.coder == "deflate":
            return zlib.compress(flat.tobytes())
        return b"".join(pack_bytes(row) for row in flat)

    def _pack_positions(self, codes: Codes) -> bytes:
        if self.coder == "deflate":
            return zlib.compress(codes.astype("<i8").tobytes())
        return pack_cells(codes, self.depth)

    def decode(self, part: Part) -> Splats:
        """Return the scene of a part. Errors: ``PayloadError``."""
        try:
            return self._decoded(part)
        except WRONG_VALUES as e:
            raise PayloadError(f"a damaged part: {str(e)[:80]}") from e

    def _decoded(self, part: Part) -> Splats:
        n, about, channels = part.count, part.about, 3 * _coefficients(part.bands)
        codes = self._unpack_positions(part.streams["positions"], n)
        (ox, oy, oz), (sx, sy, sz) = (map(float, values) for values in about["grid"])
        grid = PositionGrid((ox, oy, oz), (sx, sy, sz), self.depth)
        ranges = _joined(self._unpack(part, "ranges", (4, 2 * self.blocks * 10)), "<f4").astype(np.float64)
        parts = np.split(ranges, [2 * self.blocks * 7])
        rest = block_values(
            self._unpack(part, "attributes", (7, n - 1)).T, parts[0].reshape(2, self.blocks, 7)
        )
        scales = block_values(self._unpack(part, "log_scales", (3, n)).T, parts[1].reshape(2, self.blocks, 3))
        plan = HaarPlan.of(codes, self.depth)
        seven = plan.inverse(np.insert(rest, plan.root, np.array(about["root"], np.float64), axis=0))
        harmonics = np.zeros((n, 0), np.float32)
        if channels:
            size = int(about["book"])
            require(0 < size <= self.book, PayloadError, f"a book of {size} vectors")
            book = _joined(self._unpack(part, "codebook", (4, size * channels)), "<f4").reshape(
                size, channels
            )
            harmonics = book[_joined(self._unpack(part, "indices", (4, n)), "<i4")]
        harmonics = harmonics.reshape(n, -1, 3) if channels else np.zeros((n, 0, 3), np.float32)
        return _splats_of(seven, grid.positions(cells_of(codes), self._within), scales, harmonics)

    def _unpack(self, part: Part, name: str, shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
        data = part.streams[name]
        if self.coder == "own":
            cursor = ByteCursor(data, name)
            rows = [unpack_bytes(cursor, shape[1]) for _ in range(shape[0])]
            cursor.close()
            return np.stack(rows)
        return np.frombuffer(_inflated(data, shape[0] * shape[1], name), np.uint8).reshape(shape)

    def _unpack_positions(self, data: bytes, n: int) -> Codes:
        if self.coder == "own":
            cursor = ByteCursor(data, "positions")
            codes = unpack_cells(cursor, n, self.depth)
            cursor.close()
            return codes
        codes = np.frombuffer(_inflated(data, 8 * n, "positions"), "<i8").astype(np.uint64)
        rising = bool((codes[1:] > codes[:-1]).all()) and int(codes[-1]) < 1 << 3 * self.depth
        require(rising, PayloadError, "positions that do not rise")
        return codes


@dataclass(frozen=True, eq=False)
class Voxels:
    """What is left of a scene before it is quantised: a splat a voxel, and their importance."""

    grid: PositionGrid
    codes: Codes
    rows: Splats
    weights: Floats
    plan: HaarPlan


def _seven(rows: Splats) -> Floats:
    return np.concatenate([rows.opacities[:, None], orientations.to_euler(rows.rotations), rows.colours], 1)


def _splats_of(seven: Floats, positions: Array, scales: Floats, harmonics: Array) -> Splats:
    return Splats.of(
        positions,
        log_scales=scales,
        rotations=orientations.from_euler(seven[:, 1:4]),
        opacities=seven[:, 0],
        colours=seven[:, 4:],
        harmonics=harmonics,
    )


def _tied(harmonics: Array, weights: Floats, book: Array, at: Indices | None) -> Array:
    """Return a book of the means of those harmonics that have each of its vectors; of none, what it was."""
    if at is None:
        return book
    total = np.bincount(at, weights, len(book))[:, None]
    flat = harmonics.reshape(len(harmonics), -1).astype(np.float64)
    sums = np.stack([np.bincount(at, weights * column, len(book)) for column in flat.T], axis=1)
    return np.where(total > 0, sums / np.maximum(total, 1e-300), book).astype(np.float32)


def block_codes(x: Floats, blocks: int) -> tuple[Array, npt.NDArray[np.uint8]]:
    """Return ranges [2, blocks, channels], low and step, and codes of 8 bits [n, channels] of x.

    Blocks are of neighbours; each range holds 0 as well.
    """
    codes, ranges = np.empty(x.shape, np.uint8), np.zeros((2, blocks, x.shape[1]), np.float32)
    for i, part in enumerate(np.array_split(np.arange(len(x)), blocks)):
        if len(part):
            low, high = np.minimum(x[part].min(0), 0), np.maximum(x[part].max(0), 0)
            ranges[0, i], ranges[1, i] = low, np.maximum((high - low) / LEVELS, 1e-12)
            codes[part] = np.clip(np.rint((x[part] - ranges[0, i]) / ranges[1, i]), 0, LEVELS)
    return ranges, codes


def block_values(codes: npt.NDArray[np.uint8], ranges: Floats) -> Floats:
    """Return what ``block_codes``' codes [n, channels] stand for."""
    found = np.empty(codes.shape)
    for i, part in enumerate(np.array_split(np.arange(len(codes)), ranges.shape[1])):
        found[part] = codes[part] * ranges[1, i] + ranges[0, i]
    return found


def _merged(splats: Splats, importance: Floats, codes: Codes) -> tuple[Codes, Splats, Floats]:
    """Return places on the curve, the mean by importance of the splats at each, and their importance.

    Rotations have no mean: that of the most important one counts.
    """
    order = np.lexsort((-importance, codes))
    rows, weight = splats.take(order), np.maximum(importance[order], 1e-30)
    unique, begin = np.unique(codes[order], return_index=True)
    total = np.add.reduceat(weight, begin)

    def mean(x: Array) -> Floats:
        flat = x.reshape(len(x), -1)
        found: Floats = np.add.reduceat(flat * weight[:, None], begin, axis=0) / total[:, None]
        return found.reshape(len(begin), *x.shape[1:])

    merged = Splats.of(
        rows.positions[begin],
        log_scales=mean(np.maximum(rows.log_scales, FLOOR)),
        rotations=rows.rotations[begin],
        opacities=mean(np.clip(rows.opacities, -LOGIT, LOGIT)),
        colours=mean(rows.colours),
        harmonics=mean(rows.harmonics) if rows.bands else rows.harmonics[begin],
    )
    return unique, merged, total


def _coefficients(bands: int) -> int:
    return next(k for k, b in COEFFICIENTS.items() if b == bands)


def _planes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the four bytes of each number as columns [n, 4]."""
    return np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, 4)


def _joined(planes: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[Any]:
    return np.ascontiguousarray(planes.T).view(kind).reshape(-1)


def _inflated(data: bytes, n: int, name: str) -> bytes:
    """Return the ``n`` bytes that a DEFLATE stream holds. Errors: ``PayloadError``."""
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(data, n + 1)
    except zlib.error as e:
        raise PayloadError(f"{name}: {e}") from e
    require(len(found) == n and reader.eof, PayloadError, f"{name} hold {len(found)} bytes, expected {n}")
    return found
