"""A ShelfWriter in its own thread: keyframes, disks without room, replacement, restarts, leases."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest
import torch
from following import small
from stores import FAST, Model, versions_of
from waiting import LONG, until

from thinwire.files.local_folder import PlainFolder
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patches.patch import Version
from thinwire.types import InputError
from thinwire.uses.following.pull import store_writer as writer_module
from thinwire.uses.following.pull.claim import read_manifest
from thinwire.uses.following.pull.manifest import Proof, unpack
from thinwire.uses.following.pull.retention import RetentionPolicy
from thinwire.uses.following.pull.store_fetching import recall
from thinwire.uses.following.pull.store_reader import ShelfReader
from thinwire.uses.following.pull.store_writer import Keyframe, ShelfWriter, StoreWriting

pytest.importorskip("zstandard")


def test_a_keyframe_outlives_no_writer(tmp_path, monkeypatch):
    """Whoever has closed may delete the folder, and nobody needs a file that no manifest names."""
    model, store, write, begun = Model(), PlainFolder(tmp_path), PlainFolder.write, threading.Event()

    def slow(self, name, data):
        if threading.current_thread().name == "thinwire keyframe":
            begun.set()
            until(lambda: writer._closing)
        write(self, name, data)

    monkeypatch.setattr(PlainFolder, "write", slow)
    with ShelfWriter.of(tmp_path, model, keeping=RetentionPolicy(keyframe_every=1)) as writer:
        for _ in range(2):
            model.w.data[0] += 1
            writer.publish()
            writer.flush(LONG)
        assert begun.wait(LONG)
    assert "thinwire keyframe" not in {thread.name for thread in threading.enumerate()}
    named = {f.name for f in unpack(store.read("state.json", 1 << 22), Proof(None), "here").files}
    kept = {*store.sizes("keyframes")}
    assert len(kept) == 2 and kept <= named  # it was nearly there, and is what newcomers begin with


def test_a_keyframe_that_is_dropped_while_it_is_made_is_not_written():
    made, written = threading.Event(), []

    def recall(version, more):
        assert made.wait(LONG)
        return SimpleNamespace(version=version.number, hash=version.hash, published=0.0)

    keyframe = Keyframe(SimpleNamespace(recall=recall), Version(1, 1), written.append, lambda: None)
    assert keyframe.drop(0.0) is None
    made.set()
    until(lambda: not keyframe.running)
    assert not written and keyframe.result() is None


def test_a_writer_tells_what_keeps_it_from_writing_and_goes_on_when_it_can(tmp_path, monkeypatch):
    model = Model()
    writer = ShelfWriter.of(tmp_path, model)
    writer.publish()
    writer.flush()

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        m.setattr("thinwire.uses.following.pull.store_writer.RETRY", 0.05)
        model.train_a_little()
        writer.publish()
        until(lambda: writer.status.error)
        with pytest.raises(InputError, match="the disk is full: cannot write to"):
            writer.flush(0.1)
        assert "the disk is full" in writer.status.error and writer.status.version == 1
        model.train_a_little()
        writer.publish()  # training goes on
    writer.flush()
    assert writer.status.error is None and writer.status.version == 3
    writer.close()


def test_a_full_disk_does_not_keep_old_files_from_being_deleted(tmp_path, monkeypatch):
    writer = ShelfWriter.of(tmp_path, Model(), keeping=RetentionPolicy(grace=0.0))
    writer.flush()
    swept = threading.Event()

    def full(store):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr("thinwire.uses.following.pull.store_writer.RETRY", 0.05)
        m.setattr(StoreWriting, "write", full)
        m.setattr(StoreWriting, "sweep", lambda store: swept.set())
        writer.publish()
        assert swept.wait(LONG)
    writer.close()


def test_a_writer_that_was_replaced_tells_the_trainer(tmp_path):
    model = Model()
    writer = ShelfWriter.of(tmp_path, model, instance="a" * 16)
    with pytest.raises(InputError, match="another publisher writes"):
        ShelfWriter.of(tmp_path, model)
    with ShelfWriter.of(tmp_path, model, instance="a" * 16) as same_name:
        same_name.publish()
    ShelfWriter.of(tmp_path, model, instance="b" * 16).close()
    with pytest.raises(InputError, match="another publisher has taken over"):
        writer.publish()
        writer.flush()
    with pytest.raises(InputError, match="another publisher has taken over"):
        writer.publish()
    with pytest.raises(InputError, match="another publisher has taken over"):
        writer.close()


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("x")
    for url in (tmp_path / "file" / "store", tmp_path / "file"):
        with pytest.raises(InputError, match="cannot write to"):
            ShelfWriter.of(url, Model())
    with pytest.raises(InputError):
        ShelfWriter.of("http://127.0.0.1:1/store", Model())
    with pytest.raises(InputError, match="has no tensors of its own"):
        ShelfWriter(tmp_path / "store", History(Layout.of(dict(Model().state_dict())))).publish()


def test_names_that_no_reader_would_take_are_refused(tmp_path):
    history = History(Layout.of(dict(Model().state_dict())))
    for wrong in (
        {"name": "a\nb"},
        {"name": "x" * 300},
        {"instance": "me"},
        {"instance": ""},
        {"lease": 0.0},
        {"lease": float("nan")},
        {"lease": float("inf")},
    ):
        with pytest.raises(InputError, match=next(iter(wrong))):
            ShelfWriter(tmp_path / "store", history, **wrong)
    assert not (tmp_path / "store").exists()


def test_a_writer_that_starts_again_says_nothing_before_it_publishes(tmp_path):
    """Nobody published what it found in the store; meta data and numbers go on as if it had not been away."""
    model = Model()
    with ShelfWriter.of(tmp_path, model) as writer:
        for step in range(3):
            model.train_a_little()
            writer.publish(step=step)
            writer.flush()
    before = versions_of(tmp_path)
    with ShelfWriter.of(tmp_path, model, lease=0.1) as writer:  # nothing is offered, by time or at the end
        newest = writer.history.newest
        assert (newest.number, newest.meta, newest.published) == (3, {"step": 2}, before[-1].published)
        sleep(0.3)
    assert versions_of(tmp_path) == before
    with ShelfWriter.of(tmp_path, model) as writer, ShelfReader(tmp_path, **FAST) as reader:
        assert reader.wait(3).meta == {"step": 2}
        writer.flush()
        assert versions_of(tmp_path) == before
        model.train_a_little()
        assert writer.publish(step=7).number == 4
        assert reader.wait(4).meta == {"step": 7}
        assert torch.equal(reader.tensors()["w"], model.w)
    last = unpack((tmp_path / "state.json").read_bytes(), Proof(None), "here").files[-1]
    assert (last.base, last.version) == (3, 4)


def test_older_contents_that_a_history_begins_with_are_not_offered(tmp_path):
    model = Model()
    old = {n: x.clone() for n, x in model.state_dict().items()}
    with ShelfWriter.of(tmp_path, model) as writer:
        for _ in range(3):
            model.train_a_little()
            writer.publish()
            writer.flush()
    before = versions_of(tmp_path)
    history = History(Layout.of(old))
    history.publish(old)  # from a file that was saved some time ago
    with ShelfWriter(tmp_path, history, lease=0.1) as writer:
        sleep(0.3)
        assert versions_of(tmp_path) == before
        history.publish(dict(model.state_dict()))
        writer.offer()
        writer.flush()
        assert [v.hash for v in versions_of(tmp_path)[len(before) :]] == [history.newest.hash]


def test_what_cannot_be_gone_on_from_is_not_fetched(tmp_path, monkeypatch):
    model = Model()
    with ShelfWriter.of(tmp_path, model, name="policy") as writer:
        writer.publish(step=1)
    layout, read = Layout.of(dict(model.state_dict())), []
    real = PlainFolder.read
    monkeypatch.setattr(
        PlainFolder, "read", lambda f, name, limit: (read.append(name), real(f, name, limit))[1]
    )
    assert recall(tmp_path, None, layout, "other") is None
    assert recall(tmp_path, None, Layout.of({"w": torch.zeros(1)}), "policy") is None
    assert recall("http://127.0.0.1:1/store", None, layout, "policy") is None
    assert {*read} == {"state.json"}
    tensors, version = recall(tmp_path, None, layout, "policy")
    assert torch.equal(tensors["w"], model.w) and (version.number, version.meta) == (1, {"step": 1})


class SlowUploads(PlainFolder):
    """A folder to which one patch takes much longer than a lease."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def write(self, name: str, data: bytes) -> None:
        if name.startswith("patches/"):
            self.begun.set()
            assert self.go_on.wait(LONG)
        super().write(name, data)


def test_a_lease_outlives_a_long_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w, folder = small(), SlowUploads(tmp_path)
    monkeypatch.setattr(writer_module, "open_folder", lambda url: folder)
    with ShelfWriter.of(tmp_path, w, lease=1.0) as writer:
        writer.publish(1)
        writer.flush(LONG)
        w["w"] += 1
        writer.publish(2)
        assert folder.begun.wait(LONG)
        before = read_manifest(folder, Proof(None))
        until(lambda: read_manifest(folder, Proof(None)).written > before.written + before.lease)
        folder.go_on.set()
        writer.flush(LONG)
    assert read_manifest(folder, Proof(None)).lease == 0.0  # said goodbye, and nobody took that back
