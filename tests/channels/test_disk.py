"""References on disk: what a dictionary would do, in bounded memory, and in one sentence when it cannot."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import equal, parts

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.disk import DiskStore, ReferenceRow, RowCache, SlotFile, open_store
from thinwire.channels.memory import Delta
from thinwire.channels.references import TensorStore
from thinwire.codecs import Uniform
from thinwire.types import InputError


def until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


STEPS = st.tuples(
    st.sampled_from(["put", "put", "put", "get", "prefetch", "drop", "all"]),
    st.integers(0, 9),
    st.integers(0, 99),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=60), st.sampled_from([1, 60, 150, 400, 10**6]), st.booleans())
def test_it_does_what_a_dictionary_does(steps: list[tuple[str, int, int]], memory: int, alike: bool) -> None:
    """Whatever the memory, and whether or not all layouts are the same."""
    disk, plain = DiskStore(memory=memory), TensorStore()
    largest = 40 if alike else 250
    for what, key, seed in steps:
        if what == "get":
            assert equal(disk.get(key), plain.get(key))
        for s in (disk, plain):
            if what == "put":
                s.put(key, parts(seed, 6 if alike else seed % 70))
            elif what == "prefetch":
                s.prefetch([key, seed % 10])
            elif what != "get":
                s.drop([key, seed % 10] if what == "drop" else None)
        assert disk.resident <= max(memory, largest)
    try:
        assert disk.keys() == plain.keys()
        assert all(equal(disk.get(k), plain.get(k)) for k in range(10))
    finally:
        disk.close()


def test_another_thread_may_announce_while_one_works() -> None:
    disk, stop = DiskStore(memory=2000), threading.Event()

    def announce() -> None:
        while not stop.wait(0.0005):
            disk.prefetch(range(0, 100, 3))

    thread = threading.Thread(target=announce)
    thread.start()
    try:
        for turn in range(5):
            for key in range(100):
                if turn:
                    assert equal(disk.get(key), parts(key + turn - 1))
                disk.put(key, parts(key + turn))
    finally:
        stop.set()
        thread.join()
        disk.close()


def resident_pages() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see the process's memory")
def test_memory_stays_bounded_while_the_data_grows(tmp_path: Path, one_thread: None) -> None:
    """Twenty times the budget: held to by the store's own account and by the process."""
    memory, row = 4 * 10**6, 100_000
    disk, largest = DiskStore(tmp_path, memory), 0
    disk.put(0, (torch.zeros(row, dtype=torch.uint8),))
    gc.collect()
    before = resident_pages()
    for turn in range(2):
        for key in range(20 * memory // row):
            if key % 8 == 0:
                disk.prefetch(range(key + 8, key + 16))
            got = disk.get(key)
            assert (got is None) == (not turn and key > 0)
            assert got is None or int(got[0][-1]) == (key + turn - 1 if turn else 0) % 251
            disk.put(key, (torch.full((row,), (key + turn) % 251, dtype=torch.uint8),))
            largest = max(largest, disk.resident)
    grown = resident_pages() - before
    disk.close()
    assert memory // 4 < largest <= memory
    assert grown < 6 * memory, f"{grown} bytes"


def test_what_grows_with_the_samples_is_as_little_as_the_docs_say(tmp_path: Path, one_thread: None) -> None:
    """Where each reference lies and how often it moved: about 240 bytes a sample at each end."""
    sender = Sender(Scheme(Uniform(4), Delta(), Uniform(8), Uniform(8)), DiskStore(tmp_path, 1000))
    receiver = Receiver(DiskStore(tmp_path, 1000))

    def visit(samples: range) -> None:
        for at in samples[::64]:
            packet, _ = sender.encode(torch.randn(64, 2, 8), range(at, at + 64))
            receiver.decode(wire.unpack(wire.pack(packet)))

    visit(range(10**6, 10**6 + 640))
    gc.collect()
    tracemalloc.start()
    try:
        visit(range(2 * 10**6, 2 * 10**6 + 8192))
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] / 8192 / 2
    finally:
        tracemalloc.stop()
        sender.close()
        receiver.close()
    assert 150 < grown < 300, f"{grown:.0f} bytes a sample and end"


def test_what_is_announced_is_in_memory_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskStore(memory=4000)  # 50 rows
    for key in range(200):
        disk.put(key, parts(key))
    assert until(lambda: not disk._dirty.rows)
    disk.prefetch(range(10))
    assert until(lambda: not disk._wanted and disk._loading is None)

    def from_the_caller(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(disk, "_read", from_the_caller)
    assert all(equal(disk.get(key), parts(key)) for key in range(10))
    with pytest.raises(AssertionError, match="read again"):
        disk.get(100)
    disk.close()


def test_announcements_that_nobody_follows_do_not_stop_later_ones() -> None:
    disk = DiskStore(memory=1000)
    for key in range(200):
        disk.put(key, parts(key))
    for start in range(0, 100, 20):
        disk.prefetch(range(start, start + 20))
    disk.prefetch([])  # by now, those of 60 are two announcements old
    assert until(lambda: 80 in disk._ahead.rows and disk._loading is None)
    assert disk.resident <= 1000
    disk.close()


def test_what_is_announced_again_while_it_is_read_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.channels.disk.LINGER", 0.01)
    go, read = threading.Event(), SlotFile.read
    disk = DiskStore(memory=100)  # two rows, of which one may be read ahead
    for key in range(4):
        disk.put(key, parts(key))
    assert until(lambda: not disk._dirty.rows and disk._thread is None)
    disk._clean = RowCache()
    monkeypatch.setattr(SlotFile, "read", lambda *a: (go.wait(60), read(*a))[1])
    disk.prefetch([1])
    assert until(lambda: disk._loading == 1)
    disk.prefetch([2, 1])
    go.set()
    assert until(lambda: disk._thread is None)  # there is no room for 2
    assert 1 in disk._ahead.rows and list(disk._wanted) == [2, 1]
    assert equal(disk.get(2), parts(2))
    disk.put(3, parts(30))
    assert equal(disk.get(1), parts(1)) and equal(disk.get(3), parts(30))
    disk.close()


def test_a_put_does_not_wait_for_the_disk_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs holds up nobody before half the memory waits for it."""
    go, write = threading.Event(), SlotFile.write
    monkeypatch.setattr(SlotFile, "write", lambda *a: (go.wait(60), write(*a))[1])
    disk = DiskStore(memory=100 * 40)
    for key in range(50):
        disk.put(key, parts(key))
    blocked = threading.Thread(target=disk.put, args=(50, parts(50)))
    blocked.start()
    blocked.join(0.2)
    assert blocked.is_alive()
    go.set()
    blocked.join(60)
    assert not blocked.is_alive()
    assert all(equal(disk.get(key), parts(key)) for key in range(51))
    disk.close()


def test_a_put_that_waits_is_newer_than_what_is_read_ahead_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    go, read = threading.Event(), SlotFile.read
    disk = DiskStore(memory=160)  # four rows, of which two may wait to be written
    for key in range(8):
        disk.put(key, parts(key))
    assert until(lambda: not disk._dirty.rows)
    disk._clean = RowCache()
    monkeypatch.setattr(SlotFile, "read", lambda *a: (read(*a), go.wait(60))[0])
    disk.prefetch([0])
    assert until(lambda: disk._loading == 0)
    for key in (6, 7):
        disk.put(key, parts(key + 10))
    waiting = threading.Thread(target=disk.put, args=(0, parts(10)))
    waiting.start()
    assert until(lambda: disk._pressed)
    go.set()
    waiting.join(60)
    assert equal(disk.get(0), parts(10))
    held = [row for cache in (disk._clean, disk._ahead, disk._dirty) for row in cache.rows.values()]
    assert disk.resident == sum(row.data.numel() for row in held)
    disk.close()


def test_a_shelf_counts_a_row_that_takes_another_ones_place_once() -> None:
    cache = RowCache()
    for nbytes in (8, 24):
        cache.add(1, ReferenceRow.empty(((torch.uint8, nbytes),)))
    assert cache.nbytes == 24


def test_the_thread_goes_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.channels.disk.LINGER", 0.01)
    disk = DiskStore()
    for key in range(3):
        disk.put(key, parts(key))
        assert until(lambda: disk._thread is None)
    assert all(equal(disk.get(key), parts(key)) for key in range(3))
    disk.close()


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``nbytes``: to a store as good as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_sentence_at_the_next_call(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, memory=10**6)
    with largest_file(2000):
        disk.put(0, parts(0, 100))
        disk.put(1, parts(1, 5000))
        assert until(lambda: disk._error is not None)
    for call in (lambda: disk.put(2, parts(2)), lambda: disk.get(0)):
        with pytest.raises(InputError, match=r"references are lost on disk in .*; free space there"):
            call()
    disk.prefetch([0])
    disk.close()


def test_a_full_disk_ends_the_wait_for_room(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, memory=20_000)
    with largest_file(30_000), pytest.raises(InputError, match="are lost on disk"):
        for key in range(200):
            disk.put(key, parts(key, 1000))
    disk.close()


def test_a_file_that_lost_its_end_is_no_reference(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, memory=100)
    for key in range(20):
        disk.put(key, parts(key))
    assert until(lambda: not disk._dirty.rows)
    os.ftruncate(disk._file._fd, 40)
    with pytest.raises(InputError, match="bytes of a row are missing"):
        disk.get(5)
    disk.close()


@pytest.mark.parametrize("bad", ["file/inside", "file", "not/there"])
def test_a_folder_that_is_none_is_one_sentence(tmp_path: Path, bad: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"references cannot be kept in .*; name a folder"):
        DiskStore(tmp_path / bad)
    assert not (tmp_path / "not").exists()


def test_a_named_folder_is_made_and_kept_and_no_file_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    one, two = DiskStore(folder), DiskStore(folder)
    one.put(1, parts(1))
    two.put(1, parts(2))
    assert equal(one.get(1), parts(1)) and equal(two.get(1), parts(2))
    assert list(folder.iterdir()) == []  # even now: a crash could leave nothing behind
    one.close()
    two.close()
    two.close()
    assert folder.is_dir()


def test_a_store_that_is_closed_says_so() -> None:
    disk = DiskStore()
    disk.put(1, parts(1))
    disk.close()
    for call in (lambda: disk.put(1, parts(1)), lambda: disk.get(1)):
        with pytest.raises(InputError, match="closed"):
            call()


def test_the_space_of_dropped_references_is_used_again(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, memory=100)
    for key in range(1000):
        disk.put(key, parts(key))
        disk.drop([key - 10])
    assert until(lambda: not disk._dirty.rows)
    assert os.fstat(disk._file._fd).st_size < 2000
    disk.drop()
    assert os.fstat(disk._file._fd).st_size == 0
    disk.close()


@pytest.mark.parametrize(
    ("text", "folder", "memory"),
    [
        ("disk", None, 256_000_000),
        ("disk:refs", "refs", 256_000_000),
        ("disk:refs,memory=500MB", "refs", 500_000_000),
        ("disk,memory=1.5GB", None, 1_500_000_000),
        ("disk:a,b=c,memory=20kb", "a,b=c", 20_000),
    ],
)
def test_the_option_says_where_and_how_much(text: str, folder: str | None, memory: int) -> None:
    made = open_store(text)
    assert getattr(made, "func", None) is DiskStore
    assert getattr(made, "keywords", None) == {"folder": folder, "memory": memory}


def test_the_option_makes_a_store_for_each_end(tmp_path: Path) -> None:
    for text in ("memory", f"disk:{tmp_path},memory=1MB"):
        make = open_store(text)
        a, b = make(), make()
        a.put(1, parts(1))
        assert b.get(1) is None and equal(a.get(1), parts(1))
        a.close()
        b.close()


@pytest.mark.parametrize(
    "text", ["", "disc", "disk:", "disk,memory=", "disk,memory=lots", "disk,memory=-1MB", "memory=5MB"]
)
def test_other_texts_are_refused_with_what_would_be_right(text: str) -> None:
    with pytest.raises(InputError, match="write memory, disk or disk:FOLDER"):
        open_store(text)


def test_no_memory_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="memory=0 bytes"):
        open_store("disk,memory=0MB")
    with pytest.raises(InputError, match="memory=0 bytes"):
        DiskStore(memory=0)
