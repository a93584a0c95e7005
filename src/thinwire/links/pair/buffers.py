"""Large buffers of messages, and copies of them while other threads go on."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Iterable

import numpy as np

from thinwire.links.message import Data
from thinwire.types import PayloadError, require

LONG = 1 << 17  # bytes of a piece, on average, that are worth letting other threads go on meanwhile
ROOMY = 1 << 22  # bytes for which the system's large pages are worth asking for
KEPT = (1 << 25) - (1 << 16)  # bytes: about the largest block that raises what glibc keeps of freed memory
_FREE = 3  # references to a buffer that is only in a list and in the hands of who asks
_new = ctypes.pythonapi.PyBytes_FromStringAndSize
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
_place = ctypes.pythonapi.PyBytes_AsString
_place.restype, _place.argtypes = ctypes.c_void_p, (ctypes.py_object,)


@functools.cache
def keep_freed() -> None:
    """Let the C library keep freed blocks of messages for the next ones, where it is glibc; once a process.

    It gives blocks of 128 KiB and more back to the system, which clears each page of new ones, until a larger
    block was freed: from then on it keeps twice as much. Whoever has set its limits keeps them.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        library = ctypes.CDLL(None)
        library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        library.free.restype, library.free.argtypes = None, (ctypes.c_void_p,)
        library.free(library.malloc(KEPT))  # never touched, so it costs nothing


def _in_large_pages(place: int, nbytes: int) -> None:
    """Let what is new there lie in large pages, where there are any: each small one costs a fault."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        begin = -(-place // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (place + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


class Spare:
    """Buffers that are used again once nobody else holds them: new memory costs more than a copy.

    >>> spare = Spare(4, 1)
    >>> first, second = bytes(spare.filled([b"ab", b"c"])), bytes(spare.filled([b"d"]))
    >>> first, second
    (b'abc', b'd')
    """

    def __init__(self, nbytes: int, most: int) -> None:
        self._nbytes, self._most = nbytes, most
        self._buffers: list[bytearray] = []

    def filled(self, pieces: Iterable[Data]) -> memoryview:
        """Return one copy of all pieces, read-only; it is the reader's while he holds it or a part."""
        buffer = self._taken()
        if buffer is None:
            return memoryview(b"".join(pieces))
        room, end = memoryview(buffer), 0
        for piece in pieces:
            start, end = end, end + len(piece)
            room[start:end] = piece
        return room[:end].toreadonly()

    def _taken(self) -> bytearray | None:
        for buffer in self._buffers:
            if sys.getrefcount(buffer) == _FREE:
                return buffer
        if len(self._buffers) == self._most:
            return None
        self._buffers.append(bytearray(self._nbytes))
        return self._buffers[-1]


class Assembly:
    """Bytes of a known length that come piece by piece, each copied once.

    >>> whole = Assembly(5)
    >>> whole.add(b"abc"), whole.add(b"de")
    (None, None)
    >>> whole.result()
    b'abcde'
    """

    def __init__(self, nbytes: int) -> None:
        self._bytes: bytes = _new(None, nbytes)  # of no content yet, and nobody else's before ``result``
        place = _place(self._bytes)
        if nbytes >= ROOMY:
            _in_large_pages(place, nbytes)
        room = memoryview((ctypes.c_char * nbytes).from_address(place))
        self._room = np.frombuffer(room, np.uint8) if nbytes else np.empty(0, np.uint8)
        self._filled = 0

    def add(self, piece: Data) -> None:
        """Copy the next piece to its place. Errors: ``PayloadError`` where there is no room for it."""
        end = self._filled + len(piece)
        require(end <= len(self._room), PayloadError, f"pieces of {end} bytes for {len(self._room)}")
        self._room[self._filled : end] = np.frombuffer(piece, np.uint8)
        self._filled = end

    def result(self) -> bytes:
        """Return the bytes. Errors: ``PayloadError`` where some are missing."""
        missing = len(self._room) - self._filled
        require(missing == 0, PayloadError, f"{missing} bytes of a message are missing")
        return self._bytes


def joined(pieces: Iterable[Data]) -> bytes:
    """Return one copy of all pieces.

    >>> joined([b"ab", memoryview(b"c")])
    b'abc'
    """
    pieces = [piece for piece in pieces if len(piece)]
    if len(pieces) == 1 and (isinstance(pieces[0], bytes) or len(pieces[0]) < LONG):
        return bytes(pieces[0])  # which is no copy of what is bytes already
    nbytes = sum(map(len, pieces))
    if nbytes < LONG * len(pieces):
        return b"".join(pieces)
    whole = Assembly(nbytes)
    for piece in pieces:
        whole.add(piece)
    return whole.result()
