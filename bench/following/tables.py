"""The tables of ``costs`` for the docs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from bench.study.tables import Rows, table, tabled
from thinwire.runs.records.build import build
from thinwire.runs.records.runs import Run
from thinwire.uses.following.run.cards import saving
from thinwire.uses.following.run.record import StateRecord, VersionMetrics

OURS, PLAIN = "thinwire", "thinwire, numpy"
DASH = "–"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _yes(ok: bool) -> str:
    return "yes" if ok else "no"


@tabled("learning rate", "steps a version", "changed", "thinwire", "against bf16 whole", "best other",
        "against bf16 whole", "fewer bytes than it", "goals met")  # fmt: skip
def ratios(found: dict[str, Any]) -> Rows:
    """Return bytes a version against bf16 whole and the best of the others."""
    for r in found["coding"]:
        mine, best = r["ways"][OURS], r["ways"][r["best_other"]]
        yield [
            f"{r['rate']:g}",
            str(r["every"]),
            f"{r['changed']:.2%}",
            _size(mine["bytes"]),
            f"{mine['ratio']:.0f}×",
            f"{_size(best['bytes'])} ({r['best_other']})",
            f"{best['ratio']:.0f}×",
            f"{r['fewer']:.1%}",
            _yes(r["met"]["ratio"] and r["met"]["fewer"]),
        ]


def ways(found: dict[str, Any]) -> str:
    """Return bytes a version of every way."""
    names = [name for r in found["coding"][:1] for name in r["ways"] if name != PLAIN]
    rows = (
        [f"{r['rate']:g}", str(r["every"]), *(_size(r["ways"][n]["bytes"]) for n in names)]
        for r in found["coding"]
    )
    return table(["learning rate", "steps a version", *names], rows)


def speeds(found: dict[str, Any]) -> str:
    """Return GB/s of bf16 input a core, whole path, and the pause."""
    others = (PLAIN, "xor zstd-1", "pulse zstd-1")

    def rows() -> Rows:
        for r in found["coding"]:
            both = [f"{r['ways'][n]['encode']:.2f} / {r['ways'][n]['decode']:.2f}" for n in (OURS, *others)]
            parts = [_time(r["parts_s"][k]) for k in ("publish", "code")]
            pause = r["pause"]
            yield [
                f"{r['rate']:g}",
                str(r["every"]),
                f"{r['changed']:.2%}",
                *both,
                *parts,
                f"{pause['median'] * 1e3:.1f} / {pause['worst'] * 1e3:.1f} ms",
                _yes(r["met"]["speed"] and r["met"]["pause"]),
            ]

    passes = "compiled" if all(r["compiled"] for r in found["coding"]) else "not compiled"
    head = ["learning rate", "steps a version", "changed", f"thinwire ({passes}): encode / decode, GB/s",
            *(f"{n}: encode / decode" for n in others), "publish() takes", "making the patch",
            "consumer's pause: median / worst", "goals met"]  # fmt: skip
    return table(head, rows())


@tabled("link, 30 ms", "TCP", "learning rate", "steps a version", "a version every",
        "published → arrived", "patch", "its transfer T", "encoding", "after its last byte",
        "age at arrival: median / worst", "within T + round trip + both", "within 2T + round trip",
        "note")  # fmt: skip
def ages(found: dict[str, Any]) -> Rows:
    """Return the age of versions at their arrival over slow links."""
    for a in found["age"]:
        s = a["summary"]
        note = "" if a["valid"] else "the machine was late"
        yield [
            f"{a['mbit']} Mbit/s",
            a["control"],
            f"{a['rate']:g}",
            str(a["stride"]),
            f"{_time(s['published_every'])} ({s['times_the_link']:.1f}× the link)",
            f"{s['published']} → {s['arrived']}",
            _size(s["bytes"]),
            _time(s["transfer"]),
            _time(s["encode"]),
            _time(s["apply"]),
            f"{_time(s['age']['median'])} / {_time(s['age']['worst'])}",
            f"{s['within_first']:.0%}, worst {s['worst_of_first']:.2f}×",
            f"{s['within_second']:.0%}, worst {s['worst_of_second']:.2f}×",
            note,
        ]


def beside(found: dict[str, Any]) -> str:
    """Return the age of versions that do not wait for each other, ours and the others', over bbr."""
    sent = [row | {k: o[k] for k in ("mbit", "rate", "valid")} for o in found["others"] for row in o["rows"]]
    names = list(dict.fromkeys(row["way"] for row in sent))

    def of(way: str, place: dict[str, Any]) -> str:
        known = [s for s in sent if s["way"] == way and place.items() <= s.items()]
        if not known:
            return DASH
        return _time(statistics.fmean(s["age"] for s in known)) + _late(all(s["valid"] for s in known))

    def rows() -> Rows:
        alone = [a for a in found["age"] if a["pace"] in ("trained", "apart") and a["control"] == "bbr"]
        for a in sorted(alone, key=lambda a: (a["mbit"], a["rate"], a["stride"])):
            both = a["summary"]["age"]
            mine = f"{_time(both['median'])} / {_time(both['worst'])}{_late(a['valid'])}"
            theirs = [of(name, {k: a[k] for k in ("mbit", "rate", "stride")}) for name in names]
            yield [f"{a['mbit']} Mbit/s", f"{a['rate']:g}", str(a["stride"]), mine, *theirs]

    head = ["link, 30 ms", "learning rate", "steps a version", f"{OURS}: median / worst", *names]
    return table(head, rows())


def _late(valid: bool) -> str:
    return "" if valid else " (the machine was late)"


@tabled("followers", "publisher's uplink, a version", "against one follower", "versions each got",
        "all bit-identical")  # fmt: skip
def feeds(found: dict[str, Any]) -> Rows:
    """Return what leaves the publisher for one follower and for many."""
    names = {"one": "one follower", "relay": "eight behind one relay", "direct": "eight, each on its own"}
    base = next((f["uplink_bytes"] / f["versions"] for f in found["feed"] if f["kind"] == "one"), None)

    for f in found["feed"]:
        each = f["uplink_bytes"] / f["versions"]
        first = f["kind"] != "relay"  # who has no base gets the first version too, as a keyframe
        arrived = f"{min(f['arrived'])} to {max(f['arrived'])} of {f['versions'] + first}"
        times = DASH if base is None else f"{each / base:.2f}×"
        yield [
            names[f["kind"]] + _late(f["network"]["valid"]),
            _size(each),
            times,
            arrived,
            _yes(f["identical"]),
        ]


def followed(found: dict[str, Any]) -> str:
    """Return what came to each follower of the state demo, and how old it was."""
    lines = [build(VersionMetrics, line, "a version") for line in found["metrics"]]
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
                _yes(log.finished["digest"] == record.trained["digest"]),
            ]

    head = ["follower", "versions that came", "a patch, median", "received, with all headers",
            "against each version whole", "age at arrival: median / worst",
            "ended with the trainer's bits"]  # fmt: skip
    published = f"{len(lines)} versions, {record.config['steps']} at each of the two rates"
    return f"{table(head, rows())}\n\nPublished were {published}; what merged on the way came as one."


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "state-ratios": ratios,
    "state-ways": ways,
    "state-speeds": speeds,
    "state-ages": ages,
    "state-beside": beside,
    "state-feeds": feeds,
}
