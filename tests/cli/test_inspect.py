"""thinwire inspect: files, stores and publishers, and the check of their contents."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commanded import invoke, one_sentence, weights
from slow_proxy import SlowProxy
from waiting import free_port

from thinwire.files.checkpoint import write_checkpoint
from thinwire.files.local_folder import PlainFolder
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.types import MissingExtra
from thinwire.uses.following.pull.claim import read_manifest
from thinwire.uses.following.pull.manifest import MAX_NUMBER, STATE, Manifest, Proof
from thinwire.uses.following.pull.store_writer import ShelfWriter
from thinwire.uses.following.push.publisher import Publisher

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("zstandard")
pytest.importorskip("safetensors")


def test_meta_data_does_not_pass_for_what_a_file_is(tmp_path: Path):
    names = ("kind", "where", "nbytes", "checked", "version", "hash", "base", "tensors", "files", "published")
    history = History(Layout.of(weights()))
    history.publish(weights(), dict.fromkeys(names, "evil") | {"x_nbytes": "evil"})
    with ShelfWriter(tmp_path / "store", history) as writer:
        writer.offer()
        writer.flush()
    history.save(tmp_path / "saved")
    patch = next((tmp_path / "store").rglob("*.safetensors"))
    write_checkpoint(
        tmp_path / "m.safetensors", weights(), dict.fromkeys(names, "evil") | {"x_nbytes": "evil"}
    )
    for path, kind in (
        (patch, "keyframe"),
        (tmp_path / "saved", "saved state"),
        (tmp_path / "m.safetensors", ""),
    ):
        found = json.loads(invoke("inspect", path, "--json").stdout)
        assert found["kind"] == (kind or "checkpoint") and found["where"] == str(path)
        assert found["nbytes"] == path.stat().st_size and "checked" not in found
        if kind:
            assert found["version"] == 1 and len(found["hash"]) == 16 and found["published"] != "evil"
        shown = invoke("inspect", path)
        assert shown.exit_code == 0 and "x nbytes: evil" in shown.stdout, shown.output


def damage(path: Path) -> None:
    """Turn a bit of the last tensor in a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("bounds", [None, {"b": 0.01}], ids=["exact", "bound"])
def test_a_check_of_a_followed_file_reads_its_tensors(tmp_path: Path, bounds: dict[str, float] | None):
    """The layout's order and bounds are not in the file, and its names are."""
    out, moved = tmp_path / "o.safetensors", tmp_path / "moved"
    with Publisher(weights(), bounds=bounds) as publisher:
        publisher.publish(reason="better")
        assert invoke("follow", f"127.0.0.1:{publisher.port}", "--once", "--out", out).exit_code == 0
    whole = json.loads(invoke("inspect", out, "--check", "--json").stdout)
    assert (whole["checked"], whole["reason"]) == (True, "better")
    data = out.read_bytes()
    for old, new in ((b'"w":', b'"v":'), (whole["thinwire.hash"].encode(), b"0" * 16)):
        moved.write_bytes(data.replace(old, new))
        assert invoke("inspect", moved, "--check").exit_code == 3, new
    damage(out)
    broken = invoke("inspect", out, "--check")
    assert broken.exit_code == 3 and "was damaged or written to" in one_sentence(broken.stderr)
    assert invoke("inspect", out).exit_code == 0


def test_a_check_says_where_there_is_no_hash_to_check(tmp_path: Path):
    file = tmp_path / "m.safetensors"
    write_checkpoint(file, weights(), {})
    result = invoke("inspect", file, "--check")
    assert result.exit_code == 0 and "checked: no, it carries no hash\n" in result.stdout
    found = json.loads(invoke("inspect", file, "--check", "--json").stdout)
    assert (found["checked"], found["reason"]) == (False, "it carries no hash")
    write_checkpoint(file, weights(), {"thinwire.hash": "0"})
    file.write_bytes(file.read_bytes().replace(b"thinwire.imprint", b"thinwire.another"))  # of an older one
    assert "checked: no, its hash needs an order" in invoke("inspect", file, "--check").stdout


def test_a_damaged_saved_state_is_exit_code_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved = tmp_path / "saved"
    history = History(Layout.of(weights()))
    history.publish(weights())
    history.save(saved)
    assert json.loads(invoke("inspect", saved, "--check", "--json").stdout)["checked"] is True
    damage(saved)
    broken = invoke("inspect", saved, "--check")
    assert broken.exit_code == 3 and "was damaged" in one_sentence(broken.stderr)

    def missing(*_: object) -> None:
        raise MissingExtra("saving a state needs safetensors: pip install 'thinwire[store]'")

    monkeypatch.setattr("thinwire.files.file_kinds.Replica.load", missing)
    assert invoke("inspect", saved, "--check").exit_code == 2


def test_a_file_s_damage_counts_though_its_publisher_gives_signs_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with ShelfWriter.of(tmp_path, weights()) as writer:
        writer.publish()
    (keyframe,) = read_manifest(PlainFolder(tmp_path), Proof(None)).files
    damage(tmp_path / keyframe.name)
    signs = iter(range(1, 100))

    def later(*args: object) -> Manifest:
        return replace(read_manifest(*args), written=float(next(signs)))  # type: ignore[arg-type]

    monkeypatch.setattr("thinwire.cli.inspecting.read_manifest", later)
    broken = invoke("inspect", tmp_path, "--check")
    assert broken.exit_code == 3 and "is damaged" in one_sentence(broken.stderr)


def test_a_check_of_a_publisher_lasts_as_long_as_its_state_comes(tmp_path: Path, published):
    _, _, at = published
    found = json.loads(invoke("inspect", at, "--check", "--json", "--patience", "20").stdout)
    assert (found["checked"], found["version"]) == (True, 1)
    big = Publisher({"w": torch.randn(400_000)})
    with big, SlowProxy(big.port, 400e3) as proxy:
        slow = f"127.0.0.1:{proxy.port}"
        assert json.loads(invoke("inspect", slow, "--check", "--json").stdout)["checked"] is False
        big.publish()
        began = time.monotonic()
        result = invoke("inspect", slow, "--check", "--json", "--patience", "0.5")
        assert result.exit_code == 0, result.output
        assert time.monotonic() - began > 1.0  # longer than its patience


def test_nobody_to_inspect_is_said_at_once():
    port = free_port()
    result = invoke("inspect", f"127.0.0.1:{port}")
    said = one_sentence(result.stderr)
    assert result.exit_code == 3 and f"nothing listens at 127.0.0.1:{port} " in said
    assert "; start thinwire publish there" in said


def test_a_check_takes_no_more_memory_than_the_state_can_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(3)}
    with ShelfWriter.of(tmp_path, state) as writer:
        writer.publish()
    folder = PlainFolder(tmp_path)
    found = read_manifest(folder, Proof(None))
    claimed = replace(found, files=tuple(replace(file, nbytes=MAX_NUMBER) for file in found.files))
    folder.write(STATE, claimed.pack(Proof(None)))
    limits, reading = list[int](), PlainFolder.read

    def noting(place: PlainFolder, name: str, limit: int) -> bytes:
        limits.append(limit)
        return reading(place, name, limit)

    monkeypatch.setattr(PlainFolder, "read", noting)
    result = invoke("inspect", tmp_path, "--check")
    assert result.exit_code == 3 and f"cannot be read ({MAX_NUMBER} bytes, at most" in result.stderr
    assert limits and max(limits) < 1 << 24
