"""The tables of ``thinwire demo scenes``, what its receiver saw when, and of ``thinwire demo models``."""

from __future__ import annotations

from typing import Any

from bench.study.tables import Rows, tabled
from thinwire.links.shape import LinkShape
from thinwire.runs.records.progress import decibels


@tabled("what was sent", "so far", "splats seen", "seen after", "PSNR")
def shown(record: dict[str, Any]) -> Rows:
    """Each layer, and SPZ, which is one piece."""
    sent = record["packed_nbytes"] - sum(layer["nbytes"] for layer in record["layers"])
    for i, layer in enumerate(record["layers"], 1):
        sent += layer["nbytes"]
        yield _row(f"layer {i}", sent, layer["splats"], layer)
    for rival in record["rivals"]:
        yield _row(rival["name"].upper(), rival["nbytes"], record["splats"], rival)


def _row(name: str, nbytes: int, splats: int, piece: dict[str, Any]) -> list[str]:
    seen = f"{piece['seconds_measured']:.2f} s"
    return [name, f"{nbytes / 1e3:,.0f} kB", f"{splats:,}", seen, decibels(piece["psnr_db"])]


@tabled("packed by", "bytes", "seconds", "perplexity")
def packed(record: dict[str, Any]) -> Rows:
    """A model as it was, as it was packed, and as others pack it."""
    ours = f"`thinwire`, {record['bits_a_weight']:.2f} bits a weight"
    ways = [
        ("as it was", record["source_nbytes"], record["perplexity_source"]),
        (ours, record["packed_nbytes"], record["perplexity"]),
        *((rival["name"], rival["nbytes"], rival["perplexity"]) for rival in record["rivals"]),
    ]
    link = LinkShape.parse(record["config"]["link"])
    for name, nbytes, perplexity in ways:
        seconds = nbytes / (link.rate or 1) + link.delay
        yield [name, f"{nbytes / 1e6:,.1f} MB", f"{seconds:,.0f} s", f"{perplexity:.1f}"]
