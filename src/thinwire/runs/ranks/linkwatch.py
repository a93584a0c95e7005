"""What one rank's links carried and measured: step by step, and over the training steps together."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from thinwire.links.mesh import Peer
from thinwire.links.tcp.counts import FALLBACK, KernelTotals
from thinwire.runs.ranks.world import World
from thinwire.runs.records.run_record import LinkMetrics, WireCounts

KERNEL_COUNTS = "kernel, TCP_INFO"


class LinkWatch:
    """Follow the links of this rank, in training steps only: evaluation is not of the run measured."""

    def __init__(self, world: World) -> None:
        self._rank, self._watched = world.rank, {r: _Watched(p) for r, p in world.peers.items()}

    def start_step(self) -> None:
        """Count from here."""
        for watched in self._watched.values():
            watched.mark()

    def end_step(self) -> list[dict[str, Any]]:
        """Return a ``LinkMetrics`` a link, as plain values, for the step since ``start_step``."""
        return [asdict(w.step(self._rank, rank)) for rank, w in self._watched.items()]

    def totals(self) -> list[dict[str, Any]]:
        """Return a ``WireCounts`` a link, as plain values, for all steps so far."""
        return [asdict(w.totals(self._rank, rank)) for rank, w in self._watched.items()]


class _Watched:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._payload = 0
        self._kernel: KernelTotals | None = None
        self._newest: KernelTotals | None = None
        self._least: float | None = None
        self.mark()

    def mark(self) -> None:
        self._payload_before = self._peer.meter.snapshot().sent_bytes
        self._kernel_before = self._newest = self._peer.kernel.read()

    def step(self, source: int, destination: int) -> LinkMetrics:
        payload = self._peer.meter.snapshot().sent_bytes - self._payload_before
        now, before, estimate = self._peer.kernel.read(), self._kernel_before, self._peer.reliable.estimate()
        self._payload += payload
        metrics = LinkMetrics(source, destination, payload, estimate.rate, estimate.rtt, estimate.age)
        if now is None or before is None:
            return metrics
        delta = now - before
        self._newest = now
        if now.rtt is not None:  # TCP's own least is of the connection's life, evaluations included
            self._least = min(now.rtt, self._least or now.rtt)
        self._kernel = delta if self._kernel is None else self._kernel + delta
        metrics.wire_bytes, metrics.retransmitted_bytes = delta.wire_sent, delta.retransmitted
        metrics.kernel_rtt_s, metrics.delivery_bytes_s = now.rtt, now.delivery_rate
        return metrics

    def totals(self, source: int, destination: int) -> WireCounts:
        counts = WireCounts(source, destination, self._payload, counted=FALLBACK)
        if self._kernel is not None and self._newest is not None:
            counts.counted = KERNEL_COUNTS
            counts.wire_bytes, counts.retransmitted_bytes = self._kernel.wire_sent, self._kernel.retransmitted
            counts.rtt_s, counts.min_rtt_s = self._newest.rtt, self._least
            counts.delivery_bytes_s, counts.congestion = self._newest.delivery_rate, self._newest.congestion
        return counts


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
