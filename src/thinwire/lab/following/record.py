"""What happened in a state demo, message by message, and what follows from it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

KEPT = ("version", "age", "nbytes", "seconds", "when")  # of an arrival


@dataclass
class Log:
    """One follower's part: times are seconds since the training began."""

    role: str
    arrivals: list[dict[str, float]] = field(default_factory=list)
    texts: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    joined: float | None = None
    cut: list[float] = field(default_factory=list)  # from, to
    finished: dict[str, Any] | None = None

    @property
    def wire_bytes(self) -> int:
        """All bytes that came, with all headers of the protocol."""
        return int(self.status.get("nbytes", 0))


@dataclass
class Record:
    """A demo's record; ``started`` is in seconds since the epoch."""

    plan: dict[str, Any]
    network: dict[str, Any]
    followers: dict[str, Log]
    started: float = 0.0
    nbytes: int = 0  # of the whole state, as followers use it
    numel: int = 0
    published: list[dict[str, Any]] = field(default_factory=list)
    trained: dict[str, Any] | None = None
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Steps trained and published so far."""
        return len(self.published)

    @property
    def now(self) -> float:
        """Seconds since the training began; 0 before."""
        return time.time() - self.started if self.started else 0.0

    @property
    def identical(self) -> bool:
        """Whether every follower ended with the last version, bit for bit."""
        if self.trained is None:
            return False
        wanted = (self.trained["version"], self.trained["digest"])
        ends = [log.finished for log in self.followers.values()]
        return all(e is not None and (e["version"], e["digest"]) == wanted for e in ends)

    def hear(self, who: str, message: Mapping[str, Any]) -> None:
        """Note what a process said."""
        words = {k: v for k, v in message.items() if k not in ("kind", "at")}
        at = message.get("at", 0.0) - self.started
        log = self.followers.get(who)
        if message["kind"] == "published":
            self.published.append(words | {"at": at})
        elif message["kind"] == "trained":
            self.trained = words
        elif log is None:
            return
        elif message["kind"] == "arrived":
            log.arrivals.append({k: words[k] for k in KEPT} | {"at": words["when"] - self.started})
        elif message["kind"] == "wrote":
            log.texts.append(words | {"at": at})
        elif message["kind"] == "status":
            log.status = words
        elif message["kind"] == "finished":
            log.finished = words | {"at": at}

    def ages(self, who: str) -> tuple[list[float], list[float]]:
        """Return times [s] and the age [s] of what a follower held: it grows, and falls at each arrival."""
        xs, ys = list[float](), list[float]()
        before: float | None = None  # when what is held was published
        for a in self.followers[who].arrivals:
            if before is not None:
                xs.append(a["at"])
                ys.append(a["at"] - before)
            xs.append(a["at"])
            ys.append(a["age"])
            before = a["at"] - a["age"]
        return xs, ys

    def ratio(self, nbytes: float) -> float:
        """Return how many times smaller than the whole state ``nbytes`` are."""
        return self.nbytes / nbytes if nbytes else 0.0

    def saving(self, who: str) -> float:
        """Return the bytes of all versions since a follower joined, each sent whole, over what came."""
        log = self.followers[who]
        count = sum(v["at"] >= (log.joined or 0.0) for v in self.published)
        return self.ratio(log.wire_bytes / max(1, count)) if log.wire_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return asdict(self) | {"identical": self.identical}
