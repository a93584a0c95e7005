"""The layout of range-coded symbols: planes, segments, streams, lanes.

``planes`` runs of ``n`` symbols each are cut into segments of ``STREAMS * LANES * lane`` symbols, each with a
table of frequencies of its own, and these into streams of ``LANES * lane`` symbols; the last of a plane are
short. A stream of m symbols has ``ceil(m / lane)`` lanes, and lane l codes its symbols l, l + lanes, ... So
streams are coded beside each other, lanes too, and no lane takes more than ``lane`` steps. All lanes of a
stream share its words: in each step those that need a word take one each, the lowest lane first.

Lanes code by asymmetric numeral systems: see ``kernels.c``, which is the shortest. A lane costs 23 bits more
than its symbols, so there are no more lanes than a GPU needs: 32 move together there, and 1,024 steps take it
about as long as starting the work does.

Body, little-endian: for each segment the bytes of its table, u16; for each stream its words, u16; then,
segment by segment, the table and the streams' words: two for each lane's state (the low one first), then
those of the steps. A segment of one symbol only has two bytes, ``CONSTANT`` and the symbol, and no words.

A table gives frequencies that sum to 2**bits (``precision``): a parameter k, the largest symbol, u8 each,
then exponential Golomb codes of the frequencies of all symbols below that one, which has what is left. The
code of f with q = (f >> k) + 1, a number of w bits, is w - 1 zeros, a one, the low w - 1 bits of q and the
low k bits of f, each from the lowest bit on; unused bits of the last byte are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LANES, STREAMS = 32, 4
STREAM = 1 << 15  # symbols of a stream, at most: how many words it has is then a u16
LANE = STREAM // LANES
LOW = 1 << 15  # of a lane's state, which is below LOW << 16, so that all fits int32
LEAST, MOST = 8, 12
PARAMETERS, CONSTANT = 12, 255
SYMBOLS = 256
Ints = npt.NDArray[np.int64]


def precision(n: int) -> int:
    """Return the bits of the sum of the frequencies of ``n`` symbols.

    >>> precision(1), precision(1000), precision(1 << 17)
    (8, 10, 12)
    """
    return min(max((n - 1).bit_length(), LEAST), MOST)


@dataclass(frozen=True)
class Grid:
    """Where segments and streams of ``planes`` planes of ``n`` symbols lie; a lane has ``lane`` of them."""

    n: int
    planes: int = 1
    lane: int = LANE

    @property
    def stream(self) -> int:
        """Symbols of a stream, but for the last of a plane."""
        return LANES * self.lane

    @property
    def segment(self) -> int:
        """Symbols of a segment, but for the last of a plane."""
        return STREAMS * self.stream

    @property
    def segments(self) -> int:
        """Segments of all planes."""
        return self.planes * -(-self.n // self.segment)

    @property
    def streams(self) -> int:
        """Streams of all planes."""
        return self.planes * -(-self.n // self.stream)

    @property
    def heads(self) -> int:
        """Bytes in front of the first table."""
        return 2 * (self.segments + self.streams)

    def cut(self, size: int) -> tuple[Ints, Ints]:
        """Return where runs of ``size`` begin, in symbols of all planes, and how long they are."""
        begin = np.arange(0, self.n, size)
        length = np.minimum(size, self.n - begin)
        planes = np.arange(self.planes)[:, None] * self.n
        return (planes + begin).reshape(-1), np.tile(length, self.planes)

    def segment_of(self) -> Ints:
        """Return which segment each stream belongs to."""
        own = np.arange(self.streams // self.planes) // STREAMS
        each = self.segments // self.planes
        return (np.arange(self.planes)[:, None] * each + own).reshape(-1)
