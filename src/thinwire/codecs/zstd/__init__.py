"""Zstandard frames (RFC 8878) of bytes that are mostly noise of uneven odds; any decoder reads them.

In such bytes the matches that Zstandard finds, and at its fast levels always takes, cost more than they save:
up to a fifth where few bits a value are left. So there are two ways to a frame: by matches, and of literals
alone, which Huffman codes.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.codecs.zstd import literals
from thinwire.types import MissingExtra, PayloadError

Bytes = npt.NDArray[np.uint8]

WORTH = 512  # literals alone are taken where they save one byte in so many: less is not worth their time
TABLE, WINDOW = 11, 19
MATCH = 7  # bytes that a match has at least, in place of what level 1 takes: short ones cost most in noise


def compress(data: Bytes, level: int = 1, table: int = TABLE, window: int = WINDOW) -> bytes:
    """Return uint8 [n], in one piece of memory, as a frame by matches, which may be over n.

    ``level`` is Zstandard's, 1 to 19. At level 1 it remembers about 2**``table`` places where a match may
    begin, at most 2**``window`` bytes back: 6 and 17 are enough for runs of one byte, and of more it finds
    more by chance.

    >>> len(compress(np.zeros(1000, np.uint8))) < 30
    True
    """
    frame: bytes = _coders().compressor(level, table, window).compress(data)
    return frame


def smallest(data: Bytes, level: int = 1) -> bytes:
    """Return what ``compress`` does, or a frame of literals alone where that is smaller and can be made here.

    >>> noise = np.random.default_rng(0).geometric(0.5, 9999).astype(np.uint8)
    >>> len(smallest(noise)) < len(compress(noise))
    True
    """
    frame = compress(data, level)
    return literals.frame(data, len(frame) - len(frame) // WORTH) or frame


def content_size(frame: Any) -> int:
    """Return how many bytes a frame claims to hold, negative where it does not say; else ``PayloadError``."""
    try:
        size: int = package().frame_content_size(frame)
    except package().ZstdError as e:
        raise PayloadError(f"not a valid Zstandard frame: {e}") from e
    return size


def decompress(frame: Any) -> bytes:
    """Return what the one frame in a buffer holds: as much as it claims, which was checked before."""
    try:
        raw: bytes = _coders().decompressor.decompress(frame, allow_extra_data=False)
    except package().ZstdError as e:
        raise PayloadError(f"not a valid Zstandard frame: {e}") from e
    return raw


class _Coders(threading.local):
    """A coder has working memory, and serves one thread at a time."""

    def __init__(self) -> None:
        self._compressors: dict[tuple[int, ...], Any] = {}
        self.decompressor = package().ZstdDecompressor()

    def compressor(self, level: int, table: int, window: int) -> Any:
        about = level, table, window
        if about not in self._compressors:
            self._compressors[about] = _matching(package(), *about)
        return self._compressors[about]


def _matching(zstandard: ModuleType, level: int, table: int, window: int) -> Any:
    if level != 1:
        return zstandard.ZstdCompressor(level=level)
    about = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, min_match=MATCH, hash_log=table, chain_log=6, window_log=window
    )
    return zstandard.ZstdCompressor(compression_params=about)


_kept: list[_Coders] = []


def _coders() -> _Coders:
    package()  # it may be missing, so nothing is made before it is used
    if not _kept:
        _kept.append(_Coders())
    return _kept[0]


def package() -> ModuleType:
    """Return the module zstandard; ``MissingExtra`` where there is none."""
    try:
        import zstandard
    except ImportError as e:
        needs = "entropy coding and state patches need zstandard: pip install 'thinwire[entropy]'"
        raise MissingExtra(needs) from e
    return zstandard
