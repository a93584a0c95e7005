"""Names of hosts: those with IPv4 addresses, with IPv6 ones alone, and those that are not known yet."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from time import monotonic
from typing import Any

import pytest
import zmq
from waiting import LONG, until

from thinwire.files.web_folder import WebFolder
from thinwire.links import ZmqLink, sockets
from thinwire.links.hub.hub import Hub
from thinwire.links.hub.spoke import Spoke
from thinwire.links.names import interface_names, needs_ipv6, reach, resolve
from thinwire.links.relay.stream import Stream, open_stream, reason, serve_streams
from thinwire.links.security import asks_for_token
from thinwire.runs.machine.network import check_listener, check_own, way_out
from thinwire.types import LinkError

TOKEN = b"a shared secret"
NAMES = {
    "four.test": ["127.0.0.1"],
    "six.test": ["::1"],
    "both.test": ["::1", "127.0.0.1"],
    "all.test": ["::"],
}
six = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def answer(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if str(host).endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [info for at in NAMES.get(host, [host]) for info in real(at, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


@pytest.mark.parametrize(
    ("host", "first", "ipv6"),
    [
        ("four.test", "127.0.0.1", False),
        ("192.0.2.7", "192.0.2.7", False),
        pytest.param("six.test", "::1", True, marks=six),
        pytest.param("[2001:db8::7]", "2001:db8::7", True, marks=six),
    ],
)
def test_a_name_is_dialled_by_ipv6_where_it_has_nothing_else(host: str, first: str, ipv6: bool) -> None:
    infos = resolve(host, 7)
    assert infos[0][4][:2] == (first, 7) and needs_ipv6(infos) is ipv6
    sock = sockets.open_socket(zmq.DEALER, 100, 1)
    assert sockets.dial(sock, sockets.endpoint(host, 7)) and sock.ipv6 == ipv6
    sock.context.destroy(linger=0)


@six
def test_a_name_with_only_ipv6_addresses_is_listened_at_and_checked() -> None:
    check_own("six.test")
    hub = Hub.bind("all.test", token=TOKEN)
    try:
        check_listener("six.test", hub.port, has_token=True)
        with pytest.raises(LinkError, match=r"nothing listens at six\.test:1 "):
            check_listener("six.test", 1, has_token=True)
        out = way_out("six.test", hub.port)
        assert out is not None and out.address == "::1"
    finally:
        hub.close()


@pytest.mark.skipif("lo" not in interface_names(), reason="loopback is called otherwise here")
def test_an_interface_is_listened_at_by_name_and_dialled_by_address() -> None:
    hub = Hub.bind("lo", token=TOKEN)
    dialled = Spoke.connect(hub.host, hub.port, token=TOKEN)
    try:
        until(lambda: dialled.joined)
        assert hub.host == "127.0.0.1"
    finally:
        dialled.close()
        hub.close()


@six
@pytest.mark.parametrize("near", ["127.0.0.1", "::1"])
def test_all_addresses_of_both_kinds_are_those_of_publisher_and_relay(near: str) -> None:
    hub = Hub.bind("::", token=TOKEN)
    dialled = Spoke.connect(near, hub.port, token=TOKEN)
    try:
        until(lambda: dialled.joined)
    finally:
        dialled.close()
        hub.close()

    async def relayed() -> list[Stream]:
        came: list[Stream] = []
        server = await serve_streams("::", 0, came.append)
        _, writer = await asyncio.open_connection(near, server.sockets[0].getsockname()[1])
        async with asyncio.timeout(LONG):
            while not came:
                await asyncio.sleep(0.01)
        for end in (*came, writer):
            end.close()
        await came[0].flush(LONG)
        await writer.wait_closed()
        server.close()
        return came

    assert len(asyncio.run(relayed())) == 1


@six
@pytest.mark.parametrize("own", ["127.0.0.1", "[::1]"])
def test_a_name_of_both_kinds_is_dialled_where_it_answers(own: str) -> None:
    both, began = {"host": "both.test", "token": TOKEN}, monotonic()
    hub, link = Hub.bind(own, token=TOKEN), ZmqLink.bind(b"n", own, token=TOKEN, connect_timeout=LONG)
    spoke, dialling = Spoke.connect(port=hub.port, **both), ZmqLink.connect(b"n", port=link.port, **both)
    try:
        until(lambda: spoke.joined)
        dialling.send(b"hello").result(LONG)
        assert link.recv().result(LONG) == b"hello"
        dialling.redial()
        back = dialling.recv()
        until(lambda: link.send(b"and back") and back.done())  # the first may go with the old connection
        check_listener("both.test", hub.port, has_token=True)
        assert asks_for_token("both.test", hub.port)

        async def through_a_relay() -> None:
            far = await open_stream("both.test", hub.port, LONG)
            far.close()
            await far.flush(LONG)

        asyncio.run(through_a_relay())
        assert monotonic() - began < 0.8 * LONG
    finally:
        for end in (spoke, dialling, hub, link):
            end.close()


@six
def test_what_was_tried_is_told() -> None:
    refused = r"127\.0\.0\.1: Connection refused, ::1: Connection refused"
    both = {"127.0.0.1: Connection refused", "::1: Connection refused"}
    with pytest.raises(ConnectionRefusedError, match=refused):
        reach("both.test", 1, LONG)
    with pytest.raises(OSError) as told:
        asyncio.run(open_stream("both.test", 1, LONG))
    assert set(reason(told.value).split(", ")) == both
    with pytest.raises(LinkError, match=rf"nothing listens at both\.test:1 .*\({refused}"):
        check_listener("both.test", 1, has_token=True)
    with pytest.raises(OSError, match=refused):
        WebFolder("http://both.test:1").read("manifest.json", 1)
    link = ZmqLink.connect(b"n", "both.test", 1, token=TOKEN, connect_timeout=0.3)
    with pytest.raises(LinkError, match=r"did not connect within 0\.3 s \(tried 127\.0\.0\.1, ::1\)"):
        link.recv().result(LONG)
    link.close()


def test_an_address_that_says_nothing_costs_a_quarter_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", 0), backlog=0) as full, ExitStack() as stack:
        port, kept = full.getsockname()[1], list[socket.socket]()
        for _ in range(3):  # whose queue is full drops what comes
            kept.append(stack.enter_context(socket.socket()))
            kept[-1].setblocking(False)
            kept[-1].connect_ex(("127.0.0.2", port))
        stack.enter_context(socket.create_server(("127.0.0.3", port)))
        monkeypatch.setitem(NAMES, "slow.test", ["127.0.0.2", "127.0.0.3"])
        began = monotonic()
        with reach("slow.test", port, LONG) as found:
            assert found.getpeername()[0] == "127.0.0.3" and found.gettimeout() == LONG
        assert monotonic() - began < LONG / 2
        with pytest.raises(TimeoutError):
            reach("127.0.0.2", port, 0.3)


def test_who_is_not_known_yet_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sockets, "dial_again", _noting(asked, sockets.dial_again))
    monkeypatch.setattr(sockets, "REDIAL", 0.1)
    dialled = Spoke.connect("nobody.invalid", 7, token=TOKEN)
    try:
        until(lambda: len(asked) > 2)
    finally:
        dialled.close()
    link = ZmqLink.connect(b"n", "nobody.invalid", 7, token=TOKEN, connect_timeout=0.2)
    with pytest.raises(LinkError, match="did not connect"):
        link.recv().result(LONG)
    link.close()


def _noting(asked: list[str], real: Any) -> Any:
    def again(sock: Any, address: str) -> bool:
        asked.append(address)
        return bool(real(sock, address))

    return again
