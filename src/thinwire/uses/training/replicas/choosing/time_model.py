"""How long a step of replicas takes: what hides behind compute, and what does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.links.tcp.idle import FIRST_WINDOW, waiting
from thinwire.uses.training.replicas.choosing.replica_policy import EXACT_BITS, ReplicaChoice, ReplicaSite

SECONDS = 1e-9  # what stands for no time at all


def delayed_step(compute: float, wire: float, delay: float, staleness: int) -> float:
    """Return the seconds of a step whose message is applied ``staleness`` steps late.

    ``compute`` counts coding, ``wire`` is how long the message keeps the uplink busy. Bound by compute, by
    the link, or by a cycle of ``staleness + 1`` computes that one message crosses.

    >>> delayed_step(0.04, 0.01, 0.03, staleness=0), delayed_step(0.04, 0.01, 0.03, staleness=1)
    (0.08, 0.04)
    """
    return max(compute, wire, (compute + delay + wire) / (staleness + 1))


def local_step(compute: float, coding: float, transit: float, steps: int, hidden: int = 0) -> float:
    """Return the seconds a step of a round of ``steps`` local steps and one exchange.

    The message of a round travels while the next ``hidden`` steps are computed, ``steps`` at most; 0 blocks.
    It is merged before the next one leaves, so two never share the line.
    """
    waiting = max(0.0, transit - min(hidden, steps) * compute)
    return compute + (coding + waiting) / steps


def ring_step(site: ReplicaSite) -> float:
    """Return the seconds of a step that waits for the exact mean of all gradients, by a ring."""
    hops = 2 * (site.replicas - 1)
    part = site.values * EXACT_BITS / 8 / site.replicas
    return site.compute + hops * (part / (site.rate or SECONDS) + (site.delay or 0.0))


def wire_seconds(site: ReplicaSite, choice: ReplicaChoice) -> float:
    """Return how long a message to every other rank keeps the uplink busy."""
    return (site.replicas - 1) * choice.nbytes(site.values, site.sides) / (site.rate or SECONDS)


def transit_seconds(site: ReplicaSite, choice: ReplicaChoice) -> float:
    """Return how long the message of a round is under way; a pause before it may shut TCP's window."""
    wire, delay = wire_seconds(site, choice), site.delay or 0.0
    window = FIRST_WINDOW / (site.rate or SECONDS)
    return wire + delay + (waiting(wire, 2 * delay, window) if site.restarts else 0.0)


def predicted_step(site: ReplicaSite, choice: ReplicaChoice) -> float:
    """Return the seconds of a step of this rank under ``choice``, others being as quick."""
    if choice.is_exact:
        return ring_step(site)
    if choice.local_steps == 1:
        wire = wire_seconds(site, choice)
        return delayed_step(site.compute + site.coding, wire, site.delay or 0.0, choice.staleness)
    transit = transit_seconds(site, choice)
    return local_step(site.compute, site.coding, transit, choice.local_steps, choice.staleness)


@dataclass(frozen=True)
class Ranks:
    """The measured ranks of one decision: each waits for the slowest, whose compute all have."""

    sites: tuple[ReplicaSite, ...]

    @classmethod
    def of(cls, sites: Sequence[ReplicaSite]) -> Ranks:
        """Take the ranks as they are, with the largest compute and coding of all."""
        compute, coding = max(s.compute for s in sites), max(s.coding for s in sites)
        return cls(tuple(replace(s, compute=compute, coding=coding) for s in sites))

    @property
    def compute(self) -> float:
        """Seconds of compute a step."""
        return self.sites[0].compute

    def paced(self, wire: float, delay: float) -> Ranks:
        """Return the same ranks on links whose messages and ways take so many times as long."""

        def paced(s: ReplicaSite) -> ReplicaSite:
            return replace(s, rate=(s.rate or SECONDS) / wire, delay=(s.delay or 0.0) * delay)

        return Ranks(tuple(map(paced, self.sites)))

    def step(self, choices: Sequence[ReplicaChoice]) -> float:
        """Return the seconds of a step: those of the slowest rank."""
        return max(predicted_step(s, c) for s, c in zip(self.sites, choices, strict=True))

    def explained(self, choices: Sequence[ReplicaChoice], why: str = "") -> list[ReplicaChoice]:
        """Return the choices with the step that they predict, and a reason with each rank's own numbers."""
        seconds = self.step(choices)
        return [
            replace(c, predicted=seconds, reason=_reason(s, c) + why)
            for s, c in zip(self.sites, choices, strict=True)
        ]


def undecided(
    sites: Sequence[ReplicaSite], every: int, start: ReplicaChoice
) -> Sequence[ReplicaChoice] | None:
    """Return the choices of ranks for which nothing is to be decided now, else ``None``.

    Those in use stay until it is time for new ones and all ranks are measured; ``start`` comes before them.
    """
    last = in_use(sites)
    if not all(s.is_measured for s in sites):
        return last or [start] * len(sites)
    return None if any(s.is_due(every) for s in sites) else last


def in_use(sites: Sequence[ReplicaSite]) -> list[ReplicaChoice] | None:
    """Return the choices in use, if every rank has one and all have the same plan."""
    last = [s.last for s in sites if s.last is not None]
    plans = {(c.staleness, c.local_steps) for c in last}
    return last if len(last) == len(sites) and len(plans) == 1 else None


def _reason(site: ReplicaSite, choice: ReplicaChoice) -> str:
    nbytes, steps = choice.nbytes(site.values, site.sides), choice.local_steps
    wire = transit_seconds(site, choice) if steps > 1 else wire_seconds(site, choice) + (site.delay or 0.0)
    size = f"{_number(nbytes / 1e6)} MB" if nbytes >= 1e6 else f"{_number(nbytes / 1e3)} kB"
    often = "a step" if steps == 1 else f"every {steps} steps"
    late = f", {choice.staleness} late" if steps == 1 else f", behind the next {choice.staleness}"
    return (
        f"link {_number((site.rate or 0.0) / 1e6)} MB/s, {1e3 * (site.delay or 0.0):.0f} ms; "
        f"{size} {often} take {_number(wire)} s of {_number(steps * site.compute)} s"
        f"{late if choice.staleness else ''}"
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"
