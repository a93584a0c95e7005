"""The tables of the study of serving, and its goals beside what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.serving.served_study import BF16, CODED, DRAFTED, FP32, ONE, PLAIN, PROMPTS, SLOW
from bench.study.tables import DASH, Draw, Row, columns, percent, tabled, times, yes

LINES = {
    "unlimited": "no limit",
    "100mbit": "100 Mbit/s, 5 ms",
    "20mbit": "20 Mbit/s, 40 ms",
    "lte": "`trace:lte`",
}
ORDER = tuple(LINES)
FASTER, SOONER, MANY = 2.0, 4.0, 5.0  # the goals


def _ordered(found: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = found["ways"]
    return sorted(rows, key=lambda r: (ORDER.index(r["link"]), r["dtype"] != BF16, r["prompt"]))


@tabled(
    "link, there and back", "dtype", "prompt", "first token, s: one machine", "bf16", "coded", "sooner",
    "tokens/s: one machine", "bf16", "drafts", "faster", "right drafts a trip", "fewer bytes", "equal: coded",
)  # fmt: skip
def ways(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each link, dtype and prompt."""
    for r in _ordered(found):
        own = r["ways"]
        first = [f"{own[way]['first_token_s']:.2f}" for way in (ONE, PLAIN, CODED)]
        rates = [f"{own[way]['tokens_per_second']:.1f}" for way in (ONE, PLAIN, DRAFTED)]
        yield [
            LINES[r["link"]], r["dtype"], f"{r['prompt']:,}",
            *first, f"{r['sooner']:.2f}×", *rates, f"{r['faster']:.2f}×",
            f"{own[DRAFTED]['accepted']:.2f}", times(r["fewer"]), percent(own[CODED]["equal_tokens"]),
        ]  # fmt: skip


@tabled("goal", "wanted", "found", "met")
def goals(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield what was wanted over 20 Mbit/s and 40 ms, and what was found: speed in bf16, equality in fp32."""
    rows = {r["prompt"]: r for r in found["ways"] if (r["link"], r["dtype"]) == (SLOW, BF16)}
    for prompt in PROMPTS:
        what = f"tokens/s with drafts, of bf16 stages', {prompt:,} tokens of prompt"
        yield _goal(what, FASTER, rows.get(prompt, {}).get("faster"))
    longest = PROMPTS[-1]
    yield _goal(
        f"first token sooner than bf16 stages', {longest:,}", SOONER, rows.get(longest, {}).get("sooner")
    )
    together = next(iter(found["at-once"]), None)
    yield _goal("tokens/s of 8 at once, of one", MANY, together and together["ways"][CODED]["gain"])
    same = min((r["drafts_equal"] for r in found["ways"] if r["dtype"] == FP32), default=None)
    met = yes(None if same is None else same == 1)
    yield ["likeliest tokens with drafts equal to those without", "100 %", percent(same), met]


def _goal(what: str, wanted: float, found: float | None) -> list[str]:
    met = yes(None if found is None else found >= wanted)
    return [what, f"{wanted:.0f}×", DASH if found is None else f"{found:.2f}×", met]


def _together(found: Mapping[str, Any]) -> list[Row]:
    names = {ONE: "one machine", PLAIN: "bf16", CODED: "coded", DRAFTED: "coded, drafts"}
    return [{"name": names[way]} | figures for r in found["at-once"] for way, figures in r["ways"].items()]


TABLES: dict[str, Draw] = {
    "serving-ways": ways,
    "serving-goals": goals,
    "serving-many": columns(
        _together,
        ("way", "{name}"),
        ("one at a time, tokens/s", "{one:.1f}"),
        ("8 at once, tokens/s", "{many:.1f}"),
        ("gain", "{gain:.2f}×"),
    ),
    "serving-blur": columns(
        "blur",
        ("recipe", "`thinwire:{what}`"),
        ("fewer bytes than bf16", "{fewer:.1f}×"),
        ("KL a token, nats", "{divergence:.4f}"),
        ("loss", "{loss:.3f}"),
        ("exact", "{exact_loss:.3f}"),
        ("equal likeliest tokens", lambda r: percent(r["equal_tokens"])),
        ("equal texts", lambda r: percent(r["equal_texts"])),
    ),
    "serving-llama": columns(
        "llama",
        ("link, there and back", lambda r: LINES[r["link"]]),
        ("prompt", "{prompt:,}"),
        ("first token, s: one machine", lambda r: f"{r['ways']['one']['first_token_s']:.2f}"),
        ("two", lambda r: f"{r['ways']['rpc']['first_token_s']:.2f}"),
        ("tokens/s: one machine", lambda r: f"{r['ways']['one']['tokens_per_second']:.1f}"),
        ("two", lambda r: f"{r['ways']['rpc']['tokens_per_second']:.1f}"),
        ("equal texts", lambda r: percent(r["equal_texts"])),
    ),
}
