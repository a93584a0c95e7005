"""Fashion-MNIST from Debian's package: only the files that are pinned, and a sentence where apt is not."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from each import each

from thinwire.runs.data import debian, fashion
from thinwire.runs.data.fashion import FASHION
from thinwire.runs.machine.downloading import download
from thinwire.runs.models import fetch
from thinwire.types import InputError

APT = """#!/bin/sh
if [ -n "$NO_LISTS" ] && [ "$1" = download ]; then exit 100; fi
if [ "$1" = -o ]; then shift 4; [ -d lists/partial ] || exit 8; fi
[ "$1" = update ] && exit 0
[ "$1 $2" = "download dataset-fashion-mnist" ] || exit 9
[ -z "$FAILS" ] || { echo "W: a warning" >&2; echo "E: Unable to locate package $2" >&2; exit 100; }
echo deb > dataset-fashion-mnist_1_all.deb
"""
DPKG = """#!/bin/sh
[ "$1" = -x ] || exit 9
mkdir -p "$3/usr/share/datasets" && cp -r "$PACKED" "$3/usr/share/datasets/fashion-mnist"
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the cache be empty, and two programs stand for apt's, which unpack ``tmp_path``/packed."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PACKED", str(tmp_path / "packed"))
    for folder in ("bin", "packed"):
        (tmp_path / folder).mkdir()
    for name, text in (("apt-get", APT), ("dpkg-deb", DPKG)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    for name in debian.SHA256:
        (tmp_path / "packed" / name).write_bytes(gzip.compress(name.encode()))
    monkeypatch.setattr(debian, "UPSTREAM", "http://127.0.0.1:9/nothing")
    pinned = {name: hashlib.sha256(name.encode()).hexdigest() for name in debian.SHA256}
    monkeypatch.setattr(debian, "SHA256", pinned)
    return tmp_path


def test_the_four_files_come_into_the_cache_and_nothing_else(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (machine / "packed" / "README").write_text("not kept")
    assert fetch.main([FASHION]) == 0
    folder = machine / "cache" / FASHION
    assert str(folder) in capsys.readouterr().out
    assert sorted(f.name for f in folder.iterdir()) == sorted(debian.SHA256)
    monkeypatch.setenv("FAILS", "1")
    assert debian.fetch_fashion() == folder  # it is there, so nothing is run
    monkeypatch.delenv("THINWIRE_DATA", raising=False)
    monkeypatch.setattr(fashion, "PACKAGED", machine / "no such place")
    with pytest.raises(InputError, match=rf"{folder}.* is damaged"):
        fashion.load_fashion()


@each(
    "change, words",
    [
        (
            lambda f: f.write_bytes(gzip.compress(b"another")),
            r"train-labels.* has SHA-256 [0-9a-f]{12}\.\.\., not",
        ),
        (lambda f: f.unlink(), "has no file train-labels"),
        (lambda f: f.symlink_to("t10k-labels-idx1-ubyte.gz"), "has no file train-labels"),
    ],
)
def test_other_files_are_refused_and_nothing_is_kept(change, words, machine: Path) -> None:  # type: ignore[no-untyped-def]
    change(machine / "packed" / "train-labels-idx1-ubyte.gz")
    with pytest.raises(InputError, match=words) as e:
        debian.fetch_fashion()
    assert "THINWIRE_DATA" in str(e.value) and not (machine / "cache" / FASHION).exists()


def test_a_machine_without_package_lists_or_without_apt_fetches_too(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_LISTS", "1")
    folder = debian.fetch_fashion()
    shutil.rmtree(folder)
    monkeypatch.setenv("PATH", str(machine / "packed"))
    with served(machine / "packed") as address:
        monkeypatch.setattr(debian, "UPSTREAM", address)
        said: list[str] = []
        assert debian.fetch_fashion(lambda text, passing=False: said.append(text)) == folder
    assert sorted(f.name for f in folder.iterdir()) == sorted(debian.SHA256)
    assert len(said) == 5 and "once" in said[0]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder's files over HTTP on loopback."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@each(
    "answer, words",
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nhalf", "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", "broke off 96 bytes before"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(2000), "more than 1000 bytes"),
        (
            b"HTTP/1.1 200 OK\r\n\r\n<html>log in first</html>",
            r"train-images.* of http://127\S+ does not unpack",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\n" + gzip.compress(b"another"), r"of http://127\S+ has SHA-256"),
        (b"SSH-2.0-server\r\n", "BadStatusLine"),
        (b"", "closed connection"),
    ],
)
def test_a_server_that_sends_something_else_is_one_sentence(
    answer: bytes, words: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debian, "FILE_LIMIT", 1000)
    monkeypatch.setenv("PATH", str(machine / "packed"))
    with answering(answer) as address:
        monkeypatch.setattr(debian, "UPSTREAM", address)
        with pytest.raises(InputError, match=rf"{words}.*; put .* THINWIRE_DATA names"):
            debian.fetch_fashion()
    assert not list((machine / "cache").iterdir())


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Listen on loopback, and give whoever asks these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):  # it is closed
                while True:
                    with server.accept()[0] as connection:
                        connection.recv(1 << 16)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Log nothing."""

    def log_message(self, *_: object) -> None: ...


def test_an_interrupt_stops_the_program_that_fetches(tmp_path: Path) -> None:
    def told(text: str, passing: bool = False) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(["sh", "-c", "echo $$ > pid; exec sleep 300"], tmp_path, "x", told)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_what_apt_says_is_passed_on_and_its_absence_said(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "1")
    said = r"apt-get fails for .* \(E: Unable to locate package .*\), and http.* does not send .*; put"
    with pytest.raises(InputError, match=said):
        debian.fetch_fashion()
    monkeypatch.setenv("PATH", str(machine / "packed"))
    with pytest.raises(
        InputError, match=r"has no apt-get to fetch dataset-fashion-mnist with, and .*; put .* THINWIRE"
    ):
        debian.fetch_fashion()
    assert not (machine / "cache" / FASHION).exists()


def test_an_unknown_thing_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["fashion"]) == 2
    assert "shakespeare, smollm2-135m, fashion-mnist" in capsys.readouterr().err
