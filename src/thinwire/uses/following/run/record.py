"""The record of a followed state: its followers, what came to each and when, and one line a version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.runs.options import Options
from thinwire.runs.records.run_record import RunRecord, UnitMetrics, about
from thinwire.uses.following.run.options import StateConfig

STREAM = "changes"


@dataclass
class FollowerLog:
    """One follower's part. Times are seconds since the training began."""

    role: str = about("what it does")
    arrivals: list[dict[str, float]] = about(
        "the patches that came: `version`, `age` and `at` in seconds, `nbytes`, `seconds` on their way",
        make=list,
    )
    texts: list[dict[str, Any]] = about(
        "what its newest weights wrote: `version`, `step`, `text`, `at`", make=list
    )
    status: dict[str, Any] = about(
        "the last it said of itself: `nbytes` received with all headers, `pause` of its model, the longest",
        make=dict,
    )
    joined: float | None = about("when it began to follow", None)
    cut: list[float] = about("when its link was cut, and when it was mended", make=list)
    finished: dict[str, Any] | None = about(
        "what it ended with: `version`, and `digest`, the SHA-256 of all its weights", None
    )

    @property
    def wire_bytes(self) -> int:
        """All bytes that came, with all headers of the protocol."""
        return int(self.status.get("nbytes", 0))


@dataclass(kw_only=True)
class StateVersionMetrics(UnitMetrics):
    """One published version."""

    version: int = about("number of the version, from 2: the base that all have is 1")
    step: int = about("the optimiser step that made it")
    at: float = about("when it was published, seconds since the training began")
    rate: float = about("learning rate of the step")
    loss: float = about("training loss of the step, nats a token")
    changed: int = about("weights that changed, as followers use them")
    training_s: float = about("seconds of the step")
    publishing_s: float = about("seconds of `publish`")

    @property
    def number(self) -> int:
        """How many versions were published by then."""
        return self.version - 1


@dataclass
class StateRecord(RunRecord):
    """The record of a state that was trained, published and followed."""

    METRICS: ClassVar[type[UnitMetrics]] = StateVersionMetrics
    CONFIG: ClassVar[type[Options]] = StateConfig
    KEYS: ClassVar[dict[str, str]] = {
        "totals.seconds": "wall-clock seconds from the start of training to the last version",
        "totals.versions": "versions published",
        f"bytes.{STREAM}": "bytes that came to all followers, all headers of the protocol included",
        f"bytes.raw_{STREAM}": "what every version would have been for each follower as plain fp32 tensors",
        f"bits_per_value.{STREAM}": "bits received for each weight, version and follower",
    }

    kind: str = about("`state`", "state")
    unit: str = about("`version`: a published version", "version")
    nbytes: int = about("bytes of the whole state, as followers use it", 0)
    numel: int = about("its weights", 0)
    followers: dict[str, FollowerLog] = about("each follower by name", make=dict)
    trained: dict[str, Any] | None = about(
        "what the trainer ended with: `version`, and `digest`, the SHA-256 of all its weights", None
    )
    identical: bool = about("whether every follower ended with the trainer's bits", False)

    def __post_init__(self) -> None:
        self.totals.setdefault("versions", 0)
        if STREAM not in self.bytes:
            self.sent(STREAM, 0, 0)

    def ends_alike(self) -> bool:
        """Return whether every follower ended with the last version, bit for bit."""
        if self.trained is None:
            return False
        wanted = (self.trained["version"], self.trained["digest"])
        ends = [log.finished for log in self.followers.values()]
        return all(e is not None and (e["version"], e["digest"]) == wanted for e in ends)

    def ratio(self, nbytes: float) -> float:
        """Return how many times smaller than the whole state ``nbytes`` are."""
        return self.nbytes / nbytes if nbytes else 0.0

    def ages(self, who: str) -> tuple[list[float], list[float]]:
        """Return times [s] and the age [s] of a follower's version: it grows, and falls at each arrival."""
        xs, ys = list[float](), list[float]()
        before: float | None = None  # when the follower's version was published
        for a in self.followers[who].arrivals:
            if before is not None:
                xs.append(a["at"])
                ys.append(a["at"] - before)
            xs.append(a["at"])
            ys.append(a["age"])
            before = a["at"] - a["age"]
        return xs, ys
