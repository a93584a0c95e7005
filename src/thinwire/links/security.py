"""Who may connect: the shared token, the CURVE keys derived from it, and the rule for addresses.

With a token, each end proves that it holds the token before a byte of a message is read, and messages are
encrypted (CurveZMQ). The same token gives the same keys on every rank; binder and connector have a pair each.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.types import InputError, require

if TYPE_CHECKING:  # a token is read without it
    import zmq
from contextlib import suppress
from time import monotonic

from thinwire.links.names import reach

REMEDY = "set THINWIRE_TOKEN or give --token-file (in Python token=thinwire.read_token())"
BINDER, CONNECTOR = b"thinwire link 1 binder", b"thinwire link 1 connector"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
MIN_TOKEN = 8  # bytes, where others can try
MAX_TOKEN = 65536  # bytes; whoever names a model file here by mistake should hear of it
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"  # only the first and last byte are fixed
LENGTH = 64  # bytes of a greeting; the security mechanism's name is in 12 to 32


def read_token(path: str | Path | None = None) -> bytes | None:
    """Return the shared token from the file ``path``, else from THINWIRE_TOKEN, else None.

    A newline at its end is cut off. Errors: ``InputError`` for an empty token or an unreadable file.
    """
    if path is None:
        text = os.environ.get("THINWIRE_TOKEN")
        return None if text is None else _checked(os.fsencode(text), "THINWIRE_TOKEN")
    try:
        with Path(path).open("rb") as f:
            token = f.read(MAX_TOKEN + 1)
    except OSError as e:
        raise InputError(f"cannot read the token file {path}: {e.strerror}; give a readable file") from e
    return _checked(token, f"the token file {path}")


def _checked(token: bytes, where: str) -> bytes:
    token = token.strip(b"\r\n")
    require(
        bool(token.strip()),
        InputError,
        f"{where} is empty; put a long random text there, the same on each rank",
    )
    require(
        len(token) <= MAX_TOKEN,
        InputError,
        f"{where} is larger than {MAX_TOKEN} bytes; give a short random text",
    )
    return token


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine's loopback address.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_host(host: str, token: bytes | None) -> None:
    """Raise ``InputError`` unless links at ``host`` are authenticated or stay on this machine."""
    check_bytes(token)
    if token is None and not is_loopback(host):
        raise InputError(
            f"a link at {host} leaves this machine and needs a shared token: {REMEDY} on each rank"
        )
    if token is None:
        return
    if not is_loopback(host):
        require_long(token)
    import zmq

    curve = zmq.has("curve")
    require(curve, InputError, "this pyzmq has no CURVE encryption; install the pyzmq wheel")


def require_long(token: bytes) -> None:
    """Raise ``InputError`` for a token that somebody who may try could guess."""
    require(
        len(token) >= MIN_TOKEN,
        InputError,
        f"a token of {len(token)} bytes can be guessed; take {MIN_TOKEN} or more for links that leave this "
        "machine, as python -c 'import secrets; print(secrets.token_urlsafe(32))' makes them",
    )


def check_bytes(token: bytes | None) -> None:
    """Raise ``InputError`` for a token that is text, as Python's callers may take it to be."""
    require(
        token is None or isinstance(token, bytes),
        InputError,
        f"the token is {type(token).__name__}, not bytes; give thinwire.read_token(), or b'...' around it",
    )


def key_pair(token: bytes, role: bytes) -> tuple[bytes, bytes]:
    """Return the public and the secret CURVE key of ``role`` (Z85 text)."""
    import zmq
    from zmq.utils import z85

    digest = hashlib.blake2b(role, key=hashlib.blake2b(token).digest(), digest_size=32).digest()
    secret = z85.encode(digest)
    return zmq.curve_public(secret), secret


def secure_binder(socket: zmq.Socket[bytes], token: bytes) -> None:
    """Make a socket that will bind take only connections that are encrypted to the token's keys."""
    socket.curve_server = True
    socket.curve_secretkey = key_pair(token, BINDER)[1]
    socket.zap_domain = b"thinwire"


def secure_connector(socket: zmq.Socket[bytes], token: bytes) -> None:
    """Make a socket that will connect prove the token and demand the same of the binder."""
    socket.curve_publickey, socket.curve_secretkey = key_pair(token, CONNECTOR)
    socket.curve_serverkey = key_pair(token, BINDER)[0]


def answer_zap(socket: zmq.Socket[bytes], token: bytes) -> bool:
    """Answer one authentication request of libzmq (RFC 27) and return whether the key was the token's."""
    from zmq.utils import z85

    frames = socket.recv_multipart()
    wanted = z85.decode(key_pair(token, CONNECTOR)[0])
    good = len(frames) == 7 and frames[5] == b"CURVE" and hmac.compare_digest(frames[6], wanted)
    status, text = (b"200", b"OK") if good else (b"400", b"wrong token")
    socket.send_multipart([*frames[:2], status, text, b"", b""])
    return good


def asks_for_token(host: str, port: int, timeout: float = 2.0) -> bool:
    """Return whether a ZeroMQ socket with CURVE greets at ``host``:``port`` within ``timeout`` seconds.

    ZeroMQ tells a connector only that a handshake broke off. Whoever listens may have refused the token; or
    there is just a tunnel or a load balancer, whose server is away. Source: ZMTP 3.1 (RFC 37), "Framing
    Layer".

    >>> asks_for_token("127.0.0.1", 1)
    False
    """
    with suppress(OSError):
        return mechanism(read_greeting(host, port, timeout, timeout)) == "CURVE"
    return False


def read_greeting(host: str, port: int, connect: float, timeout: float) -> bytes:
    """Return what a listener says first, all that comes within ``timeout`` seconds, 64 bytes at most.

    ``connect``: the part of it until the connection is there. Errors: ``OSError`` where nothing comes.
    """
    end, greeting = monotonic() + timeout, b""
    with reach(host, port, connect) as sock:
        sock.sendall(SIGNATURE + b"\x03")
        try:
            while len(greeting) < LENGTH:
                sock.settimeout(max(end - monotonic(), 1e-3))
                more = sock.recv(LENGTH - len(greeting))
                if not more:
                    break
                greeting += more
        except OSError:
            if not greeting:
                raise
    return greeting


def mechanism(greeting: bytes) -> str | None:
    """Return the security mechanism that a greeting names; None where it is not a whole one of ZeroMQ."""
    if len(greeting) < LENGTH or (greeting[0], greeting[9]) != (SIGNATURE[0], SIGNATURE[9]):
        return None
    return greeting[12:32].rstrip(b"\0").decode("latin-1")
