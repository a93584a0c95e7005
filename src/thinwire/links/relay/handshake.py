"""What a relay and those who use it say to each other before bytes are passed on; see ``docs/machines.md``.

The relay sends a nonce; the client answers with one of its own, what it wants, and a proof (HMAC-SHA256 over
all of that) that it holds the access key; the relay's verdict carries such a proof too. The access key is
derived from the ranks' token one way, so a relay can be run by somebody who could not read what it forwards:
``relay_pass`` is what such an operator gets. A token from a random generator is assumed: a short word could
be guessed from what was overheard.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import IntEnum
from typing import Annotated, NamedTuple

from thinwire.heads import U8, Head
from thinwire.types import PayloadError, require

MAGIC = b"thinwire-relay-2"
NONCE = 32  # bytes
PROOF = 32  # bytes of an HMAC-SHA256
NAME = 32  # bytes of a pair's name
INSTANCE = 16  # bytes that tell one start of a rank from another
ANYBODY = bytes(INSTANCE)
PASS = b"thinwire-relay-pass-"

PING, PONG, CALL, GO, BUSY = b"i", b"o", b"c", b"g", b"b"  # after the verdict, with a listening client

HELLO = len(MAGIC) + NONCE  # bytes, from the relay
ANSWER = 1 + INSTANCE + PROOF  # bytes, from the relay


class Role(IntEnum):
    """Which end of a pair is asking."""

    LISTEN = 1
    DIAL = 2


class Verdict(IntEnum):
    """What the relay makes of a request."""

    REFUSED = 0  # the proof was wrong
    WAITING = 1  # a listener is registered
    MATCHED = 2  # a dialler is connected to its listener: from here on the bytes are theirs
    ABSENT = 3  # nobody listens under this name
    TAKEN = 4  # another process has this rank's place, or its partner's
    FULL = 5


class Request(Head):
    """What a client wants: to be one end of the pair ``name``; ``instance`` is drawn at each start.

    ``partner``: the one instance of the other end that a dialler talks to, once it has been with it. A relay
    leaves aside that of a listener, which decides for itself who is put through to it.
    """

    role: U8  # a ``Role``
    name: Annotated[bytes, f"{NAME}s"]
    instance: Annotated[bytes, f"{INSTANCE}s"]
    partner: Annotated[bytes, f"{INSTANCE}s"] = ANYBODY


ASKING = len(MAGIC) + NONCE + Request.FORM.size + PROOF  # bytes, from the client


def relay_pass(token: bytes) -> str:
    """Return the text that admits the holders of ``token`` to a relay, and from which it cannot be computed.

    >>> relay_pass(b"a long random text")[:28]
    'thinwire-relay-pass-4fd38569'
    """
    return (PASS + _derived(token, b"access").hex().encode()).decode()


def is_pass(secret: bytes) -> bool:
    """Return whether ``secret`` is a pass, not a token."""
    return secret.startswith(PASS)


def access_key(secret: bytes) -> bytes:
    """Return the key that the proofs are made with, from a token or from its pass."""
    return hashlib.sha256(secret if is_pass(secret) else relay_pass(secret).encode()).digest()


def pair_name(token: bytes, run: str, low: int, high: int) -> bytes:
    """Return the name under which two ranks of a run meet; it says nothing to those without the token."""
    return _derived(token, f"pair {low}-{high} of {run}".encode())


def ask(key: bytes, hello: bytes, nonce: bytes, request: Request) -> bytes:
    """Return a client's answer to a relay's ``hello``."""
    body = MAGIC + nonce + request.pack()
    return body + _proof(key, b"client", hello + body)


def asked(key: bytes, hello: bytes, asking: bytes) -> Request | None:
    """Return the request in a client's answer, or None if its proof is wrong; ``PayloadError`` if garbled."""
    require(asking.startswith(MAGIC), PayloadError, "this is no client of a thinwire relay")
    body, proof = asking[:-PROOF], asking[-PROOF:]
    if not hmac.compare_digest(proof, _proof(key, b"client", hello + body)):
        return None
    request = Request.unpack(body[len(MAGIC) + NONCE :])
    require(request.role in tuple(Role), PayloadError, f"no relay client has the role {request.role}")
    return request


class Answer(NamedTuple):
    """The relay's verdict and, where it is ``MATCHED``, the instance of the listener."""

    verdict: Verdict
    partner: bytes = ANYBODY


def answer(key: bytes, hello: bytes, asking: bytes, said: Answer) -> bytes:
    """Return the relay's answer in bytes; with the verdict ``REFUSED`` its proof says nothing."""
    text = bytes([said.verdict]) + said.partner
    if said.verdict is Verdict.REFUSED:
        return text + bytes(PROOF)
    return text + _proof(key, b"relay", hello + asking + text)


def answered(key: bytes, hello: bytes, asking: bytes, data: bytes) -> Answer | None:
    """Return a relay's answer, or None where its proof is wrong."""
    text, proof = data[:-PROOF], data[-PROOF:]
    if text[0] == Verdict.REFUSED:
        return Answer(Verdict.REFUSED)
    good = hmac.compare_digest(proof, _proof(key, b"relay", hello + asking + text))
    return Answer(Verdict(text[0]), text[1:]) if good and text[0] in tuple(Verdict) else None


def _proof(key: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(key, who + b"\0" + said, "sha256")


def _derived(token: bytes, what: bytes) -> bytes:
    return hashlib.blake2b(
        b"thinwire relay 1 " + what, key=hashlib.blake2b(token).digest(), digest_size=32
    ).digest()
