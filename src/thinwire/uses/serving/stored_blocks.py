"""Blocks of prompts on disk: a stage stores keys and values of its layers, and reads them after a restart.

A block is ``BLOCK`` tokens, named by a hash of them, of all before them, and of what made the values: another
model, cut, recipe or dtype finds nothing. What comes back is what was stored, bit for bit.

File: the CRC-32 of what follows (u32, little-endian), then safetensors: ``keys.L`` and ``values.L``, both
[heads, BLOCK, width], of each layer L.
"""

from __future__ import annotations

import queue
import struct
import threading
import warnings
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from torch import Tensor

from thinwire.checksum import crc32
from thinwire.files.base import refusal
from thinwire.files.local_folder import PlainFolder
from thinwire.types import PayloadError
from thinwire.uses.serving.row_pool import StageCache, TextRows

BLOCK = 128  # tokens
HASH = 16  # bytes
MOST = 1 << 32  # bytes of a file
WAITING = 64  # blocks that may wait to be written; more are left out
_CHECK = struct.Struct("<I")
Block = dict[str, Tensor]


def chain(tokens: Sequence[int]) -> list[bytes]:
    """Return the name of each whole block of a text: a hash of all tokens to its end.

    >>> one, two = chain(range(256)), chain([*range(255), 9])
    >>> len(one), one[0] == two[0], one[1] == two[1]
    (2, True, False)
    """
    running, found = blake2b(digest_size=HASH), []
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        running.update(b"".join(int(i).to_bytes(8, "little") for i in tokens[end - BLOCK : end]))
        found.append(running.copy().digest())
    return found


class StoredBlocks:
    """The blocks of one stage in a folder. ``made``: what says which stage of what made them.

    Blocks are written by a thread of its own. A folder that takes no more is warned of once, and then left
    alone. Nothing is deleted. Errors: ``InputError`` for a folder that cannot be made.
    """

    def __init__(self, place: str | Path, made: str) -> None:
        self._folder, self._made = PlainFolder(Path(place)), made.encode()
        try:
            self._folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise refusal(e, self._folder.where) from e
        self._found = dict[int, list[Block]]()  # by request, until it has rows
        self._writes: queue.Queue[tuple[str, Block] | None] = queue.Queue(WAITING)
        self._writer = threading.Thread(target=self._write, name="stored blocks", daemon=True)
        self._writer.start()

    def seek(self, request: int, names: Sequence[bytes]) -> int:
        """Read the blocks of a request, up to the first that is not there; return how many are."""
        found = list[Block]()
        for name in names:
            block = self._read(self._file(name))
            if block is None:
                break
            found.append(block)
        self._found[request] = found
        return len(found)

    def place(self, request: int, blocks: int, cache: StageCache, rows: TextRows) -> None:
        """Put the first ``blocks`` that were found into a request's rows, and forget the others.

        Errors: ``PayloadError`` for more than were found, and for those of other layers.
        """
        found = self._found.pop(request, [])
        if blocks > len(found):
            raise PayloadError(f"{blocks} stored blocks are asked for, {len(found)} were found")
        for i, block in enumerate(found[:blocks]):
            cache.put_rows(block, TextRows(rows.first + i * BLOCK, BLOCK))

    def forget(self, request: int) -> None:
        """Forget what was found for a request."""
        self._found.pop(request, None)

    def save(self, names: Sequence[bytes], first: int, cache: StageCache, rows: TextRows) -> None:
        """Store blocks of a request from number ``first`` on, those that are not there yet."""
        for i, name in enumerate(names, first):
            file = self._file(name)
            if not (self._folder.path / file).exists() and not self._writes.full():
                self._writes.put((file, cache.rows(TextRows(rows.first + i * BLOCK, BLOCK))))

    def close(self) -> None:
        """Write what waits."""
        self._writes.put(None)
        self._writer.join(30.0)

    def _file(self, name: bytes) -> str:
        return f"{blake2b(self._made + name, digest_size=HASH).hexdigest()}.block"

    def _read(self, file: str) -> Block | None:
        """Return a block; None where it is not there, or is damaged, and then away."""
        from safetensors.torch import load

        try:
            data = self._folder.read(file, MOST)
        except OSError:
            return None
        if len(data) > _CHECK.size and _CHECK.unpack_from(data)[0] == crc32(memoryview(data)[_CHECK.size :]):
            block: Block = load(data[_CHECK.size :])
            return block
        warnings.warn(f"{self._folder.where}/{file} was damaged and is removed", stacklevel=2)
        self._folder.delete(file)
        return None

    def _write(self) -> None:
        from safetensors.torch import save

        full = False
        while (one := self._writes.get()) is not None:
            file, block = one
            data = b"" if full else save(block)
            try:
                if not full:
                    self._folder.write(file, _CHECK.pack(crc32(data)) + data)
            except OSError as e:
                full = True
                warnings.warn(f"no more prefixes are stored: {refusal(e, self._folder.where)}", stacklevel=2)
