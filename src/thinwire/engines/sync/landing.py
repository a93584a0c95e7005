"""A patch as it comes in, chunk by chunk; nothing here trusts the sender."""

from __future__ import annotations

import threading
from time import monotonic

from thinwire.engines.sync.protocol import Begin, Chunk
from thinwire.state.layout import Layout
from thinwire.state.patch import MAX_META
from thinwire.types import PayloadError, require

ROOM = 1 << 20  # bytes that a patch may take beyond the words of the state
FACTOR = 2  # times the words that it may take: positions may cost as much as what changed


def most(layout: Layout) -> int:
    """Return the bytes of the largest patch that is taken for a state."""
    words = sum(n * word.itemsize for word, n in layout.words.items())
    return FACTOR * words + MAX_META + ROOM


class Landing:
    """The bytes of one transfer that are here. Errors: ``PayloadError``, and then it is of no more use.

    One thread adds bytes, or drops it; another may wait for them.
    """

    def __init__(self, begin: Begin, limit: int, part: bytearray | None = None) -> None:
        at = len(part) if part is not None else 0
        require(
            begin.start == at <= begin.nbytes and begin.nbytes > 0,
            PayloadError,
            f"a patch of {begin.nbytes} bytes that begins at byte {begin.start}, expected at {at}",
        )
        require(
            begin.nbytes <= limit, PayloadError, f"a patch of {begin.nbytes} bytes; at most {limit} are taken"
        )
        self.begin = begin
        self.data = bytearray() if part is None else part  # grows as bytes come: a claim costs nothing
        self.dropped = False  # no more will come
        self.came = self._began = monotonic()  # when the newest bytes did
        self._news = threading.Condition()

    @property
    def whole(self) -> bool:
        return len(self.data) == self.begin.nbytes

    @property
    def seconds(self) -> float:
        """How long the bytes took to come."""
        return self.came - self._began

    @property
    def ended(self) -> bool:
        return self.whole or self.dropped

    def drop(self) -> None:
        """Note that no more will come; nothing where all is here."""
        with self._news:
            self.dropped = self.dropped or not self.whole
            self._news.notify_all()

    def wait(self, nbytes: int, timeout: float) -> None:
        """Wait until more than ``nbytes`` are here, or it has ended; ``timeout`` in seconds."""
        with self._news:
            self._news.wait_for(lambda: self.ended or len(self.data) > nbytes, timeout)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk, which must be the next one."""
        fits = chunk.at == len(self.data) and 0 < len(chunk.data) <= self.begin.nbytes - len(self.data)
        require(
            fits,
            PayloadError,
            f"a chunk of {len(chunk.data)} bytes at {chunk.at}, expected at {len(self.data)} of "
            f"{self.begin.nbytes}",
        )
        with self._news:
            self.came = monotonic()
            self.data += chunk.data
            self._news.notify_all()

    def continued_by(self, begin: Begin) -> bool:
        """Return whether ``begin`` goes on with this patch after a new connection."""
        mine, theirs = self.begin, begin
        same = (mine.base, mine.base_hash, mine.version, mine.hash, mine.nbytes) == (
            theirs.base,
            theirs.base_hash,
            theirs.version,
            theirs.hash,
            theirs.nbytes,
        )
        return same and begin.start == len(self.data)
