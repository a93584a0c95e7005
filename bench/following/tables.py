"""The tables of what following a model costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from bench.study.tables import DASH, Draw, Row, Rows, columns, table, yes
from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.run_record import build
from thinwire.uses.following.run.cards import saving
from thinwire.uses.following.run.record import StateRecord, StateVersionMetrics

OURS, PLAIN = "thinwire", "thinwire, numpy"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _late(valid: bool) -> str:
    return "" if valid else " (the machine was late)"


PLACE = (("learning rate", "{rate:g}"), ("steps a version", "{every}"))
ratios = columns(  # bytes a version against bf16 whole and the best of the others
    lambda found: (
        r | {"mine": r["ways"][OURS], "best": r["ways"][r["best_other"]]} for r in found["coding"]
    ),
    *PLACE, ("changed", "{changed:.2%}"), ("thinwire", lambda r: _size(r["mine"]["bytes"])),
    ("against bf16 whole", "{mine[ratio]:.0f}×"),
    ("best other", lambda r: f"{_size(r['best']['bytes'])} ({r['best_other']})"),
    ("against bf16 whole", "{best[ratio]:.0f}×"), ("fewer bytes than it", "{fewer:.1%}"),
    ("goals met", lambda r: yes(r["met"]["ratio"] and r["met"]["fewer"])),
)  # fmt: skip


def ways(found: Row) -> str:
    """Return bytes a version of every way."""
    names = [name for r in found["coding"][:1] for name in r["ways"] if name != PLAIN]
    sizes = ((name, lambda r, name=name: _size(r["ways"][name]["bytes"])) for name in names)
    return columns("coding", *PLACE, *sizes)(found)


def speeds(found: Row) -> str:
    """Return GB/s of bf16 input a core, whole path, and the pause."""

    def speed(name: str, head: str) -> tuple[str, str]:
        return head, f"{{ways[{name}][encode]:.2f}} / {{ways[{name}][decode]:.2f}}"

    passes = "compiled" if all(r["compiled"] for r in found["coding"]) else "not compiled"
    return columns(
        "coding", *PLACE, ("changed", "{changed:.2%}"),
        speed(OURS, f"thinwire ({passes}): encode / decode, GB/s"),
        *(speed(n, f"{n}: encode / decode") for n in (PLAIN, "xor zstd-1", "pulse zstd-1")),
        ("publish() takes", lambda r: _time(r["parts_s"]["publish"])),
        ("making the patch", lambda r: _time(r["parts_s"]["code"])),
        ("consumer's pause: median / worst", "{pause[median]:.1fm} / {pause[worst]:.1fm} ms"),
        ("goals met", lambda r: yes(r["met"]["speed"] and r["met"]["pause"])),
    )(found)  # fmt: skip


def _parts(name: str) -> Any:
    return lambda a: _time(a[name])


ages = columns(  # of versions at their arrival over slow links
    lambda found: (a | a["summary"] for a in found["age"]),
    ("link, 30 ms", "{mbit} Mbit/s"), ("TCP", "{control}"), ("learning rate", "{rate:g}"),
    ("steps a version", "{stride}"),
    ("a version every", lambda a: f"{_time(a['published_every'])} ({a['times_the_link']:.1f}× the link)"),
    ("published → arrived", "{published} → {arrived}"), ("patch", lambda a: _size(a["bytes"])),
    ("its transfer T", _parts("transfer")), ("encoding", _parts("encode")),
    ("after its last byte", _parts("apply")),
    ("age at arrival: median / worst", lambda a: f"{_time(a['age']['median'])} / {_time(a['age']['worst'])}"),
    ("within T + round trip + both", "{within_first:.0%}, worst {worst_of_first:.2f}×"),
    ("within 2T + round trip", "{within_second:.0%}, worst {worst_of_second:.2f}×"),
    ("note", lambda a: "" if a["valid"] else "the machine was late"),
)  # fmt: skip


def beside(found: Row) -> str:
    """Return the age of versions that do not wait for each other, ours and the others', over bbr."""
    sent = [row | {k: o[k] for k in ("mbit", "rate", "valid")} for o in found["others"] for row in o["rows"]]
    names = list(dict.fromkeys(row["way"] for row in sent))

    def theirs(way: str, a: Row) -> str:
        place = {"way": way} | {k: a[k] for k in ("mbit", "rate", "stride")}
        known = [s for s in sent if place.items() <= s.items()]
        if not known:
            return DASH
        return _time(statistics.fmean(s["age"] for s in known)) + _late(all(s["valid"] for s in known))

    def mine(a: Row) -> str:
        both = a["summary"]["age"]
        return f"{_time(both['median'])} / {_time(both['worst'])}{_late(a['valid'])}"

    alone = [a for a in found["age"] if a["pace"] in ("trained", "apart") and a["control"] == "bbr"]
    return columns(
        lambda _: sorted(alone, key=lambda a: (a["mbit"], a["rate"], a["stride"])),
        ("link, 30 ms", "{mbit} Mbit/s"), ("learning rate", "{rate:g}"), ("steps a version", "{stride}"),
        (f"{OURS}: median / worst", mine),
        *((name, lambda a, name=name: theirs(name, a)) for name in names),
    )(found)  # fmt: skip


FEEDS = {"one": "one follower", "relay": "eight behind one relay", "direct": "eight, each on its own"}


def _fed(found: Row) -> Iterator[Row]:
    """Yield what leaves the publisher for one follower and for many."""
    base = next((f["uplink_bytes"] / f["versions"] for f in found["feed"] if f["kind"] == "one"), None)
    for f in found["feed"]:
        each = f["uplink_bytes"] / f["versions"]
        came = f["versions"] + (f["kind"] != "relay")  # who has no base gets the first version too, whole
        yield f | {"each": each, "came": came, "times": base and each / base}


feeds = columns(
    _fed,
    ("followers", lambda f: FEEDS[f["kind"]] + _late(f["network"]["valid"])),
    ("publisher's uplink, a version", lambda f: _size(f["each"])),
    ("against one follower", lambda f: DASH if f["times"] is None else f"{f['times']:.2f}×"),
    ("versions each got", lambda f: f"{min(f['arrived'])} to {max(f['arrived'])} of {f['came']}"),
    ("all bit-identical", lambda f: yes(f["identical"])),
)


def followed(found: Row) -> str:
    """Return what came to each follower of the state demo, and how old it was."""
    lines = [build(StateVersionMetrics, line, "a version") for line in found["metrics"]]
    run = Run("followed", StateRecord.from_dict(found["record"], "the state demo's record"), lines)
    record = run.record

    def rows() -> Rows:
        for log in record.followers.values():
            sizes, ages = ([a[key] for a in log.arrivals] for key in ("nbytes", "age"))
            yield [
                log.role,
                str(len(sizes)),
                _size(statistics.median(sizes)),
                _size(log.wire_bytes),
                f"{saving(run, log):.0f}×",
                f"{_time(statistics.median(ages))} / {_time(max(ages))}",
                yes(log.finished["digest"] == record.trained["digest"]),
            ]

    head = ["follower", "versions that came", "a patch, median", "received, with all headers",
            "against each version whole", "age at arrival: median / worst",
            "ended with the trainer's bits"]  # fmt: skip
    published = f"{len(lines)} versions, {record.config['steps']} at each of the two rates"
    return f"{table(head, rows())}\n\nPublished were {published}; what merged on the way came as one."


coded = columns(  # what more classes gain, and what they cost
    "coded", ("learning rate", "{rate:g}"), ("versions", "{versions}"),
    ("up to 4 classes", lambda r: _size(r["before"]["bytes"])),
    ("up to 16", lambda r: _size(r["now"]["bytes"])), ("fewer", "{fewer:.2f}×"),
    ("publishing and coding take", "{encode_slower:.2f}×"), ("applying takes", "{decode_slower:.2f}×"),
)  # fmt: skip


def ideal(found: Row) -> str:
    """Return ideal code lengths by context, a column a learning rate."""
    rows = found["ideal"]
    names = list(rows[0]["bytes"]) if rows else []
    known = "exponent"  # what both ends know without a memory
    return table(
        ["known of a weight", *(f"{r['rate']:g}" for r in rows)],
        ([n, *(f"{_size(r['bytes'][n])} ({r['bytes'][known] / r['bytes'][n]:.2f}×)" for r in rows)]
         for n in names),
    )  # fmt: skip


TABLES: dict[str, Draw] = {
    "movers-coded": coded,
    "movers-ideal": ideal,
    "state-ratios": ratios,
    "state-ways": ways,
    "state-speeds": speeds,
    "state-ages": ages,
    "state-beside": beside,
    "state-feeds": feeds,
    "followed": followed,
}
