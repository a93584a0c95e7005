"""Tables of packed scenes: every format of a scene, on the same scene."""

from __future__ import annotations

from typing import Any

from bench.study.tables import Rows, tabled
from thinwire.runs.records.progress import decibels

NAMES = {"sog": "SOG, as it came", "spz": "SPZ 4", "compressed.ply": "compressed `.ply`"}
FORMS = {"float": "dequantised", "sog": "as it is"}
GOALS = {"spz": {"float": 30, "sog": 25}, "mesongs": {"float": 25, "sog": 25}}  # per cent fewer bytes
DECODED_S, ENCODED_S, FIRST_SHARE, FIRST_DB, WITHIN = 2.0, 60.0, 10, 26, 2


def name_of(row: dict[str, Any]) -> str:
    """Return what a row is called, and at whose quality it is."""
    name = NAMES.get(row["name"], f"`{row['name']}`")
    at = row.get("at")
    return f"{name} at the PSNR of {NAMES.get(at, f'`{at}`')}" if at else name


def scene_of(cell: dict[str, Any]) -> str:
    """Return what a cell is about."""
    return f"`{cell['level']}`, {cell['splats']:,} splats, {FORMS[cell['form']]}"


def ours_at(cell: dict[str, Any], at: str) -> list[dict[str, Any]]:
    """Return our rows at a rival's quality: in layers, and in one."""
    return [row for row in cell["rows"] if row.get("at") == at]


def row_of(cell: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a rival's row."""
    found: dict[str, Any] = next(row for row in cell["rows"] if row["name"] == name)
    return found


def seconds(x: float | None) -> str:
    """Return processor seconds."""
    return "–" if x is None else f"{x:.2f}" if x < 1 else f"{x:.1f}"


@tabled("scene", "format", "bytes", "PSNR", "SSIM", "encode, CPU-s", "decode, CPU-s")
def formats(found: Any) -> Rows:
    """Every format of each scene."""
    for cell in found["cells"]:
        for i, row in enumerate(cell["rows"]):
            yield [
                "" if i else scene_of(cell),
                name_of(row),
                f"{row['nbytes'] / 1e6:.3f} MB",
                decibels(row["psnr_db"]),
                f"{row['ssim']:.4f}",
                seconds(row["encode_cpu_s"]),
                seconds(row["decode_cpu_s"]),
            ]


@tabled("scene", "format", "kB by stream")
def streams(found: Any) -> Rows:
    """What takes the bytes of each format."""
    for cell in found["cells"]:
        for i, row in enumerate(cell["rows"]):
            ordered = sorted(row["streams"].items(), key=lambda x: -x[1])
            told = ", ".join(f"{name.replace('_', ' ')} {nbytes / 1e3:,.0f}" for name, nbytes in ordered)
            yield ["" if i else scene_of(cell), name_of(row), told]


@tabled("scene", "layer", "bytes so far", "of all", "splats seen", "PSNR")
def layers(found: Any) -> Rows:
    """What a receiver sees after each layer, where the whole has SPZ's PSNR."""
    for cell in found["cells"]:
        row = ours_at(cell, "spz")[0]
        for i, layer in enumerate(row["layers"]):
            share = layer["nbytes"] / row["nbytes"]
            yield [
                "" if i else scene_of(cell),
                str(i + 1),
                f"{layer['nbytes'] / 1e3:,.0f} kB",
                f"{100 * share:.0f} %",
                f"{layer['splats']:,}",
                decibels(layer["psnr_db"]),
            ]


@tabled("scene", "asked for", "packed", "under", "PSNR", "encode, CPU-s")
def budgets(found: Any) -> Rows:
    """How near packing comes to the bytes asked for."""
    for cell in found["cells"]:
        for i, row in enumerate(cell["budgets"]):
            asked, packed = row["target_nbytes"], row["nbytes"]
            yield [
                "" if i else scene_of(cell),
                f"{asked / 1e6:.3f} MB",
                f"{packed / 1e6:.3f} MB",
                f"{100 * (1 - packed / asked):.1f} %",
                decibels(row["psnr_db"]),
                seconds(row["encode_cpu_s"]),
            ]


@tabled("scene", "goal", "wanted", "found", "met")
def goals(found: Any) -> Rows:
    """What was to be reached, and what was."""
    for cell in found["cells"]:
        for i, (goal, wanted, told, met) in enumerate(_goals(cell)):
            yield ["" if i else scene_of(cell), goal, wanted, told, "yes" if met else "**no**"]


def _goals(cell: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    found = list[tuple[str, str, str, bool]]()
    for rival in [row["name"] for row in cell["rows"] if ours_at(cell, row["name"])]:
        least = GOALS[rival.partition(":")[0]][cell["form"]]
        for row in ours_at(cell, rival):
            fewer = 100 * (1 - row["nbytes"] / row_of(cell, rival)["nbytes"])
            name = f"`{row['name']}`, fewer bytes than {NAMES.get(rival, f'`{rival}`')} at its PSNR"
            found.append((name, f"{least} %", f"{fewer:.1f} %", fewer >= least))
    whole, first = ours_at(cell, "spz")[0], ours_at(cell, "spz")[0]["layers"][0]
    share, wanted = 100 * first["nbytes"] / whole["nbytes"], f"{FIRST_SHARE} % and {FIRST_DB} dB"
    told = f"{share:.1f} % and {decibels(first['psnr_db'])}"
    found.append(("first layer", wanted, told, share <= FIRST_SHARE and first["psnr_db"] >= FIRST_DB))
    under = [100 * (1 - row["nbytes"] / row["target_nbytes"]) for row in cell["budgets"]]
    good = all(0 <= x <= WITHIN for x in under)
    found.append(
        ("under the bytes asked for", f"0 to {WITHIN} %", f"{min(under):.1f} to {max(under):.1f} %", good)
    )
    slow = max(row["encode_cpu_s"] for row in (*cell["budgets"], *ours_at(cell, "spz")))
    found.append(("encoded, CPU-s at most", f"{ENCODED_S:g}", seconds(slow), slow <= ENCODED_S))
    slow = max(row["decode_cpu_s"] for row in (*cell["budgets"], *ours_at(cell, "spz")))
    found.append(("decoded, CPU-s at most", f"{DECODED_S:g}", seconds(slow), slow <= DECODED_S))
    return found


TABLES = {
    "scenes": formats,
    "scenes-streams": streams,
    "scenes-layers": layers,
    "scenes-budgets": budgets,
    "scenes-goals": goals,
}
