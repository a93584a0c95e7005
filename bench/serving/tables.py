"""What serving costs: the table of what ``thinwire demo serve`` leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.study.tables import Draw, tabled
from thinwire.runs.records.progress import megabytes

WAYS = {
    "one": "one machine",
    "bf16": "two stages, bf16",
    "coded": "two stages, prompts coded",
    "coded-drafts": "two stages, prompts coded, drafts",
}


@tabled("way", "first token", "tokens a second", "right drafts a trip", "sent", "fewer bytes", "equal tokens")
def served(found: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield a row for each way to serve; bytes are compared with bf16's."""
    plain = next(r["bytes"]["stages"] for r in found if r["recipe"]["name"] == "bf16")
    for r in found:
        sent, drafts = r["bytes"].get("stages"), r["recipe"]["name"] == "coded-drafts"
        yield [
            WAYS[r["recipe"]["name"]],
            f"{r['first_token_s']:.2f} s",
            f"{r['tokens_per_second']:.1f}",
            f"{r['accepted']:.2f}" if drafts else "–",
            megabytes(sent) if sent else "–",
            f"{plain / sent:.1f}×" if sent else "–",
            f"{r['equal_tokens']:.0%}",
        ]


TABLES: dict[str, Draw] = {"served": served}
