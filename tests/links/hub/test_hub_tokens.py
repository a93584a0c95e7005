"""Tokens of hubs and spokes: who is refused hears why, and nobody else is blamed."""

from __future__ import annotations

import socket
import threading
from time import monotonic

import pytest
from hubs import await_event, hub, spoke
from tcp_proxy import TcpProxy
from waiting import LONG, until

from thinwire.links.hub.station import EventKind
from thinwire.links.security import SIGNATURE, asks_for_token
from thinwire.links.sockets import REFUSALS
from thinwire.types import AuthError


@pytest.mark.parametrize(("token", "other"), [(b"right", b"wrong"), (b"right", None)], ids=["wrong", "none"])
def test_without_the_right_token_nothing_is_heard_and_the_spoke_says_so(
    token: bytes | None, other: bytes | None
) -> None:
    with hub(token=token) as h, spoke(h.port, other) as s:
        with pytest.raises(AuthError, match=rf"127.0.0.1:{h.port} refused this token: set THINWIRE_TOKEN"):
            await_event(s, EventKind.JOINED)
        until(lambda: h.refused)
        assert not s.send(b"secret") and h.recv(0.05) is None and h.peers == ()


def test_who_is_let_in_and_cut_off_before_any_greeting_blames_no_token() -> None:
    """A tunnel or a load balancer accepts and closes while the server behind it starts again."""
    token = b"a shared secret"
    with hub(token=token) as h, TcpProxy(h.port) as proxy:
        proxy.cut()
        with spoke(proxy.port, token) as s:
            for _ in range(2):  # before the hub was ever there, and after it was
                before, end = proxy.turned_away, monotonic() + LONG
                while proxy.turned_away < before + 2 * REFUSALS + 2 and monotonic() < end:
                    assert (event := s.recv(0.05)) is None or event.kind is EventKind.LOST
                assert proxy.turned_away >= before + 2 * REFUSALS + 2
                proxy.restore()
                await_event(s, EventKind.JOINED)
                proxy.cut()


def test_a_token_that_was_taken_once_is_never_blamed_later() -> None:
    with hub(token=b"first") as h:
        port = h.port
        with spoke(port, b"first") as s:
            await_event(s, EventKind.JOINED)
            h.close(0.5)
            await_event(s, EventKind.LOST)
            with hub(port=port, token=b"second") as other:
                end = monotonic() + LONG
                while other.refused < REFUSALS + 1 and monotonic() < end:
                    assert s.recv(0.05) is None
                assert other.refused > REFUSALS
            with hub(port=port, token=b"first"):
                await_event(s, EventKind.JOINED)


def test_who_greets_with_anything_else_asks_for_no_token() -> None:
    greeting = SIGNATURE + b"\x03\x00" + b"CURVE".ljust(52, b"\0")
    for said in (
        b"",
        b"HTTP/1.1 400 Bad Request\r\n" * 4,
        greeting[:30],
        greeting.replace(b"CURVE", b"NULL\0"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def answer(server: socket.socket = server, said: bytes = said) -> None:
                with server.accept()[0] as peer:
                    peer.sendall(said)

            thread = threading.Thread(target=answer)
            thread.start()
            assert not asks_for_token("127.0.0.1", server.getsockname()[1], 0.5)
            thread.join(LONG)
    with hub(token=b"t") as h:
        assert asks_for_token("127.0.0.1", h.port, LONG)
