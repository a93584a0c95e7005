"""Folders of stores, also remote ones and those behind a web server: whole files or errors."""

from __future__ import annotations

import errno
import http.server
import os
import re
import threading
from base64 import b64encode
from contextlib import closing
from email.utils import formatdate
from time import sleep, time
from typing import ClassVar

import pytest
from each import each
from waiting import free_port

from thinwire.files.base import refusal, shown
from thinwire.files.local_folder import PlainFolder, open_folder
from thinwire.files.remote_folder import RemoteFolder
from thinwire.files.web_folder import WebFolder
from thinwire.links.hub.hub import Hub
from thinwire.types import InputError, PayloadError


@pytest.fixture(params=["plain", "memory", "file"])
def folder(request, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    if request.param == "plain":
        return open_folder(tmp_path / "store")
    if request.param == "memory":
        yield_root = f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").store.clear()
        return open_folder(yield_root)
    return RemoteFolder(f"file://{tmp_path}/store", {})  # a store that is written by renaming


def test_a_folder_holds_whole_files(folder):
    assert folder.sizes("patches") == {}
    with pytest.raises(FileNotFoundError):
        folder.read("state.json", 100)
    folder.write("patches/a", b"one")
    folder.write("patches/a", b"three")
    folder.write("state.json", b"{}")
    assert folder.read("patches/a", 5) == b"three"
    assert folder.sizes("patches") == {"patches/a": 5}
    assert folder.sizes("") == {"patches": None, "state.json": 2}
    with pytest.raises(PayloadError, match="5 bytes, expected at most 4"):
        folder.read("patches/a", 4)
    folder.delete("patches/a")
    folder.delete("patches/a")
    assert folder.sizes("patches") == {}
    with pytest.raises(FileNotFoundError):
        folder.read("patches/a", 100)


def full(*_args, **_options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    folder = PlainFolder(tmp_path)
    folder.write("state.json", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as e:
        folder.write("state.json", b"new")
    assert str(refusal(e.value, folder.where)).startswith("the disk is full: cannot write to ")
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    assert folder.read("state.json", 10) == b"old"


def test_a_move_that_fails_leaves_nothing_half_written(tmp_path, monkeypatch):
    folder = RemoteFolder(f"file://{tmp_path}", {})
    monkeypatch.setattr(folder._free[0][0], "mv", full)
    with pytest.raises(OSError):
        folder.write("state.json", b"new")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_under_a_files_name_holds_nobody_up(tmp_path):
    os.mkfifo(tmp_path / "state.json")
    with pytest.raises(PayloadError, match="is not a file"):
        PlainFolder(tmp_path).read("state.json", 10)


@each("url", ["nope://a/b", "gs://key:secret@bucket/a"])
def test_a_store_that_nothing_reads_is_refused_without_its_password(url):
    with pytest.raises(InputError) as e:
        open_folder(url, no_such_option=1)
    assert "secret" not in str(e.value)


def test_what_is_shown_of_a_url_holds_no_secret():
    assert shown("https://me:secret@host/a?key=secret#secret") == "https://host/a"
    assert shown("simplecache::s3://id:secret@b/c/") == "simplecache::s3://b/c"


class Handler(http.server.SimpleHTTPRequestHandler):
    """A folder, an entity tag by content, and whatever a test wants to go wrong."""

    asked: ClassVar[list] = []
    changed: ClassVar[float | None] = 60.0  # seconds ago
    logins: ClassVar[list] = []

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.asked.append((self.path, self.headers.get("If-None-Match")))
        self.logins.append(self.headers.get("Authorization"))
        answers = {
            "/boom": self.boom,
            "http://store.example/boom": self.boom,  # as a proxy is asked
            "/short": self.short,
            "/endless": self.endless,
            "/dribble": self.dribble,
            "/state.json": self.tagged,
            "/moved": self.moved,
        }
        answers.get(self.path, super().do_GET)()

    def boom(self):
        self.send_error(503)

    def moved(self):
        self.send_response(302)
        self.send_header("Location", "/state.json")
        self.end_headers()

    def short(self):
        self.send_response(200)
        self.send_header("Content-Length", "10")
        self.end_headers()
        self.wfile.write(b"half")

    def endless(self):
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(1 << 16))
        except OSError:
            pass

    def dribble(self):
        try:
            while True:
                self.wfile.write(b"HTTP/1.0 200 OK\r\n" if not self.begun else b"x")
                self.begun = True
                sleep(0.02)
        except OSError:
            pass

    begun = False

    def tagged(self):
        body = b"{}"
        fresh = self.headers.get("If-None-Match") != '"tag"'
        self.send_response(200 if fresh else 304)
        self.send_header("ETag", '"tag"')
        if self.changed is not None:
            self.send_header("Last-Modified", formatdate(time() - self.changed, usegmt=True))
        self.end_headers()
        if fresh:
            self.wfile.write(body)


@pytest.fixture
def web(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Handler.asked, Handler.logins = [], []

    def handler(*args):
        return Handler(*args, directory=str(tmp_path))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield WebFolder(f"http://127.0.0.1:{server.server_port}/", timeout=60.0)
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_web_server_is_read(web, tmp_path):
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "a").write_bytes(b"hello")
    assert web.read("patches/a", 5) == b"hello"
    with pytest.raises(FileNotFoundError):
        web.read("patches/b", 5)
    with pytest.raises(PayloadError, match="at most 4"):
        web.read("patches/a", 4)
    for refused in (lambda: web.write("a", b""), lambda: web.delete("a"), lambda: web.sizes("patches")):
        with pytest.raises(InputError, match="publish to the folder that the server shows"):
            refused()


def test_what_goes_wrong_on_the_web_is_bounded_and_named(web):
    with pytest.raises(OSError, match="answered 503"):
        web.read("boom", 100)
    with pytest.raises((PayloadError, OSError), match="short"):
        web.read("short", 100)
    with pytest.raises(PayloadError, match="at most 100000"):
        web.read("endless", 100_000)
    with pytest.raises(OSError, match="cannot be reached"):
        WebFolder("http://127.0.0.1:1").read("state.json", 10)


@pytest.mark.parametrize(("scheme", "user"), [("http", "me:secret@"), ("https", "")])
def test_a_proxy_of_the_environment_is_named(web, monkeypatch, scheme, user):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    at = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv(f"{scheme}_proxy", f"http://{user}{at}")
    by = f"the way there is by the proxy http://{at}, as {scheme}_proxy says: mend that, or put store.example"
    with pytest.raises(OSError, match="store.example/a cannot be reached: .*refused; " + re.escape(by)):
        WebFolder(f"{scheme}://store.example/a").read("state.json", 10)
    monkeypatch.setenv(f"{scheme}_proxy", web.where)
    with pytest.raises(OSError, match=f"(answered 503|501).* the way there is by the proxy {web.where}, as"):
        WebFolder(f"{scheme}://store.example").read("boom", 10)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(OSError, match=r"answered 503 [^;]*$"):
        web.read("boom", 10)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("token", [None, b"a shared secret"])
def test_a_publisher_s_port_is_no_web_server(monkeypatch, scheme, token):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with closing(Hub.bind(token=token)) as hub:
        where = f"{scheme}://127.0.0.1:{hub.port}"
        with pytest.raises(
            InputError, match=f"^{where} is no web server, .* as 127.0.0.1:{hub.port}, without"
        ):
            WebFolder(where).read("state.json", 10)


def test_headers_that_never_end_hold_nobody_up(web):
    web._timeout = 0.3
    with pytest.raises(OSError, match=r"dribble: \d+ bytes came in 0 s; the server is too slow"):
        web.read("dribble", 100)


def test_a_manifest_that_did_not_change_is_not_sent_again(web):
    assert [web.read("state.json", 10) for _ in range(2)] == [b"{}", b"{}"]
    assert Handler.asked == [("/state.json", None), ("/state.json", '"tag"')]


@pytest.mark.parametrize("changed", [0.0, None, -60.0])
def test_a_tag_of_what_has_just_changed_stands_for_nothing(web, monkeypatch, changed):
    """Many servers make it of the time in whole seconds and the size, which the next manifest may share."""
    assert web.read("state.json", 10) == b"{}"
    monkeypatch.setattr(Handler, "changed", changed)
    web._last.clear()
    assert [web.read("state.json", 10) for _ in range(2)] == [b"{}", b"{}"]
    assert Handler.asked == [("/state.json", None)] * 3


def test_a_user_and_a_password_go_to_their_server_alone_and_into_no_message(web):
    address = web.where.removeprefix("http://")
    own = open_folder(f"http://me:pass%40word@{address}/")
    assert own.where == web.where and own.read("moved", 10) == b"{}"
    assert Handler.logins == ["Basic " + b64encode(b"me:pass@word").decode(), None]
    with pytest.raises(OSError, match="answered 503") as told:
        own.read("boom", 10)
    with pytest.raises(OSError, match="cannot be reached") as unreached:
        open_folder("http://me:pass%40word@127.0.0.1:1").read("state.json", 10)
    assert "pass" not in f"{told.value} {unreached.value}"
