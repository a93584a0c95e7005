"""Scenes as a file a layer, and as a state: whole or not there, and what has come is the beginning of one."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from scenes import layered

from thinwire.files.base import Folder
from thinwire.files.local_folder import PlainFolder, open_folder
from thinwire.types import InputError, LinkError, PayloadError
from thinwire.uses.scenes.delivery import (
    MANIFEST,
    PartialFile,
    deliver,
    fetch,
    first_pieces,
    is_there,
    read_manifest,
)
from thinwire.uses.scenes.files.packed_scene import read_outline, read_scene
from thinwire.uses.scenes.layers import shown_after
from thinwire.uses.scenes.state_form import LayeredScene, scene_of

pytest.importorskip("zstandard")
DATA, OTHER = layered(3), layered(2)


@pytest.fixture(params=["plain", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "plain":
        yield PlainFolder(tmp_path / "scene")
        return
    pytest.importorskip("fsspec")
    yield open_folder(f"memory://{uuid4().hex}/scene")


def test_the_layers_of_a_folder_are_the_packed_scene(folder: Folder) -> None:
    assert not is_there(folder)
    pieces = deliver(folder, DATA)
    assert is_there(folder) and read_manifest(folder) == pieces
    come = list(fetch(folder, pieces))
    assert b"".join(come) == DATA
    outline = read_outline(DATA)
    for k in range(1, 4):
        beginning = b"".join(come[:k])
        assert len(read_scene(beginning)) == k == outline.whole(len(beginning))
        assert shown_after(read_scene(beginning)).count == outline.layers[k - 1].splats
    assert first_pieces(pieces, len(DATA) - 1) == pieces[:2]
    with pytest.raises(PayloadError, match="first layer ends at byte"):
        first_pieces(pieces, 10)


def test_another_scene_takes_the_place_of_one_and_a_reader_of_that_is_told(folder: Folder) -> None:
    reading = fetch(folder, deliver(folder, DATA))
    next(reading)
    assert b"".join(fetch(folder, deliver(folder, OTHER))) == OTHER
    with pytest.raises(LinkError, match=r"layer 2 of 3 .* is gone"):
        next(reading)
    assert set(folder.sizes("")) == {MANIFEST, *(piece.name for piece in read_manifest(folder))}


@pytest.mark.parametrize("last", [0, 2, 3])
@pytest.mark.parametrize("trouble", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=["disk", "^C"])
def test_a_write_that_ends_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, trouble: BaseException
) -> None:
    folder = PlainFolder(tmp_path)
    deliver(folder, OTHER)
    before, written, write = set(tmp_path.iterdir()), list[str](), folder.write

    def failing(name: str, data: bytes) -> None:
        written.append(name)
        if len(written) > last:
            raise trouble
        write(name, data)

    monkeypatch.setattr(folder, "write", failing)
    expected = InputError if isinstance(trouble, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        deliver(folder, DATA)
    assert set(tmp_path.iterdir()) == before
    assert b"".join(fetch(folder, read_manifest(folder))) == OTHER


def test_damage_names_the_layer_and_what_came_before_it_is_kept(tmp_path: Path) -> None:
    folder = PlainFolder(tmp_path / "scene")
    pieces = deliver(folder, DATA)
    second = folder.path / pieces[1].name
    whole = second.read_bytes()
    second.write_bytes(whole[:-1] + b"?")
    kept = PartialFile(tmp_path / "kept", pieces)
    with pytest.raises(PayloadError, match=r"layer 2 of 3 of .* is damaged: its checksum"):
        for layer in fetch(folder, pieces):
            kept.add(layer)
    second.write_bytes(whole + b"?")
    with pytest.raises(PayloadError, match=r"layer 2 of 3 of .* is damaged"):
        list(fetch(folder, pieces, 1))
    second.write_bytes(whole)
    with (tmp_path / "kept").open("ab") as file:
        file.write(whole[:100])  # killed in the middle of a write
    again = PartialFile(tmp_path / "kept", pieces)
    assert again.held == 1
    for layer in fetch(folder, pieces, again.held):
        again.add(layer)
    assert (tmp_path / "kept").read_bytes() == again.data == DATA
    assert PartialFile(tmp_path / "kept", deliver(folder, OTHER)).held == 0


def test_a_full_disk_keeps_the_layers_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PlainFolder(tmp_path / "scene")
    pieces = deliver(folder, DATA)
    first, second, _ = fetch(folder, pieces)
    kept = PartialFile(tmp_path / "kept", pieces)
    kept.add(first)
    opened = Path.open

    def full(path: Path, mode: str = "r") -> Any:
        file = opened(path, mode)
        if path == tmp_path / "kept" and monkeypatching:
            monkeypatching.clear()
            file.write(b"half")
            file.close()
            raise OSError(errno.ENOSPC, "No space left on device")
        return file

    monkeypatching = ["once"]
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space"):
        kept.add(second)
    kept.add(second)
    assert kept.held == 2 and DATA.startswith(kept.data)


@pytest.mark.parametrize(
    ("manifest", "told"),
    [
        (b"{", "damaged"),
        (b'{"kind": "thinwire.scene", "version": 7, "layers": []}', "version 7, and .* reads version 1"),
        (b'{"kind": "thinwire.scene", "version": 1, "layers": []}', "no list of layers"),
        (
            b'{"kind": "thinwire.scene", "version": 1, '
            b'"layers": [{"name": "../x", "nbytes": 1, "sha256": ""}]}',
            "a wrong layer",
        ),
        (b"[" * 60000, "damaged"),
        (b" " * 70000, "expected at most 65536"),
    ],
)
def test_a_wrong_manifest_is_told(tmp_path: Path, manifest: bytes, told: str) -> None:
    (tmp_path / MANIFEST).write_bytes(manifest)
    with pytest.raises(PayloadError, match=told):
        read_manifest(PlainFolder(tmp_path))


def test_a_state_holds_the_layers_that_its_version_says() -> None:
    scene = LayeredScene(DATA)
    for k in range(1, scene.count + 1):
        state = scene.state(k)
        assert {x.numel() for x in state.values()} == {x.numel() for x in scene.state(0).values()}
        assert DATA.startswith(scene_of(state, k)) and len(read_scene(scene_of(state, k))) == k
    assert scene_of(scene.state(3), 3) == DATA
    for wrong in (0, 4, "3", None):
        with pytest.raises(PayloadError, match="no scene of"):
            scene_of(scene.state(3), wrong)
    with pytest.raises(PayloadError, match="bytes of a scene of"):
        LayeredScene(DATA[:-1])
