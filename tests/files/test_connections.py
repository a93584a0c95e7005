"""Connections of stores that end: made anew, used by one thread, closed when idle."""

from __future__ import annotations

import sys
import threading

import pytest
from waiting import LONG
from wired import Gone, Wired

from thinwire.files.base import Folder
from thinwire.files.local_folder import open_folder
from thinwire.types import InputError, MissingExtra

pytest.importorskip("zstandard")


@pytest.mark.parametrize(
    ("operation", "call", "done"),
    [
        ("info", lambda folder: folder.read("state.json", 10), "read"),
        ("cat_file", lambda folder: folder.read("state.json", 10), "read"),
        ("pipe_file", lambda folder: folder.write("state.json", b"new"), "written"),
        ("rm_file", lambda folder: folder.delete("state.json"), "cleared"),
        ("ls", lambda folder: folder.sizes("patches"), "listed"),
    ],
)
@pytest.mark.parametrize("error", [Gone("no endpoint"), EOFError()], ids=repr)
def test_what_a_store_raises_of_its_own_is_an_os_error(url, operation, call, done, error) -> None:
    folder = open_folder(url)
    folder.write("state.json", b"old")
    Wired.outage[operation] = error
    with pytest.raises(OSError, match=f"wired://store cannot be {done}: (no endpoint|EOFError)"):
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
        with pytest.raises(OSError, match=f"wired://store cannot be read: {said}"):
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


def test_a_bucket_that_was_never_there_is_a_wrong_name_and_one_that_was_may_come_back(url: str) -> None:
    Wired.outage["info"] = FileNotFoundError("The specified bucket does not exist")
    folder = open_folder(url)
    with pytest.raises(InputError, match="the bucket 'store' does not exist"):
        folder.read("state.json", 10)
    folder.write("state.json", b"old")
    with pytest.raises(FileNotFoundError):
        folder.read("state.json", 10)


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
    monkeypatch.setattr("thinwire.files.remote_folder.IDLE", 0.0)
    assert folder.read("state.json", 10) == b"old"
    assert Client.closed == 1 and len(Wired.made) == 2
    Wired.made[1].broken = Gone("closed")
    monkeypatch.setattr("thinwire.files.remote_folder.IDLE", LONG)
    with pytest.raises(OSError, match="closed"):
        folder.read("state.json", 10)
    assert Client.closed == 2


@pytest.mark.parametrize(("module", "needs"), [("fsspec", "store"), ("fsspec.implementations.sftp", "more")])
def test_a_package_that_is_missing_is_named(monkeypatch, module: str, needs: str) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=f"sftp://host/store needs .*{needs}"):
        open_folder("sftp://host/store")
