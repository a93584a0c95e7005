"""Tables of packed scenes: every format on the same scene, and what the demo's receiver saw when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.study.tables import DASH, Draw, Row, Rows, columns, tabled, yes
from thinwire.runs.records.progress import decibels

NAMES = {"sog": "SOG, as it came", "spz": "SPZ 4", "compressed.ply": "compressed `.ply`"}
FORMS = {"float": "dequantised", "sog": "as it is"}
GOALS = {"spz": {"float": 30, "sog": 25}, "mesongs": {"float": 25, "sog": 25}}  # per cent fewer bytes
DECODED_S, ENCODED_S, FIRST_SHARE, FIRST_DB, WITHIN = 2.0, 60.0, 10, 26, 2


def called(name: str) -> str:
    """Return what a format is called."""
    return NAMES.get(name, f"`{name}`")


def name_of(row: Row) -> str:
    """Return what a row is called, and at whose quality it is."""
    return called(row["name"]) + (f" at the PSNR of {called(row['at'])}" if row.get("at") else "")


def ours_at(cell: Row, at: str) -> list[dict[str, Any]]:
    """Return our rows at a rival's quality: in layers, and in one."""
    return [row for row in cell["rows"] if row.get("at") == at]


def seconds(x: float | None) -> str:
    """Return processor seconds."""
    return DASH if x is None else f"{x:.2f}" if x < 1 else f"{x:.1f}"


def by_scene(rows: Callable[[Row], Iterable[Row]], *heads: Any) -> Draw:
    """Return what draws the rows of each scene, which is named in its first one."""

    def every(found: Row) -> Iterator[Row]:
        for cell in found["cells"]:
            scene = f"`{cell['level']}`, {cell['splats']:,} splats, {FORMS[cell['form']]}"
            for i, row in enumerate(rows(cell)):
                yield {"scene": "" if i else scene} | dict(row)

    return columns(every, ("scene", "{scene}"), *heads)


def _psnr(row: Row) -> str:
    return decibels(row["psnr_db"])


def _encoded(row: Row) -> str:
    return seconds(row["encode_cpu_s"])


def _by_stream(row: Row) -> str:
    ordered = sorted(row["streams"].items(), key=lambda x: -x[1])
    return ", ".join(f"{name.replace('_', ' ')} {nbytes / 1e3:,.0f}" for name, nbytes in ordered)


def _layers(cell: Row) -> Iterator[Row]:
    """Yield what a receiver sees after each layer, where the whole has SPZ's PSNR."""
    row = ours_at(cell, "spz")[0]
    for i, layer in enumerate(row["layers"], 1):
        yield layer | {"number": i, "share": layer["nbytes"] / row["nbytes"]}


def _goals(cell: Row) -> Iterator[Row]:
    """Yield what was to be reached, and what was."""

    def goal(name: str, wanted: str, found: str, met: bool) -> Row:
        return {"goal": name, "wanted": wanted, "found": found, "met": met}

    for rival in [row for row in cell["rows"] if ours_at(cell, row["name"])]:
        least = GOALS[rival["name"].partition(":")[0]][cell["form"]]
        for row in ours_at(cell, rival["name"]):
            fewer = 100 * (1 - row["nbytes"] / rival["nbytes"])
            name = f"`{row['name']}`, fewer bytes than {called(rival['name'])} at its PSNR"
            yield goal(name, f"{least} %", f"{fewer:.1f} %", fewer >= least)
    own = ours_at(cell, "spz")
    whole, first = own[0], own[0]["layers"][0]
    share, wanted = 100 * first["nbytes"] / whole["nbytes"], f"{FIRST_SHARE} % and {FIRST_DB} dB"
    met = share <= FIRST_SHARE and first["psnr_db"] >= FIRST_DB
    yield goal("first layer", wanted, f"{share:.1f} % and {_psnr(first)}", met)
    under = [100 * (1 - row["nbytes"] / row["target_nbytes"]) for row in cell["budgets"]]
    told = f"{min(under):.1f} to {max(under):.1f} %"
    yield goal("under the bytes asked for", f"0 to {WITHIN} %", told, all(0 <= x <= WITHIN for x in under))
    for what, most in (("encode", ENCODED_S), ("decode", DECODED_S)):
        slow = max(row[f"{what}_cpu_s"] for row in (*cell["budgets"], *own))
        yield goal(f"{what}d, CPU-s at most", f"{most:g}", seconds(slow), slow <= most)


@tabled("what was sent", "so far", "splats seen", "seen after", "PSNR")
def shown(record: Row) -> Rows:
    """The demo: each layer, and SPZ, which is one piece."""
    sent = record["packed_nbytes"] - sum(layer["nbytes"] for layer in record["layers"])
    pieces = list[tuple[str, float, Row]]()
    for i, layer in enumerate(record["layers"], 1):
        sent += layer["nbytes"]
        pieces.append((f"layer {i}", sent, layer))
    for rival in record["rivals"]:
        pieces.append((rival["name"].upper(), rival["nbytes"], rival | {"splats": record["splats"]}))
    for name, nbytes, piece in pieces:
        seen = f"{piece['seconds_measured']:.2f} s"
        yield [name, f"{nbytes / 1e3:,.0f} kB", f"{piece['splats']:,}", seen, _psnr(piece)]


TABLES: dict[str, Draw] = {
    "scenes": by_scene(
        lambda cell: cell["rows"],
        ("format", name_of), ("bytes", "{nbytes:.3fM} MB"), ("PSNR", _psnr), ("SSIM", "{ssim:.4f}"),
        ("encode, CPU-s", _encoded), ("decode, CPU-s", lambda row: seconds(row["decode_cpu_s"])),
    ),
    "scenes-streams": by_scene(lambda cell: cell["rows"], ("format", name_of), ("kB by stream", _by_stream)),
    "scenes-layers": by_scene(
        _layers,
        ("layer", "{number}"), ("bytes so far", "{nbytes:,.0fk} kB"), ("of all", "{share:.0fc} %"),
        ("splats seen", "{splats:,}"), ("PSNR", _psnr),
    ),
    "scenes-budgets": by_scene(
        lambda cell: cell["budgets"],
        ("asked for", "{target_nbytes:.3fM} MB"), ("packed", "{nbytes:.3fM} MB"),
        ("under", lambda row: f"{100 * (1 - row['nbytes'] / row['target_nbytes']):.1f} %"), ("PSNR", _psnr),
        ("encode, CPU-s", _encoded),
    ),
    "scenes-goals": by_scene(
        _goals,
        ("goal", "{goal}"), ("wanted", "{wanted}"), ("found", "{found}"),
        ("met", lambda g: yes(g["met"], "**no**")),
    ),
    "shown": shown,
}  # fmt: skip
