"""Is the emulated network what was asked for? Measured with real sockets, not by the router's counters."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from thinwire.links.profile import Profile, one_way
from thinwire.links.shape import MTU, SEGMENT
from thinwire.runs.emulator.namespaces import address
from thinwire.types import MeasurementError

MakeSocket = Callable[[int], socket.socket]
_Rates = tuple[float, float]  # payload [bytes/s], asked for and found
Restart = Callable[[bool], float]  # clean: without loss and jitter -> when it began

DELAY_LIMIT = 2e-3  # seconds of a round trip
RATE_LIMIT = 0.03  # of what the headers leave
PINGS = 7  # more on a busy machine, where the pinging itself is slow
PING = MTU - SEGMENT + 1  # bytes on the wire
WINDOW = 0.75  # seconds; twice in a row, the rate must be right
PATIENCE = 5.0  # seconds, and 40 round trips, for TCP to fill the line
_BLOCK = bytes(1 << 18)
_TCP_CONGESTION = 13  # linux/tcp.h; the socket module has it on Linux only


@dataclass(frozen=True)
class LinkCheck:
    """What was asked for and found from one rank to another: round trip [s], payload rate [bytes/s]."""

    source: int
    destination: int
    trip_asked: float
    trip_found: float
    jitter: float  # asked: what a round trip may take more
    rate_asked: float | None  # what headers leave; for a trace, in the time measured; None: no limit
    rate_found: float
    congestion: str  # as read from the socket

    def fault(self) -> str | None:
        """Return what is wrong, in words, or None."""
        way = f"from rank {self.source} to rank {self.destination}"
        if not -DELAY_LIMIT <= self.trip_found - self.trip_asked <= self.jitter + DELAY_LIMIT:
            found, asked = self.trip_found * 1e3, self.trip_asked * 1e3
            return f"the round trip {way} takes {found:.2f} ms, but {asked:.2f} ms was asked for"
        if self.rate_asked is None:
            return None
        if abs(self.rate_found / self.rate_asked - 1) > RATE_LIMIT:
            found, asked = self.rate_found / 125e3, self.rate_asked / 125e3
            return f"TCP carries {found:.2f} Mbit/s {way}, but headers leave {asked:.2f} Mbit/s of its rate"
        return None


@dataclass(frozen=True)
class CheckResult:
    """What the check found, one entry for each kind of way between neighbours."""

    links: tuple[LinkCheck, ...]
    congestion: str
    seconds: float

    def verdict(self, asked: str) -> None:
        """Raise ``MeasurementError`` unless everything is as asked for.

        ``asked`` is the congestion control.
        """
        faults = [fault for link in self.links if (fault := link.fault())]
        wrong = next((link.congestion for link in self.links if link.congestion != asked), None)
        if wrong is not None:
            faults.append(f"connections use the congestion control {wrong}, but {asked} was asked for")
        if faults:
            raise MeasurementError(f"the emulated network is not what was asked for: {'; '.join(faults)}")


def check_network(profiles: Sequence[Profile], make: MakeSocket, restart: Restart) -> CheckResult:
    """Measure from each rank to the next; of ways between equal profiles, one stands for all.

    ``make`` returns a new socket in a rank's namespace. Takes two to three seconds a way, more where TCP
    needs more round trips to fill the line. Errors: ``MeasurementError`` where nothing gets through.
    """
    begin, seen, links = time.monotonic(), set(), []
    for source, a in enumerate(profiles):
        target = (source + 1) % len(profiles)
        if (a, profiles[target]) not in seen:
            seen.add((a, profiles[target]))
            links.append(_LinkUnderTest(profiles, source, target).measure(make, restart))
    return CheckResult(tuple(links), links[0].congestion, time.monotonic() - begin)


class _LinkUnderTest:
    """The way from one rank to another: what it should do, and what it does."""

    def __init__(self, profiles: Sequence[Profile], source: int, destination: int) -> None:
        self._ranks = source, destination
        self._ends = a, b = profiles[source], profiles[destination]
        self._lines = a.uplink, b.downlink
        self._back = b.uplink, a.downlink
        self._unlimited = min(line.mean for line in self._lines) == float("inf")

    def measure(self, make: MakeSocket, restart: Restart) -> LinkCheck:
        a, b = self._ends
        start = restart(False)
        with self._connected(make) as (near, far):
            congestion = near.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, 16).rstrip(b"\0").decode()
            asked, found = self._ping(near, far, start)
        start = restart(True)
        with self._connected(make) as (near, far):
            rate_asked, rate_found = self._flood(near, far, start)
        return LinkCheck(*self._ranks, asked, found, a.jitter + b.jitter, rate_asked, rate_found, congestion)

    def _trip(self, time: float) -> float:
        """Return how long a ping sent at ``time`` after the start should take: delays, and its own bytes."""
        own = sum(max(line.finish(time, PING) - time for line in way) for way in (self._lines, self._back))
        return 2 * one_way(*self._ends, time) + own

    @contextmanager
    def _connected(self, make: MakeSocket) -> Iterator[tuple[socket.socket, socket.socket]]:
        source, destination = self._ranks
        patience = PATIENCE + 40 * self._trip(0.0)
        with ExitStack() as stack:
            server, near = (stack.enter_context(make(rank)) for rank in (destination, source))
            server.bind((address(destination), 0))
            server.listen(1)
            for s in (server, near):
                s.settimeout(patience)
            try:
                near.connect(server.getsockname())
                far = stack.enter_context(server.accept()[0])
            except OSError as e:
                raise MeasurementError(
                    f"rank {source} cannot reach rank {destination} ({e}), so the network cannot be checked"
                ) from e
            far.settimeout(patience)
            for s in (near, far):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # Closing resets the connection, so that nothing of it is sent again in the run.
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            yield near, far

    def _ping(self, near: socket.socket, far: socket.socket, start: float) -> tuple[float, float]:
        """Return the round trip [s] asked for and found: the fastest, as processors only ever add to it."""
        trips: list[tuple[float, float]] = []
        end = time.monotonic() + PATIENCE
        try:
            while len(trips) < PINGS or (min(map(_late, trips)) > DELAY_LIMIT / 2 and time.monotonic() < end):
                begin = time.monotonic()
                near.send(b"?")
                far.send(far.recv(1))
                near.recv(1)
                found = time.monotonic() - begin
                trips.append((self._trip(begin - start), found))
        except OSError as e:
            raise MeasurementError(
                f"no answer from rank {self._ranks[1]} to a ping from rank {self._ranks[0]} ({e})"
            ) from e
        return min(trips, key=_late)

    def _flood(self, near: socket.socket, far: socket.socket, start: float) -> tuple[float | None, float]:
        """Return the payload rate [bytes/s] asked for and found once TCP has filled the line."""
        sender = threading.Thread(target=_send_all, args=(near,), daemon=True)
        sender.start()
        try:
            asked, found = self._steady(far, start)
            return None if self._unlimited else asked, found
        except OSError as e:
            raise MeasurementError(
                f"nothing came from rank {self._ranks[0]} to rank {self._ranks[1]} ({e})"
            ) from e
        finally:
            far.close()  # which resets the connection, and so ends the sender
            sender.join(PATIENCE)

    def _steady(self, far: socket.socket, start: float) -> _Rates:
        """Return the rates of the first two windows in a row that are right, else of a later, median one."""
        seen: list[_Rates] = []
        for rates in self._windows(far, start):
            seen.append(rates)
            right = [self._unlimited or abs(_ratio(r) - 1) <= RATE_LIMIT for r in seen[-2:]]
            if right == [True, True]:
                return rates
        later = sorted(seen[len(seen) // 2 :], key=_ratio)
        return later[len(later) // 2]

    def _windows(self, far: socket.socket, start: float) -> Iterator[_Rates]:
        """Yield the rates asked for and found in one stretch of time after another."""
        window = max(WINDOW, 10 * self._lines[0].finish(0.0, MTU))
        begin = time.monotonic()
        end = begin + PATIENCE + 40 * self._trip(0.0) + 4 * window
        nbytes, buffer = 0, bytearray(1 << 20)
        while begin < end:
            nbytes += far.recv_into(buffer)
            now = time.monotonic()
            if now - begin >= window:
                yield self._allowed(begin - start, now - start), nbytes / (now - begin)
                begin, nbytes = now, 0

    def _allowed(self, begin: float, end: float) -> float:
        delay = one_way(*self._ends, begin)
        nbytes = min(line.between(begin - delay, end - delay) for line in self._lines)
        return nbytes / (end - begin) * SEGMENT / MTU


def _ratio(rates: _Rates) -> float:
    return rates[1] / rates[0]


def _late(trip: tuple[float, float]) -> float:
    return trip[1] - trip[0]


def _send_all(near: socket.socket) -> None:
    try:
        while True:
            near.sendall(_BLOCK)
    except OSError:  # the receiver has seen enough
        return
