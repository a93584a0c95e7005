"""Scenes by other programs, and ours as these read them: one scene in each format.

``tests/golden/scenes`` holds a random scene of ours, ``source.ply``, as splat-transform 2.7.1 wrote it in SPZ
3 and 4, compressed ``.ply`` and SOG. @adobe/spz 0.2.2 wrote ``version2.spz``; ``version1.spz`` is the same
with positions as float16. gaussforge 0.6.0 wrote ``bands0.splat``.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scenes import ball

from thinwire.types import PayloadError
from thinwire.uses.scenes.files import foreign
from thinwire.uses.scenes.files.foreign import NAMED, ODD_IN, turned
from thinwire.uses.scenes.files.ply import read_ply
from thinwire.uses.scenes.files.scene_file import form_of, read_scene_file
from thinwire.uses.scenes.scene import Splats
from thinwire.uses.scenes.view.harmonics import basis
from thinwire.uses.scenes.view.project import rotation_matrices

gaussforge = pytest.importorskip("gaussforge")
GOLDEN = Path(__file__).parents[2] / "golden" / "scenes"


def covariances(splats: Splats) -> np.ndarray:
    axes = rotation_matrices(splats.rotations) * np.exp(splats.log_scales.T)
    return np.einsum("ikn,jkn->nij", axes, axes).astype(np.float64)


def alike(found: Splats, scene: Splats, harmonics: float, size: float = 0.1, logit: float = 0.1) -> None:
    """Fail unless two scenes are the same but for their order and what 8 bits a number round away."""
    apart = np.linalg.norm(scene.positions[:, None] - found.positions[None], axis=2)
    which = apart.argmin(1)
    assert sorted(which) == list(range(found.count)) and apart.min(1).max() < 2e-3
    own, other = covariances(scene), covariances(found)[which]
    assert (np.linalg.norm(own - other, axis=(1, 2)) / np.linalg.norm(own, axis=(1, 2))).max() < size
    assert np.abs(scene.opacities - found.opacities[which]).max() < logit
    assert np.abs(scene.colours - found.colours[which]).max() < 0.02
    assert found.harmonics.shape == scene.harmonics.shape
    assert np.abs(scene.harmonics - found.harmonics[which]).max(initial=0) < harmonics


def source(bands: int) -> Splats:
    scene = read_ply((GOLDEN / "source.ply").read_bytes())
    return replace(scene, harmonics=scene.harmonics[:, : (bands + 1) ** 2 - 1])


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir() if p.name != "source.ply"))
def test_what_another_program_wrote_is_that_scene(name: str) -> None:
    bands = int(name[5]) if name.startswith("bands") else 3
    found, _ = read_scene_file(GOLDEN / name)
    if form_of(Path(name)) != "sog":
        alike(found, source(bands), 0.07)
        return
    alike(replace(found, harmonics=found.harmonics[:, :0]), source(0), 1)  # a few harmonics stand for all
    apart = np.linalg.norm(source(3).positions[:, None] - found.positions[None], axis=2)
    own, other = source(3).harmonics.reshape(24, -1), found.harmonics[apart.argmin(1)].reshape(24, -1)
    assert np.corrcoef(own.ravel(), other.ravel())[0, 1] > 0.4


@pytest.mark.parametrize("form", ["spz", "compressed.ply"])
@pytest.mark.parametrize("bands", range(4))
def test_what_is_written_is_that_scene_to_another_program(
    form: str, bands: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gaussforge does not turn an SPZ's axes: it sees what is in the file."""
    for version in (3, 4) if form == "spz" else (4,):
        monkeypatch.setattr(foreign, "SPZ_VERSION", version)
        data = foreign.write_foreign(source(bands), form)
        alike(foreign.read_foreign(data, form), source(bands), 0.07)
        seen = read_ply(gaussforge.GaussForge().convert(data, form, "ply")["data"])
        alike(seen, turned(source(bands), "RUB" if form == "spz" else "RDF"), 0.07)


def test_turning_axes_turns_places_ellipsoids_and_colours_from_every_side() -> None:
    scene, draw = ball(50, 3), np.random.default_rng(1)
    directions = draw.normal(size=(3, 50)).astype(np.float32)
    assert len(ODD_IN) == 15
    for axes in NAMED.values():
        signs = np.array([1 if a == b else -1 for a, b in zip(axes, "RDF", strict=True)], np.float32)
        other = turned(scene, axes)
        assert (other.positions == scene.positions * signs).all()
        expected = covariances(scene) * signs[:, None] * signs[None]
        assert np.allclose(covariances(other), expected, atol=1e-5)
        seen, again = basis(directions, 15)[1:], basis(directions * signs[:, None], 15)[1:]
        before = np.einsum("nkc,kn->nc", scene.harmonics, seen)
        assert np.allclose(np.einsum("nkc,kn->nc", other.harmonics, again), before, atol=1e-5)


def with_axes(data: bytes, number: int) -> bytes:
    """Return an SPZ 4 with two records, of which the second one names its axes."""
    records = struct.pack("<IIIII", 0xADBE0002, 12, 0, 0, 0) + struct.pack("<III", 0xADBE0003, 4, number)
    head = bytearray(data[:32])
    head[14] |= 2
    struct.pack_into("<I", head, 16, 32 + len(records))
    return bytes(head) + records + data[32:]


def test_an_spz_may_name_its_own_axes() -> None:
    data = foreign.write_foreign(source(3), "spz")
    for number, axes in NAMED.items():
        inside = turned(source(3), "RUB")
        alike(foreign.read_foreign(with_axes(data, number), "spz"), turned(inside, axes), 0.07)
    with pytest.raises(PayloadError, match="axes are those of number 15"):
        foreign.read_foreign(with_axes(data, 15), "spz")
