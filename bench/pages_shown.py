"""The table of ``thinwire demo scenes``: what its receiver saw after how many seconds."""

from __future__ import annotations

from typing import Any

from bench.tables import Rows, tabled


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
    db = "equal" if piece["psnr_db"] is None else f"{piece['psnr_db']:.1f} dB"
    return [name, f"{nbytes / 1e3:,.0f} kB", f"{splats:,}", f"{piece['seconds_measured']:.2f} s", db]
