"""The schema of the run record: every field of ``run.json`` and ``metrics.jsonl``, as dataclasses.

``docs/run-record.md`` explains each of them, and a test keeps the two equal. A number that does not exist is
``null``: what was not measured, and a loss that is not finite.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from dataclasses import dataclass, field
from typing import Any

from thinwire.lab.records.build import build
from thinwire.types import InputError

SCHEMA = "thinwire-run/1"
EMULATED = "in-process shaper: no TCP dynamics"
KERNEL = "network namespaces: the kernel's TCP over an emulated link"
INVALID = "invalid"  # the status of a run whose network did not keep its time


@dataclass
class RecipeInfo:
    """What crosses the stage boundaries: the name asked for and the printable spec it stands for."""

    name: str
    spec: str = ""


@dataclass
class LinkInfo:
    """The link as asked for and as measured: bytes/s and seconds."""

    asked: str = "none"
    rate_bytes_s: float | None = None
    delay_s: float | None = None
    rtt_s: float | None = None
    emulation: str = "none"
    lateness_s: float | None = None
    emulator: dict[str, Any] = field(default_factory=dict)


@dataclass
class Totals:
    """Sums over the training steps."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0


@dataclass
class BoundaryBytes:
    """Bytes sent over one stage boundary in one direction."""

    boundary: str
    direction: str
    bytes: int


@dataclass
class Bytes:
    """Bytes as sent on the links, all headers included; ``raw_*`` is what fp32 tensors would have been."""

    forward: int = 0
    backward: int = 0
    control: int = 0
    evaluation: int = 0
    saving: int = 0
    raw_forward: int = 0
    raw_backward: int = 0
    by_boundary: list[BoundaryBytes] = field(default_factory=list)


@dataclass
class WireCounts:
    """What one rank sent to another in training: by our own count, and what the kernel made of it."""

    source: int
    destination: int
    payload_bytes: int
    wire_bytes: int | None = None
    retransmitted_bytes: int | None = None
    rtt_s: float | None = None
    min_rtt_s: float | None = None
    delivery_bytes_s: float | None = None
    congestion: str | None = None
    counted: str = ""


@dataclass
class Decision:
    """What a policy chose for one direction of one boundary after a step, and why."""

    step: int
    boundary: str
    direction: str
    choice: str
    bits: float
    reason: str
    rate_bytes_s: float | None = None
    rtt_s: float | None = None


@dataclass
class BitsPerValue:
    """Bits sent for each value that crossed a boundary, metadata included."""

    forward: float | None = None
    backward: float | None = None


@dataclass
class Evaluation:
    """An uncompressed evaluation on the way, after ``step`` steps."""

    step: int
    heldout: float | None = None
    train: float | None = None


@dataclass
class Loss:
    """Mean cross-entropy in nats a token; ``train`` by step, the rest by uncompressed evaluation passes."""

    train: list[float] = field(default_factory=list)
    eval_first: float | None = None
    eval_final: float | None = None
    train_eval_first: float | None = None
    train_eval_final: float | None = None
    evaluations: list[Evaluation] = field(default_factory=list)


@dataclass
class Memory:
    """Largest resident set of each rank, in bytes."""

    peak_rss_bytes: list[int] = field(default_factory=list)


@dataclass
class RunRecord:
    """Everything one run leaves behind, nested as in ``run.json``.

    >>> RunRecord(recipe=RecipeInfo("fp32")).to_dict()["recipe"]["name"]
    'fp32'
    """

    recipe: RecipeInfo
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    link: LinkInfo = field(default_factory=LinkInfo)
    totals: Totals = field(default_factory=Totals)
    bytes: Bytes = field(default_factory=Bytes)
    bits_per_value: BitsPerValue = field(default_factory=BitsPerValue)
    loss: Loss = field(default_factory=Loss)
    memory: Memory = field(default_factory=Memory)
    wire: list[WireCounts] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    status: str = "running"
    notes: list[str] = field(default_factory=list)
    started: str = field(
        default_factory=lambda: datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    )
    schema: str = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; a number that is not finite becomes ``None``."""
        plain = finite(dataclasses.asdict(self))
        return plain if isinstance(plain, dict) else {}

    @classmethod
    def from_dict(cls, values: Any, where: str = "run.json") -> RunRecord:
        """Read a record back; ``InputError`` names the field that is missing or of a wrong type."""
        record = build(cls, values, where)
        if record.schema != SCHEMA:
            raise InputError(f"{where} has schema {record.schema!r}; this thinwire reads {SCHEMA!r}")
        return record


@dataclass
class LinkMetrics:
    """One direction between two ranks in one step: bytes sent, and what was known of the link after it."""

    source: int
    destination: int
    payload_bytes: int
    rate_bytes_s: float | None = None
    rtt_s: float | None = None
    age_s: float | None = None
    wire_bytes: int | None = None
    retransmitted_bytes: int | None = None
    kernel_rtt_s: float | None = None
    delivery_bytes_s: float | None = None


@dataclass
class StepMetrics:
    """One line of ``metrics.jsonl``, one optimiser step: bytes and seconds (``*_s``: means over ranks)."""

    step: int
    loss: float
    seconds: float
    compute_s: float
    encode_s: float
    decode_s: float
    wait_s: float
    bytes_forward: int
    bytes_backward: int
    bits_forward: float | None = None
    bits_backward: float | None = None
    lr: float | None = None
    ranks: list[dict[str, float]] | None = None
    links: list[LinkMetrics] | None = None


def finite(value: Any) -> Any:
    """Return plain values with ``None`` for every number that JSON cannot hold."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
