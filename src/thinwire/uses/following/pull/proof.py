"""How a reader knows that a file of a store is what its publisher wrote.

With a token, by a keyed hash (HMAC-SHA-256, RFC 2104) over the file's name and bytes, with a key made from
the token: whoever can write to the store but lacks the token cannot make a reader take anything. Without
one, by SHA-256, against accidents only. Neither hides what is in the store.
"""

from __future__ import annotations

import hashlib
import hmac

from thinwire.links.security import REMEDY, check_bytes
from thinwire.types import AuthError

CONTEXT = b"thinwire shelf 1"


class Proof:
    """Makes and checks the hashes of files.

    >>> Proof(None).of("a", b"data") == Proof(b"token").of("a", b"data")
    False
    """

    def __init__(self, token: bytes | None) -> None:
        check_bytes(token)
        self.keyed = token is not None
        self._key = hashlib.blake2b(
            CONTEXT, key=hashlib.blake2b(token or b"").digest(), digest_size=32
        ).digest()

    def of(self, name: str, data: bytes) -> str:
        """Return the hash of the file ``name`` with these bytes: 64 hexadecimal digits."""
        if not self.keyed:
            return hashlib.sha256(data).hexdigest()
        code = hmac.new(self._key, name.encode() + b"\0", hashlib.sha256)  # no name has a zero byte
        code.update(data)
        return code.hexdigest()

    def fits(self, name: str, data: bytes, check: str) -> bool:
        """Return whether ``check`` is the hash of the file."""
        return hmac.compare_digest(self.of(name, data).encode(), check.encode())

    def same_side(self, keyed: bool, where: str) -> None:
        """Raise ``AuthError`` where just one of publisher and reader has a token."""
        if keyed and not self.keyed:
            raise AuthError(f"the state at {where} is signed with a token: {REMEDY}, the publisher's")
        if self.keyed and not keyed:
            raise AuthError(f"the state at {where} is not signed: publish with the token, or read without")
