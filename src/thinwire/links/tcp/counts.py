"""What the kernel counted for one peer: the totals of its TCP connections, over all that came and went."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from time import monotonic

from thinwire.links.tcp import info as tcp_info
from thinwire.links.tcp.info import SocketPlace, TcpInfo

FALLBACK = "payload counts, no TCP_INFO"  # the label of counts that are the meter's instead
RECENT = 10.0  # seconds that a delivery rate is remembered
RESCAN = 1.0  # seconds between two searches for a new connection


@dataclass(frozen=True)
class KernelTotals:
    """The counters of one peer's connections; those of two moments subtract.

    Bytes are of the TCP stream, ZeroMQ's framing and handshakes included; ``wire`` adds IP and TCP headers
    [derived]. What a connection carried after its last reading, before it broke, is missing.
    """

    connections: int = 0
    sent: int = 0  # bytes, retransmissions included
    retransmitted: int = 0
    wire_sent: int = 0
    received: int = 0
    wire_received: int = 0
    segments_sent: int = 0
    segments_received: int = 0
    rtt: float | None = None  # seconds, smoothed, queues included; of the newest connection, like the next
    min_rtt: float | None = None  # seconds
    delivery_rate: float | None = None  # bytes/s, the best of the last seconds that were not app-limited
    congestion: str | None = None  # congestion control: cubic, bbr

    def __add__(self, other: KernelTotals) -> KernelTotals:
        return dataclasses.replace(other, **{n: getattr(self, n) + getattr(other, n) for n in _COUNTS})

    def __sub__(self, other: KernelTotals) -> KernelTotals:
        return dataclasses.replace(self, **{n: getattr(self, n) - getattr(other, n) for n in _COUNTS})


_COUNTS = tuple(f.name for f in dataclasses.fields(KernelTotals) if f.type == "int")


class KernelCounts:
    """Follow the connections that have ``port`` at this end (``local``) or at the peer's.

    A pair of ranks has a port of its own, so these are the peer's. The first reading looks through all
    descriptors of the process; later ones (some 10 us) go to the place that was found, and look again each
    second and when it is gone. Nothing is held open. Not ``supported``: another system than Linux, or one
    whose TCP_INFO lacks some, or traffic that goes another way; then there are the meter's counts, to be
    labelled ``FALLBACK``.
    """

    def __init__(
        self,
        port: int,
        local: bool,
        supported: bool | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.supported = tcp_info.supported() if supported is None else supported
        self._port, self._local, self._clock = port, local, clock
        self._lock = Lock()
        self._open: dict[SocketPlace, TcpInfo] = {}  # newest last
        self._gone = KernelTotals()
        self._rates: deque[tuple[float, float]] = deque()
        self._looked = -math.inf

    def read(self) -> KernelTotals | None:
        """Return the totals so far, or None where not ``supported``."""
        if not self.supported:
            return None
        now = self._clock()
        with self._lock:
            self._refresh(now)
            if not self._open or now - self._looked >= RESCAN:
                self._look(now)
            return self._totals(now)

    def _refresh(self, now: float) -> None:
        """Read the known connections anew and book those that ended."""
        for place in list(self._open):
            info = tcp_info.read_at(place)
            if info is not None and self._ours(info):
                self._note(place, info, now)
            else:
                self._gone += _counts(self._open.pop(place))

    def _look(self, now: float) -> None:
        self._looked = now
        for place in tcp_info.sockets():
            info = tcp_info.read_at(place)
            if info is not None and self._ours(info):
                self._note(place, info, now)

    def _ours(self, info: TcpInfo) -> bool:
        return self._port == (info.local if self._local else info.remote)[1]

    def _note(self, place: SocketPlace, info: TcpInfo, now: float) -> None:
        before = self._open.get(place)
        moved = before is None or info.bytes_sent > before.bytes_sent
        if moved and not info.app_limited and info.delivery_rate:  # an idle connection keeps its last rate
            self._rates.append((now, info.delivery_rate))
        self._open[place] = info

    def _totals(self, now: float) -> KernelTotals:
        while self._rates and now - self._rates[0][0] > RECENT:
            self._rates.popleft()
        best = max((rate for _, rate in self._rates), default=None)
        total = sum(map(_counts, self._open.values()), self._gone)
        return dataclasses.replace(total, delivery_rate=best)


def _counts(info: TcpInfo) -> KernelTotals:
    return KernelTotals(
        connections=1,
        sent=info.bytes_sent,
        retransmitted=info.bytes_retransmitted,
        wire_sent=info.wire_out,
        received=info.bytes_received,
        wire_received=info.wire_in,
        segments_sent=info.segments_out,
        segments_received=info.segments_in,
        rtt=info.rtt,
        min_rtt=info.min_rtt,
        congestion=info.congestion,
    )
