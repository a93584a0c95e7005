"""Scene files by strangers: claims beyond their bytes take no memory, and what a format clips is counted."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scene_fuzz
from scenes import ball

from thinwire.types import PayloadError
from thinwire.uses.scenes.files import foreign
from thinwire.uses.scenes.files.clipping import RANGES, beyond, told_beyond
from thinwire.uses.scenes.files.foreign import turned
from thinwire.uses.scenes.scene import Splats

pytest.importorskip("zstandard")
pytest.importorskip("gaussforge")
MB = 1 << 20
AXES = {"spz": foreign.SPZ, "compressed.ply": foreign.PLY}


def test_damaged_files_are_read_or_refused_in_little_memory() -> None:
    """700 cases; the program's own words say how to run more."""
    here = Path(scene_fuzz.__file__)
    src = Path(foreign.__file__).parents[5]
    run = subprocess.run(
        [sys.executable, "-W", "error", str(here), "700"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"OMP_NUM_THREADS": "1", "PATH": "", "PYTHONPATH": f"{src}:{here.parent}"},
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["cases"] == 700 and found["grew"] <= 4 * found["largest"] + 48 * MB
    for name in scene_fuzz.samples():
        assert found[f"{name}: read"] > 0 and found[f"{name}: refused"] > 0


def spz(version: int, splats: int, inside: int) -> bytes:
    """Return an SPZ that claims ``splats``, and is ``inside`` bytes of zero when unpacked."""
    head = struct.pack("<4sIIBBBB", b"NGSP", version, splats, 3, 12, 0, 1 if version > 3 else 0)
    if version < 4:
        return gzip.compress(head + bytes(inside))
    return head + struct.pack("<I12xQQ", 32, 100, inside) + bytes(100)


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize(
    ("splats", "inside", "told"),
    [
        (10_000_000, 64 * 10_000_000 // 100, "10000000 splats in"),
        (60_000, 400 * MB // 4, "60000 splats take"),
        (60_000, 0, "60000 splats take"),
    ],
)
def test_claims_of_an_spz_are_checked_first(
    version: int, splats: int, inside: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "_forge", lambda: pytest.fail("it was read"))
    with pytest.raises(PayloadError, match=told):
        foreign.read_foreign(spz(version, splats, inside), "spz")


def test_a_newer_spz_is_told_with_both_versions() -> None:
    with pytest.raises(PayloadError, match="SPZ version 9, and this thinwire reads versions up to 4"):
        foreign.read_foreign(spz(9, 1, 10), "spz")


def within(n: int, bands: int) -> Splats:
    """Return a scene that every format holds."""
    scene = ball(n, bands)
    np.clip(scene.harmonics, -0.8, 0.8, out=scene.harmonics)
    return scene


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("bands", range(4))
def test_both_spz_are_read_with_any_bands(version: int, bands: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "SPZ_VERSION", version)
    scene = within(300, bands)
    found = foreign.read_foreign(foreign.write_foreign(scene, "spz"), "spz")
    assert (found.count, found.bands) == (300, bands)
    apart = np.linalg.norm(found.positions[:, None] - scene.positions[None], axis=2)
    which = apart.argmin(1)
    assert apart.min(1).max() < 0.01 and sorted(which) == list(range(300))
    assert np.abs(found.log_scales - scene.log_scales[which]).max() < 0.1
    assert np.abs(found.colours - scene.colours[which]).max() < 0.05
    assert np.abs(found.harmonics - scene.harmonics[which]).max(initial=0) < 0.1


@pytest.mark.parametrize("form", RANGES)
def test_what_is_within_a_format_s_ranges_reads_back(form: str) -> None:
    assert beyond(within(300, 3), form) == {} == beyond(within(3, 0), form)
    for name, (low, high) in RANGES[form].items():
        scene = within(2, 3)
        values = getattr(scene, name)
        values[0], values[1] = low * 0.9999, high * 0.9999
        assert beyond(turned(scene, AXES[form]), form) == {}
        values[1] *= 1.2
        assert beyond(turned(scene, AXES[form]), form) == {name: 1, "splats": 1}
    flat = Splats.of(np.zeros((2, 3)), log_scales=np.full((2, 3), 30))
    assert told_beyond(flat, form)[0].endswith("log-scales 2")
    found = foreign.read_foreign(foreign.write_foreign(flat, form), form)
    assert found.log_scales.max() < 21  # as it is told


def test_strays_that_spoil_their_neighbours_in_a_compressed_ply_are_told() -> None:
    scene = within(600, 0)
    assert told_beyond(scene, "compressed.ply") == []
    scene.positions[:2, 0] = 2047, -500
    (told,) = told_beyond(scene, "compressed.ply")
    assert told.startswith("2 splats are far out, and in compressed .ply up to 510 others share ranges")
    assert "their places are 1 apart" in told
