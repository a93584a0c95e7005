"""A folder that a web server shows: read only, with the standard library alone."""

from __future__ import annotations

import io
import socket
import ssl
import urllib.error
import urllib.request
from base64 import b64encode
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http.client import (
    BadStatusLine,
    HTTPConnection,
    HTTPException,
    HTTPMessage,
    HTTPResponse,
    HTTPSConnection,
)
from time import monotonic
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from thinwire.files.base import check_size, shown
from thinwire.links.names import reach
from thinwire.types import WRONG_VALUES, InputError, PayloadError

TIMEOUT = 30.0  # seconds without a byte
SLOWEST = 1e3  # bytes/s on average, headers and all, below which a server only keeps its reader busy
PIECE = 1 << 16  # bytes read at once
SHOWN = 40  # bytes of an answer that is not HTTP
GONE, UNCHANGED = (404, 410), 304
MAX_TAG = 256  # characters
PORTS = {"http": 80, "https": 443}
HTTP, LINK = b"H", b"\xff"  # what a web server's answer begins with, and what a publisher's greeting does
GREETING = 2.0  # seconds for it
REST = 2.0  # seconds that a file has not changed before its tag stands for its contents


class _Steady(io.RawIOBase):
    """What comes from a socket, as long as it does not come too slowly; ``TimeoutError`` then.

    Anything but HTTP ends at its first byte, as it may have no first line to wait for.
    """

    def __init__(self, source: io.BufferedReader, patience: float) -> None:
        self._source, self._patience = source, patience
        self._nbytes, self._began = 0, monotonic()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        took = monotonic() - self._began
        if took > self._patience + self._nbytes / SLOWEST:
            raise TimeoutError(f"{self._nbytes} bytes came in {took:.0f} s; the server is too slow")
        count = self._source.readinto1(buffer)
        if count and not self._nbytes and bytes(buffer[:1]) != HTTP:
            raise BadStatusLine(bytes(buffer[: min(count, SHOWN)]).decode("latin-1"))
        self._nbytes += count
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


class _Response(HTTPResponse):
    # A timeout of a socket begins anew with each byte, and there may be hours of them before the body.
    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Steady(self.fp, sock.gettimeout() or TIMEOUT))


def _dial(address: tuple[str, int], timeout: float, source: object) -> socket.socket:
    return reach(*address, timeout)


class _Dialled:
    # The library's own way waits for one address of a name after the other, for the whole timeout each.
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._create_connection = _dial


class _Plain(_Dialled, HTTPConnection):
    response_class = _Response


class _Secure(_Dialled, HTTPSConnection):
    response_class = _Response


class _PlainHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Plain, req)


class _SecureHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Secure, req)


def _greets(host: str, port: int) -> bool:
    """Return whether whoever listens there begins before it is asked, as a publisher does."""
    with suppress(OSError), reach(host, port, GREETING) as sock:
        return sock.recv(1) == LINK
    return False


def _login(parts: SplitResult) -> str:
    """Return what proves the user of an address to its server (RFC 7617); empty where it names none."""
    if parts.username is None:
        return ""
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return "Basic " + b64encode(pair.encode()).decode()


def _rests(headers: HTTPMessage) -> bool:
    """Return whether a file had not changed for a while: many tags are its second and its size alone."""
    try:
        now, changed = (parsedate_to_datetime(headers[n]).timestamp() for n in ("Date", "Last-Modified"))
    except WRONG_VALUES:  # one is missing, or no time
        return False
    return now - changed >= REST


class WebFolder:
    """Files under an ``http://`` or ``https://`` address, with its user and password if it has some.

    Proxies are the environment's.
    """

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        parts = urlsplit(url)
        self._base = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
        self._query = f"?{parts.query}" if parts.query else ""  # a presigned address carries its proof there
        self._login = _login(parts)
        self.where = shown(url)
        self._timeout = timeout
        self._opener = urllib.request.build_opener(_PlainHandler, _SecureHandler)
        self._last: dict[str, tuple[str, bytes]] = {}  # by name: the server's tag for it, and what it was

    def read(self, name: str, limit: int) -> bytes:
        # Whatever caches on the way must ask the server again: the manifest changes under its name.
        headers = {"Cache-Control": "no-cache", "User-Agent": "thinwire", "Accept-Encoding": "identity"}
        if name in self._last:
            headers["If-None-Match"] = self._last[name][0]
        request = urllib.request.Request(f"{self._base}/{quote(name)}{self._query}", headers=headers)
        if self._login:
            request.add_unredirected_header("Authorization", self._login)  # it is this server's alone
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return self._keep(name, response, self._body(response, limit, f"{self.where}/{name}"))
        except urllib.error.HTTPError as e:
            with e:
                return self._answer(name, e)
        except urllib.error.URLError as e:
            if isinstance(e.reason, ConnectionError | ssl.SSLError):
                self._check_web(e)
            raise OSError(f"{self.where} cannot be reached: {e.reason}{way(self._base)}") from e
        except TimeoutError as e:
            raise OSError(f"{self.where}/{name}: {e}") from e
        except ConnectionError as e:
            self._check_web(e)
            raise OSError(f"{self.where} broke off at {name} ({e.strerror or e}){way(self._base)}") from e
        except (HTTPException, ValueError) as e:
            self._check_web(e)
            raise OSError(f"{self.where} did not answer in HTTP for {name}: {e!r}") from e

    def _check_web(self, error: Exception) -> None:
        """Raise ``InputError`` where a publisher's port answers: asked in HTTP, it greets or breaks off."""
        parts = urlsplit(self._base)
        port = parts.port or PORTS[parts.scheme]
        if way(self._base) or not _greets(parts.hostname or "", port):
            return
        address = parts.netloc if parts.port else f"{parts.netloc}:{port}"
        raise InputError(
            f"{self.where} is no web server, but the port of a publisher or of its relay; "
            f"follow it as {address}, without {parts.scheme}://"
        ) from error

    def _body(self, response: HTTPResponse, limit: int, where: str) -> bytes:
        """Return the body, a piece at a time, so that no length the server claims is allocated."""
        claimed = response.headers.get("Content-Length", "")
        if claimed.isdecimal() and len(claimed) < 20:
            check_size(int(claimed), limit, where)
        body = bytearray()
        while piece := response.read1(PIECE):
            body += piece
            check_size(len(body), limit, where)
        if claimed.isdecimal() and len(body) != int(claimed):
            raise PayloadError(f"{where} ended after {len(body)} of {claimed} bytes")
        return bytes(body)

    def _keep(self, name: str, response: HTTPResponse, body: bytes) -> bytes:
        """Remember what lies in no folder of its own: the manifest, which is asked for over and over."""
        tag = response.headers.get("ETag", "")
        self._last.pop(name, None)
        if "/" not in name and tag.isprintable() and 0 < len(tag) <= MAX_TAG and _rests(response.headers):
            self._last[name] = (tag, body)
        return body

    def _answer(self, name: str, error: urllib.error.HTTPError) -> bytes:
        if error.code == UNCHANGED and name in self._last:
            return self._last[name][1]
        if error.code in GONE:
            raise FileNotFoundError(f"{self.where} has no {name}") from error
        told = f"{self.where} answered {error.code} {error.reason} for {name}{way(self._base)}"
        raise OSError(told) from error

    def write(self, name: str, data: bytes) -> None:
        raise InputError(f"{self.where} can only be read; publish to the folder that the server shows")

    def delete(self, name: str) -> None:
        raise InputError(f"{self.where} can only be read; publish to the folder that the server shows")

    def sizes(self, folder: str) -> dict[str, int | None]:
        raise InputError(f"{self.where} cannot be listed; publish to the folder that the server shows")


def way(url: str) -> str:
    """Return the end of a sentence on a server that does not answer as it should; empty without a proxy."""
    parts = urlsplit(url)
    host, proxy = parts.hostname or "", getproxies().get(parts.scheme, "")
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return ""
    name = shown(proxy if "//" in proxy else f"//{proxy}").removeprefix("//")
    variable = f"{parts.scheme}_proxy"
    return f"; the way there is by the proxy {name}, as {variable} says: mend that, or put {host} in no_proxy"
