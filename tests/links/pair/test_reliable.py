"""The reliable link under faults: of messages (an injecting link), connections (a proxy), processes."""

from __future__ import annotations

import random
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest
from launchers import warm
from slow_proxy import SlowProxy
from tcp_proxy import DOWN, UP, TcpProxy
from waiting import threads, until

from thinwire.links import Link, LinkShape, Metered, Reliable, Shaped, ZmqLink, loopback_pair
from thinwire.links.link import LinkEstimate
from thinwire.links.mesh import stack
from thinwire.links.message import Data, Message
from thinwire.links.pair.reliable import MAX_SEGMENT, PIECE
from thinwire.links.pair.segment import Kind, label_of, pack, parse
from thinwire.links.tcp import info as tcp_info
from thinwire.links.tcp.counts import KernelCounts
from thinwire.types import LinkError

LONG = 30.0


class Faulty:
    """Inject faults into what is sent: each message may be dropped, repeated, held back or changed."""

    def __init__(self, link: Link, kinds: str, share: float = 0.15, seed: int = 0) -> None:
        self._link, self._kinds, self._share = link, kinds.split("+"), share
        self._rng, self._held, self._lock = random.Random(seed), [], threading.Lock()
        self.injected = 0

    @property
    def peer(self) -> str:
        return self._link.peer

    def send(self, data: Data, label: str = "control") -> Future[None]:
        with self._lock:
            batch, self._held = [bytes(data), *self._held], []  # held back until after this one
            if self._rng.random() < self._share:
                self.injected += 1
                batch = self._fault(self._rng.choice(self._kinds), batch)
            done: Future[None] = Future()
            done.set_result(None)
            for one in batch:
                done = self._link.send(one, label)
            return done

    def _fault(self, kind: str, batch: list[bytes]) -> list[bytes]:
        if kind == "drop":
            return batch[1:]
        if kind == "repeat":
            return [batch[0], *batch]
        if kind == "reorder":
            self._held = [batch[0]]
            return batch[1:]
        changed = bytearray(batch[0])
        changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
        return [bytes(changed), *batch[1:]]

    def recv(self) -> Future[bytes]:
        return self._link.recv()

    def more(self) -> deque[Message]:
        return self._link.more()

    def estimate(self) -> LinkEstimate:
        return self._link.estimate()

    def close(self, timeout: float = 5.0) -> None:
        self._link.close(timeout)


def _body(i: int) -> bytes:
    return random.Random(i).randbytes((i * 7919) % 3000) + i.to_bytes(4, "big", signed=True)


@contextmanager
def closing(*links: Reliable) -> Iterator[None]:
    try:
        yield
    finally:
        threads = [threading.Thread(target=link.close, args=(2.0,)) for link in links]
        for t in threads:
            t.start()
        for t in threads:
            t.join()


@pytest.mark.parametrize("kinds", ["drop", "repeat", "reorder", "corrupt", "drop+repeat+reorder+corrupt"])
def test_faulty_messages_are_repaired(kinds: str) -> None:
    x, y = loopback_pair()
    fx, fy = Faulty(x, kinds, seed=1), Faulty(y, kinds, seed=2)
    a = Reliable(fx, deadline=LONG, heartbeat=0.05)
    b = Reliable(fy, deadline=LONG, heartbeat=0.05)
    with closing(a, b):
        sent = [a.send(_body(i), "forward") for i in range(150)]
        back = [b.send(_body(-i), "backward") for i in range(150)]
        for i in range(150):
            assert b.recv().result(LONG) == _body(i)
            assert a.recv().result(LONG) == _body(-i)
        assert not wait(sent + back, LONG).not_done
        assert fx.injected + fy.injected > 20
        if kinds == "repeat":
            assert a.repeated + b.repeated > 0 and a.resent == 0
        elif kinds != "reorder":
            assert a.resent + b.resent > 0
        assert (a.damaged + b.damaged > 0) == ("corrupt" in kinds)


@contextmanager
def over_proxy(
    deadline: float = LONG, token: bytes | None = None, rate: float | None = None
) -> Iterator[tuple[Reliable, Reliable, TcpProxy]]:
    options = {"token": token, "connect_timeout": LONG, "max_message": MAX_SEGMENT}
    binder = ZmqLink.bind(b"n", peer="rank 1", **options)
    with TcpProxy(binder.port) if rate is None else SlowProxy(binder.port, rate) as proxy:
        a = Reliable(binder, deadline, kernel=KernelCounts(binder.port, local=True))
        connector = ZmqLink.connect(b"n", "127.0.0.1", proxy.port, peer="rank 0", **options)
        b = Reliable(connector, deadline, kernel=KernelCounts(proxy.port, local=False))
        with closing(a, b):
            b.wait_alive(LONG)
            yield a, b, proxy


def _stream(sender: Reliable, count: int, stop: threading.Event, out: list[Future[None]]) -> None:
    for i in range(count):
        out.append(sender.send(_body(i), "forward"))
        stop.wait(0.005)


@pytest.mark.parametrize(
    ("how", "token", "seconds"),
    [("reset", None, 1.5), ("stall", None, 1.5), ("reset", b"t", 1.0), ("stall", b"t", 1.0)],
)
def test_a_cut_in_mid_stream_both_ways_loses_nothing(how: str, token: bytes | None, seconds: float) -> None:
    with over_proxy(token=token) as (a, b, proxy):
        count, stop = 200, threading.Event()
        sent: list[Future[None]] = []
        threads = [threading.Thread(target=_stream, args=(link, count, stop, sent)) for link in (a, b)]
        for t in threads:
            t.start()
        assert a.recv().result(LONG) == b.recv().result(LONG) == _body(0)
        sleep(0.2)
        proxy.cut() if how == "reset" else proxy.stall()
        sleep(seconds)
        proxy.restore() if how == "reset" else proxy.resume()
        for i in range(1, count):
            assert a.recv().result(LONG) == b.recv().result(LONG) == _body(i)
        for t in threads:
            t.join()
        assert not wait(sent, LONG).not_done
        assert not any(f.exception() for f in sent)
        extra = a.recv()
        assert wait([extra], 0.2).not_done  # nothing came twice
        assert proxy.connections >= (2 if how == "reset" else 1)


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("token", [None, b"t"], ids=["plain", "curve"])
def test_a_corrupted_byte_on_the_wire_is_repaired(token: bytes | None, way: str) -> None:
    with over_proxy(deadline=8.0, token=token) as (a, b, proxy):
        sender, receiver = (b, a) if way == UP else (a, b)
        sender.send(b"first")
        assert receiver.recv().result(LONG) == b"first"
        proxy.corrupt(way, 5000)
        sent = [sender.send(_body(i), "forward") for i in range(30)]
        for i in range(30):
            assert receiver.recv().result(LONG) == _body(i)
        assert not wait(sent, LONG).not_done


def test_a_corrupted_frame_length_is_survived() -> None:
    with over_proxy(deadline=8.0) as (a, b, proxy):
        b.send(b"first").result(LONG)
        sleep(0.1)
        for after in (0, 1, 8):  # flags and length of the next frames
            proxy.corrupt(UP, after)
            b.send(bytes(1000), "forward")
            assert a.recv().result(LONG) in (b"first", bytes(1000))
        b.send(b"last")
        while a.recv().result(LONG) != b"last":
            pass


def test_a_silent_peer_fails_every_future_within_the_deadline() -> None:
    with over_proxy(deadline=1.0) as (_, b, proxy):
        proxy.cut()
        start = monotonic()
        sent, got = b.send(b"into the void"), b.recv()
        for future in (sent, got):
            with pytest.raises(LinkError, match=r"rank 0 \(127.0.0.1:\d+\) has not answered for 1 s"):
                future.result(LONG)
        assert monotonic() - start > 0.5
        for late in (b.send(b"late"), b.recv()):
            with pytest.raises(LinkError, match="has not answered"):
                late.result(0)


CHILD = """
import sys, time
from thinwire.links import Reliable, ZmqLink
link = Reliable(ZmqLink.connect(b"n", "127.0.0.1", int(sys.argv[1]), peer="rank 0"))
link.send(b"hello")
while True:
    link.send(link.recv().result())
"""


def test_a_killed_process_is_a_link_error_that_names_it(tmp_path: Path) -> None:
    binder = ZmqLink.bind(b"n", peer="rank 1", connect_timeout=60.0)
    child = warm().python(tmp_path, "-c", CHILD, binder.port)
    a = Reliable(binder, deadline=2.0, first_deadline=60.0)
    try:
        assert a.recv().result(60.0) == b"hello"
        a.send(b"echo")
        assert a.recv().result(LONG) == b"echo"
        got = a.recv()
        child.signal(signal.SIGKILL)
        with pytest.raises(LinkError, match=r"rank 1 \(127.0.0.1:\d+\) has not answered for 2 s"):
            got.result(LONG)
    finally:
        child.end(signal.SIGKILL)
        a.close()


def test_a_clean_close_is_told_apart_and_flushes() -> None:
    x, y = loopback_pair()
    a, b = Reliable(Shaped(x, LinkShape(1e6, 0.05)), LONG), Reliable(y, LONG)
    last = a.send(bytes(100_000))
    a.close(LONG)
    assert last.result(0) is None
    assert b.recv().result(LONG) == bytes(100_000)
    for future in (b.recv(), b.send(b"too late")):
        with pytest.raises(LinkError, match="rank 0 closed the link"):
            future.result(LONG)
    with pytest.raises(LinkError, match="this end closed the link to rank 1"):
        a.send(b"x").result(0)
    b.close()
    a.close()


def test_a_restarted_peer_is_not_mistaken_for_the_old_one() -> None:
    with over_proxy() as (a, b, proxy):
        b.send(b"one")
        assert a.recv().result(LONG) == b"one"
        port = proxy.port
        b._stopped = True  # as a killed process would: no word of farewell
        b._link.close(0.0)
        again = Reliable(ZmqLink.connect(b"n", "127.0.0.1", port, peer="rank 0"), LONG)
        with closing(again), pytest.raises(LinkError, match=r"rank 1 .* was restarted"):
            a.recv().result(LONG)


def test_both_ends_learn_of_a_restart_though_the_old_end_speaks_first() -> None:
    x, y = loopback_pair()
    acknowledging = {"session": 1, "number": 0, "ack": 1, "repair": 0, "arrived": 0}
    x.send(pack(Kind.ACK, "control", b"", **acknowledging))  # to a process of which the peer had a message
    new = Reliable(y, LONG)
    with closing(new):
        with pytest.raises(LinkError, match="an earlier start of this rank; start all"):
            new.recv().result(LONG)
        assert parse(x.recv().result(LONG)).kind == Kind.BYE  # by which the peer sees another session


def test_large_messages_travel_in_pieces_and_limits_hold() -> None:
    x, y = loopback_pair()
    a, b = Reliable(x, LONG, limit=10 * PIECE), Reliable(y, LONG)
    with closing(a, b):
        body = random.Random(0).randbytes(3 * PIECE + 17)
        done = a.send(bytearray(body), "forward")
        assert bytes(b.recv().result(LONG)) == body
        assert done.result(LONG) is None
        a.send(b"")
        assert b.recv().result(LONG) == b""
        told = f"a message of {11 * PIECE} bytes to .*; at most {10 * PIECE} go at once: compress it"
        with pytest.raises(LinkError, match=told):
            a.send(bytes(11 * PIECE)).result(0)
        with a._lock:  # so that nothing is acknowledged between the two
            done, late = a.send(bytes(6 * PIECE)), a.send(bytes(6 * PIECE))
        with pytest.raises(LinkError, match="at the limit"):
            late.result(0)
        assert len(b.recv().result(LONG)) == 6 * PIECE and done.result(LONG) is None


def test_a_slow_link_is_not_sent_twice_and_is_measured() -> None:
    shape = LinkShape(250e3, 0.02)
    x, y = loopback_pair()
    meter = Metered(x, label_of)
    a = Reliable(Shaped(meter, shape), deadline=LONG, heartbeat=0.1)
    b = Reliable(Shaped(y, shape), deadline=LONG, heartbeat=0.1)
    with closing(a, b):
        a.wait_alive(LONG)
        sleep(0.3)
        big = a.send(bytes(400_000), "forward")  # 1.6 s of line time
        small = [a.send(bytes(20_000), "forward") for _ in range(10)]
        assert not wait([big, *small], LONG).not_done
        assert a.resent == b.resent == b.repeated == 0
        seen = a.estimate()
        assert seen.rtt is not None and 0.04 <= seen.rtt < 0.4
        assert seen.rate == pytest.approx(250e3, rel=0.3)
        assert seen.age is not None and seen.age < LONG
        assert a._estimator.smoothed is not None and a._estimator.smoothed >= seen.rtt


@pytest.mark.skipif(not tcp_info.supported(), reason="the kernel's counts are Linux's")
def test_a_line_too_slow_for_a_piece_within_the_deadline_is_left_alone() -> None:
    with over_proxy(deadline=3.0, rate=PIECE / 4) as (a, b, proxy):
        sent = a.send(bytes(PIECE), "forward")
        assert b.recv().result(LONG) == bytes(PIECE)
        assert sent.result(LONG) is None
        assert proxy.connections == 1 and a.resent == a.repeated == b.repeated == 0


def test_an_emulated_line_that_is_slow_is_given_small_pieces() -> None:
    binder = ZmqLink.bind(b"n", connect_timeout=LONG)
    connector = ZmqLink.connect(b"n", "127.0.0.1", binder.port, connect_timeout=LONG)
    a = stack(1, binder, LinkShape(40e3), 0, 2.0, LONG)
    b = stack(0, connector, LinkShape(), 0, 2.0, LONG)
    a.mailbox.send(b"x", bytes(100_000), "forward")  # 2.5 s of line time
    assert b.get(b"x", LONG, "a message") == bytes(100_000)
    until(lambda: a.meter.sent["forward"].messages >= 13)  # the last one may be there before it is counted
    sent = a.meter.sent["forward"]
    assert sent.messages == 13 and sent.nbytes == a.wire_bytes(b"x", 100_000)
    assert b.reliable.piece == PIECE
    a.close()
    b.close()


def test_control_traffic_is_small_beside_20_kb_messages() -> None:
    x, y = loopback_pair()
    ax, by = Metered(x, label_of), Metered(y, label_of)
    a, b = Reliable(ax, LONG), Reliable(by, LONG)
    with closing(a, b):
        for _ in range(300):
            a.send(bytes(20_000), "forward")
            b.recv().result(LONG)
        total = ax.snapshot().sent_bytes + by.snapshot().sent_bytes
        control = ax.sent["control"].nbytes + by.sent["control"].nbytes
        assert 0 < control < 0.01 * total
        assert by.received["forward"].messages == 300


def test_what_came_is_acknowledged_in_time_though_more_waits_to_be_read() -> None:
    x, y = loopback_pair()
    count, body = 1000, bytes(PIECE)
    for number in range(1, count + 1):
        x.send(pack(Kind.DATA, "other", body, session=1, number=number, ack=0, repair=0, arrived=0))
    acks = [0]
    with closing(Reliable(y, LONG)):
        while acks[-1] < count:
            acks.append(parse(x.recv().result(LONG)).ack)
    assert len(set(acks)) > 4  # without: before the first, behind the first, behind the last


def test_no_thread_is_left() -> None:
    before = threads()
    with over_proxy() as (a, b, _):
        a.send(b"x")
        b.recv().result(LONG)
    assert threads() <= before


class Breaking(Faulty):
    """Take no more messages once it is ``broken``, while others still come."""

    broken = False

    def send(self, data: Data, label: str = "control") -> Future[None]:
        if self.broken:
            raise RuntimeError("out of order")
        return super().send(data, label)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("shape", [LinkShape(), LinkShape(delay=0.001)], ids=["direct", "shaped"])
def test_whoever_waits_is_told_at_once_that_a_link_below_broke(shape: LinkShape) -> None:
    x, y = loopback_pair()
    below = Breaking(x, "drop", 0.0)
    a = Reliable(Shaped(below, shape), deadline=LONG, heartbeat=0.05)
    b = Reliable(y, deadline=LONG, heartbeat=0.05)
    with closing(a, b):
        a.wait_alive(LONG)
        waiting = a.recv()
        below.broken = True
        with pytest.raises(LinkError, match=r"link to rank 1 failed: RuntimeError: out of order"):
            waiting.result(LONG / 3)  # well before the deadline
        with pytest.raises(LinkError, match="out of order"):
            a.send(b"late").result(LONG / 3)
