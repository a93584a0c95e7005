"""A watch of checkpoints: changes are told once they rest, half-written and lost ones are not taken."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commanded import same, trained, weights
from waiting import until

from thinwire.files import watch
from thinwire.files.checkpoint import INDEX, write_checkpoint
from thinwire.files.watch import PART_REST, REST, Watch
from thinwire.types import InputError

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("zstandard")
pytest.importorskip("safetensors")


def test_a_watch_tells_each_change_once_it_rests(tmp_path: Path):
    file = tmp_path / "m.safetensors"
    write_checkpoint(file, weights(), {})
    watch = Watch(file, rest=0.05)
    assert watch.first().keys() == weights().keys()
    assert not watch.changed()
    write_checkpoint(file, trained(weights()), {})
    assert not watch.changed()  # it has just been seen
    time.sleep(0.06)
    assert watch.changed() and watch.take() is not None and not watch.changed()
    file.unlink()
    assert not watch.changed()


@pytest.mark.parametrize("rest", [None, 3.0])
def test_half_of_a_checkpoint_has_to_rest_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: float | None
):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr("thinwire.files.watch.time", clock)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (tmp_path / INDEX).write_text(json.dumps(index))

    def write(shard: int, value: float) -> None:
        write_checkpoint(tmp_path / names[shard], {f"w{shard}": torch.full((3,), value)}, {})

    def told_after(seconds: float) -> bool:
        """Say whether a change is told then, and not before."""
        before, now[0] = watch.changed(), now[0] + seconds - 0.01
        early, now[0] = watch.changed(), now[0] + 0.02
        return not before and not early and watch.changed()

    write(0, 1.0)
    write(1, 1.0)
    watch = Watch(tmp_path, rest)
    watch.first()
    write(0, 2.0)
    assert not watch.changed()
    now[0] += 2.5  # as long as a slow disk takes for the next one
    assert not watch.changed()
    write(1, 2.0)
    assert told_after(rest or REST)
    found = watch.take()
    assert found is not None and {float(x[0]) for x in found.values()} == {2.0}
    write(1, 3.0)  # and no other one
    assert not watch.changed()
    now[0] += 2.5
    (tmp_path / f".{names[0]}.a8Xk2").write_text("grows, as rsync's do")
    assert told_after(rest or PART_REST)
    assert watch.take() is not None and not watch.changed()


def test_what_comes_back_as_it_was_is_no_change(tmp_path: Path):
    file, aside = tmp_path / "m.safetensors", tmp_path / "aside"
    write_checkpoint(file, weights(), {})
    watch = Watch(file, rest=0.01)
    watch.first()
    file.rename(aside)
    file.write_bytes(b"8 bytes.")
    until(watch.changed, "the damaged file")
    with pytest.raises(InputError, match="cannot read"):
        watch.take()
    assert not watch.changed()
    file.unlink()
    aside.rename(file)
    for _ in range(5):
        assert not watch.changed()
        time.sleep(0.02)


def spoilt(file: Path, data: bytes) -> Callable[[], None]:
    """Leave half of what is to be in ``file``; return what writes the rest and keeps size, time and inode."""
    file.write_bytes(data[:100] + bytes(len(data) - 100))
    was = file.stat()

    def mend() -> None:
        file.write_bytes(data)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))

    return mend


def without_descriptors(file: Path, data: bytes) -> Callable[[], None]:
    file.write_bytes(data)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("spoil", [spoilt, without_descriptors])
def test_what_cannot_be_read_is_read_again_though_it_looks_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path, bytes], Callable[[], None]]
):
    monkeypatch.setattr(watch, "RETRY", 0.02)
    file, data = tmp_path / "m.safetensors", tmp_path / "next"
    write_checkpoint(file, weights(), {})
    write_checkpoint(data, trained(weights()), {})
    looking, whole = Watch(file, rest=0.01), data.read_bytes()
    looking.first()
    mend = spoil(file, whole)
    try:
        for _ in range(2):
            until(looking.changed, "an attempt")
            with pytest.raises((InputError, OSError)) as told:
                looking.take()
            assert looking.trouble == str(told.value) and not looking.changed()
    finally:
        mend()
    until(lambda: looking.changed() and same(looking.take() or {}, trained(weights())), "the mended file")
    assert looking.trouble == "" and not looking.changed()


def test_parts_without_an_index_are_a_checkpoint_once_all_are_there(tmp_path: Path):
    def write(part: int) -> None:
        write_checkpoint(tmp_path / f"m-0000{part}-of-00002.safetensors", {f"w{part}": torch.ones(3)}, {})

    write(2)
    with pytest.raises(InputError, match="has 1 of the 2 parts of m; save or fetch"):
        Watch(tmp_path, rest=0.01).first()
    write(1)
    assert Watch(tmp_path, rest=0.01).first().keys() == {"w1", "w2"}


def test_a_single_file_counts_before_the_index_that_an_earlier_checkpoint_left(tmp_path: Path):
    """As for from_pretrained; save_pretrained deletes the shards of earlier ones, and not their index."""
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    write_checkpoint(tmp_path / "model.safetensors", {"w": torch.ones(3)}, {})
    assert Watch(tmp_path).first().keys() == {"w"}


def test_of_a_trainer_s_folder_the_newest_whole_checkpoint_counts(tmp_path: Path):
    def write(step: int, *names: str) -> Path:
        (folder := tmp_path / f"checkpoint-{step}").mkdir(exist_ok=True)
        for name in names:
            write_checkpoint(folder / name, {name: torch.full((1,), float(step))}, {})
        return folder

    def taken() -> dict[str, float] | None:
        found = watch.take() if watch.changed() else None
        return found and {name: float(x) for name, x in found.items()}

    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    watch = Watch(tmp_path, rest=0.01)
    with pytest.raises(InputError, match="has no safetensors file"):
        watch.await_files(0.0)
    write(20, "adapter_model.safetensors")
    write(100, "model.safetensors")
    write(99, "model.safetensors")
    (tmp_path / "checkpoint-200").mkdir()
    assert watch.first() == {"model.safetensors": torch.tensor([100.0])}
    before = watch.stamp()
    index = write(300, shards[0]) / INDEX
    assert watch.stamp() == before
    write(300, shards[1])
    index.write_text('{"weight_map"')
    assert watch.stamp() == before
    index.write_text(json.dumps({"weight_map": {name: name for name in shards}}))
    until(lambda: taken() == dict.fromkeys(shards, 300.0), "both")
    shutil.rmtree(index.parent)
    until(lambda: taken() == {"model.safetensors": 100.0}, "the one before")
    write_checkpoint(tmp_path / "model.safetensors", {"last": torch.tensor([301.0])}, {})
    until(lambda: taken() == {"last": 301.0}, "the model at the end")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / "b.safetensors").unlink(), r"b\.safetensors is not there, but the index"),
        (lambda folder: (folder / INDEX).write_text("{"), "is not a safetensors index"),
        (shutil.rmtree, "checkpoint is not there"),
    ],
    ids=["shard", "index", "folder"],
)
def test_a_checkpoint_that_is_lost_is_told_once_and_again_after_it_was_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], object], told: str
):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr("thinwire.files.watch.time", clock)
    folder = tmp_path / "checkpoint"

    def write() -> None:
        folder.mkdir(exist_ok=True)
        (folder / INDEX).write_text(json.dumps({"weight_map": {n: f"{n}.safetensors" for n in "ab"}}))
        for name in "ab":
            write_checkpoint(folder / f"{name}.safetensors", {name: torch.ones(3)}, {})

    write()
    watch = Watch(folder)
    watch.first()
    for _ in range(2):
        spoil(folder)
        assert not watch.changed()
        now[0] += PART_REST - 1.0  # whoever writes the next one may still be at it
        assert not watch.changed()
        now[0] += 1.0
        assert watch.changed()
        with pytest.raises(InputError, match=told):
            watch.take()
        now[0] += PART_REST
        assert not watch.changed()
        write()
        now[0] += PART_REST
        watch.changed()
        now[0] += PART_REST
        assert watch.changed() and watch.take() is not None


def test_a_shard_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ATTEMPTS", 2)
    monkeypatch.setattr(watch, "LOOK", 0.0)
    write_checkpoint(tmp_path / "a.safetensors", {"a": torch.ones(3)}, {})
    found = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(found))
    with pytest.raises(InputError, match=r"b\.safetensors is not there, but the index names it"):
        Watch(tmp_path).first()
