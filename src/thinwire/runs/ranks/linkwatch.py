"""What one rank's links carried and measured: step by step, and over the training steps together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.links.mesh import Peer
from thinwire.links.metered import Counts, Traffic, minus
from thinwire.links.tcp.counts import FALLBACK, KernelTotals
from thinwire.runs.ranks.world import World
from thinwire.runs.records.run_record import LinkMetrics, WireCounts

KERNEL_COUNTS = "kernel, TCP_INFO"


@dataclass(frozen=True)
class Counted:
    """What this rank sent, read once: by rank and label since the links were made, and as it was watched."""

    sent: dict[int, Counts]
    wire: list[dict[str, Any]]  # a ``WireCounts`` a link, as plain values
    between: Counts  # of the watched links between replicas, together


class LinkWatch:
    """Follow the links of this rank in training steps only: evaluation is not of the run measured.

    No evaluation crosses the links between replicas. There, all counts from the first step on: what a step
    has queued may leave after it.
    """

    def __init__(self, world: World) -> None:
        self._rank, own = world.rank, world.replica
        self._watched = {r: _Watched(p, r // world.stages == own) for r, p in world.peers.items()}

    def start_step(self) -> None:
        """Count from here."""
        for watched in self._watched.values():
            watched.start_step()

    def end_step(self) -> list[dict[str, Any]]:
        """Return a ``LinkMetrics`` a link, as plain values, for the step since ``start_step``."""
        return [asdict(w.step(self._rank, rank)) for rank, w in self._watched.items()]

    def count(self) -> Counted:
        """Return what was sent so far."""
        sent = {rank: w.count() for rank, w in self._watched.items()}
        wire = [asdict(w.totals(self._rank, rank)) for rank, w in self._watched.items()]
        between = [w.payload for w in self._watched.values() if not w.evaluates]
        return Counted(sent, wire, _summed(between))


class _Watched:
    """One link; ``evaluates``: evaluations cross it."""

    def __init__(self, peer: Peer, evaluates: bool) -> None:
        self._peer, self.evaluates = peer, evaluates
        self.payload: Counts = {}
        self._begun = False
        self._kernel: KernelTotals | None = None
        self._newest: KernelTotals | None = None
        self._least: float | None = None
        self._mark(peer.meter.sent, peer.kernel.read())

    def start_step(self) -> None:
        if self.evaluates or not self._begun:
            self._mark(self._peer.meter.sent, self._peer.kernel.read())
        self._begun = True

    def _mark(self, sent: Counts, kernel: KernelTotals | None) -> None:
        self._before, self._kernel_before = sent, kernel

    def count(self) -> Counts:
        """Return what was sent since the link was made, and watch it up to here unless it evaluates."""
        sent, kernel = self._peer.meter.sent, self._peer.kernel.read()
        if self._begun and not self.evaluates:
            self._take(sent, kernel)
        return sent

    def _take(self, sent: Counts, now: KernelTotals | None) -> tuple[int, KernelTotals | None]:
        """Add what was sent since the last mark; return its bytes, by our count and by the kernel's."""
        payload, before = minus(sent, self._before), self._kernel_before
        self.payload = _summed([self.payload, payload])
        self._mark(sent, now)
        nbytes = sum(t.nbytes for t in payload.values())
        if now is None or before is None:
            return nbytes, None
        delta = now - before
        self._newest = now
        if now.rtt is not None:  # TCP's own least is of the connection's life, evaluations included
            self._least = min(now.rtt, self._least or now.rtt)
        self._kernel = delta if self._kernel is None else self._kernel + delta
        return nbytes, delta

    def step(self, source: int, destination: int) -> LinkMetrics:
        estimate = self._peer.reliable.estimate()
        payload, delta = self._take(self._peer.meter.sent, self._peer.kernel.read())
        metrics = LinkMetrics(source, destination, payload, estimate.rate, estimate.rtt, estimate.age)
        if delta is not None and self._newest is not None:
            metrics.wire_bytes, metrics.retransmitted_bytes = delta.wire_sent, delta.retransmitted
            metrics.kernel_rtt_s, metrics.delivery_bytes_s = self._newest.rtt, self._newest.delivery_rate
        return metrics

    def totals(self, source: int, destination: int) -> WireCounts:
        payload = sum(t.nbytes for t in self.payload.values())
        counts = WireCounts(source, destination, payload, counted=FALLBACK)
        if self._kernel is not None and self._newest is not None:
            counts.counted = KERNEL_COUNTS
            counts.wire_bytes, counts.retransmitted_bytes = self._kernel.wire_sent, self._kernel.retransmitted
            counts.rtt_s, counts.min_rtt_s = self._newest.rtt, self._least
            counts.delivery_bytes_s, counts.congestion = self._newest.delivery_rate, self._newest.congestion
        return counts


def _summed(parts: Iterable[Counts]) -> Counts:
    out: Counts = {}
    for part in parts:
        for label, traffic in part.items():
            out[label] = out.get(label, Traffic()) + traffic
    return out


def added(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return totals with the counts of the part before a resume added."""
    earlier = {(c["source"], c["destination"]): c for c in before}
    return [_added(earlier.get((c["source"], c["destination"])), c) for c in now]


def _added(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    if before is None:
        return now
    if not now["payload_bytes"]:  # no step since
        return before
    sums = {"payload_bytes": before["payload_bytes"] + now["payload_bytes"]}
    for name in ("wire_bytes", "retransmitted_bytes"):  # the kernel's; a part without them leaves no sum
        known = before[name] is not None and now[name] is not None
        sums[name] = before[name] + now[name] if known else None
    return now | sums | ({} if sums["wire_bytes"] is not None else {"counted": FALLBACK})
