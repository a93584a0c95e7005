"""A shelf end to end: publishers and readers of a folder, and all that can go wrong between them."""

from __future__ import annotations

import errno
import http.server
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from thinwire.engines.sync.claim import LOOKS
from thinwire.engines.sync.fetching import AVOID, Fetching
from thinwire.engines.sync.folder import PlainFolder, open_folder
from thinwire.engines.sync.keeping import Keeping
from thinwire.engines.sync.keyframe import Keyframe
from thinwire.engines.sync.manifest import unpack
from thinwire.engines.sync.mirror import Mirror
from thinwire.engines.sync.peek import recall, resume
from thinwire.engines.sync.proof import Proof
from thinwire.engines.sync.shelf import ShelfReader, ShelfWriter
from thinwire.engines.sync.shelf_reader import SIGNS
from thinwire.engines.sync.shelving import BEATS, LATE, Shelving
from thinwire.state import lane
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patch import Patch
from thinwire.types import AuthError, InputError, LinkError, PayloadError

pytest.importorskip("zstandard")
LEASE = 60.0
LONG = 60.0  # seconds; a limit, not an expectation


def until(done):
    end = monotonic() + LONG
    while not done():
        assert monotonic() < end, "in vain"
        sleep(0.005)


class Clock:
    now = 1_000_000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Source:
    """A state of bfloat16 that is trained a little at a time, its history, and what each version held."""

    def __init__(self, seed=0, size=3000, history=None):
        self.g = torch.Generator().manual_seed(seed)
        self.state = {
            "w": torch.randn(size, generator=self.g).bfloat16(),
            "b": torch.randn(7, generator=self.g),
        }
        self.history = history or History(Layout.of(self.state), budget=1 << 20)
        self.seen = {}

    def train(self, share=0.02):
        where = torch.rand(self.state["w"].shape, generator=self.g) < share
        self.state["w"] = torch.where(where, self.state["w"] * 1.01, self.state["w"]).bfloat16()
        self.state["b"][0] += 1

    def publish(self):
        self.train()
        version = self.history.publish(self.state, {"step": len(self.seen)})
        self.note(version)
        return version

    def note(self, version):
        self.seen[version.number] = {n: x.clone() for n, x in self.state.items()}


def shelving(folder, source, clock=None, instance="a" * 16, token=None, steady=None, **keeping):
    kept, clock = Keeping(**keeping), clock or Clock()
    return Shelving(
        folder,
        source.history,
        "model",
        instance,
        Proof(token),
        kept,
        LEASE,
        lambda: None,
        clock=clock,
        sleep=clock.sleep,
        steady=steady,
    )


def settle(shelf):
    """Let a writer do all that is due, its keyframe included."""
    for _ in range(4):
        shelf.write()
        shelf.tend()
        until(lambda: shelf._keyframe is None or not shelf._keyframe.running)
    assert shelf._keyframe is None


def same(fetching, state):
    fetching.replica.swap()
    got = fetching.replica.tensors()
    return got.keys() == state.keys() and all(torch.equal(got[n], x) for n, x in state.items())


@pytest.fixture(params=["plain", "memory"])
def folder(request, tmp_path):
    if request.param == "plain":
        return open_folder(tmp_path / "shelf")
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").store.clear()
    return open_folder(f"memory://{tmp_path.name}")


@pytest.fixture
def plain(tmp_path):
    return PlainFolder(tmp_path / "shelf")


# --- the way it should go ---


def test_a_reader_has_every_version_bit_for_bit(folder):
    source = Source()
    shelf, reader = shelving(folder, source), Fetching(folder, Proof(None))
    assert not reader.look()
    for _ in range(20):
        version = source.publish()
        assert shelf.write() and not shelf.write()
        assert reader.look() and not reader.look()
        assert reader.held == replace(version, changed=0)
        assert same(reader, source.state)
        shelf.tend()


def test_a_reader_takes_published_versions_in_order_and_a_merged_patch_where_that_is_cheaper(folder):
    source = Source()
    shelf, early = shelving(folder, source, keyframe_every=100), Fetching(folder, Proof(None))
    source.publish()
    shelf.write()
    early.look()
    for _ in range(8):
        source.publish()
        shelf.write()
    landed = []
    early.look(lambda version: landed.append(version.number))
    assert landed == [9]  # one patch across eight versions, not eight
    assert same(early, source.state)
    late = Fetching(folder, Proof(None))
    late.look(lambda version: landed.append(version.number))
    assert landed[1:] == [1, 9]
    assert same(late, source.state)


def test_versions_that_came_while_writing_are_merged(folder):
    source = Source()
    shelf, reader = shelving(folder, source), Fetching(folder, Proof(None))
    for count in (1, 5, 9):
        for _ in range(count):
            source.publish()
        shelf.write()
        assert reader.look() and same(reader, source.state)
    assert [v.number for v in shelf.manifest.versions] == [1, 6, 15]


def test_a_keyframe_comes_by_bytes_and_leads_on(folder):
    """Whoever comes late never reads much more than one keyframe and a half."""
    source = Source()
    shelf = shelving(folder, source, span=0)
    for _ in range(40):
        source.publish()
        settle(shelf)
        late = Fetching(folder, Proof(None))
        late.look()
        assert same(late, source.state)
        first = next(f for f in shelf.manifest.files if not f.base)
        assert late.patch_nbytes < 2.2 * first.nbytes
    assert sum(not f.base for f in shelf.manifest.files) > 1


def test_a_keyframe_is_shown_once_something_leads_on_from_it(folder):
    """Readers that follow closely never fetch one, whenever it was made and however long it took."""
    source = Source()
    shelf, early = shelving(folder, source, keyframe_every=1, span=0), Fetching(folder, Proof(None))
    source.publish()
    shelf.write()
    early.look()
    source.publish()
    shelf.write()
    source.publish()  # not written yet
    shelf.tend()  # begins a keyframe, of version 3
    until(lambda: not shelf._keyframe.running)
    shelf.tend()
    assert [v.number for v in shelf.manifest.versions] == [1, 2]
    source.publish()
    shelf.write()
    shelf.tend()
    legs = {(f.base, f.version) for f in shelf.manifest.files}
    assert legs == {(0, 1), (1, 2), (2, 4), (0, 3), (3, 4)}
    landed, late = [], Fetching(folder, Proof(None))
    early.look(lambda version: landed.append(version.number))
    assert landed == [2, 4] and same(early, source.state)
    folder.delete(next(f.name for f in shelf.manifest.files if f.version == 1))
    late.look()
    assert late.held.number == 4 and same(late, source.state)


def test_only_what_the_manifest_needs_stays(folder):
    source, clock = Source(), Clock()
    shelf = shelving(folder, source, clock, versions=4, span=2, keyframe_every=6, grace=5.0)
    for _ in range(30):
        source.publish()
        settle(shelf)
        clock.now += 1.0
    assert len(shelf.manifest.versions) <= 4 + 7
    clock.now += 10.0
    shelf.tend()
    there = {*folder.sizes("patches"), *folder.sizes("keyframes")}
    assert there == {f.name for f in shelf.manifest.files}


class Watching:
    """A folder that looks at its reader at each read, as whoever uses the tensors may at any time."""

    def __init__(self, folder, look):
        self.folder, self.where, self.look = folder, folder.where, look

    def read(self, name, limit):
        self.look()
        return self.folder.read(name, limit)


def test_a_reader_that_rested_at_any_version_goes_on_and_never_back(plain):
    """Versions between spans leave the manifest, and the keyframe that newcomers begin with may be older."""
    source, clock = Source(), Clock()
    shelf = shelving(plain, source, clock, versions=8, span=4, share=2.0, grace=0.0)
    readers, stranded = [], 0
    for number in range(1, 41):
        source.publish()
        settle(shelf)
        clock.now += 1.0
        readers.append(Fetching(plain, Proof(None)))
        readers[-1].look()
        assert same(readers[-1], source.state) and readers[-1].held.number == number
    keyframe = max(f.version for f in shelf.manifest.files if not f.base)
    for number, reader in enumerate(readers, 1):
        shown = [number]

        def look(reader=reader, shown=shown):
            reader.mirror.prepare()
            assert same(reader, source.seen[reader.held.number])
            assert reader.replica.version == reader.held.number >= shown[-1]
            shown.append(reader.held.number)

        stranded += keyframe < number and not reader.place(shelf.manifest)
        reader._folder = Watching(plain, look)
        assert reader.look(lambda _version, look=look: look()) or number == 40
        assert same(reader, source.state) and reader.held.number == 40 and reader.confirmed
    assert stranded > 20  # by a way from nothing that begins below what they hold


def test_a_way_from_nothing_that_breaks_below_what_is_held_changes_nothing(plain):
    source, clock = Source(), Clock()
    shelf = shelving(plain, source, clock, versions=8, span=4, share=2.0, grace=0.0)
    for number in range(1, 31):
        source.publish()
        settle(shelf)
        clock.now += 1.0
        if number == 15:
            reader = Fetching(plain, Proof(None), clock=clock)
            reader.look()
    assert not reader.place(shelf.manifest)
    second = next(f for f in shelf.manifest.files if f.base and f.version <= 15)
    whole = plain.read(second.name, 1 << 30)
    damage(plain, second.name)
    for _ in range(2):
        with pytest.raises(LinkError, match=r"leads from version 15 to 30 now \(.*damaged"):
            reader.look()
        reader.mirror.prepare()
        assert reader.held.number == 15 and same(reader, source.seen[15])
    plain.write(second.name, whole)
    clock.now += 2 * AVOID
    assert reader.look() and same(reader, source.state)


def test_a_base_that_the_reader_has_costs_it_no_keyframe(folder):
    source = Source()
    model = torch.nn.ParameterDict({n: torch.nn.Parameter(x.clone()) for n, x in source.state.items()})
    shelf = shelving(folder, source)
    source.note(source.history.publish(source.state))
    shelf.write()
    for _ in range(3):
        source.publish()
        shelf.write()
    mirror, first = Mirror(model), model["w"].detach().clone()
    reader = Fetching(folder, Proof(None), mirror)
    reader.look()
    assert torch.equal(model["w"], first)  # it is moved by who uses it
    assert mirror.show(reader.replica, model)
    assert same(reader, source.state) and torch.equal(model["w"], source.state["w"])
    keyframe = next(f for f in shelf.manifest.files if not f.base)
    assert reader.patch_nbytes < keyframe.nbytes / 2


@pytest.mark.parametrize("later", [0, 3], ids=["the newest", "older"])
def test_a_mapping_is_a_base_and_the_newest_one_gets_its_number(folder, later):
    source = Source()
    base = {n: x.clone() for n, x in source.state.items()} | {"another": torch.zeros(1)}
    shelf = shelving(folder, source)
    for i in range(1 + later):
        source.note(source.history.publish(source.state, {"step": 0})) if i == 0 else source.publish()
        shelf.write()
    reader = Fetching(folder, Proof(None), Mirror(base=base))
    assert not reader.confirmed
    reader.look()
    assert same(reader, source.state) and reader.held.number == 1 + later and reader.confirmed
    keyframe = next(f for f in shelf.manifest.files if not f.base)
    assert reader.patch_nbytes < keyframe.nbytes / 2 and bool(reader.patch_nbytes) == bool(later)
    assert reader.held.meta == {"step": later}


def test_what_was_published_along_outlives_the_publisher(folder):
    source = Source()
    shelf = shelving(folder, source, keyframe_every=1)
    source.publish()
    source.publish()
    shelf.write()
    settle(shelf)
    shelving(folder, going_on(source))
    reader = Fetching(folder, Proof(None), Mirror(base=source.state))
    reader.look()
    assert not reader.patch_nbytes and reader.held.meta == {"step": 1}


def test_a_damaged_or_foreign_state_file_is_bad_input(tmp_path):
    torch_file = pytest.importorskip("safetensors.torch")
    path = tmp_path / "held.safetensors"
    path.write_bytes(b"no tensors at all")
    for _ in range(2):
        with pytest.raises(InputError, match=r"held\.safetensors is not a saved state"):
            Mirror(saved=path)
        torch_file.save_file({"w": torch.zeros(3)}, path)
    source = Source()
    source.history.publish(source.state)
    mirror = Mirror()
    mirror.agree(source.history.layout, "model")
    mirror.apply(source.history.patch())
    mirror.replica.save(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"held\.safetensors was damaged; delete it"):
        Mirror(saved=path)


def test_a_reader_goes_on_from_what_it_saved(folder, tmp_path):
    pytest.importorskip("safetensors")
    source, saved = Source(), tmp_path / "saved.safetensors"
    shelf, reader = shelving(folder, source), Fetching(folder, Proof(None))
    source.publish()
    shelf.write()
    reader.look()
    reader.replica.save(saved)
    source.publish()
    shelf.write()
    again = Fetching(folder, Proof(None), Mirror(saved=saved))
    landed = []
    again.look(lambda version: landed.append(version.number))
    assert landed == [2] and same(again, source.state)
    assert again.patch_nbytes < reader.patch_nbytes / 4


@pytest.fixture
def web(plain, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    plain.path.mkdir()
    handler = partial(Quiet, directory=str(plain.path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield open_folder(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_a_web_server_that_shows_the_folder_is_enough(plain, web):
    source = Source()
    shelf, reader = shelving(plain, source, token=b"t"), Fetching(web, Proof(b"t"))
    for _ in range(10):
        source.publish()
        shelf.write()
        assert reader.look() and same(reader, source.state)


# --- retention, restarts, two publishers ---


class Racing:
    """A folder in which something happens between the manifest and the first file that is read."""

    def __init__(self, folder, happens):
        self.folder, self.where, self.happens = folder, folder.where, happens

    def read(self, name, limit):
        if "/" in name and self.happens is not None:
            happens, self.happens = self.happens, None
            happens()
        return self.folder.read(name, limit)


def test_a_slow_reader_takes_another_path_when_its_files_are_deleted_under_it(folder):
    source, clock = Source(), Clock()
    shelf = shelving(folder, source, clock, versions=2, grace=0.0, keyframe_every=3)
    source.publish()
    settle(shelf)
    reader = Fetching(folder, Proof(None))
    reader.look()
    source.publish()
    settle(shelf)

    def publish_on():
        for _ in range(12):
            source.publish()
            settle(shelf)
            clock.now += 1

    reader._folder = Racing(folder, publish_on)
    old = {f.name for f in shelf.manifest.files}
    assert reader.look() and same(reader, source.state)
    assert not old & {*folder.sizes("patches"), *folder.sizes("keyframes")}


def three_versions(folder):
    """Return the source of three versions in a folder, and a reader that has them."""
    source = Source()
    shelf, reader = shelving(folder, source), Fetching(folder, Proof(None))
    for _ in range(3):
        source.publish()
        shelf.write()
    reader.look()
    return source, reader


def going_on(source):
    """Return a source with a history of its own that begins with the state of another."""
    again = Source(history=History(Layout.of(source.state)))
    again.state = source.state
    return again


def test_a_writer_that_restarts_with_the_same_state_goes_on_without_a_keyframe(folder):
    source, reader = three_versions(folder)
    again = going_on(source)
    restarted = shelving(folder, again)
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
    restarted = shelving(folder, again)
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
    restarted = shelving(folder, again)
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
    shelf = shelving(plain, source)
    source.publish()
    shelf.write()
    plain.write("patches/00000001-00000002-aaaaaaaa.safetensors", b"orphan")
    plain.write("patches/.00000001-00000002-aaaaaaaa.safetensors.12345678.part", b"orphan")
    plain.write("patches/notes.txt", b"somebody's")
    restarted = shelving(plain, source, clock, grace=0.0)
    restarted.tend()
    assert [*plain.sizes("patches")] == ["patches/notes.txt"]
    assert [f.name for f in restarted.manifest.files] == [*plain.sizes("keyframes")]


@pytest.mark.parametrize(
    "name", ["state.json", "layout.json", "patches/00000001-00000002-aaaaaaaa.safetensors"]
)
def test_what_a_writer_that_dies_leaves_of_a_file_is_swept(plain, name):
    """In the root too, where the file lies that is written most often."""
    shelf_of(plain, 1)
    dies = "import os, sys, thinwire.engines.sync.folder as f; os.fsync = lambda _: os._exit(9);"
    writes = "f.PlainFolder(f.Path(sys.argv[1])).write(sys.argv[2], b'half')"
    found = subprocess.run([sys.executable, "-c", dies + writes, str(plain.path), name], timeout=LONG)
    assert found.returncode == 9 and len([*plain.path.rglob("*.part")]) == 1
    restarted = shelving(plain, Source(), grace=0.0)
    restarted.tend()
    assert not [*plain.path.rglob("*.part")]
    assert restarted.manifest.newest.number == 1 and plain.read("layout.json", 10**6)


def test_a_second_publisher_is_refused_while_the_first_is_alive(folder):
    clock = Clock()
    shelf = shelving(folder, Source(), clock)
    with pytest.raises(InputError, match="another publisher writes the state 'model'"):
        shelving(folder, Source(), clock, instance="b" * 16)
    clock.now += LEASE + 1
    shelving(folder, Source(), clock, instance="b" * 16)
    with pytest.raises(InputError, match="another publisher has taken over"):
        shelf.tend()


@pytest.mark.parametrize(
    "ahead", [LEASE + 1, 86400.0, -86400.0], ids=["a lease ahead", "a day", "a day behind"]
)
def test_a_life_is_not_told_by_comparing_clocks(folder, ahead):
    first, second = Clock(), Clock()
    shelf = shelving(folder, Source(), first)

    def sleep(seconds):
        first.now += seconds
        shelf.tend()  # as often as it is due

    second.now, second.sleep = first.now + ahead, sleep
    with pytest.raises(InputError, match=r"another publisher writes the state 'model' .* wait (60|19) s"):
        shelving(folder, Source(), second, instance="b" * 16)

    def alone(seconds):
        first.now += seconds

    began, second.now, second.sleep = first.now, first.now + ahead, alone  # it has died
    shelving(folder, Source(), second, instance="b" * 16)
    assert first.now == pytest.approx(began + LEASE)


@pytest.mark.parametrize("end", ["goodbye", "deleted", "at the last moment"])
def test_what_is_seen_while_looking_counts(folder, end):
    first, second, slept = Clock(), Clock(), []
    shelf = shelving(folder, Source(), first)
    second.now += 2 * LEASE

    def sleep(seconds):
        slept.append(seconds)
        if end == "goodbye":
            shelf.leave()
        elif end == "deleted":
            folder.delete("state.json")
        elif len(slept) == LOOKS:
            first.now += LEASE
            shelf.tend()

    second.sleep = sleep
    if end == "at the last moment":
        with pytest.raises(InputError, match="another publisher writes"):
            shelving(folder, Source(), second, instance="b" * 16)
    else:
        shelving(folder, Source(), second, instance="b" * 16)
        assert len(slept) == 1


@pytest.mark.parametrize("step", [-3600.0, 3600.0], ids=["back", "forward"])
def test_signs_of_life_come_in_time_whatever_the_clock_is_set_to(plain, step):
    wall, steady = Clock(), Clock()
    shelf = shelving(plain, Source(), wall, steady=steady)
    for renew, share in ((shelf.tend, 1 / BEATS), (shelf.beat, LATE)):
        wall.now += step
        before = plain.read("state.json", 1 << 22)
        steady.now += 0.9 * share * LEASE
        renew()
        assert plain.read("state.json", 1 << 22) == before  # not due yet
        steady.now += 0.2 * share * LEASE
        renew()
        assert unpack(plain.read("state.json", 1 << 22), Proof(None), "here").written == wall.now


def test_old_files_stay_for_their_time_whatever_the_clock_is_set_to(plain):
    source, wall, steady = Source(), Clock(), Clock()
    shelving(plain, source, wall, steady=steady)
    plain.write("patches/00000001-00000002-aaaaaaaa.safetensors", b"orphan")
    shelf = shelving(plain, source, wall, steady=steady, grace=5.0)
    wall.now += 3600
    shelf.sweep()
    assert plain.sizes("patches")
    steady.now += 6
    shelf.sweep()
    assert not plain.sizes("patches")


def test_nobody_waits_for_a_lease_of_years(folder):
    shelving(folder, Source())
    forged(folder, lambda m: replace(m, lease=1e300, written=1e301))
    with pytest.raises(InputError, match="another publisher writes"):
        shelving(folder, Source(), instance="b" * 16)


def test_a_publisher_whose_manifest_was_replaced_writes_nothing_more(folder):
    clock, source = Clock(), Source()
    shelf = shelving(folder, source, clock)
    clock.now += LEASE + 1
    other = Source(seed=1)
    winner = shelving(folder, other, clock, instance="b" * 16)
    source.publish()
    with pytest.raises(InputError, match="another publisher has taken over"):
        shelf.write()
    other.publish()
    winner.write()
    reader = Fetching(folder, Proof(None))
    assert reader.look() and same(reader, other.state)


def test_a_publisher_with_another_token_takes_over_too(folder):
    shelf = shelving(folder, Source(), token=b"a")
    folder.delete("state.json")
    shelving(folder, Source(), token=b"b")
    with pytest.raises(InputError, match="another publisher has taken over"):
        shelf.leave()


def test_a_publisher_that_said_goodbye_or_has_the_same_name_keeps_nobody_waiting(folder):
    clock = Clock()
    shelving(folder, Source(), clock)
    shelving(folder, Source(), clock).leave()
    shelving(folder, Source(), clock, instance="b" * 16)


def test_another_state_in_the_folder_is_refused(folder):
    shelving(folder, Source())
    with pytest.raises(InputError, match="of other names, shapes or dtypes"):
        shelving(folder, Source(size=10))
    with pytest.raises(InputError, match="holds the state 'model', not 'other'"):
        Shelving(folder, Source().history, "other", "a" * 16, Proof(None), Keeping(), 1.0, lambda: None)
    with pytest.raises(InputError, match="holds the state 'model', not 'other'"):
        Fetching(folder, Proof(None), name="other").look()
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="w is in the state but not in the model"):
        Fetching(folder, Proof(None), Mirror(model)).look()


# --- what the history keeps for a shelf ---


class Uploads:
    """A folder in which something happens while a file of some kind is on its way there."""

    def __init__(self, folder, kind, happens):
        self.folder, self.kind, self.happens, self.busy = folder, kind, happens, False

    def __getattr__(self, name):
        return getattr(self.folder, name)

    def write(self, name, data):
        if name.startswith(self.kind) and not self.busy:
            self.busy = True
            self.happens()
            self.busy = False
        self.folder.write(name, data)


def crowded(size=3000):
    """A source whose log has room for two entries only: those that somebody says are in use."""
    source = Source(size=size)
    source.history = History(Layout.of(source.state), budget=1)
    return source


def test_a_keyframe_that_takes_long_to_write_gets_into_the_manifest(plain, monkeypatch):
    monkeypatch.setattr(lane, "LATELY", 0.0)  # it takes longer than that
    source, go_on = crowded(), threading.Event()
    folder = Uploads(plain, "keyframes", lambda: go_on.wait(LONG))
    go_on.set()
    shelf = shelving(folder, source, keyframe_every=2, span=0)
    for _ in range(3):
        source.publish()
        shelf.write()
    go_on.clear()
    shelf.tend()  # begins a keyframe, of version 3
    until(lambda: shelf._keyframe.version)
    for _ in range(12):
        source.publish()
        source.history.patch(source.history.newest.number - 1)  # a feed marks what it sends
        shelf.write()
        shelf.tend()
    go_on.set()
    until(lambda: not shelf._keyframe.running)
    source.publish()
    shelf.write()
    assert [(f.base, f.version) for f in shelf.manifest.files][-2:] == [(0, 3), (3, 16)]
    late = Fetching(plain, Proof(None))
    assert late.look() and same(late, source.state)


def test_a_keyframe_counts_where_each_upload_takes_longer_than_a_version(plain):
    source = crowded()
    folder = Uploads(plain, "patches", source.publish)
    shelf = shelving(folder, source, keyframe_every=2, span=0, versions=4)
    source.publish()
    for _ in range(60):
        shelf.write()
        shelf.tend()
        until(lambda: shelf._keyframe is None or not shelf._keyframe.running)
    assert len(shelf.manifest.versions) < 12 and len(shelf.manifest.files) < 16


def test_others_marks_do_not_cost_a_shelf_its_base(plain, monkeypatch):
    monkeypatch.setattr(lane, "LATELY", 0.0)  # a feed's last patch is not what keeps it
    source = crowded()
    shelf = shelving(plain, source, keyframe_every=4096)
    source.publish()
    shelf.write()
    for _ in range(80):  # a feed that is faster than the store
        source.publish()
        source.history.patch(source.history.newest.number - 1)
    shelf.write()
    assert [(f.base, f.version) for f in shelf.manifest.files] == [(0, 1), (1, 81)]
    assert source.history._users
    shelf.leave()
    assert not source.history._users


def test_the_version_being_written_is_kept_meanwhile(plain):
    source = crowded()

    def publish_on():
        for _ in range(10):
            source.publish()

    shelf = shelving(Uploads(plain, "patches", publish_on), source, keyframe_every=4096)
    for _ in range(2):
        source.publish()
        shelf.write()
    shelf.write()
    assert [(f.base, f.version) for f in shelf.manifest.files] == [(0, 1), (1, 2), (2, 12)]


# --- faults ---


def shelf_of(folder, versions, **options):
    source = Source()
    shelf = shelving(folder, source, **options)
    for _ in range(versions):
        source.publish()
        shelf.write()
    return source, shelf


def damage(folder, name):
    data = bytearray(folder.read(name, 1 << 30))
    data[len(data) // 2] ^= 1
    folder.write(name, bytes(data))


def cut(folder, name):
    folder.write(name, folder.read(name, 1 << 30)[:-1])


@pytest.mark.parametrize("fault", [damage, lambda folder, name: folder.delete(name)])
def test_a_patch_that_is_damaged_or_gone_costs_a_keyframe_and_no_more(folder, fault):
    source, shelf = shelf_of(folder, 2, keyframe_every=1)
    settle(shelf)
    reader = Fetching(folder, Proof(None))
    reader.look()
    source.publish()
    settle(shelf)
    patch, keyframe = (
        next(f for f in shelf.manifest.files[::-1] if bool(f.base) == b) for b in (True, False)
    )
    assert patch.version == keyframe.version == 3
    fault(folder, patch.name)
    assert reader.look() and same(reader, source.state)


@pytest.mark.parametrize("fault", [damage, lambda folder, name: folder.delete(name)])
def test_without_another_way_a_reader_keeps_what_it_has_and_catches_up_later(folder, fault):
    source, shelf = shelf_of(folder, 1, keyframe_every=100)
    clock = Clock()
    reader = Fetching(folder, Proof(None), clock=clock)
    reader.look()
    before = dict(source.seen[1])
    source.publish()
    shelf.write()
    good = {f.name: folder.read(f.name, 1 << 30) for f in shelf.manifest.files}
    fault(folder, shelf.manifest.files[-1].name)
    for _ in range(3):
        with pytest.raises(LinkError, match=r"no file at .* leads from version 1 to 2 now"):
            reader.look()
        assert reader.held.number == 1 and same(reader, before)
    for name, data in good.items():
        folder.write(name, data)
    clock.now += 2 * AVOID
    assert reader.look() and same(reader, source.state)


@pytest.mark.parametrize("fault", [lambda folder, name: folder.delete(name), cut])
@pytest.mark.parametrize("based", [False, True], ids=["keyframe", "patch"])
def test_a_file_that_is_lost_or_cut_short_is_replaced_by_the_publisher(folder, fault, based):
    clock = Clock()
    source, shelf = shelf_of(folder, 3, clock=clock, keyframe_every=100)
    fault(folder, next(f.name for f in shelf.manifest.files if bool(f.base) == based))
    reader = Fetching(folder, Proof(None))
    with pytest.raises(LinkError):
        reader.look()
    clock.now += LEASE / 2
    settle(shelf)
    settle(shelf)
    late = Fetching(folder, Proof(None))
    assert late.look() and same(late, source.state)


@pytest.mark.parametrize("fault", [lambda folder, name: folder.delete(name), cut, damage])
def test_a_lost_layout_is_written_again_also_where_news_come_often(folder, fault):
    clock = Clock()
    source, shelf = shelf_of(folder, 1, clock=clock)
    fault(folder, "layout.json")
    with pytest.raises((LinkError, PayloadError), match=r"has lost layout\.json|layout\.json .* is damaged"):
        Fetching(folder, Proof(None)).look()
    for _ in range(3):
        clock.now += LEASE / 5
        source.publish()
        shelf.write()
        shelf.tend()
    newcomer = Fetching(folder, Proof(None))
    assert newcomer.look() and same(newcomer, source.state)


class Interrupted:
    """A folder in which something happens just before one file is written."""

    def __init__(self, folder, name, call):
        self._folder, self._name, self._call = folder, name, call

    def __getattr__(self, name):
        return getattr(self._folder, name)

    def write(self, name, data):
        if name == self._name and self._call is not None:
            call, self._call = self._call, None
            call()
        self._folder.write(name, data)


@pytest.mark.parametrize("file", ["layout.json", "state.json"])
def test_of_two_that_begin_at_the_same_time_one_stays_and_is_followed(folder, file):
    """Each has looked before the other wrote; in between, the second writes its layout and manifest."""
    first, second, shelves = Source(), Source(size=10), []
    meanwhile = Interrupted(folder, file, lambda: shelves.append(shelving(folder, second, instance="b" * 16)))
    shelf = shelving(meanwhile, first)
    first.publish()
    shelf.write()
    second.publish()
    with pytest.raises(InputError, match="taken over"):
        shelves[0].write()
    reader = Fetching(folder, Proof(None))
    assert reader.look() and same(reader, first.state)


def test_of_two_that_begin_at_the_same_time_the_one_that_was_replaced_is_told_at_once(folder):
    class Late(Interrupted):
        def write(self, name, data):
            self._folder.write(name, data)
            if name == self._name:
                forged(self._folder, lambda manifest: replace(manifest, instance="b" * 16))

    with pytest.raises(InputError, match="taken over"):
        shelving(Late(folder, "state.json", None), Source())


def forged(folder, change, proof=None):
    """Let ``change`` edit the manifest's fields, and make its hash fit again."""
    manifest = unpack(folder.read("state.json", 1 << 22), Proof(proof), "here")
    folder.write("state.json", change(manifest).pack(Proof(proof)))


def test_a_manifest_that_lies_about_a_file_gets_nothing_in(folder):
    source, shelf = shelf_of(folder, 2)
    keyframe, patch = shelf.manifest.files
    huge = replace(keyframe, nbytes=1 << 50)
    swapped = replace(keyframe, version=2)
    for lie in (
        [huge],
        [swapped],
        [replace(keyframe, check="0" * 64)],
        [replace(keyframe, nbytes=5)],
        [patch],
    ):
        forged(folder, lambda m, lie=lie: replace(m, files=tuple(lie)))
        reader = Fetching(folder, Proof(None))
        with pytest.raises(LinkError, match="no file at"):
            reader.look()
        assert reader.held.number == 0
    forged(folder, lambda m: replace(m, files=(keyframe, patch)))
    assert reader.look() and same(reader, source.state)


def test_with_a_token_no_file_passes_for_another(folder):
    """Whoever can write to the store cannot put an old, whole and signed file under another name."""
    _, shelf = shelf_of(folder, 2, token=b"t", keyframe_every=1)
    settle(shelf)
    reader = Fetching(folder, Proof(b"t"))
    files = shelf.manifest.files
    for f in files[1:]:
        folder.write(f.name, folder.read(files[0].name, 1 << 30))
    with pytest.raises(LinkError):
        reader.look()
    assert reader.held.number in (0, 1)


@pytest.mark.parametrize(("writes", "reads"), [(b"a", None), (None, b"a"), (b"a", b"b")])
def test_a_token_at_one_end_only_or_another_one_is_told(folder, writes, reads):
    shelf_of(folder, 1, token=writes)
    with pytest.raises(AuthError, match="token"):
        Fetching(folder, Proof(reads)).look()
    with pytest.raises(AuthError, match="token"):
        shelving(folder, Source(), token=reads)


def begin_anew(folder):
    for name in ("state.json", *folder.sizes("patches"), *folder.sizes("keyframes")):
        folder.delete(name)


def test_who_deletes_the_manifest_strands_no_reader(folder):
    """What a publisher says of the way out is one: numbers go on from the names of the files there."""
    _, reader = three_versions(folder)
    folder.delete("state.json")
    source, shelf = shelf_of(folder, 1)
    assert [v.number for v in shelf.manifest.versions] == [4]
    assert reader.look() and reader.held.number == 4 and same(reader, source.state)


def test_a_manifest_that_is_away_for_a_moment_leaves_its_publisher_the_folder(folder):
    """As on servers where a file has to go aside before another gets its name."""
    shelf_of(folder, 1)
    away, clock = folder.read("state.json", 1 << 22), Clock()

    def later(seconds):
        clock.sleep(seconds)
        folder.write("state.json", away)

    for aside in ("patches/notes.txt", "state.json.12345678.part"):
        for name in ("state.json", *folder.sizes("patches"), *folder.sizes("keyframes")):
            folder.delete(name)
        folder.write(aside, b"x")
        known = Source().history, "model", "b" * 16, Proof(None), Keeping(), LEASE, lambda: None
        with pytest.raises(InputError, match="another publisher writes"):
            Shelving(folder, *known, clock=Clock(), sleep=later)
    assert clock.now < Clock.now + 2


def test_no_name_of_a_file_uses_up_the_numbers_of_versions(plain):
    plain.write("keyframes/9007199254740000-aaaaaaaa.safetensors", b"x")
    plain.write("keyframes/00000500.safetensors", b"x")  # nor does a name that no publisher writes
    _, shelf = shelf_of(plain, 1)
    assert shelf.manifest.newest.number == 1


def test_a_shelf_that_began_anew_is_told_to_those_that_are_ahead(plain):
    source, _shelf = shelf_of(plain, 3)
    reader = Fetching(plain, Proof(None))
    reader.look()
    begin_anew(plain)
    shelf_of(plain, 1)
    with pytest.raises(LinkError, match="versions up to 1, and version 3 is held"):
        reader.look()
    assert same(reader, source.state)


def test_a_shelf_that_began_anew_is_followed_once_its_numbers_are_higher(plain):
    """Even where an older version there has the contents that are held: nobody goes back in numbers."""
    source, _shelf = shelf_of(plain, 3)
    reader = Fetching(plain, Proof(None))
    reader.look()
    begin_anew(plain)
    again = Source(seed=5, history=History(Layout.of(source.state)))
    again.state = dict(source.state)
    shelf = shelving(plain, again, keyframe_every=1)
    again.history.publish(again.state)
    shelf.write()
    for _ in range(4):
        again.publish()
        settle(shelf)
    landed = []
    reader.look(lambda version: landed.append(version.number))
    assert landed[-1] == 5 and landed[0] > 3 and same(reader, again.state)
    assert not reader._bad  # nothing was fetched in vain


def test_a_state_that_changed_its_shapes_is_told(plain):
    shelf_of(plain, 1)
    reader = Fetching(plain, Proof(None))
    reader.look()
    plain.delete("state.json")
    shelving(plain, Source(size=10))
    with pytest.raises(InputError, match=r"w is bfloat16 \[10\] at the publisher and bfloat16 \[3000\] here"):
        reader.look()


@pytest.mark.parametrize("name", ["state.json", "layout.json"])
@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 1000, bytes(1 << 23), b'{"format":"thinwire-shelf/1"}'])
def test_nonsense_in_the_folder_is_a_payload_error(plain, name, data):
    shelf_of(plain, 1)
    plain.write(name, data)
    with pytest.raises(PayloadError):
        Fetching(plain, Proof(None)).look()


def test_a_layout_that_would_take_too_much_memory_is_refused(plain):
    shelf_of(plain, 1)
    with pytest.raises(PayloadError, match="over the limit"):
        Fetching(plain, Proof(None), Mirror(max_nbytes=100)).look()


def test_a_state_is_followed_whose_patches_are_larger_than_any_by_default(plain, monkeypatch):
    """The layout was within ``max_nbytes``; its patches are, then."""
    source, _shelf = shelf_of(plain, 1)
    monkeypatch.setattr(Patch.unpack.__func__, "__defaults__", (100,))
    reader = Fetching(plain, Proof(None))
    assert reader.look() and same(reader, source.state)


def test_a_full_disk_leaves_readers_with_what_they_had(plain, monkeypatch):
    source, shelf = shelf_of(plain, 2)
    files = sorted(p.name for p in plain.path.rglob("*"))
    source.publish()

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        with pytest.raises(OSError):
            shelf.write()
    assert sorted(p.name for p in plain.path.rglob("*")) == files
    reader = Fetching(plain, Proof(None))
    assert reader.look() and same(reader, source.seen[2])
    shelf.write()
    assert reader.look() and same(reader, source.state)


def test_a_manifest_that_cannot_be_written_leaves_readers_with_what_they_had(plain, monkeypatch):
    source, shelf = shelf_of(plain, 2)
    source.publish()
    real = plain.write

    def write(name, data):
        if name == "state.json":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(name, data)

    with monkeypatch.context() as m:
        m.setattr(plain, "write", write)
        with pytest.raises(OSError):
            shelf.write()
    reader = Fetching(plain, Proof(None))
    assert reader.look() and same(reader, source.seen[2])
    shelf.write()
    assert reader.look() and same(reader, source.state)


# --- everything at once ---


class World:
    """A publisher and two readers of one folder, and things that happen to them, one at a time."""

    def __init__(self, folder, seed):
        self.rng = np.random.default_rng(seed)
        self.folder, self.clock = folder, Clock()
        self.source = Source(seed, size=400)
        self.keeping = {"versions": 6, "span": 3, "grace": 2.0, "share": 0.6}
        self.seen = {}
        self.published = []  # hashes of contents, in the order in which they were published
        self.open()
        self.readers = [self.reader(), self.reader()]
        self.held = [0, 0]
        self.place = [0, 0]  # in that order, of what each reader holds

    def open(self):
        self.shelf = shelving(self.folder, self.source, self.clock, **self.keeping)

    def reader(self):
        return Fetching(self.folder, Proof(None), clock=self.clock)

    def publish(self):
        for _ in range(self.rng.integers(1, 4)):
            self.note(self.source.publish())

    def note(self, version):
        self.seen[version.hash] = {n: x.clone() for n, x in self.source.state.items()}
        self.published.append(version.hash)
        self.shelf.offers = True

    def save(self):
        settle(self.shelf)
        self.clock.now += 1.0

    def look(self):
        which = int(self.rng.integers(2))
        try:
            self.readers[which].look(lambda version: self.check(which))
        except LinkError:
            pass
        except FileNotFoundError:
            pass

    def check(self, which):
        reader = self.readers[which]
        assert reader.held.number > self.held[which], "never older than before"
        self.held[which] = reader.held.number
        later = self.published[self.place[which] :]
        assert reader.held.hash in later, "nor older contents under a newer number"
        self.place[which] += later.index(reader.held.hash)
        assert same(reader, self.seen[reader.held.hash]), "bit-identical to a published version"

    def lose(self):
        names = [*self.folder.sizes("patches"), *self.folder.sizes("keyframes")]
        if names:
            self.folder.delete(names[int(self.rng.integers(len(names)))])

    def corrupt(self):
        names = [*self.folder.sizes("patches"), *self.folder.sizes("keyframes")]
        if names:
            damage(self.folder, names[int(self.rng.integers(len(names)))])

    def restart(self):
        """The publisher dies. What starts again has the same state, or one of some steps before.

        That is published at once, or is what its history begins with: from a file, or from the store. Then
        some time goes by before it publishes.
        """
        how = self.rng.choice(["published", "saved", "recalled"])
        if self.seen and self.rng.random() < 0.5:
            states = list(self.seen.values())
            chosen = states[int(self.rng.integers(len(states)))]
            self.source.state = {n: x.clone() for n, x in chosen.items()}
        self.source.history = History(
            Layout.of(self.source.state), budget=int(self.rng.choice([1000, 1 << 20]))
        )
        if how == "saved":
            self.source.history.publish(self.source.state)
        elif how == "recalled":
            resume(self.source.history, self.folder.path, name="model")
        self.open()
        if how == "published":
            self.note(self.source.history.publish(self.source.state))
        else:
            self.save()
            self.look()

    def newcomer(self):
        which = int(self.rng.integers(2))
        self.readers[which], self.held[which], self.place[which] = self.reader(), 0, 0

    def settle(self):
        """A last version, after which nothing goes wrong: whoever looks often enough has it."""
        self.publish()
        self.keeping["keyframe_every"] = 1
        self.open()
        for _ in range(6):
            self.clock.now += LEASE
            self.note(self.source.publish())
            settle(self.shelf)
        for which, reader in enumerate(self.readers):
            self.clock.now += AVOID * 2**11
            reader.look(lambda version, which=which: self.check(which))
            assert same(reader, self.source.state)


@pytest.mark.parametrize(("seed", "versions"), [(0, 200), *((seed, 30) for seed in range(1, 8))])
def test_whatever_happens_a_reader_holds_published_versions_in_order(tmp_path, seed, versions):
    world = World(PlainFolder(tmp_path), seed)
    often = [world.publish, world.save, world.look] * 4
    events = [*often, world.lose, world.corrupt, world.restart, world.newcomer]
    while len(world.seen) < versions:
        events[int(world.rng.integers(len(events)))]()
    world.settle()


# --- with their threads ---


class Model(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.w = torch.nn.Parameter(torch.randn(2000, generator=g).bfloat16())
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def train_a_little(self):
        with torch.no_grad():
            self.w[:: int(torch.randint(5, 50, (1,)))] *= 1.01
            self.count += 1


FAST = {"poll": 0.01}


def test_a_model_is_published_and_followed(tmp_path):
    model, follower = Model(0), Model(1)
    with (
        ShelfWriter.of(tmp_path, model, name="policy", token=b"t") as writer,
        ShelfReader(tmp_path, b"t", name="policy", **FAST) as reader,
    ):
        for step in range(20):
            model.train_a_little()
            version = writer.publish(step, loss=0.5)
            assert version.meta == {"step": step, "loss": 0.5}
            found = reader.wait(version.number, timeout=LONG)
            assert (found.number, found.meta["step"]) == (step + 1, step)
            assert reader.apply_to(follower).pause < LONG
            assert torch.equal(follower.w, model.w) and int(follower.count) == step + 1
        writer.flush()
        status = reader.status
        assert (status.version, status.held, status.error) == (20, 20, None)
        assert status.age < LONG and status.rate > 0 and status.trip > 0 and status.ratio > 1
        assert status.nbytes > 0 and writer.status.nbytes > 0 and writer.status.version == 20
    assert writer.status.error is None


def test_iteration_skips_to_the_newest_and_ends_with_the_publisher(tmp_path):
    model, numbers = Model(), []
    writer = ShelfWriter.of(tmp_path, model)
    reader = ShelfReader(tmp_path, **FAST)
    writer.publish(0)
    for version in reader:
        numbers.append(version.number)
        assert reader.tensors()["w"].shape == (2000,)
        if version.number < 10:
            for _ in range(3):
                model.train_a_little()
                last = writer.publish()
        else:
            writer.close()
            writer.close()
    assert numbers == sorted(set(numbers)) and numbers[-1] == last.number
    assert torch.equal(reader.tensors()["w"], model.w)
    reader.close()
    reader.close()
    assert list(reader) == []


def test_ages_are_right_once_the_readers_clock_is(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=monotonic, time=lambda: time.time() - 3600)
    monkeypatch.setattr("thinwire.engines.sync.shelf_reader.time", clock)
    with ShelfWriter.of(tmp_path, Model()) as writer, ShelfReader(tmp_path, **FAST) as reader:
        writer.publish()
        reader.wait(timeout=LONG)
        until(lambda: reader.status.age > 0)  # by the publisher's clock, from which it has heard
        clock.time = time.time
        assert reader.status.age < 1800


def test_ages_are_right_once_the_publishers_clock_is(plain):
    class Wall(Clock):
        ahead = 3600.0

        def __call__(self):
            return time.time() + self.ahead

    source, clock = Source(), Wall()
    shelf = shelving(plain, source, clock)
    with ShelfReader(plain.path, **FAST) as reader:
        for number in range(1, SIGNS + 3):
            source.publish()
            shelf.write()
            reader.wait(number, timeout=LONG)
            clock.ahead = 0.0
        until(lambda: reader.status.age < 1800)


def test_a_reader_saves_on_close_and_goes_on_from_there(tmp_path):
    pytest.importorskip("safetensors")
    model, state = Model(), tmp_path / "held.safetensors"
    with ShelfWriter.of(tmp_path / "shelf", model) as writer:
        first = writer.publish()
        with ShelfReader(tmp_path / "shelf", state=state, **FAST) as reader:
            reader.wait(first.number)
            read = reader.status.nbytes
        model.train_a_little()
        second = writer.publish()
        with ShelfReader(tmp_path / "shelf", state=state, into=Model(), **FAST) as reader:
            reader.wait(second.number)
            assert torch.equal(reader.tensors()["w"], model.w)
            assert reader.status.nbytes < read
    with pytest.raises(InputError, match="there is no place to save to"):
        ShelfReader(tmp_path / "shelf", **FAST).save()


def test_a_reader_of_nothing_waits_and_names_the_store(tmp_path):
    with ShelfReader(tmp_path / "none", patience=0.05, **FAST) as reader:
        with pytest.raises(
            LinkError, match=r"version 1 did not come from .*none in 0.05 s: no state is .* yet"
        ):
            reader.wait(timeout=0.05)
        with pytest.raises(
            LinkError, match=r"no sign of the publisher at .*none for 0.05 s: no state is .* yet"
        ):
            list(reader)
        with pytest.raises(InputError, match="nothing has come from"):
            reader.apply_to(Model())
        assert reader.status.error and reader.status.age is None


@pytest.mark.parametrize(
    "call", [lambda r: r.wait(), list, lambda r: r.tensors(), lambda r: r.apply_to(Model())]
)
def test_a_wrong_token_reaches_whoever_asks(tmp_path, call):
    with ShelfWriter.of(tmp_path, Model(), token=b"a") as writer:
        writer.publish()
        writer.flush()
        with ShelfReader(tmp_path, b"b", **FAST) as reader:
            with pytest.raises(AuthError, match="another token"):
                reader.wait()
            with pytest.raises(AuthError, match="another token"):
                call(reader)


def test_who_waits_for_ever_is_served(tmp_path):
    forever = float("inf")
    with ShelfWriter.of(tmp_path, Model()) as writer:
        writer.publish()
        writer.flush(forever)
        with ShelfReader(tmp_path, poll=forever, patience=forever) as reader:
            assert reader.wait(1, forever).number == 1
            assert next(iter(reader)).number == 1
            assert reader._thread.is_alive() and reader.status.error is None
        with ShelfReader(tmp_path, poll=forever, patience=0.01) as reader:
            reader.wait(1, LONG)
            versions = iter(reader)
            next(versions)
            with pytest.raises(LinkError, match=r"no sign of the publisher at .* for 0\.01 s"):
                next(versions)
        writer.close(forever)


def test_a_keyframe_outlives_no_writer(tmp_path, monkeypatch):
    """Whoever has closed may delete the folder, and nobody needs a file that no manifest names."""
    model, shelf, write, begun = Model(), PlainFolder(tmp_path), PlainFolder.write, threading.Event()

    def slow(self, name, data):
        if threading.current_thread().name == "thinwire keyframe":
            begun.set()
            until(lambda: writer._closing)
        write(self, name, data)

    monkeypatch.setattr(PlainFolder, "write", slow)
    with ShelfWriter.of(tmp_path, model, keeping=Keeping(keyframe_every=1)) as writer:
        for _ in range(2):
            model.w.data[0] += 1
            writer.publish()
            writer.flush(LONG)
        assert begun.wait(LONG)
    assert "thinwire keyframe" not in {thread.name for thread in threading.enumerate()}
    named = {f.name for f in unpack(shelf.read("state.json", 1 << 22), Proof(None), "here").files}
    kept = {*shelf.sizes("keyframes")}
    assert len(kept) == 2 and kept <= named  # it was nearly there, and is what newcomers begin with


def test_a_keyframe_that_is_dropped_while_it_is_made_is_not_written():
    made, written = threading.Event(), []

    def patch(base):
        assert made.wait(LONG)
        return SimpleNamespace(version=1, hash=1, published=0.0)

    keyframe = Keyframe(SimpleNamespace(patch=patch), written.append, lambda: None)
    assert keyframe.drop(0.0) is None
    made.set()
    until(lambda: not keyframe.running)
    assert not written and keyframe.done is None


def test_a_writer_tells_what_keeps_it_from_writing_and_goes_on_when_it_can(tmp_path, monkeypatch):
    model = Model()
    writer = ShelfWriter.of(tmp_path, model)
    writer.publish()
    writer.flush()

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        m.setattr("thinwire.engines.sync.shelf_writer.RETRY", 0.05)
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
    writer = ShelfWriter.of(tmp_path, Model(), keeping=Keeping(grace=0.0))
    writer.flush()
    swept = threading.Event()

    def full(shelf):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr("thinwire.engines.sync.shelf_writer.RETRY", 0.05)
        m.setattr(Shelving, "write", full)
        m.setattr(Shelving, "sweep", lambda shelf: swept.set())
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
    for url in (tmp_path / "file" / "shelf", tmp_path / "file"):
        with pytest.raises(InputError, match="cannot write to"):
            ShelfWriter.of(url, Model())
    with pytest.raises(InputError):
        ShelfWriter.of("http://127.0.0.1:1/shelf", Model())
    with pytest.raises(InputError, match="has no tensors of its own"):
        ShelfWriter(tmp_path / "shelf", History(Layout.of(dict(Model().state_dict())))).publish()


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
            ShelfWriter(tmp_path / "shelf", history, **wrong)
    assert not (tmp_path / "shelf").exists()


def versions_of(path):
    return unpack((path / "state.json").read_bytes(), Proof(None), "here").versions


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
    assert recall("http://127.0.0.1:1/shelf", None, layout, "policy") is None
    assert {*read} == {"state.json"}
    tensors, version = recall(tmp_path, None, layout, "policy")
    assert torch.equal(tensors["w"], model.w) and (version.number, version.meta) == (1, {"step": 1})
