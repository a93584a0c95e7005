"""What the meter says is what the sockets carried."""

from __future__ import annotations

import random
import socket
from time import monotonic, sleep

import pytest
from tcp_proxy import DOWN, UP, TcpProxy

from thinwire.links import Metered, Snapshot, Traffic, ZmqLink, loopback_pair
from thinwire.links.metered import wire_bytes
from thinwire.links.tcp import info as tcp_info
from thinwire.types import LinkError

LONG = 30.0
SIZES = (0, 1, 200, 221, 222, 223, 254, 255, 256, 257, 1000, 65535, 65536, 300_000)


def _settled(proxy: TcpProxy, way: str, least: int) -> int:
    end = monotonic() + LONG
    while proxy.counts[way] < least and monotonic() < end:
        sleep(0.005)
    sleep(0.1)  # anything too much would come now
    return proxy.counts[way]


@pytest.mark.parametrize("token", [None, b"t"], ids=["plain", "curve"])
def test_the_meter_equals_the_bytes_on_the_socket(token: bytes | None) -> None:
    with_binder = ZmqLink.bind(b"n", token=token, connect_timeout=LONG)
    with TcpProxy(with_binder.port) as proxy:
        a = Metered(with_binder)
        b = Metered(ZmqLink.connect(b"n", "127.0.0.1", proxy.port, token=token, connect_timeout=LONG))
        b.send(b"first")
        a.recv().result(LONG)
        a.send(b"first")
        b.recv().result(LONG)
        sleep(0.1)
        shook = dict(proxy.counts)  # greeting, handshake, first messages
        up0, down0 = b.snapshot(), a.snapshot()
        for size in SIZES:
            b.send(random.Random(size).randbytes(size), "forward")
            a.send(bytes(size), "backward")
            assert len(a.recv().result(LONG)) == len(b.recv().result(LONG)) == size
        up, down = b.snapshot() - up0, a.snapshot() - down0
        assert up.sent["forward"] == Traffic(len(SIZES), sum(wire_bytes(n, token is not None) for n in SIZES))
        assert _settled(proxy, UP, shook[UP] + up.sent_bytes) - shook[UP] == up.sent_bytes
        assert _settled(proxy, DOWN, shook[DOWN] + down.sent_bytes) - shook[DOWN] == down.sent_bytes
        assert a.snapshot().received_bytes == b.snapshot().sent_bytes
        assert b.snapshot().received_bytes == a.snapshot().sent_bytes
        b.close(1.0)
        a.close(1.0)


@pytest.mark.skipif(not tcp_info.supported(), reason="the kernel's counters are read on Linux only")
def test_the_kernel_agrees_within_five_percent() -> None:
    a = Metered(binder := ZmqLink.bind(b"n", connect_timeout=LONG))
    b = Metered(ZmqLink.connect(b"n", "127.0.0.1", binder.port, connect_timeout=LONG))
    for _ in range(50):
        b.send(bytes(20_000), "forward")
    for _ in range(50):
        a.recv().result(LONG)
    rows = [r for r in map(tcp_info.read_at, tcp_info.sockets()) if r is not None]
    mine = next(r for r in rows if r.remote[1] == binder.port)
    theirs = next(r for r in rows if r.local[1] == binder.port)
    sent = mine.bytes_sent - mine.bytes_retransmitted
    assert b.snapshot().sent_bytes <= sent <= 1.05 * b.snapshot().sent_bytes
    assert theirs.bytes_received == sent
    assert mine.wire_out > mine.bytes_sent
    assert mine.min_rtt >= 0 and mine.rtt > 0 and mine.segments_out > 0
    b.close(1.0)
    a.close(1.0)


def test_kernel_counters_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unconnected:
        assert tcp_info.read(unconnected) is None
    monkeypatch.setattr("sys.platform", "plan9")
    assert tcp_info.sockets() == [] and not tcp_info.supported()


def test_counts_by_label_and_direction() -> None:
    x, y = loopback_pair()
    a, b = Metered(x), Metered(y, label_of=lambda data: "forward" if data == b"abc" else "other")
    a.send(b"abc", "forward")
    a.send(b"abcd", "forward")
    a.send(b"", "control")
    for _ in range(3):
        b.recv().result(0)
    assert a.sent == {"forward": Traffic(2, 5 + 6), "control": Traffic(1, 2)}
    assert b.received == {"forward": Traffic(1, 5), "other": Traffic(2, 6 + 2)}
    assert a.received == b.sent == {}
    before = a.snapshot()
    a.send(b"x", "control")
    assert (a.snapshot() - before).sent == {"forward": Traffic(), "control": Traffic(1, 3)}
    assert Snapshot().sent_bytes == 0


def test_what_fails_is_not_counted() -> None:
    a, b = loopback_pair()
    meter = Metered(a)
    b.close()
    with pytest.raises(LinkError, match="rank 1 closed"):
        meter.send(b"x").result(0)
    with pytest.raises(LinkError, match="rank 1 closed"):
        meter.recv().result(0)
    assert meter.snapshot() == Snapshot()
