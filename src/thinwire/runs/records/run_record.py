"""The schema of the run record: the envelope that every kind of run has, field by field with its meaning.

An engine adds its own sections as fields of a subclass. Schema check, reader and the tables of
``docs/run-record.md`` are all made from these classes. A number that does not exist is ``null``: what was not
measured, and a loss that is not finite.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

from thinwire.runs.options import Options
from thinwire.types import MAX_KEY, InputError, MeasurementError

SCHEMA, FIRST = "thinwire-run/2", "thinwire-run/1"
EMULATED = "in-process shaper: no TCP dynamics"
KERNEL = "network namespaces: the kernel's TCP over an emulated link"
INVALID = "invalid"  # the status of a run whose network did not keep its time
T = TypeVar("T")


def about(meaning: str, default: Any = dataclasses.MISSING, make: Any = dataclasses.MISSING) -> Any:
    """Return a field of a record with its meaning, and its default or what makes one."""
    return field(default=default, default_factory=make, metadata={"meaning": meaning})


@dataclass
class RecipeText:
    """What a run sent: the name asked for and the printable spec it stands for."""

    name: str = about("the recipe as asked for, with its parameters: `aqsgd:fw=4,bw=8`")
    spec: str = about("the codecs and memories it stands for, in printable specs", "")


@dataclass
class LinkInfo:
    """The link as asked for and as measured: bytes/s and seconds."""

    asked: str = about("the shape asked for, or `none`", "none")
    rate_bytes_s: float | None = about("the shape's rate, bytes/s in each direction", None)
    delay_s: float | None = about("the shape's one-way delay, seconds", None)
    rtt_s: float | None = about("the round trip as measured on the link, seconds", None)
    emulation: str = about(
        "`none`, or what made the link slow and what that leaves out: `in-process shaper: no TCP dynamics`, "
        "or network namespaces with the kernel's own TCP",
        "none",
    )
    lateness_s: float | None = about(
        "how late the shaper delivered a message on average, seconds; too late, and the run is `invalid` "
        "(exit code 4)",
        None,
    )
    emulator: dict[str, Any] = about(
        "with `--emulate`: profiles, self-check, congestion control as read back, lateness and counters of "
        "the emulator",
        make=dict,
    )

    def keep_time(self, network: dict[str, Any]) -> None:
        """Note what an emulated network was and how it kept time, as it describes itself."""
        self.emulator, self.lateness_s = network, network["lateness"]["mean"]


@dataclass
class PeakMemory:
    """What the processes of a run took."""

    peak_rss_bytes: list[int] = about("the largest resident set of each rank, in rank order", make=list)
    weights_bytes: list[int] = about("of pictures: the weights that each rank held", make=list)
    device_bytes: list[int] = about(
        "of pictures: the most that each rank's GPU had allocated, 0 without", make=list
    )


@dataclass
class WireCounts:
    """What one rank sent to another: by our own count, and what the kernel made of it."""

    source: int = about("the rank that sent")
    destination: int = about("the rank it sent to")
    payload_bytes: int = about("bytes handed to TCP by our own count, message and frame headers included")
    wire_bytes: int | None = about(
        "bytes as IP packets: the kernel's count of the TCP stream, with retransmissions, and 52 bytes a "
        "segment",
        None,
    )
    retransmitted_bytes: int | None = about("bytes that TCP sent again", None)
    rtt_s: float | None = about("TCP's smoothed round trip at the end, seconds, queues included", None)
    min_rtt_s: float | None = about(
        "the least of TCP's smoothed round trips at the ends of steps, seconds", None
    )
    delivery_bytes_s: float | None = about(
        "the best recent delivery rate that was limited by the network, bytes/s", None
    )
    congestion: str | None = about("congestion control of the connection, read back from it", None)
    counted: str = about("who counted: the kernel, or nobody (`payload counts, no TCP_INFO`)", "")


@dataclass
class LinkMetrics:
    """One direction between two ranks in one step: bytes sent, and what was known of the link after it."""

    source: int = about("the rank that sent")
    destination: int = about("the rank it sent to")
    payload_bytes: int = about("bytes handed to TCP in the step, headers of ours included")
    rate_bytes_s: float | None = about("the link's own estimate after the step, bytes/s", None)
    rtt_s: float | None = about("the least round trip of late, by the link's own heartbeats, seconds", None)
    age_s: float | None = about("how old that estimate was, seconds", None)
    wire_bytes: int | None = about("the kernel's count for the step, as in `run.json`", None)
    retransmitted_bytes: int | None = about("bytes that TCP sent again in the step", None)
    kernel_rtt_s: float | None = about("TCP's smoothed round trip after the step, seconds", None)
    delivery_bytes_s: float | None = about("TCP's best recent delivery rate after the step, bytes/s", None)


@dataclass(kw_only=True)
class UnitMetrics:
    """One line of ``metrics.jsonl``: one unit of the run, with bytes and bits by stream."""

    seconds: float = about("wall-clock seconds of the unit")
    bytes: dict[str, int] = about("bytes sent in the unit by stream, headers included", make=dict)
    bits: dict[str, float | None] = about("bits sent for each value, by stream", make=dict)

    @property
    def number(self) -> int:
        """Number of the unit, from 1."""
        raise NotImplementedError


@dataclass
class RunRecord:
    """Everything one run leaves behind, nested as in ``run.json``; the base of what each kind of run leaves.

    >>> RunRecord(recipe=RecipeText("fp32")).to_dict()["recipe"]["name"]
    'fp32'
    """

    METRICS: ClassVar[type[UnitMetrics]] = UnitMetrics
    CONFIG: ClassVar[type[Options]] = Options
    KEYS: ClassVar[dict[str, str]] = {}  # what a kind has in the envelope's objects, and what it means
    # Options that change no figure; in any other one, runs that compare with each other are the same.
    FREE: ClassVar[frozenset[str]] = frozenset(
        {"recipe", "out", "host", "port", "advertise", "token_file", "deadline", "quiet", "json", "device"}
    )

    recipe: RecipeText = about("what was sent, and how")
    kind: str = about(
        "which engine ran: `pipeline`, `replicas`, `swarm`, `serving`, `pictures`, `federated`, `scene`, "
        "`model`, `state` or `rollouts`",
        "run",
    )
    unit: str = about(
        "what the run is made of, and `metrics.jsonl` has a line of: `step`, `round`, `version`, "
        "`repeat`, `batch`, `text`; or `scene`, `model`, which have no such lines",
        "unit",
    )
    status: str = about(
        "`running`, `done`, `interrupted` (by Ctrl-C, SIGTERM or SIGHUP), `failed` or `invalid` (no "
        "measurement, as `notes` say: the machine was too busy for the emulated link, say; reports leave its "
        "times out)",
        "running",
    )
    started: str = about(
        "local time of the start, ISO 8601 with the offset",
        make=lambda: datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    )
    notes: list[str] = about("warnings a reader must know, one sentence each", make=list)
    unreached: str = about(
        "where a run had a target and another rule ended it sooner: which one, and how far it came", ""
    )
    config: dict[str, Any] = about("every option of the run, by its name; see below", make=dict)
    environment: dict[str, Any] = about("versions and machine; see below", make=dict)
    link: LinkInfo = about("the link as asked for and as measured", make=LinkInfo)
    totals: dict[str, float] = about(
        "sums over the run: `seconds`, and how many units under their name (`steps`, `versions`)",
        make=lambda: {"seconds": 0.0},
    )
    bytes: dict[str, int] = about(
        "bytes sent by stream, every header included; under `raw_` and its name, what a stream would have "
        "been as plain fp32 tensors",
        make=dict,
    )
    bits_per_value: dict[str, float | None] = about(
        "bits sent for each value of a stream, metadata and headers included; fp32 is 32", make=dict
    )
    memory: PeakMemory = about("what the processes took", make=PeakMemory)
    wire: list[WireCounts] = about(
        "one object a direction between two ranks, over the training steps", make=list
    )
    schema: str = about(f"`{SCHEMA}`", SCHEMA)
    sections: dict[str, Any] = field(default_factory=dict, repr=False)  # what this class has no fields for

    def count(self, done: UnitMetrics) -> None:
        """Add a unit that is done to the totals, and what it sent to its streams."""
        self.totals[f"{self.unit}s"] = done.number
        self.totals["seconds"] += done.seconds
        for stream, sent in done.bytes.items():
            bits = done.bits.get(stream)
            values = round(8 * sent / bits) if bits else 0
            self.sent(
                stream,
                self.bytes.get(stream, 0) + sent,
                self.bytes.get(f"raw_{stream}", 0) // 4 + values,
            )

    def sent(self, stream: str, nbytes: int, values: int) -> None:
        """Set what a stream has sent so far: bytes, and the values that these stand for."""
        self.bytes[stream], self.bytes[f"raw_{stream}"] = nbytes, 4 * values
        self.bits_per_value[stream] = 8 * nbytes / values if values else None

    def recount(self, done: Sequence[UnitMetrics]) -> None:
        """Set the counts to those of the units done: a killed run's record is of some time before."""
        self.totals = dict.fromkeys(self.totals, 0)
        for stream in [name.removeprefix("raw_") for name in self.bytes if name.startswith("raw_")]:
            self.sent(stream, 0, 0)
        for unit in done:
            self.count(unit)

    @property
    def suffix(self) -> str:
        """What a run's folder has after the recipe's name, where a comparison runs that several times."""
        return ""

    def conditions(self) -> dict[str, str]:
        """Return what must be the same in runs whose figures compare, by name, in words.

        Precision, threads and devices count as the machine had them, whatever was asked for; and so does its
        processor.
        """
        there = self.environment
        had = {key: there.get(key) for key in ("dtype", "threads")}
        machine = there.get("machine") or {}
        names = [d.get("name") for d in there.get("devices") or ([{"name": "cpu"}] if machine else [])]
        computed = ", ".join(dict.fromkeys(map(str, names)))  # older records do not say: all were on the CPU
        had |= {"processor": machine.get("cpu"), "device": computed or None}
        asked = {key: str(value) for key, value in self.config.items() if key not in self.FREE}
        return asked | {key: str(value) for key, value in had.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; a number that is not finite becomes ``None``."""
        own = dataclasses.asdict(self)
        head = {name: own.pop(name) for name in ("schema", "kind", "unit")}
        sections = own.pop("sections")
        plain = finite(head | own | sections)
        return plain if isinstance(plain, dict) else {}

    @classmethod
    def from_dict(cls, values: Any, where: str = "run.json") -> Self:
        """Read a record back; ``InputError`` names the field that is missing or of a wrong type."""
        values = upgraded(values)
        record = build(cls, values, where)
        if record.schema != SCHEMA:
            raise InputError(f"{where} has schema {record.schema!r}; this thinwire reads {SCHEMA!r}")
        names = {f.name for f in dataclasses.fields(cls)}
        record.sections = {key: value for key, value in values.items() if key not in names}
        return record


def status_of(error: BaseException) -> str:
    """Return the status of a run that an error ended."""
    if isinstance(error, MeasurementError):
        return INVALID
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def upgraded(values: Any) -> Any:
    """Return a record of the first schema, which was of pipelines alone, as one of today's."""
    if not isinstance(values, dict) or values.get("schema") != FIRST:
        return values
    sent = values.get("bytes")
    boundaries = sent.get("by_boundary", []) if isinstance(sent, dict) else []
    rest = {k: v for k, v in sent.items() if k != "by_boundary"} if isinstance(sent, dict) else sent
    today = {"schema": SCHEMA, "kind": "pipeline", "unit": "step", "boundaries": boundaries}
    return values | today | ({"bytes": rest} if "bytes" in values else {})


def upgraded_unit(values: Any) -> Any:
    """Return a line of the first schema's metrics as one of today's, with bytes and bits by stream."""
    if not isinstance(values, dict) or "bytes_forward" not in values:
        return values
    line = {k: v for k, v in values.items() if not k.startswith(("bytes_", "bits_"))}
    for what in ("bytes", "bits"):
        streams = {k.removeprefix(f"{what}_"): v for k, v in values.items() if k.startswith(f"{what}_")}
        line[what] = streams
    return line


def finite(value: Any) -> Any:
    """Return plain values with ``None`` for every number that JSON cannot hold."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def build(cls: type[T], values: Any, where: str, prefix: str = "") -> T:
    """Return ``cls`` made from a JSON object. Unknown keys are left out, for records of later versions.

    Errors: ``InputError`` that names ``where`` and the dotted field.
    """
    if not isinstance(values, dict):
        raise InputError(f"{where}: {prefix.rstrip('.') or 'the record'} is not an object; run it again")
    hints = typing.get_type_hints(cls)
    kwargs = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]  # only dataclasses are built
        name = prefix + f.name
        if f.name in values:
            kwargs[f.name] = _value(hints[f.name], values[f.name], where, name)
        elif _required(f, hints[f.name], top=prefix == ""):
            raise InputError(f"{where} lacks {name!r}, so it is no complete run record; run it again")
    return cls(**kwargs)


def _required(f: dataclasses.Field[Any], hint: Any, top: bool) -> bool:
    """Return whether a record cannot be without a field: at the top, not without its objects of numbers."""
    if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
        return True
    counts = typing.get_origin(hint) is dict and typing.get_args(hint)[1] is not Any
    return top and (counts or dataclasses.is_dataclass(hint))


def _value(hint: Any, value: Any, where: str, name: str) -> Any:
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where, name + ".")
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    origin = typing.get_origin(hint)
    if origin is list:
        _expect(value, list, where, name)
        (inner,) = typing.get_args(hint)
        return [_value(inner, v, where, f"{name}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        _expect(value, dict, where, name)
        _, inner = typing.get_args(hint)
        return {k: _value(inner, v, where, f"{name}.{k}") for k, v in value.items()}
    return _number(value, where, name) if hint is float else _expect(value, hint, where, name)


def _number(value: Any, where: str, name: str) -> float:
    if value is None:  # a loss that was not finite
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}: {name!r} is {str(value)[:40]!r}, not a number; run it again")
    return _expect(value, type(value), where, name)  # a count that is whole stays so


def _expect(value: Any, kind: type, where: str, name: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InputError(
            f"{where}: {name!r} is {str(value)[:40]!r}, not of type {kind.__name__}; run it again"
        )
    if isinstance(value, int) and abs(value) >= MAX_KEY:  # no float, and no figure, could show it
        raise InputError(f"{where}: {name!r} is {str(value)[:20]}..., beyond 2**63; run it again")
    return value
