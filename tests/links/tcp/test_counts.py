"""The kernel's counts of one peer, against a proxy's and over reconnects."""

from __future__ import annotations

import errno
import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from time import monotonic, sleep

import pytest
from tcp_proxy import DOWN, UP, TcpProxy
from waiting import LONG, until

from thinwire.links import Metered, ZmqLink
from thinwire.links.tcp import info as tcp_info
from thinwire.links.tcp.counts import KernelCounts, KernelTotals

needs_linux = pytest.mark.skipif(not tcp_info.supported(), reason="the kernel's counters are Linux's")


@contextmanager
def _connection() -> Iterator[tuple[socket.socket, socket.socket, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        near = socket.create_connection(("127.0.0.1", port))
        far, _ = listener.accept()
        with near, far:
            yield near, far, port


def _read(counts: KernelCounts) -> KernelTotals:
    totals = counts.read()
    assert totals is not None
    return totals


@needs_linux
def test_each_end_counts_its_own_connection() -> None:
    with _connection() as (near, _, port):
        mine, theirs = KernelCounts(port, local=False), KernelCounts(port, local=True)
        near.sendall(bytes(50_000))
        until(lambda: _read(theirs).received == 50_000)
        a, b = _read(mine), _read(theirs)
        assert (a.sent, a.received, a.connections) == (50_000, 0, 1)
        assert (b.sent, b.received) == (0, 50_000)
        assert a.wire_sent == a.sent + 52 * a.segments_sent and a.segments_sent > 1
        assert b.wire_received == b.received + 52 * b.segments_received
        assert a.rtt is not None and a.min_rtt is not None and 0 <= a.min_rtt <= a.rtt + 1
        assert a.congestion and a.congestion.isalnum()
        near.sendall(b"more")
        until(lambda: _read(theirs).received == 50_004)
        assert (_read(mine) - a).sent == 4 and (_read(mine) - a).connections == 0


@needs_linux
def test_ipv6_segments_have_longer_headers() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with listener, socket.create_connection(listener.getsockname()[:2]) as near:
        near.sendall(b"x")
        totals = _read(KernelCounts(listener.getsockname()[1], local=False))
        assert totals.wire_sent == 1 + 72 * totals.segments_sent


@needs_linux
def test_the_counts_equal_a_proxys_and_add_up_over_reconnects() -> None:
    binder = ZmqLink.bind(b"n", connect_timeout=LONG)
    with TcpProxy(binder.port) as proxy, closing(binder):
        other = Metered(ZmqLink.connect(b"n", "127.0.0.1", proxy.port, connect_timeout=LONG))
        with closing(other):
            counts = KernelCounts(proxy.port, local=False)
            for connection in (1, 2, 3):
                other.send(bytes(300_000))
                assert len(binder.recv().result(LONG)) == 300_000
                until(lambda: carried(counts) == proxy.counts[UP])  # the proxy has read all of it
                assert _read(counts).received == proxy.counts[DOWN]
                assert _read(counts).connections == connection == proxy.connections
                assert other.snapshot().sent_bytes <= carried(counts) <= 1.01 * other.snapshot().sent_bytes
                if connection < 3:
                    proxy.cut()
                    sleep(0.1)
                    proxy.restore()
                    until(lambda n=connection: proxy.connections == n + 1)  # type: ignore[misc]


def carried(counts: KernelCounts) -> int:
    """Return the bytes that were sent, each counted once: a busy machine sends some again for nothing."""
    totals = _read(counts)
    return totals.sent - totals.retransmitted


@needs_linux
def test_reading_keeps_no_connection_open() -> None:
    with _connection() as (near, far, port):
        counts = KernelCounts(port, local=False)
        assert _read(counts).connections == 1
        near.close()  # its only descriptor, so the peer must hear of it
        far.settimeout(LONG)
        assert far.recv(1) == b""
        assert _read(counts).connections == 1
        gc.collect()


@needs_linux
def test_another_file_under_the_same_number_is_not_mistaken() -> None:
    with _connection() as (near, _, port), _connection() as (other, _, _):
        counts = KernelCounts(port, local=False)
        near.sendall(b"12345")
        before = _read(counts)
        number = near.detach()
        other.sendall(bytes(1000))
        with closing(socket.socket(fileno=number)) as again:
            again.close()
            with socket.fromfd(other.fileno(), socket.AF_INET, socket.SOCK_STREAM) as taken:
                assert taken.fileno() == number  # the lowest free one
                assert _read(counts) == before
    assert before.sent == 5


@needs_linux
def test_a_reading_is_cheap_and_safe_from_threads() -> None:
    with _connection() as (near, _, port):
        counts, failures = KernelCounts(port, local=False), []

        def many() -> None:
            for _ in range(200):
                if _read(counts).connections != 1:
                    failures.append(1)

        near.sendall(b"x")
        threads = [threading.Thread(target=many) for _ in range(4)]
        start = monotonic()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failures
        assert (monotonic() - start) / 800 < 2e-3  # some 20 us on a quiet machine


@needs_linux
def test_a_copy_that_another_thread_looks_at_is_no_connection_of_its_own() -> None:
    with _connection() as (near, _, port):
        now, seen = 0.0, []
        counts = KernelCounts(port, local=False, clock=lambda: now)
        reader = threading.Thread(target=lambda: seen.append(_read(counts).connections))
        place = tcp_info.place_of(near.fileno())
        assert place is not None
        with tcp_info.borrowed(place) as lent:
            assert lent is not None
            reader.start()
            reader.join(0.2)  # it need not wait for the end of this block, but may
        reader.join(LONG)
        now = 10.0  # time to look for new ones again
        assert seen == [1] and _read(counts).connections == 1


def test_the_best_rate_that_was_not_app_limited_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now, place = 0.0, tcp_info.SocketPlace(3, 7)
    rows = [(1000, 5e6, False), (2000, 9e6, True), (3000, 2e6, False), (3000, 8e6, False), (4000, 1e6, False)]
    monkeypatch.setattr(tcp_info, "sockets", lambda: [place])
    counts = KernelCounts(7000, local=False, supported=True, clock=lambda: now)
    seen = []
    for i, (sent, rate, limited) in enumerate(rows):
        info = _info(sent, rate, limited)
        monkeypatch.setattr(tcp_info, "read_at", lambda _, info=info: info)
        now = 4.0 * i
        seen.append(_read(counts).delivery_rate)
    # app-limited, then better ones that are gone after 10 s; the fourth is a repetition, nothing was sent
    assert seen == [5e6, 5e6, 5e6, 2e6, 2e6]
    assert _read(counts).sent == 4000


def _info(sent: int, rate: float, limited: bool) -> tcp_info.TcpInfo:
    ends = (("127.0.0.1", 40_000), ("127.0.0.1", 7000))
    return tcp_info.TcpInfo(*ends, sent, 0, 0, 10, 10, 0.1, 0.1, rate, limited, 52, "cubic")


def test_a_system_without_the_counters_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "plan9")
    counts = KernelCounts(7000, local=True)
    assert not counts.supported and counts.read() is None


@needs_linux
def test_a_system_that_tells_too_little_has_no_counts_rather_than_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_info, "MIN_LENGTH", 1000)  # more than any kernel has
    counts = KernelCounts(7000, local=True)
    assert not counts.supported and counts.read() is None
    assert tcp_info.visible()  # a congestion control can be set all the same


@needs_linux
def test_a_system_that_could_not_be_asked_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    tcp_info._told.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", refuse)
        assert not tcp_info.supported()
    assert tcp_info.supported()
