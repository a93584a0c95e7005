"""The record of one federated run: one method, one seed, on a virtual clock or on real machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.runs.options import Options
from thinwire.runs.records.run_record import RunRecord, UnitMetrics, about
from thinwire.types import InputError, require
from thinwire.uses.federated.run.options import FederatedConfig

TARGET = {"accuracy", "virtual_s", "up", "down"}
DEPLOYMENT = {
    "method",
    "processes",
    "check",
    "identical",
    "emulated",
    "link",
    "seconds",
    "foretold_s",
    "ratio",
}


@dataclass(kw_only=True)
class ModelVersionMetrics(UnitMetrics):
    """One line of ``metrics.jsonl``: one version of the model."""

    version: int = about("number of the version, from 1")
    virtual_s: float = about("virtual time at which it was made, seconds", 0.0)
    updates: int = about("updates that it took in", 0)
    staleness: float = about("by how many versions these were late, the mean", 0.0)
    density: float | None = about("share of the values that these sent, the mean", None)

    @property
    def number(self) -> int:
        """Number of the version, from 1."""
        return self.version


@dataclass
class AccuracyPoint:
    """What an evaluation found, and what had been sent by then."""

    version: int = about("version that was evaluated")
    virtual_s: float = about("virtual time, seconds")
    up: int = about("bytes that clients had sent by then")
    down: int = about("bytes that the server had sent by then")
    accuracy: float = about(
        "share of the held-out samples that were named right: of all, or of some drawn at random"
    )
    density: float | None = about("share of the values that the last updates sent, the mean", None)
    staleness: float = about("by how many versions the last updates were late, the mean", 0.0)


@dataclass
class Accuracy:
    """How good the model was, and when."""

    final: float | None = about("of the last version", None)
    best: float | None = about("of the version that evaluations found best, on all held-out samples", None)
    curve: list[AccuracyPoint] = about("evaluations in order; see below", make=list)


@dataclass
class ClientFigures:
    """What one client did."""

    id: int = about("number of the client")
    samples: int = about("samples that it holds")
    steps: float = about("local steps of a turn, the mean")
    ratio: float | None = about("share of the values that a turn sent, the mean", None)
    updates: int = about("updates that were taken in", 0)
    up: int = about("bytes that it sent", 0)
    down: int = about("bytes that it was sent", 0)
    staleness: float = about("by how many versions its updates were late, the mean", 0.0)


@dataclass
class RefusedUpdate:
    """An update that was not taken in."""

    client: int = about("number of the client")
    at_s: float = about("virtual time, seconds")
    reason: str = about("why")


@dataclass
class FederatedRecord(RunRecord):
    """The record of a model that many clients trained without showing their data."""

    METRICS: ClassVar[type[UnitMetrics]] = ModelVersionMetrics
    CONFIG: ClassVar[type[Options]] = FederatedConfig
    KEYS: ClassVar[dict[str, str]] = {
        "totals.seconds": "wall-clock seconds of the run",
        "totals.virtual_s": "virtual seconds until its end",
        "totals.rounds": "versions that were made",
        "totals.local_steps": "local steps of all clients",
        "bytes.up": "bytes that clients sent, headers included",
        "bytes.down": "bytes that the server sent, headers included",
    }
    FREE: ClassVar[frozenset[str]] = RunRecord.FREE | {"methods", "seeds", "workers"}

    kind: str = about("`federated`", "federated")
    unit: str = about("`version`: a version of the model", "version")
    seed: int = about("seed of weights, split and drawing", 0)
    accuracy: Accuracy = about("see below", make=Accuracy)
    target: dict[str, float] | None = about(
        "when `--until` was reached, and the bytes sent by then: `accuracy`, `virtual_s`, `up`, `down`; null "
        "where it was not, or not asked for",
        None,
    )
    clients: list[ClientFigures] = about("one object a client; see below", make=list)
    counts: list[list[int]] = about("samples by client and class", make=list)
    refused: list[RefusedUpdate] = about("updates that were not taken in; see below", make=list)
    weights: str = about("SHA-256 of the final weights as float32 bytes", "")
    deployment: dict[str, Any] = about(
        "with `--deploy`: whether real processes ended with the same weights, and the seconds of rounds as "
        "foretold and as measured",
        make=dict,
    )

    def __post_init__(self) -> None:
        for name, value, wanted in (
            ("target", self.target, TARGET),
            ("deployment", self.deployment or None, DEPLOYMENT),
        ):
            lacks = ", ".join(sorted(wanted - value.keys())) if value is not None else ""
            require(not lacks, InputError, f"{name} of a federated record lacks {lacks}; run it again")

    @property
    def suffix(self) -> str:
        """The seed, where the run was one of several seeds."""
        return f"-{self.seed}" if "," in str(self.config.get("seeds", "")) else ""
