"""A folder that a web server shows: read only, with the standard library alone."""

from __future__ import annotations

import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from time import monotonic
from urllib.parse import quote, urlsplit

from thinwire.engines.sync.folder import check_size, shown
from thinwire.types import InputError, PayloadError

TIMEOUT = 30.0  # seconds without a byte
SLOWEST = 1e3  # bytes/s on average, below which a server only keeps its reader busy
PIECE = 1 << 16  # bytes read at once
GONE, UNCHANGED = (404, 410), 304
MAX_TAG = 256  # characters


class WebFolder:
    """Files under an ``http://`` or ``https://`` address. Proxies are the environment's."""

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        query = urlsplit(url).query
        self._base = url.partition("?")[0].partition("#")[0].rstrip("/")
        self._query = f"?{query}" if query else ""  # a presigned address carries its proof there
        self.where = shown(url)
        self._timeout = timeout
        self._last: dict[str, tuple[str, bytes]] = {}  # by name: the server's tag for it, and what it was

    def read(self, name: str, limit: int) -> bytes:
        # Whatever caches on the way must ask the server again: the manifest changes under its name.
        headers = {"Cache-Control": "no-cache", "User-Agent": "thinwire", "Accept-Encoding": "identity"}
        if name in self._last:
            headers["If-None-Match"] = self._last[name][0]
        request = urllib.request.Request(f"{self._base}/{quote(name)}{self._query}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                return self._keep(name, response, self._body(response, limit, f"{self.where}/{name}"))
        except urllib.error.HTTPError as e:
            with e:
                return self._answer(name, e)
        except urllib.error.URLError as e:
            raise OSError(f"{self.where} cannot be reached: {e.reason}") from e
        except (HTTPException, ValueError) as e:
            raise OSError(f"{self.where} did not answer in HTTP for {name}: {e!r}") from e

    def _body(self, response: HTTPResponse, limit: int, where: str) -> bytes:
        """Return the body, a piece at a time, so that no length the server claims is allocated."""
        claimed = response.headers.get("Content-Length", "")
        if claimed.isdecimal() and len(claimed) < 20:
            check_size(int(claimed), limit, where)
        body, began = bytearray(), monotonic()
        while piece := response.read1(PIECE):
            body += piece
            check_size(len(body), limit, where)
            took = monotonic() - began
            if took > self._timeout + len(body) / SLOWEST:
                raise OSError(f"{where}: {len(body)} bytes came in {took:.0f} s; the server is too slow")
        if claimed.isdecimal() and len(body) != int(claimed):
            raise PayloadError(f"{where} ended after {len(body)} of {claimed} bytes")
        return bytes(body)

    def _keep(self, name: str, response: HTTPResponse, body: bytes) -> bytes:
        """Remember what lies in no folder of its own: the manifest, which is asked for over and over."""
        tag = response.headers.get("ETag", "")
        if "/" not in name and tag.isprintable() and 0 < len(tag) <= MAX_TAG:
            self._last[name] = (tag, body)
        return body

    def _answer(self, name: str, error: urllib.error.HTTPError) -> bytes:
        if error.code == UNCHANGED and name in self._last:
            return self._last[name][1]
        if error.code in GONE:
            raise FileNotFoundError(f"{self.where} has no {name}") from error
        raise OSError(f"{self.where} answered {error.code} {error.reason} for {name}") from error

    def write(self, name: str, data: bytes) -> None:
        raise InputError(f"{self.where} can only be read; publish to the folder that the server shows")

    def delete(self, name: str) -> None:
        raise InputError(f"{self.where} can only be read; publish to the folder that the server shows")

    def names(self, folder: str) -> list[str]:
        raise InputError(f"{self.where} cannot be listed; publish to the folder that the server shows")
