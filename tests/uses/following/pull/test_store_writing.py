"""Writers of a store: restarts, keyframes that take long, what is swept and what stays, full disks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import pytest
from stores import (
    Clock,
    Source,
    Uploads,
    crowded,
    going_on,
    same,
    settle,
    store_of,
    three_versions,
    writing,
)
from waiting import LONG, until
from wired import Gone, Wired, thousand

from thinwire.files.local_folder import open_folder
from thinwire.state.patches import draft
from thinwire.uses.following.pull.manifest import Proof
from thinwire.uses.following.pull.retention import RetentionPolicy
from thinwire.uses.following.pull.store_fetching import Fetching
from thinwire.uses.following.pull.store_writer import ShelfWriter

pytest.importorskip("zstandard")


def test_only_what_the_manifest_needs_stays(folder):
    source, clock = Source(), Clock()
    store = writing(folder, source, clock, versions=4, span=2, keyframe_every=6, grace=5.0)
    for _ in range(30):
        source.publish()
        settle(store)
        clock.now += 1.0
    assert len(store.manifest.versions) <= 4 + 7
    clock.now += 10.0
    store.tend()
    there = {*folder.sizes("patches"), *folder.sizes("keyframes")}
    assert there == {f.name for f in store.manifest.files}


def test_a_writer_that_restarts_with_the_same_state_goes_on_without_a_keyframe(folder):
    source, reader = three_versions(folder)
    again = going_on(source)
    restarted = writing(folder, again)
    again.note(again.history.publish(again.state))
    restarted.write()
    again.publish()
    restarted.write()
    landed = []
    reader.look(lambda version: landed.append(version.number))
    assert same(reader, again.state)
    assert landed == [4, 5]
    assert sum(not f.base for f in restarted.manifest.files) == 1


def test_a_writer_that_restarts_may_publish_on_before_it_writes(folder):
    source, reader = three_versions(folder)
    again = going_on(source)
    restarted = writing(folder, again)
    again.history.publish(again.state)
    again.publish()
    restarted.write()
    assert (restarted.manifest.files[-1].base, restarted.manifest.files[-1].version) == (3, 5)
    read = reader.patch_nbytes
    assert reader.look() and same(reader, again.state)
    assert reader.patch_nbytes - read < restarted.manifest.files[-1].nbytes + 1


@pytest.mark.parametrize("first", ["publish", "claim"])
def test_a_writer_that_restarts_with_another_state_begins_with_a_keyframe_at_the_next_number(folder, first):
    _, reader = three_versions(folder)
    again = Source(seed=1)
    if first == "publish":
        again.publish()
    restarted = writing(folder, again)
    if first == "claim":
        again.publish()
    else:
        assert not restarted.write()  # what a history begins with may be old: it is no news
        restarted.offers = True
    restarted.write()
    assert restarted.manifest.newest.number == 4
    assert reader.look() and reader.held.number == 4 and same(reader, again.state)


def test_what_a_dead_writer_left_half_written_is_swept(plain):
    source, clock = Source(), Clock()
    store = writing(plain, source)
    source.publish()
    store.write()
    plain.write("patches/00000001-00000002-aaaaaaaa.safetensors", b"orphan")
    plain.write("patches/.00000001-00000002-aaaaaaaa.safetensors.12345678.part", b"orphan")
    plain.write("patches/notes.txt", b"somebody's")
    restarted = writing(plain, source, clock, grace=0.0)
    restarted.tend()
    assert [*plain.sizes("patches")] == ["patches/notes.txt"]
    assert [f.name for f in restarted.manifest.files] == [*plain.sizes("keyframes")]


@pytest.mark.parametrize(
    "name", ["state.json", "layout.json", "patches/00000001-00000002-aaaaaaaa.safetensors"]
)
def test_what_a_writer_that_dies_leaves_of_a_file_is_swept(plain, name):
    """In the root too, where the file lies that is written most often."""
    store_of(plain, 1)
    dies = "import os, sys, thinwire.files.local_folder as f; os.fsync = lambda _: os._exit(9);"
    writes = "f.PlainFolder(f.Path(sys.argv[1])).write(sys.argv[2], b'half')"
    found = subprocess.run([sys.executable, "-c", dies + writes, str(plain.path), name], timeout=LONG)
    assert found.returncode == 9 and len([*plain.path.rglob("*.part")]) == 1
    restarted = writing(plain, Source(), grace=0.0)
    restarted.tend()
    assert not [*plain.path.rglob("*.part")]
    assert restarted.manifest.newest.number == 1 and plain.read("layout.json", 10**6)


def test_old_files_stay_for_their_time_whatever_the_clock_is_set_to(plain):
    source, wall, steady = Source(), Clock(), Clock()
    writing(plain, source, wall, steady=steady)
    plain.write("patches/00000001-00000002-aaaaaaaa.safetensors", b"orphan")
    store = writing(plain, source, wall, steady=steady, grace=5.0)
    wall.now += 3600
    store.sweep()
    assert plain.sizes("patches")
    steady.now += 6
    store.sweep()
    assert not plain.sizes("patches")


def test_a_keyframe_that_takes_long_to_write_gets_into_the_manifest(plain, monkeypatch):
    monkeypatch.setattr(draft, "LATELY", 0.0)  # it takes longer than that
    source, go_on = crowded(), threading.Event()
    folder = Uploads(plain, "keyframes", lambda: go_on.wait(LONG))
    go_on.set()
    store = writing(folder, source, keyframe_every=2, span=0, versions=4)
    for _ in range(3):
        source.publish()
        store.write()
    go_on.clear()
    store.tend()  # begins a keyframe, of version 3
    until(lambda: store._keyframe.begun)
    for _ in range(12):
        source.publish()
        source.history.patch(source.history.newest.number - 1)  # a feed marks what it sends
        store.write()
        store.tend()
    go_on.set()
    until(lambda: not store._keyframe.running)
    source.publish()
    store.write()
    store.tend()
    found = [(f.base, f.version) for f in store.manifest.files]
    assert sorted(found) == [(0, 3), *((n, n + 1) for n in range(3, 16))]  # all that leads on from it stayed
    late = Fetching(plain, Proof(None))
    assert late.look() and same(late, source.state)


def test_a_keyframe_counts_where_each_upload_takes_longer_than_a_version(plain):
    source = crowded()
    folder = Uploads(plain, "patches", source.publish)
    store = writing(folder, source, keyframe_every=2, span=0, versions=4)
    source.publish()
    for _ in range(60):
        store.write()
        store.tend()
        until(lambda: store._keyframe is None or not store._keyframe.running)
    assert len(store.manifest.versions) < 12 and len(store.manifest.files) < 16


def test_a_keyframe_counts_where_versions_come_faster_than_patches_are_made(plain, monkeypatch):
    """So the history's newest version is never the store's."""
    source = crowded()
    make = source.history.patch

    def publish_on(*args, **options):
        found = make(*args, **options)
        source.publish()
        return found

    monkeypatch.setattr(source.history, "patch", publish_on)
    store = writing(plain, source, keyframe_every=2, span=0, versions=4, grace=0.0)
    source.publish()
    for _ in range(60):
        store.write()
        store.tend()
        until(lambda: store._keyframe is None or not store._keyframe.running)
    assert source.history.newest.number > store.manifest.newest.number == 60
    assert len(store.manifest.versions) < 12 and len(store.manifest.files) < 16
    late = Fetching(plain, Proof(None))
    assert late.look() and same(late, source.seen[60])


def test_a_keyframe_is_uploaded_once_though_the_manifest_cannot_be_written_for_a_while(plain, monkeypatch):
    source, store = store_of(plain, 3, keyframe_every=2, span=0)
    store.tend()
    until(lambda: not store._keyframe.running)
    written, real = [], plain.write

    def write(name, data):
        written.append(name)
        if name == "state.json" and len(written) == 1:
            raise OSError(errno.ETIMEDOUT, "Connection timed out")
        real(name, data)

    monkeypatch.setattr(plain, "write", write)
    with pytest.raises(OSError):
        store.tend()
    source.publish()  # one alone: after two the next keyframe would be due, and may be written in time
    for _ in range(2):
        store.write()
        store.tend()
    assert not [name for name in written if name.startswith("keyframes")]
    assert [f.version for f in store.manifest.files if not f.base] == [1, 3]


def test_a_keyframe_is_of_the_newest_version_there_with_what_was_published_along(plain):
    source, store = store_of(plain, 3, keyframe_every=2, span=0)
    store.tend()
    source.publish()  # before it is made, or after
    until(lambda: not store._keyframe.running)
    store.tend()
    keyframe = max((f for f in store.manifest.files if not f.base), key=lambda f: f.version)
    assert keyframe.version == 3
    for file in store.manifest.files:
        if file != keyframe:
            plain.delete(file.name)
    late = Fetching(plain, Proof(None))
    late.look()
    assert same(late, source.seen[3])
    assert late.held.meta == {"step": 2} and late.held.published == store.manifest.newest.published


def test_others_marks_do_not_cost_a_shelf_its_base(plain, monkeypatch):
    monkeypatch.setattr(draft, "LATELY", 0.0)  # a feed's last patch is not what keeps it
    source = crowded()
    store = writing(plain, source, keyframe_every=4096)
    source.publish()
    store.write()
    for _ in range(80):  # a feed that is faster than the store
        source.publish()
        source.history.patch(source.history.newest.number - 1)
    store.write()
    assert [(f.base, f.version) for f in store.manifest.files] == [(0, 1), (1, 81)]
    assert source.history._users
    store.leave()
    assert not source.history._users


def test_the_version_being_written_is_kept_meanwhile(plain):
    source = crowded()

    def publish_on():
        for _ in range(10):
            source.publish()

    store = writing(Uploads(plain, "patches", publish_on), source, keyframe_every=4096)
    for _ in range(2):
        source.publish()
        store.write()
    store.write()
    assert [(f.base, f.version) for f in store.manifest.files] == [(0, 1), (1, 2), (2, 12)]


def test_no_name_of_a_file_uses_up_the_numbers_of_versions(plain):
    plain.write("keyframes/9007199254740000-aaaaaaaa.safetensors", b"x")
    plain.write("keyframes/00000500.safetensors", b"x")  # nor does a name that no publisher writes
    _, store = store_of(plain, 1)
    assert store.manifest.newest.number == 1


def test_a_full_disk_leaves_readers_with_what_they_had(plain, monkeypatch):
    source, store = store_of(plain, 2)
    files = sorted(p.name for p in plain.path.rglob("*"))
    source.publish()

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        with pytest.raises(OSError):
            store.write()
    assert sorted(p.name for p in plain.path.rglob("*")) == files
    reader = Fetching(plain, Proof(None))
    assert reader.look() and same(reader, source.seen[2])
    store.write()
    assert reader.look() and same(reader, source.state)


def test_a_manifest_that_cannot_be_written_leaves_readers_with_what_they_had(plain, monkeypatch):
    source, store = store_of(plain, 2)
    source.publish()
    real = plain.write

    def write(name, data):
        if name == "state.json":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(name, data)

    with monkeypatch.context() as m:
        m.setattr(plain, "write", write)
        with pytest.raises(OSError):
            store.write()
    reader = Fetching(plain, Proof(None))
    assert reader.look() and same(reader, source.seen[2])
    store.write()
    assert reader.look() and same(reader, source.state)


def test_old_files_that_cannot_be_deleted_end_no_publisher(url: str) -> None:
    with ShelfWriter.of(url, thousand()) as writer:
        writer.publish()
    open_folder(url).write("patches/00000001-00000002-aaaaaaaa.safetensors", b"orphan")
    Wired.outage["rm_file"] = Gone("no endpoint")
    state = {"w": thousand()["w"] + 1}
    with ShelfWriter.of(url, state, keeping=RetentionPolicy(grace=0.0)) as writer:
        writer.publish()
        writer.flush(LONG)
    assert writer.status.version == 2 and writer.status.error is None
