"""Bytes that come one after another: read while more come, and summed up as they do."""

from __future__ import annotations

import numpy as np

from thinwire.checksum import crc32
from thinwire.state.layout import Array

PAGE = 1 << 18  # bytes


class Pages:
    """A row of bytes that grows: one thread adds, others read what is there, and nobody waits for anybody.

    ``crc`` is the CRC-32 of all that is there. What there is never moves, so that to grow copies nothing.

    >>> pages = Pages()
    >>> pages.add(b"abc")
    >>> pages.add(b"de")
    >>> len(pages), bytes(pages[1:4])
    (5, b'bcd')
    """

    def __init__(self) -> None:
        self._pages: list[Array] = []
        self._nbytes = self.crc = 0

    def __len__(self) -> int:
        return self._nbytes

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """Append ``data``."""
        come, end = np.frombuffer(data, np.uint8), self._nbytes
        self.crc = crc32(memoryview(data), self.crc)
        while come.size:
            at = end % PAGE
            if not at:
                self._pages.append(np.empty(PAGE, np.uint8))
            n = min(come.size, PAGE - at)
            self._pages[-1][at : at + n] = come[:n]
            come, end = come[n:], end + n
        self._nbytes = end

    def __getitem__(self, part: slice) -> memoryview:
        """Return the bytes of a slice without a step, in one piece: a view where they lie in one page."""
        start, stop, _ = part.indices(self._nbytes)
        first, at = divmod(start, PAGE)
        if stop <= (first + 1) * PAGE:
            page = self._pages[first] if start < stop else np.empty(0, np.uint8)
            return page[at : at + max(0, stop - start)].data.toreadonly()
        found, done = np.empty(stop - start, np.uint8), 0
        for page in self._pages[first : -(-stop // PAGE)]:
            n = min(found.size - done, PAGE - at)
            found[done : done + n] = page[at : at + n]
            at, done = 0, done + n
        return found.data.toreadonly()
