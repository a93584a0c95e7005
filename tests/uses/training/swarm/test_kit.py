"""The kit of a model: what was packed comes out, and nothing else is written."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from thinwire.types import PayloadError
from thinwire.uses.training.swarm.kit import NAME, SIZE, kit_digest, pack_kit, unpack_kit


def folder_of(place: Path, files: dict[str, bytes]) -> Path:
    place.mkdir()
    for name, content in files.items():
        (place / name).write_bytes(content)
    return place


FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(300),
    "tokenizer.model": b"\x00\xff",
    "merges.txt": b"",
}


def test_a_kit_brings_what_a_model_is_built_from_and_no_code(tmp_path: Path) -> None:
    place = folder_of(
        tmp_path / "a", FILES | {"modeling_own.py": b"raise SystemExit", ".token.txt": b"secret"}
    )
    data = pack_kit(place)
    assert b"SystemExit" not in data and b"secret" not in data
    found = unpack_kit(data, tmp_path / "cache" / kit_digest(data))
    assert {f.name: f.read_bytes() for f in found.iterdir()} == FILES
    assert unpack_kit(data, found) == found and [f.name for f in found.parent.iterdir()] == [found.name]


@pytest.mark.parametrize(
    "name", ["../config.json", "/etc/config.json", "a/config.json", "run.py", ".json", "x\x00.json"]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    data = pack_kit(folder_of(tmp_path / "a", {"config.json": b"{}"}))
    own, other = b"config.json", name.encode()
    wrong = data.replace(NAME.pack(len(own)) + own, NAME.pack(len(other)) + other)
    with pytest.raises(PayloadError, match="a model's kit has the file"):
        unpack_kit(wrong, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_damage_is_an_error_of_ours_and_writes_nothing(tmp_path: Path) -> None:
    data, draw = pack_kit(folder_of(tmp_path / "a", FILES)), random.Random(0)
    for _ in range(400):
        wrong = bytearray(data[: draw.randrange(len(data))])
        for _ in range(draw.randrange(3)):
            if wrong:
                wrong[draw.randrange(len(wrong))] ^= 1 << draw.randrange(8)
        try:
            unpack_kit(bytes(wrong), tmp_path / "b" / str(draw.random()))
        except PayloadError:
            continue
        raise AssertionError("a kit that was cut was taken")
    with pytest.raises(PayloadError):
        unpack_kit(data.replace(SIZE.pack(300), SIZE.pack(2**40)), tmp_path / "c")
    assert not (tmp_path / "b").exists() and not (tmp_path / "c").exists()
