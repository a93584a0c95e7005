"""The parts of a shelf: folders, the route through its files, hostile manifests, proofs, wrapped patches."""

from __future__ import annotations

import errno
import http.server
import json
import os
import threading
from base64 import b64encode
from dataclasses import asdict, replace
from email.utils import formatdate
from itertools import pairwise
from time import sleep, time
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from thinwire.engines.sync import manifest as manifests
from thinwire.engines.sync.folder import PlainFolder, open_folder, refusal, shown
from thinwire.engines.sync.keeping import Keeping
from thinwire.engines.sync.manifest import MAX_VERSIONS, File, Manifest, Shelved, unpack
from thinwire.engines.sync.proof import Proof
from thinwire.engines.sync.remote_folder import RemoteFolder
from thinwire.engines.sync.route import cheapest, farthest
from thinwire.engines.sync.web_folder import WebFolder
from thinwire.engines.sync.wrapping import unwrap, wrap
from thinwire.types import AuthError, InputError, PayloadError


@pytest.fixture(params=["plain", "memory", "file"])
def folder(request, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    if request.param == "plain":
        return open_folder(tmp_path / "shelf")
    if request.param == "memory":
        yield_root = f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").store.clear()
        return open_folder(yield_root)
    return RemoteFolder(f"file://{tmp_path}/shelf", {})  # a store that is written by renaming


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


@pytest.mark.parametrize("url", ["nope://a/b", "s3://key:secret@bucket/a"])
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


# --- the route ---


def leg(base, version, nbytes):
    return File(f"patches/{base}-{version}-{nbytes}.safetensors", base, version, nbytes, "0" * 64)


def test_the_route_takes_what_costs_least():
    files = [leg(0, 1, 1000), leg(1, 2, 10), leg(2, 3, 10), leg(1, 3, 15), leg(0, 3, 1010)]
    assert cheapest(files, 2, 3) == [leg(2, 3, 10)]
    assert cheapest(files, 1, 3) == [leg(1, 3, 15)]
    assert cheapest(files, 0, 3) == [leg(0, 3, 1010)]
    assert cheapest([*files, leg(0, 3, 5)], 2, 3) == [leg(0, 3, 5)]  # a keyframe, whatever is held
    assert cheapest(files, 0, 4) is None
    assert farthest([*files, leg(4, 5, 1)], 1) == [leg(1, 3, 15)]
    assert farthest(files, 3) == []


def all_routes(files, at, goal):
    if at == goal:
        yield 0
    for f in files:
        if f.base == at:
            yield from (f.nbytes + rest for rest in all_routes(files, f.version, goal))


@settings(deadline=None)
@given(st.data())
def test_no_other_route_is_cheaper(data):
    goal = data.draw(st.integers(1, 6))
    pairs = st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 50)).filter(lambda t: t[0] < t[1])
    files = [leg(*t) for t in data.draw(st.lists(pairs, max_size=12))]
    held = data.draw(st.integers(0, goal - 1))
    chain = cheapest(files, held, goal)
    costs = [*all_routes(files, held, goal), *all_routes([f for f in files if f.version > held], 0, goal)]
    assert (chain is None) == (not costs)
    if chain is not None:
        assert sum(f.nbytes for f in chain) == min(costs)
        assert chain[0].base in (0, held) and chain[-1].version == goal
        assert all(a.version == b.base for a, b in pairwise(chain))


# --- what is kept ---


def chain(n, first=1000, each=10):
    """A manifest of one keyframe and a patch from each version to the next."""
    versions = tuple(Shelved(i, i, 0.0) for i in range(1, n + 1))
    files = (leg(0, 1, first), *(leg(i, i + 1, each) for i in range(1, n)))
    return example(versions=versions, files=files)


def test_trimming_keeps_the_newest_versions_and_a_way_to_them_from_nothing():
    kept = Keeping(versions=2, span=0).trimmed(chain(9))
    assert kept == chain(9)  # the way leads over all of them
    more = chain(9)
    more = replace(more, files=(*more.files, leg(0, 5, 1020)))
    kept = Keeping(versions=2, span=0).trimmed(more)
    assert [v.number for v in kept.versions] == [5, 6, 7, 8, 9]
    assert {(f.base, f.version) for f in kept.files} == {(0, 5), (5, 6), (6, 7), (7, 8), (8, 9)}
    assert Keeping().trimmed(example(versions=(), files=())).versions == ()


def test_a_keyframe_is_due_by_bytes_by_count_or_where_there_is_no_way():
    assert not Keeping(share=0.5).keyframe_due(chain(51))
    assert Keeping(share=0.5).keyframe_due(chain(52))
    assert [Keeping(keyframe_every=3).keyframe_due(chain(n)) for n in (1, 2, 3, 4, 5)] == [0, 0, 0, 1, 1]
    assert Keeping().keyframe_due(replace(chain(3), files=chain(3).files[1:]))
    tiny = {"first": 10**9, "each": 1}  # a manifest has no room for a way that is longer
    long = (MAX_VERSIONS, MAX_VERSIONS + 1)
    assert [Keeping().keyframe_due(chain(n, **tiny)) for n in long] == [False, True]
    assert not Keeping().keyframe_due(example(versions=(), files=()))


def test_one_patch_in_each_span_leads_across_it():
    keeping, manifest = Keeping(span=4), chain(5)
    assert Keeping(span=0).span_base(manifest) is None
    assert keeping.span_base(chain(4)) is None
    assert keeping.span_base(manifest).number == 1
    jump = leg(1, 5, 25)
    for n, base in ((5, None), (8, None), (9, 5)):
        longer = replace(chain(n), files=(*chain(n).files, jump))
        found = keeping.span_base(longer)
        assert (found and found.number) == base


@pytest.mark.parametrize(
    "wrong",
    [
        {"versions": 0},
        {"versions": 10**6},
        {"span": -1},
        {"keyframe_every": 0},
        {"keyframe_every": 10**5},
        {"share": 0},
        {"grace": -1},
    ],
)
def test_nonsense_to_keep_is_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Keeping(**wrong)


# --- the manifest ---


def example(**changes):
    layout = File("layout.json", 0, 0, 10, "a" * 64)
    versions = (Shelved(3, 7, 1000.5), Shelved(4, 2**64 - 1, 1001.0))
    files = (replace(leg(0, 3, 100), name="keyframes/a.safetensors"), leg(3, 4, 10))
    return replace(Manifest("model", "a" * 32, 1.5, 60.0, "d" * 16, layout, versions, files), **changes)


TOKENS = [None, b"token"]


@pytest.mark.parametrize("token", TOKENS)
def test_a_manifest_reads_back(token):
    proof = Proof(token)
    for known in (example(), example(meta={"step": 3, "loss": 0.1})):
        assert unpack(known.pack(proof), proof, "here") == known
    assert example().newest.number == 4
    assert example(versions=(), files=()).newest is None


def test_a_proof_is_for_one_name_one_token_and_one_content():
    proofs = {Proof(t).of(name, data) for t in (b"a", b"b") for name in "xy" for data in (b"1", b"2")}
    assert len(proofs) == 8
    assert Proof(b"a").fits("x", b"1", Proof(b"a").of("x", b"1"))


def test_a_token_at_one_end_only_or_another_one_is_refused():
    with pytest.raises(AuthError, match="signed with a token"):
        unpack(example().pack(Proof(b"a")), Proof(None), "here")
    with pytest.raises(AuthError, match="not signed"):
        unpack(example().pack(Proof(None)), Proof(b"a"), "here")
    with pytest.raises(AuthError, match="another token"):
        unpack(example().pack(Proof(b"a")), Proof(b"b"), "here")


def test_an_unsigned_change_to_a_signed_manifest_is_refused():
    fields = json.loads(example().pack(Proof(b"a")))
    fields["versions"][0]["published"] += 1
    with pytest.raises(AuthError):
        unpack(json.dumps(fields).encode(), Proof(b"a"), "here")


HOSTILE = [
    ("files", [asdict(leg(3, 4, 10)) | {"name": name}])
    for name in (
        "../a",
        "/etc/passwd",
        "patches/../../a.safetensors",
        "patches/a.safetensors\n",
        "patches/A",
        7,
    )
] + [
    ("files", [asdict(leg(base, version, 10))]) for base, version in ((4, 3), (3, 3), (1, 4), (3, 5), (-1, 4))
]
HOSTILE += [("files", [asdict(leg(3, 4, size))]) for size in (0, -1, 2**60, 1.5, True, "1", None)]
HOSTILE += [("files", {}), ("files", [7]), ("files", None), ("files", [{}] * 100_000), ("versions", [{}])]
HOSTILE += [("name", "x" * 1000), ("name", "a\x1b[0m"), ("instance", "../.."), ("written", float("nan"))]
HOSTILE += [("meta", meta) for meta in (None, [1], {"a": [1]}, {"a": "\x1b[0m"}, {"a": "x" * (1 << 16)})]
HOSTILE += [("lease", "1"), ("digest", 3), ("layout", {}), ("check", "0" * 64), ("check", None)]
HOSTILE += [("format", "thinwire-shelf/2"), ("versions", [asdict(v) for v in example().versions[::-1]])]


@pytest.mark.parametrize(("field", "value"), HOSTILE, ids=lambda x: str(x)[:40])
def test_nonsense_in_a_manifest_is_a_payload_error(field, value):
    """Its hash made to fit: whoever writes the manifest can do that where there is no token."""
    proof = Proof(None)
    fields = json.loads(example().pack(proof)) | {field: value}
    if field == "versions":
        fields["versions"] = [v | {"hash": "0" * 16} for v in value]
    if field != "check":
        del fields["check"]
        fields["check"] = proof.of(manifests.STATE, manifests._canonical(fields))
    with pytest.raises(PayloadError):
        unpack(json.dumps(fields).encode(), proof, "here")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_a_payload_error(data):
    with pytest.raises(PayloadError):
        unpack(data, Proof(None), "here")


@pytest.mark.parametrize("data", [b"[" * 100_000, b"9" * 10_000, b'{"a":' * 50_000, b"null", b"\xff"])
def test_deep_and_long_json_is_a_payload_error(data):
    with pytest.raises(PayloadError):
        unpack(data, Proof(None), "here")


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_manifest_is_never_taken(place, value):
    data = bytearray(example().pack(Proof(b"a")))
    place %= len(data)
    if data[place] != value:
        data[place] = value
        try:
            assert unpack(bytes(data), Proof(b"a"), "here") == example()  # the same JSON, written otherwise
        except (PayloadError, AuthError):
            pass


# --- wrapped patches ---


def test_a_wrapped_patch_is_a_safetensors_file(tmp_path):
    data = wrap(b"\x01\x02\x03", {"version": "4"})
    assert bytes(unwrap(data)) == b"\x01\x02\x03"
    (tmp_path / "a.safetensors").write_bytes(data)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.get_tensor("patch").tolist() == [1, 2, 3]
        assert file.metadata() == {"version": "4"}


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_bytes_that_wrap_no_patch_are_a_payload_error(data):
    with pytest.raises(PayloadError):
        unwrap(data)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_wrapping_gives_a_payload_error_or_bytes_of_the_file(place, value):
    data = bytearray(wrap(b"body", {"a": "b"}))
    data[place % len(data)] = value
    try:
        assert len(unwrap(bytes(data))) == 4
    except PayloadError:
        pass
