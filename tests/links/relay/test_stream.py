"""Streams of relay and tunnel: a line that is slow is not one that stands still."""

from __future__ import annotations

import asyncio
import socket

import pytest

from thinwire.links.relay.stream import BUFFER, Stream, serve_streams
from thinwire.links.tcp import info as tcp_info

SILENCE = 0.2  # seconds
PIECE, PAUSE = 1 << 13, 0.03  # bytes that are read at once, seconds before the next


async def _read(sink: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(sink, PIECE):
        await asyncio.sleep(PAUSE)


async def _put(nbytes: int, room: int, reads: bool) -> float:
    """Put ``nbytes`` at once, of which the system takes ``room``; return the seconds that it took."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[Stream] = loop.create_future()
    server = await serve_streams("127.0.0.1", 0, arrived.set_result)
    with socket.socket() as sink:
        sink.setblocking(False)
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
        await loop.sock_connect(sink, server.sockets[0].getsockname())
        stream = await arrived
        stream._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        reading = asyncio.create_task(_read(sink) if reads else asyncio.sleep(0.0))
        began = loop.time()
        try:
            await stream.put(bytes(nbytes), SILENCE)
            return loop.time() - began
        finally:
            reading.cancel()
            stream._writer.transport.abort()
            server.close()


def test_a_slow_line_is_left_alone_while_bytes_go_out() -> None:
    assert asyncio.run(_put(3 * BUFFER // 2, 1 << 13, True)) > 2 * SILENCE


@pytest.mark.skipif(not tcp_info.supported(), reason="a system's own buffer is seen into on Linux")
def test_bytes_that_leave_the_system_count_though_it_takes_no_new_ones_for_long() -> None:
    assert asyncio.run(_put(3 * BUFFER, 1 << 17, True)) > 2 * SILENCE


def test_a_line_that_stands_still_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(_put(3 * BUFFER // 2, 1 << 13, False))
