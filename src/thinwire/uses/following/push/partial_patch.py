"""A patch as it comes in, chunk by chunk; nothing here trusts the sender."""

from __future__ import annotations

import threading
from time import monotonic

from thinwire.state.patches.patch import FIELDS, HEAD, MAX_META, Patch
from thinwire.types import PayloadError, require
from thinwire.uses.following.push.protocol import Begin, Chunk, End

MAX_HEAD = HEAD.size + FIELDS.size + MAX_META  # bytes


class PartialPatch:
    """What is here of one transfer: bytes of a patch's body, at most ``limit``, and in the end its head.

    One thread adds bytes, ends it or drops it; another may wait for them. Errors: ``PayloadError``, and then
    it is of no more use.
    """

    def __init__(self, begin: Begin, limit: int, part: bytearray | None = None) -> None:
        at = len(part) if part is not None else 0
        fits = begin.start == at
        require(fits, PayloadError, f"a patch that begins at byte {begin.start}, expected at {at}")
        self.begin, self._limit = begin, limit
        self.data = bytearray() if part is None else part  # grows as bytes come: a claim costs nothing
        self.head = b""  # the patch's, which comes last
        self.dropped = False  # no more will come
        self.came = self._began = monotonic()  # when the newest bytes did
        self._news = threading.Condition()

    @property
    def whole(self) -> bool:
        return bool(self.head)

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
        here, n = len(self.data), len(chunk.data)
        require(
            chunk.at == here and n > 0,
            PayloadError,
            f"{n} bytes of a patch at {chunk.at}, expected at {here}",
        )
        require(
            here + n <= self._limit, PayloadError, f"a patch of over {self._limit} bytes, too many for it"
        )
        with self._news:
            self.came = monotonic()
            self.data += chunk.data
            self._news.notify_all()

    def end(self, end: End) -> None:
        """Take the head: all of the body is here."""
        here = len(self.data)
        fits = 0 < end.nbytes == here and 0 < len(end.head) <= MAX_HEAD
        require(fits, PayloadError, f"the end of a patch of {end.nbytes} bytes, of which {here} are here")
        with self._news:
            self.came, self.head = monotonic(), bytes(end.head)
            self._news.notify_all()

    def patch(self) -> Patch:
        """Return the patch, and let go of its bytes, which it has. Errors: ``PayloadError`` for none."""
        patch, told = Patch.join(self.head, self.data), self.begin.version
        self.data = bytearray()
        as_told = _ends(patch) == _ends(self.begin)
        require(as_told, PayloadError, f"a patch to version {patch.version} announced as one to {told}")
        return patch

    def continued_by(self, begin: Begin) -> bool:
        """Return whether ``begin`` goes on with this patch after a new connection."""
        return _ends(begin) == _ends(self.begin) and begin.start == len(self.data)


def _ends(of: Begin | Patch) -> tuple[int, int, int, int]:
    return of.base, of.base_hash, of.version, of.hash
