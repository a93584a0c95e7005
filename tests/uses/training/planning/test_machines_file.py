"""The file of machines and links: what it may say, and sentences for what it may not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from machine_files import ATTIC, DESK, LINK, written

from thinwire.types import InputError
from thinwire.uses.training.pipeline.choosing.pipeline_plan import Way
from thinwire.uses.training.planning.machines_file import MachineSpeed, read_machines


def test_a_file_of_machines_is_read(tmp_path: Path) -> None:
    measured = MachineSpeed("gpt2-lab", 256, 0.0125, 0.5, 0.002, embed=0.125)
    back = (
        LINK.replace("desk", "x")
        .replace("attic", "desk")
        .replace('"x"', '"attic"')
        .replace("20mbit", "5mbit")
    )
    text = DESK + 'address = "192.0.2.1"\n' + measured.toml("attic") + "\n" + LINK
    found = read_machines(written(tmp_path, text))
    assert [m.name for m in found.machines] == ["desk", "attic"]
    assert found.machines[0].speed == 1 and found.machines[0].address == "192.0.2.1"
    assert found.machines[1].measured == measured
    more = replace(measured, embed=0.25, lora=8, threads=3)
    assert (
        read_machines(written(tmp_path, more.toml("attic") + "\n" + DESK + LINK)).machines[0].measured == more
    )
    assert found.ways["desk", "attic"] == found.ways["attic", "desk"] == Way(2.5e6, 0.05)
    found = read_machines(written(tmp_path, text + back))
    assert found.ways["attic", "desk"].rate == 625e3 and found.ways["desk", "attic"].rate == 2.5e6
    assert found.ways["desk", "attic"].restarts
    found = read_machines(written(tmp_path, text.replace(LINK, LINK + "restarts = false\n")))
    assert not found.ways["desk", "attic"].restarts


def test_a_line_is_told_with_its_headers(tmp_path: Path) -> None:
    line = LINK.replace("link = ", "line = ")
    found = read_machines(written(tmp_path, DESK + ATTIC + line))
    assert found.ways["desk", "attic"].rate == pytest.approx(2.5e6 * 1448 / 1500)
    assert found.ways["desk", "attic"].delay == 0.05
    free = read_machines(written(tmp_path, DESK + ATTIC + line.replace("20mbit,25ms,jitter=50ms", "none")))
    assert free.ways["desk", "attic"] == Way()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[machine", "not valid TOML"),
        ("", r"has no \[\[machine\]\]"),
        (DESK + ATTIC, r"has no \[\[link\]\]"),
        ("machine = 3", r"no list of tables; write \[\[machine\]\]"),
        (DESK + ATTIC + LINK + "[[linc]]\n", "unknown 'linc'; did you mean link"),
        (DESK + "sped = 2\n" + ATTIC + LINK, "machine 1 of .* has an unknown 'sped'; did you mean speed"),
        ("[[machine]]\nspeed = 1\n" + LINK, "machine 1 of .* has no name"),
        (DESK + DESK + LINK, "two machines named 'desk'"),
        (
            DESK + "speed = 0\n" + ATTIC + LINK,
            "machine 'desk' has speed = 0, which is not a number above zero",
        ),
        (DESK + "speed = nan\n" + ATTIC + LINK, "speed = nan"),
        (DESK + "speed = 1e308\n" + ATTIC + LINK, "speed = 1e[+]308, which no machine has"),
        (DESK + f"speed = 1{'0' * 400}\n" + ATTIC + LINK, "which no machine has; give one from 1e-12"),
        (DESK + 'speed = "fast"\n' + ATTIC + LINK, "speed = 'fast'"),
        (DESK + "layer = 0.1\n" + ATTIC + LINK, "machine 'desk' has no tokens"),
        (
            DESK + "tokens = 0.5\nlayer = 0.1\nhead = 1\nupdate = 1\n" + ATTIC + LINK,
            "machine 'desk' has tokens = 0.5, which is no whole number",
        ),
        (
            DESK + "tokens = 5\nlayer = 1\nhead = 1\nupdate = 1\nthreads = 2.5\n" + ATTIC + LINK,
            "machine 'desk' has threads = 2.5, which is no whole number",
        ),
        (DESK + "speed = 1\nlayer = 0.1\n" + ATTIC + LINK, "has both speed and layer"),
        (
            DESK + 'model = "m"\ntokens = 1\nlayer = 1\nhead = 1\nupdate = 1\n' + ATTIC + LINK,
            "machine 'desk' says nothing of its embedding, embed; measure it again",
        ),
        (DESK + ATTIC + LINK.replace("attic", "atic"), "names the machine 'atic'; did you mean attic"),
        (DESK + ATTIC + LINK.replace("attic", "desk"), "leads from desk to itself"),
        (DESK + ATTIC + LINK + LINK, "two links from desk to attic"),
        (DESK + ATTIC + LINK.replace("20mbit", "fast"), "cannot read 'fast' in link"),
        (DESK + ATTIC + LINK.replace("20mbit", "0mbit"), "is zero"),
        (DESK + ATTIC + LINK + 'line = "20mbit"\n', "has both link and line"),
        (
            DESK + ATTIC + LINK.replace("20mbit,25ms,jitter=50ms", "trace:lte"),
            r"'trace:lte' is one of an emulated network; a plan takes one rate",
        ),
        (DESK + ATTIC + LINK.replace('"20mbit,25ms,jitter=50ms"', "20"), "link = 20; give it as text"),
        (DESK + ATTIC + LINK + "restarts = 0\n", "link 1 of .* has restarts = 0; give true or false"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as e:
        read_machines(written(tmp_path, text))
    assert "\n" not in str(e.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*; give a readable TOML file"):
        read_machines(tmp_path / "none.toml")
