"""TCP streams for relay and tunnel: a deadline on every read, an end that is noticed, two of them spliced."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import socket
from collections.abc import Callable

from thinwire.links.names import EYEBALLS
from thinwire.links.tcp import congestion
from thinwire.links.tcp import info as tcp_info

CHUNK = 1 << 16  # bytes
BUFFER = 1 << 17  # bytes that a stream holds in each direction before its sender has to wait
LINGER = 2.0  # seconds for the other direction to end once one has
IDLE = 60.0  # seconds without a byte, in or out; a live link has a heartbeat each second


class _EndNotingReader(asyncio.StreamReader):
    """A reader that also tells that the other end has closed while there is still something to read."""

    def __init__(self) -> None:
        super().__init__(limit=BUFFER // 2)
        self.ended = asyncio.get_running_loop().create_future()

    def feed_eof(self) -> None:
        super().feed_eof()
        self._end()

    def set_exception(self, exc: BaseException) -> None:
        super().set_exception(exc)  # type: ignore[arg-type]
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Stream:
    """One TCP connection. Every failure of it is an ``OSError``, an end in the middle of a read too."""

    def __init__(self, reader: _EndNotingReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.ended: asyncio.Future[None] = reader.ended  # done when the other end has closed
        peer, here = (writer.get_extra_info(n) or ("?", 0) for n in ("peername", "sockname"))
        self.address, self.port = str(peer[0]), int(here[1])
        writer.transport.set_write_buffer_limits(BUFFER)

    async def take(self, nbytes: int, timeout: float) -> bytes:
        """Read exactly ``nbytes`` within ``timeout`` seconds."""
        async with asyncio.timeout(timeout):
            try:
                return await self._reader.readexactly(nbytes)
            except asyncio.IncompleteReadError as e:
                raise ConnectionResetError("the other end closed the connection") from e

    async def put(self, data: bytes, timeout: float) -> None:
        """Write ``data`` and wait for room; give up after ``timeout`` seconds in which nothing went out."""
        self._writer.write(data)
        before, left = math.inf, self._left()
        while left < before:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._writer.drain()
                    return
            before, left = left, self._left()
        raise TimeoutError

    def _left(self) -> int:
        """Return a number that falls while bytes go out: on a slow line the buffer alone falls in leaps."""
        info = tcp_info.read(self._writer.get_extra_info("socket"))
        sent = info.bytes_sent - info.bytes_retransmitted if info is not None else 0
        return self._writer.transport.get_write_buffer_size() - sent

    async def copy_to(self, sink: Stream, count: Callable[[int], object]) -> None:
        """Pass everything on until the end, then tell ``sink`` that it was the end."""
        with contextlib.suppress(OSError):
            while True:
                async with asyncio.timeout(IDLE):
                    data = await self._reader.read(CHUNK)
                if not data:
                    break
                await sink.put(data, IDLE)
                count(len(data))
        with contextlib.suppress(OSError, RuntimeError):  # it may be closed by now
            sink._writer.write_eof()

    def close(self) -> None:
        """Close; what was written already still goes out."""
        self._writer.close()

    async def flush(self, timeout: float) -> None:
        """Wait until a closed stream has sent what was written; after ``timeout`` seconds, drop it."""
        try:
            async with asyncio.timeout(timeout):
                await self._writer.wait_closed()
        except OSError:  # too late, or broken: either way there is nobody to send it to
            self._writer.transport.abort()


async def open_stream(host: str, port: int, timeout: float, control: str | None = None) -> Stream:
    """Connect to ``host`` within ``timeout`` seconds; ``OSError`` otherwise.

    ``control``: TCP's congestion control, from ``congestion.resolve``.
    """
    loop = asyncio.get_running_loop()
    reader = _EndNotingReader()
    async with asyncio.timeout(timeout):
        transport, protocol = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader), host, port, happy_eyeballs_delay=EYEBALLS
        )
    congestion.use(transport.get_extra_info("socket"), control)
    return Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


async def serve_streams(host: str, port: int, arrived: Callable[[Stream], None]) -> asyncio.Server:
    """Listen at ``host`` and call ``arrived`` with each new connection; ``::`` takes IPv4 ones too."""

    def protocol() -> asyncio.StreamReaderProtocol:
        reader = _EndNotingReader()
        return asyncio.StreamReaderProtocol(reader, lambda _, writer: arrived(Stream(reader, writer)))

    loop, host = asyncio.get_running_loop(), host.strip("[]")
    if host == "::" and socket.has_dualstack_ipv6():  # of which asyncio's own takes IPv6 alone
        both = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
        return await loop.create_server(protocol, sock=both)
    return await loop.create_server(protocol, host, port)


def reason(error: Exception) -> str:
    """Return why a connection failed, in the system's words.

    >>> reason(ConnectionRefusedError(111, "Connect call failed ('192.0.2.9', 7000)"))
    'Connection refused'
    """
    if isinstance(error, TimeoutError) and not error.errno:
        return "no answer"
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)  # asyncio's own text is about calls and tuples
    each = re.findall(r"\[Errno (\d+)\][^(]*\('([^']+)'", str(error))  # asyncio's text of several addresses
    if each:
        return ", ".join(f"{at}: {os.strerror(int(number))}" for number, at in each)
    return str(getattr(error, "strerror", None) or error)


async def splice(
    a: Stream, b: Stream, up: Callable[[int], object] = int, down: Callable[[int], object] = int
) -> None:
    """Pass bytes from ``a`` to ``b`` (counted by ``up``) and back (``down``) until one ends; close both.

    A side that reads slowly slows the other one down: at most a few buffers are held here.
    """
    ways = {asyncio.ensure_future(a.copy_to(b, up)), asyncio.ensure_future(b.copy_to(a, down))}
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        # a farewell on its way back would be lost by a reset, if this end were closed at once
        await asyncio.wait(ways, timeout=LINGER)
    finally:
        for way in ways:
            way.cancel()
        a.close()
        b.close()
    await a.flush(LINGER)
    await b.flush(LINGER)
