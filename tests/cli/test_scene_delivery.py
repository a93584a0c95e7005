"""Scenes on their way: folders of layers, web servers, publishers, and what is said of each by inspect."""

from __future__ import annotations

import errno
import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from commanded import invoke, one_sentence, running
from scenes import ball, layered
from waiting import until

from thinwire.files.local_folder import PlainFolder
from thinwire.uses.scenes.delivery import deliver, fetch, read_manifest
from thinwire.uses.scenes.files.packed_scene import read_outline
from thinwire.uses.scenes.files.ply import read_ply, write_ply

pytestmark = pytest.mark.timeout(120)
pytest.importorskip("zstandard")
DATA = layered(3)
OUTLINE = read_outline(DATA)


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    path = tmp_path / "scene.tw"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))
    )
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def count(path: Path) -> int:
    return read_ply(path.read_bytes()).count


def test_a_reader_that_is_cut_off_goes_on_from_the_last_whole_layer(tmp_path: Path, web: str) -> None:
    folder = PlainFolder(tmp_path / "scene")
    pieces, out = deliver(folder, DATA), tmp_path / "out.ply"
    last = folder.path / pieces[2].name
    whole = last.read_bytes()
    last.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    cut = invoke("unpack", f"{web}/scene", "-o", out)
    assert cut.exit_code == 3 and "layer 3 of 3" in one_sentence(cut.stderr)
    said = cut.stderr.splitlines()
    for i, layer in enumerate(OUTLINE.layers[:2]):
        assert said[i].startswith(f"layer {i + 1} of 3: {layer.splats} splats, {layer.end} bytes, ")
    assert count(out) == OUTLINE.layers[1].splats
    kept = out.with_name("out.ply.part.tw")
    assert kept.read_bytes() == DATA[: OUTLINE.layers[1].end]
    last.write_bytes(whole)
    again = invoke("unpack", f"{web}/scene", "-o", out)
    assert again.exit_code == 0 and again.stderr.startswith("2 of 3 layers came before")
    assert "layer 2" not in again.stderr
    assert count(out) == OUTLINE.layers[2].splats and not kept.exists()
    assert "give --force" in one_sentence(invoke("unpack", f"{web}/scene", "-o", out).stderr)


def test_scenes_are_read_from_any_place_and_in_part(tmp_path: Path, scene: Path, web: str) -> None:
    deliver(PlainFolder(tmp_path / "d"), DATA)
    nbytes = OUTLINE.layers[0].end + 5
    for place in (scene, tmp_path / "d", f"{web}/scene.tw", f"{web}/d/"):
        for options, layers in (((), 3), (("--prefix", nbytes), 1)):
            result = invoke("unpack", place, "-o", tmp_path / "out.ply", "--force", *options)
            assert result.exit_code == 0, result.output
            assert count(tmp_path / "out.ply") == OUTLINE.layers[layers - 1].splats
    for place, code, told in (
        (f"{web}/none.tw", 3, "cannot read"),
        (f"{web}/none", 2, "holds no scene: there is no scene.json"),
        (tmp_path, 2, "holds no scene"),
    ):
        refused = invoke("unpack", place, "-o", tmp_path / "new.ply")
        assert refused.exit_code == code and told in one_sentence(refused.stderr)
        assert not (tmp_path / "new.ply").exists()


def test_a_folder_that_holds_a_scene_or_cannot_be_written_is_refused_before_work(
    tmp_path: Path, web: str
) -> None:
    source = tmp_path / "in.ply"
    source.write_bytes(write_ply(ball(3)))
    deliver(PlainFolder(tmp_path / "d"), DATA)
    for place, told in ((f"{tmp_path}/d/", "give --force"), (f"{web}/d.tw", "ending in /")):
        refused = invoke("pack", source, "-o", place, "--target", "1MB")
        assert refused.exit_code == 2 and told in one_sentence(refused.stderr)
    new = invoke("pack", source, "-o", f"{tmp_path}/d/", "--recipe", "mesongs:depth=5,book=2", "--force")
    assert new.exit_code == 0, new.output
    folder = PlainFolder(tmp_path / "d")
    assert len(list(fetch(folder, read_manifest(folder)))) == 1


@pytest.mark.parametrize(
    ("command", "trouble"),
    [("pack", OSError(errno.ENOSPC, "No space")), ("unpack", KeyboardInterrupt())],
    ids=["disk", "^C"],
)
def test_a_full_disk_and_ctrl_c_leave_no_partial_file(
    tmp_path: Path, scene: Path, monkeypatch: pytest.MonkeyPatch, command: str, trouble: BaseException
) -> None:
    source = tmp_path / "in.ply"
    source.write_bytes(write_ply(ball(3)))
    before, write = set(tmp_path.iterdir()), Path.write_bytes

    def failing(path: Path, data: bytes) -> int:
        write(path, data[:100])
        raise trouble

    monkeypatch.setattr(Path, "write_bytes", failing)
    order = ["-o", tmp_path / "out.tw", "--recipe", "mesongs:depth=5,book=2"]
    result = (
        invoke(command, source, *order)
        if command == "pack"
        else invoke(command, scene, "-o", tmp_path / "out.ply")
    )
    assert result.exit_code == (2 if isinstance(trouble, OSError) else 130), result.output
    assert "Traceback" not in result.output and set(tmp_path.iterdir()) == before


def test_layers_are_published_one_by_one_and_followed_as_a_scene(tmp_path: Path, scene: Path) -> None:
    out, heard = tmp_path / "out.tw", tmp_path / "heard"
    copy = f"cp $THINWIRE_FILE {tmp_path}/$THINWIRE_VERSION.tw && echo $THINWIRE_VERSION >> {heard}"
    with running(tmp_path, "publish", scene, "--layers", "--port", 0, "--store", tmp_path / "s") as publisher:
        at = publisher.says(r"follow (127\.0\.0\.1:\d+)")[1]
        with running(tmp_path, "follow", at, "--out", out, "--exec", copy):
            until(lambda: out.exists() and out.read_bytes() == DATA, "all layers")
            until(lambda: heard.exists() and heard.read_text().endswith("3\n"), "the command after the last")
        versions = list(map(int, heard.read_text().split()))
        assert versions[0] == 1 and versions == sorted(versions)
        for k in versions:
            assert (tmp_path / f"{k}.tw").read_bytes() == DATA[: OUTLINE.layers[k - 1].end]
    stored = invoke("follow", tmp_path / "s", "--once", "--out", tmp_path / "stored.tw")
    assert stored.exit_code == 0, stored.output
    assert (tmp_path / "stored.tw").read_bytes() == DATA
    refused = invoke("publish", tmp_path / "1.tw", "--layers", "--port", 0)
    assert refused.exit_code == 2 and "no whole packed scene" in one_sentence(refused.stderr)


def test_inspect_says_what_scenes_hold_and_what_each_prefix_shows(
    tmp_path: Path, scene: Path, web: str
) -> None:
    deliver(PlainFolder(tmp_path / "d"), DATA)
    for place in (scene, tmp_path / "d", f"{web}/d"):
        found = json.loads(invoke("inspect", place, "--json", "--check").stdout)
        assert found["kind"].startswith("packed scene") and found["nbytes"] == len(DATA)
        assert (found["version"], found["recipe"], found["bands"]) == (1, "thinwire", 1)
        assert (found["splats"], found["layers_here"]) == (180, "3 of 3") and found["checked"] is True
        shows = [(layer["prefix"], layer["splats"]) for layer in found["layers"]]
        assert shows == [(layer.end, layer.splats) for layer in OUTLINE.layers]
        total = sum(stream["nbytes"] for stream in found["streams"])
        assert total + found["header_nbytes"] == len(DATA)
        by_layer = [sum(s[f"layer {i}"] for s in found["streams"]) for i in (1, 2, 3)]
        assert by_layer == [layer["nbytes"] for layer in found["layers"]]
    scene.write_bytes(DATA[: OUTLINE.layers[1].end])
    assert "layers here: 2 of 3" in invoke("inspect", scene).stdout
    scene.write_bytes(DATA[:100])
    cut = invoke("inspect", scene)
    assert cut.exit_code == 3 and "cut short" in one_sentence(cut.stderr)


def test_inspect_counts_the_odd_splats_of_a_scene_of_others(tmp_path: Path) -> None:
    odd = ball(5, 2)
    odd.opacities[0], odd.rotations[1], odd.colours[2] = float("inf"), 0, float("nan")
    (tmp_path / "a.ply").write_bytes(write_ply(odd))
    found = json.loads(invoke("inspect", tmp_path / "a.ply", "--json").stdout)
    assert (found["kind"], found["splats"], found["bands"]) == ("scene, ply", 5, 2)
    assert found["odd"] == {"dropped": 1, "endless": 1, "turnless": 1}
    assert found["bounds"]["high"] == [round(float(x), 4) for x in odd.positions[[0, 1, 3, 4]].max(0)]
