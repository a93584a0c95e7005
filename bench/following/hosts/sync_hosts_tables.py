"""The tables of weight updates where rollouts happen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.following.hosts.host_coding import OURS
from bench.following.hosts.host_sources import EXPERTS
from bench.following.hosts.large_state import APPLY, PUBLISH
from bench.study.tables import DASH, Draw, Row, Rows, columns, percent, tabled, times, yes


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"


def _named(of: str) -> str:
    return "experts at random" if of == EXPERTS else f"SmolLM2-135M at {of}"


def _ways(found: Row) -> Iterator[Row]:
    """Yield a row for each way and model."""
    for of in found["coding"]:
        for way in sorted(of["ways"], key=lambda n: of["ways"][n]["bytes"]):
            mine, own = of["ways"][OURS], of["ways"][way]
            held = of["peak"][way] if of["peak"] else dict.fromkeys(("encode", "decode"))
            peak = {end: nbytes and nbytes / of["whole"] for end, nbytes in held.items()}
            yield {"of": of["of"], "versions": of["versions"], "way": way, **own, "peak": peak,
                   "whole": of["whole"] / own["bytes"], "more": own["bytes"] / mine["bytes"]}  # fmt: skip


ways = columns(
    _ways,
    ("weights", lambda r: _named(r["of"])), ("of versions", "{versions}"), ("way", "{way}"),
    ("a version", lambda r: _size(r["bytes"])),
    ("against bf16 whole", lambda r: times(r["whole"])), ("against thinwire", lambda r: times(r["more"])),
    ("encoding", "{encode:.2f} s"), ("applying", "{decode:.2f} s"),
    ("peak where it is encoded", lambda r: times(r["peak"]["encode"])),
    ("peak where it is applied", lambda r: times(r["peak"]["decode"])),
)  # fmt: skip

loops = columns(
    "loops",
    ("line", "{line}"), ("learning rate", "{rate}"), ("`max_age`", "{max_age}"), ("way", "{way}"),
    ("a step", "{step_s:.2f} s"), ("tokens a second", "{tokens_s:.1f}"),
    ("waiting for weights", lambda r: percent(r["waiting"])), ("versions behind", "{behind:.1f}"),
    ("age", "{age:.2f} s"), ("sent a step", lambda r: _size(r["sent"])),
    ("same bits at the end", lambda r: yes(r["identical"])),
    ("note", lambda r: "beside other work" if r["busy"] else "" if r["valid"] else "the machine was late"),
)  # fmt: skip


def _best(r: Row) -> str:
    return f"{_size(r['ways'][r['best_other']]['bytes'])} ({r['best_other']})"


short = columns(
    "coding",
    ("weights", lambda r: _named(r["of"])), ("thinwire", lambda r: _size(r["ways"][OURS]["bytes"])),
    ("vLLM, verl", lambda r: _size(r["ways"]["vllm sparse"]["bytes"])), ("best other", _best),
)  # fmt: skip


@tabled("goal", "found", "met")
def goals(found: Any) -> Rows:
    """Yield what the issue wants, and what was found."""
    for r in found["coding"]:
        told = f"at most a third of the bytes of the best of the others: {_named(r['of'])}"
        yield [told, percent(r["share"]), yes(r["met"])]
    versions, big = found["versions"], found["large"]
    told = "bit-identical after 100 versions, two restarts of each end"
    same = versions and versions["identical"] == versions["versions"]
    yield [told, f"{versions['identical']} of {versions['versions']}" if versions else DASH, yes(same)]
    number = f"{big['numel'] / 1e9:.2f} G" if big else "1.2 G"
    for what, limit, key in (("publish", PUBLISH, "whole_publish"), ("apply", APPLY, "apply")):
        told = f"two cores {what} {number} bf16 values at 1e-6 in {limit:g} s"
        met = yes(big["met"][what]) if big else yes(None)
        beside = f" beside other work (load {big['load']:.0f})" if big and big["met"][what] is None else ""
        took = f"{big[key]:.2f} s{beside}; {big[key + '_cpu']:.2f} s of one core" if big else DASH
        yield [told, took, met]


TABLES: dict[str, Draw] = {
    "sync_hosts-ways": ways,
    "sync_hosts-loops": loops,
    "sync_hosts-short": short,
    "sync_hosts-goals": goals,
}
