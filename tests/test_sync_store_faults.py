"""Stores that cannot be reached for a while: publishers and readers outlive it, whatever the store raises."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from thinwire.engines.sync.folder import Folder, PlainFolder, open_folder
from thinwire.engines.sync.keeping import Keeping
from thinwire.engines.sync.proof import Proof
from thinwire.engines.sync.shelf import ShelfReader, ShelfWriter
from thinwire.engines.sync.shelving import Shelving
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.types import InputError, MissingExtra

pytest.importorskip("zstandard")
fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.local import LocalFileSystem  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

LONG = 60.0  # seconds; a limit, not an expectation
OPERATIONS = ("info", "cat_file", "pipe_file", "rm_file", "ls", "makedirs")


def until(done: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.005)


class Gone(Exception):
    """What a store's own library raises: no ``OSError``."""


class Wired(MemoryFileSystem):
    """Connects once, when it is made, and takes the options of that alone, as SFTP's does.

    ``outage`` is the server's, by operation; what ``broken`` says of a connection stays so.
    """

    protocol = ("wired", "memory")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    outage: ClassVar[dict[str, Exception]] = {}
    made: ClassVar[list[Wired]] = []

    def __init__(self) -> None:
        self.broken: Exception | None = None
        self.reach("connect")
        super().__init__()
        self.made.append(self)

    def reach(self, operation: str) -> None:
        for error in (self.broken, self.outage.get(operation)):
            if error is not None:
                raise error

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        found: str = super()._strip_protocol(path.removeprefix("wired://"))
        return found


def _reached(operation: str) -> Callable[..., Any]:
    real = getattr(MemoryFileSystem, operation)

    def reaching(self: Wired, *args: Any, **options: Any) -> Any:
        self.reach(operation)
        return real(self, *args, **options)

    return reaching


for name in OPERATIONS:
    setattr(Wired, name, _reached(name))


@pytest.fixture
def url() -> Iterator[str]:
    fsspec.register_implementation("wired", Wired, clobber=True)
    yield "wired://shelf"
    for kept in (Wired.store, Wired.outage, Wired.made):
        kept.clear()
    Wired.pseudo_dirs[:] = [""]


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(1000.0)}


@pytest.mark.parametrize(
    ("operation", "call", "done"),
    [
        ("info", lambda folder: folder.read("state.json", 10), "read"),
        ("cat_file", lambda folder: folder.read("state.json", 10), "read"),
        ("pipe_file", lambda folder: folder.write("state.json", b"new"), "written"),
        ("makedirs", lambda folder: folder.write("state.json", b"new"), "written"),
        ("rm_file", lambda folder: folder.delete("state.json"), "cleared"),
        ("ls", lambda folder: folder.sizes("patches"), "listed"),
    ],
)
@pytest.mark.parametrize("error", [Gone("no endpoint"), EOFError()], ids=repr)
def test_what_a_store_raises_of_its_own_is_an_os_error(url, operation, call, done, error) -> None:
    folder = open_folder(url)
    folder.write("state.json", b"old")
    Wired.outage[operation] = error
    with pytest.raises(OSError, match=f"wired://shelf cannot be {done}: (no endpoint|EOFError)"):
        call(folder)
    Wired.outage.clear()
    assert folder.read("state.json", 10) == b"old"


@pytest.mark.parametrize(
    "error",
    [Gone("closed"), EOFError(), OSError("Socket is closed"), ConnectionResetError(), TimeoutError()],
    ids=repr,
)
def test_a_connection_that_ended_for_good_is_made_anew(url: str, error: Exception) -> None:
    folder = open_folder(url)
    folder.write("state.json", b"old")
    (first,) = Wired.made
    first.broken = error
    with pytest.raises(OSError):
        folder.read("state.json", 10)
    assert folder.read("state.json", 10) == b"old"
    assert not folder.sizes("patches") and len(Wired.made) == 2


def test_a_connection_is_made_when_the_server_is_back(url: str) -> None:
    folder = open_folder(url)
    folder.write("state.json", b"old")
    Wired.made[0].broken = Gone("closed")
    Wired.outage["connect"] = Gone("refused")
    for said in ("closed", "refused", "refused"):
        with pytest.raises(OSError, match=f"wired://shelf cannot be read: {said}"):
            folder.read("state.json", 10)
    Wired.outage.clear()
    assert folder.read("state.json", 10) == b"old"


@pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError(), FileExistsError()], ids=repr)
def test_an_answer_of_the_store_ends_no_connection(url: str, error: Exception) -> None:
    folder = open_folder(url)
    Wired.outage["info"] = error
    with pytest.raises(type(error)):
        folder.read("state.json", 10)
    Wired.outage.clear()
    folder.write("state.json", b"old")
    assert folder.read("state.json", 10) == b"old" and len(Wired.made) == 1


def test_nobody_is_given_a_connection_that_ended(url: str) -> None:
    open_folder(url).write("state.json", b"old")
    Wired.made[0].broken = Gone("closed")
    assert open_folder(url).read("state.json", 10) == b"old"


class Busy:
    """A thread that is writing ``keyframes/k``, and what is wrong with using its connection meanwhile."""

    def __init__(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self.user = threading.Event(), threading.Event(), threading.get_ident()
        self.connection: Wired | None = None
        real, reach = Wired.pipe_file, Wired.reach

        def pipe_file(system: Wired, path: str, data: bytes) -> None:
            if "keyframes/k" in path:
                self.connection, self.user = system, threading.get_ident()
                self.begun.set()
                assert self.go_on.wait(LONG)
                self.connection = None
            real(system, path, data)

        def alone(system: Wired, operation: str) -> None:
            if system is self.connection and threading.get_ident() != self.user:
                raise Gone("an answer to another thread")
            reach(system, operation)

        monkeypatch.setattr(Wired, "pipe_file", pipe_file)
        monkeypatch.setattr(Wired, "reach", alone)
        self.thread = threading.Thread(target=folder.write, args=("keyframes/k", b"whole"), daemon=True)
        self.thread.start()
        assert self.begun.wait(LONG)

    def end(self) -> None:
        self.go_on.set()
        self.thread.join(LONG)


def test_no_two_threads_use_one_connection(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(url)
    folder.write("state.json", b"old")
    for _ in range(3):
        busy = Busy(folder, monkeypatch)
        folder.write("state.json", b"new")
        assert folder.read("state.json", 10) == b"new" and folder.sizes("patches") == {}
        folder.delete("state.json")
        busy.end()
        assert folder.read("keyframes/k", 10) == b"whole"
    assert len(Wired.made) == 2  # each is used again


def test_nor_one_at_the_end_of_a_chain(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(f"dir::{url}")
    busy = Busy(folder, monkeypatch)
    folder.write("state.json", b"new")
    assert folder.read("state.json", 10) == b"new"
    busy.end()
    assert folder.read("keyframes/k", 10) == b"whole" and len(Wired.made) == 2


def test_what_serves_many_threads_at_once_is_made_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wired, "async_impl", True)
    folder = open_folder(url)
    writing = [threading.Thread(target=folder.write, args=(f"patches/{i}", b"x")) for i in range(4)]
    for thread in writing:
        thread.start()
    for thread in writing:
        thread.join(LONG)
    assert len(folder.sizes("patches")) == 4 and len(Wired.made) == 1
    Wired.made[0].broken = Gone("closed")
    with pytest.raises(OSError, match="closed"):
        folder.read("patches/1", 10)
    assert folder.read("patches/1", 10) == b"x" and len(Wired.made) == 2


def test_a_connection_that_was_idle_for_long_is_closed_and_made_anew(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        closed = 0

        def close(self) -> None:
            Client.closed += 1

    monkeypatch.setattr(Wired, "protocol", ("sftp", "memory"))  # what fsspec's class for SFTP has
    monkeypatch.setattr(Wired, "client", Client(), raising=False)
    folder = open_folder(url)
    folder.write("state.json", b"old")
    assert not Client.closed and len(Wired.made) == 1
    monkeypatch.setattr("thinwire.engines.sync.remote_folder.IDLE", 0.0)
    assert folder.read("state.json", 10) == b"old"
    assert Client.closed == 1 and len(Wired.made) == 2
    Wired.made[1].broken = Gone("closed")
    monkeypatch.setattr("thinwire.engines.sync.remote_folder.IDLE", LONG)
    with pytest.raises(OSError, match="closed"):
        folder.read("state.json", 10)
    assert Client.closed == 2


@pytest.mark.parametrize(("module", "needs"), [("fsspec", "store"), ("fsspec.implementations.sftp", "more")])
def test_a_package_that_is_missing_is_named(monkeypatch, module: str, needs: str) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=f"sftp://host/shelf needs .*{needs}"):
        open_folder("sftp://host/shelf")


def test_an_outage_ends_neither_publisher_nor_reader(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is published meanwhile: it is the signs of life that meet with it."""
    monkeypatch.setattr("thinwire.engines.sync.shelf_writer.RETRY", 0.01)
    state = weights()
    with ShelfWriter.of(url, state, lease=1.0) as writer, ShelfReader(url, poll=0.01) as reader:
        writer.publish()
        reader.wait(1, timeout=LONG)
        writer.flush(LONG)
        for connection in Wired.made:
            connection.broken = Gone("closed")
        Wired.outage |= dict.fromkeys((*OPERATIONS, "connect"), Gone("no endpoint"))
        until(lambda: "no endpoint" in (writer.status.error or ""))
        until(lambda: "no endpoint" in (reader.status.error or ""))
        Wired.outage.clear()
        state["w"][0] = 7.0
        writer.publish()
        reader.wait(2, timeout=LONG)
        assert torch.equal(reader.tensors()["w"], state["w"])
        until(lambda: writer.status.error is None)


def test_old_files_that_cannot_be_deleted_end_no_publisher(url: str) -> None:
    with ShelfWriter.of(url, weights()) as writer:
        writer.publish()
    open_folder(url).write("patches/00000001-00000002-aaaaaaaa.safetensors", b"orphan")
    Wired.outage["rm_file"] = Gone("no endpoint")
    state = {"w": weights()["w"] + 1}
    with ShelfWriter.of(url, state, keeping=Keeping(grace=0.0)) as writer:
        writer.publish()
        writer.flush(LONG)
    assert writer.status.version == 2 and writer.status.error is None


def test_a_store_that_cannot_be_listed_refuses_a_publisher_in_a_sentence(url: str) -> None:
    with ShelfWriter.of(url, weights()) as writer:
        writer.publish()
    Wired.outage["ls"] = Gone("no endpoint")
    with pytest.raises(InputError, match=r"cannot write to wired://shelf \(.* be listed: no endpoint\)"):
        ShelfWriter.of(url, weights())


def test_who_waits_for_a_dead_publisher_says_so(tmp_path: Path) -> None:
    history = History(Layout.of(weights()))
    dead = ("state", "ab" * 16, Proof(None), Keeping(), 0.3, lambda: None)
    Shelving(PlainFolder(tmp_path), history, *dead, clock=lambda: time.time() - 1000)
    with pytest.warns(UserWarning, match="did not say goodbye; this one begins in 0 s") as told:
        ShelfWriter(tmp_path, History(Layout.of(weights()))).close()
    assert [warning.filename for warning in told] == [__file__]


class Stubborn(LocalFileSystem):
    """A server whose files are written by moving them, which moves onto no file that is there.

    ``answers``: what the next moves end in, None for what they would; ``ends``: the connection along with it.
    """

    protocol = "stubborn"
    answers: ClassVar[list[Exception | None]] = []
    ends: ClassVar[bool] = False
    ended: Exception | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        found: str = super()._strip_protocol(path.removeprefix("stubborn://"))
        return found

    def rm_file(self, path: str) -> None:
        if self.ended is not None:
            raise self.ended
        super().rm_file(path)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        error = self.answers.pop(0) if self.answers else None
        self.ended = self.ended or (error if self.ends else None)
        if (failure := self.ended or error) is not None:
            raise failure
        if self.exists(path2):
            raise FileExistsError(errno.EEXIST, "File exists", path2)
        super().mv(path1, path2)


@pytest.fixture
def stubborn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    fsspec.register_implementation("stubborn", Stubborn, clobber=True)
    monkeypatch.setattr(Stubborn, "answers", [])
    folder = open_folder(f"stubborn://{tmp_path}")
    folder.write("state.json", b"old")
    yield folder


TROUBLES = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    OSError(errno.EIO, "Input/output error"),
    OSError("Socket is closed"),
    PermissionError(errno.EACCES, "Permission denied"),
    ConnectionResetError(),
    TimeoutError(),
]
LOST = [OSError("Socket is closed"), ConnectionResetError(), TimeoutError()]


def test_a_server_that_moves_onto_no_file_has_its_files_replaced(stubborn: Folder) -> None:
    stubborn.write("state.json", b"new")
    assert stubborn.read("state.json", 10) == b"new"
    assert [*stubborn.sizes("")] == ["state.json"]


@pytest.mark.parametrize("moved", [0, 1, 2])
@pytest.mark.parametrize(
    ("error", "ends"), [*((e, False) for e in TROUBLES), *((e, True) for e in LOST)], ids=repr
)
def test_what_cannot_be_moved_in_leaves_the_old_file(
    stubborn: Folder, monkeypatch: pytest.MonkeyPatch, error: Exception, moved: int, ends: bool
) -> None:
    """It is moved in, which is refused, then the old one aside, then it once more: each of these may fail."""
    Stubborn.answers[:] = [None] * moved + [error, error][moved > 0 :]
    monkeypatch.setattr(Stubborn, "ends", ends)
    with pytest.raises(type(error)):
        stubborn.write("state.json", b"new")
    assert stubborn.read("state.json", 10) == b"old"
    assert ends or [*stubborn.sizes("")] == ["state.json"]
    Stubborn.answers.clear()
    monkeypatch.setattr(Stubborn, "ends", False)
    stubborn.write("state.json", b"new")
    assert stubborn.read("state.json", 10) == b"new"


@pytest.mark.parametrize("error", TROUBLES[:2] + TROUBLES[-2:], ids=repr)
def test_a_full_disk_or_a_lost_line_is_no_file_in_the_way(stubborn: Folder, error: Exception) -> None:
    Stubborn.answers[:] = [error]
    with pytest.raises(type(error)):
        stubborn.write("state.json", b"new")
    assert stubborn.read("state.json", 10) == b"old"
