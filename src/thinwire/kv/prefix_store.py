"""A store of prefixes: packed caches in a folder, a web server or an object store, named by their tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from thinwire.codecs.caches.components import Components
from thinwire.files.base import Folder, refusal
from thinwire.files.local_folder import open_folder
from thinwire.kv.cache_packing import pack_cache, unpack_cache
from thinwire.types import InputError, require

NAME = re.compile(r"([0-9a-f]{32})-(\d{1,9})\.kv")
MOST = 1 << 32  # bytes of one packed cache


class StoredPrefix(NamedTuple):
    """A stored prefix: how many of the tokens asked for it has, its bytes if that is told, and its name."""

    tokens: int
    nbytes: int | None
    name: str


class PrefixStore:
    """Packed caches by hash of their tokens and of the components, and so of the model.

    ``place``: a folder, or an address that ``thinwire.files`` knows; ``options`` are for the latter.
    Errors: ``InputError`` for a place that takes no files; ``OSError`` where it cannot be reached.

    >>> store = PrefixStore("prefixes", components)  # doctest: +SKIP
    >>> store.put(ids, past_key_values)  # doctest: +SKIP
    >>> found = store.longest(ids)  # doctest: +SKIP
    >>> past_key_values = store.get(found)  # doctest: +SKIP
    """

    def __init__(self, place: str, components: Components, **options: object) -> None:
        self.components = components
        self._folder: Folder = open_folder(place, **options)

    def put(self, ids: Sequence[int], past_key_values: Any, **how: Any) -> StoredPrefix:
        """Store the cache of a text with these tokens; ``how`` as ``pack_cache``. Replaces one of that name.

        Errors: ``InputError`` where the cache has seen another number of tokens, and as ``pack_cache``.
        """
        seen = int(past_key_values.get_seq_length())
        require(seen == len(ids), InputError, f"a cache of {seen} tokens for a text of {len(ids)}")
        data = pack_cache(past_key_values, self.components, **how)
        name = self.name(ids)
        try:
            self._folder.write(name, data)
        except OSError as e:
            raise refusal(e, self._folder.where) from e
        return StoredPrefix(seen, len(data), name)

    def longest(self, ids: Iterable[int]) -> StoredPrefix | None:
        """Return the stored prefix that has the most of the tokens ``ids``, if there is any."""
        own = [int(i) for i in ids]
        stored = self._stored()
        lengths = sorted({n for _, n in stored if n <= len(own)}, reverse=True)
        names = dict(zip(lengths, _hashes(own, lengths, self._begun()), strict=True))
        for n in lengths:
            if (names[n], n) in stored:
                return StoredPrefix(n, stored[names[n], n], f"{names[n]}-{n}.kv")
        return None

    def get(self, found: StoredPrefix, device: Any = "cpu") -> Any:
        """Return a stored cache. Errors: as ``unpack_cache``; ``FileNotFoundError`` where it is gone."""
        return unpack_cache(self._folder.read(found.name, MOST), self.components, device)

    def delete(self, found: StoredPrefix) -> None:
        """Remove a stored cache, if it is there."""
        self._folder.delete(found.name)

    def name(self, ids: Sequence[int]) -> str:
        """Return the name of the file for these tokens."""
        (whole,) = _hashes([int(i) for i in ids], [len(ids)], self._begun())
        return f"{whole}-{len(ids)}.kv"

    def _begun(self) -> bytes:
        return self.components.digest

    def _stored(self) -> dict[tuple[str, int], int | None]:
        """Return hash and tokens of what is stored, and the bytes of each."""
        found = {}
        for name, nbytes in self._folder.sizes("").items():
            if told := NAME.fullmatch(name):
                found[told[1], int(told[2])] = nbytes
        return found


def _hashes(ids: Sequence[int], lengths: Sequence[int], begun: bytes) -> list[str]:
    """Return hashes of the first tokens, so many each, in the order of ``lengths``, behind ``begun``."""
    running, done, found = blake2b(begun, digest_size=16), 0, dict[int, str]()
    for n in sorted(lengths):
        running.update(b"".join(i.to_bytes(8, "little") for i in ids[done:n]))
        found[n], done = running.copy().hexdigest(), n
    return [found[n] for n in lengths]
