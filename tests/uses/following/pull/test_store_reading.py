"""Readers of a store: every version bit for bit, in order, from any version, over folders and the web."""

from __future__ import annotations

import http.server
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from stores import Clock, Racing, Source, Watching, damage, going_on, same, settle, writing
from waiting import until

from thinwire.files.local_folder import open_folder
from thinwire.types import InputError, LinkError
from thinwire.uses.following.mirror import Mirror
from thinwire.uses.following.pull.manifest import Proof
from thinwire.uses.following.pull.store_fetching import AVOID, Fetching

pytest.importorskip("zstandard")


@pytest.mark.parametrize("folder", ["plain", "memory"], indirect=True)
def test_a_reader_has_every_version_bit_for_bit(folder):
    source = Source()
    store, reader = writing(folder, source), Fetching(folder, Proof(None))
    assert not reader.look()
    for _ in range(20):
        version = source.publish()
        assert store.write() and not store.write()
        assert reader.look() and not reader.look()
        assert reader.held == replace(version, changed=0)
        assert same(reader, source.state)
        store.tend()


def test_a_reader_takes_published_versions_in_order_and_a_merged_patch_where_that_is_cheaper(folder):
    source = Source()
    store, early = writing(folder, source, keyframe_every=100), Fetching(folder, Proof(None))
    source.publish()
    store.write()
    early.look()
    for _ in range(8):
        source.publish()
        store.write()
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
    store, reader = writing(folder, source), Fetching(folder, Proof(None))
    for count in (1, 5, 9):
        for _ in range(count):
            source.publish()
        store.write()
        assert reader.look() and same(reader, source.state)
    assert [v.number for v in store.manifest.versions] == [1, 6, 15]


def test_a_keyframe_comes_by_bytes_and_leads_on(folder):
    """Whoever comes late never reads much more than one keyframe and a half."""
    source = Source()
    store = writing(folder, source, span=0)
    for _ in range(40):
        source.publish()
        settle(store)
        late = Fetching(folder, Proof(None))
        late.look()
        assert same(late, source.state)
        first = next(f for f in store.manifest.files if not f.base)
        assert late.patch_nbytes < 2.2 * first.nbytes
    assert sum(not f.base for f in store.manifest.files) > 1


def test_a_keyframe_is_of_a_version_that_readers_have_already(folder):
    """Readers that follow closely never fetch one, whenever it was made and however long it took."""
    source = Source()
    store, early = writing(folder, source, keyframe_every=1, span=0), Fetching(folder, Proof(None))
    source.publish()
    store.write()
    early.look()
    source.publish()
    store.write()
    source.publish()  # not written yet
    store.tend()  # begins a keyframe, of version 2
    until(lambda: not store._keyframe.running)
    store.tend()
    assert [v.number for v in store.manifest.versions] == [1, 2]
    source.publish()
    store.write()
    store.tend()
    legs = {(f.base, f.version) for f in store.manifest.files}
    assert legs == {(0, 1), (1, 2), (2, 4), (0, 2)}
    landed, late = [], Fetching(folder, Proof(None))
    early.look(lambda version: landed.append(version.number))
    assert landed == [2, 4] and same(early, source.state)
    folder.delete(next(f.name for f in store.manifest.files if f.version == 1))
    late.look()
    assert late.held.number == 4 and same(late, source.state)


def test_a_reader_that_rested_at_any_version_goes_on_and_never_back(plain):
    """Versions between spans leave the manifest, and the keyframe that newcomers begin with may be older."""
    source, clock = Source(), Clock()
    store = writing(plain, source, clock, versions=8, span=4, share=2.0, grace=0.0)
    readers, stranded = [], 0
    for number in range(1, 41):
        source.publish()
        settle(store)
        clock.now += 1.0
        readers.append(Fetching(plain, Proof(None)))
        readers[-1].look()
        assert same(readers[-1], source.state) and readers[-1].held.number == number
    keyframe = max(f.version for f in store.manifest.files if not f.base)
    for number, reader in enumerate(readers, 1):
        shown = [number]

        def look(reader=reader, shown=shown):
            reader.mirror.prepare()
            assert same(reader, source.seen[reader.held.number])
            assert reader.replica.version == reader.held.number >= shown[-1]
            shown.append(reader.held.number)

        stranded += keyframe < number and not reader.place(store.manifest)
        reader._folder = Watching(plain, look)
        assert reader.look(lambda _version, look=look: look()) or number == 40
        assert same(reader, source.state) and reader.held.number == 40 and reader.confirmed
    assert stranded > 20  # by a way from nothing that begins below what they hold


def test_a_way_from_nothing_that_breaks_below_what_is_held_changes_nothing(plain):
    source, clock = Source(), Clock()
    store = writing(plain, source, clock, versions=8, span=4, share=2.0, grace=0.0)
    for number in range(1, 31):
        source.publish()
        settle(store)
        clock.now += 1.0
        if number == 15:
            reader = Fetching(plain, Proof(None), clock=clock)
            reader.look()
    assert not reader.place(store.manifest)
    second = next(f for f in store.manifest.files if f.base and f.version <= 15)
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
    store = writing(folder, source)
    source.note(source.history.publish(source.state))
    store.write()
    for _ in range(3):
        source.publish()
        store.write()
    mirror, first = Mirror(model), model["w"].detach().clone()
    reader = Fetching(folder, Proof(None), mirror)
    reader.look()
    assert torch.equal(model["w"], first)  # it is moved by who uses it
    assert mirror.show(reader.replica, model)
    assert same(reader, source.state) and torch.equal(model["w"], source.state["w"])
    keyframe = next(f for f in store.manifest.files if not f.base)
    assert reader.patch_nbytes < keyframe.nbytes / 2


@pytest.mark.parametrize("later", [0, 3], ids=["the newest", "older"])
def test_a_mapping_is_a_base_and_the_newest_one_gets_its_number(folder, later):
    source = Source()
    base = {n: x.clone() for n, x in source.state.items()} | {"another": torch.zeros(1)}
    store = writing(folder, source)
    for i in range(1 + later):
        source.note(source.history.publish(source.state, {"step": 0})) if i == 0 else source.publish()
        store.write()
    reader = Fetching(folder, Proof(None), Mirror(base=base))
    assert not reader.confirmed
    reader.look()
    assert same(reader, source.state) and reader.held.number == 1 + later and reader.confirmed
    keyframe = next(f for f in store.manifest.files if not f.base)
    assert reader.patch_nbytes < keyframe.nbytes / 2 and bool(reader.patch_nbytes) == bool(later)
    assert reader.held.meta == {"step": later}


def test_what_was_published_along_outlives_the_publisher(folder):
    source = Source()
    store = writing(folder, source, keyframe_every=1)
    source.publish()
    source.publish()
    store.write()
    settle(store)
    writing(folder, going_on(source))
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
    store, reader = writing(folder, source), Fetching(folder, Proof(None))
    source.publish()
    store.write()
    reader.look()
    reader.replica.save(saved)
    source.publish()
    store.write()
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
    store, reader = writing(plain, source, token=b"t"), Fetching(web, Proof(b"t"))
    for _ in range(10):
        source.publish()
        store.write()
        assert reader.look() and same(reader, source.state)


def test_a_slow_reader_takes_another_path_when_its_files_are_deleted_under_it(folder):
    source, clock = Source(), Clock()
    store = writing(folder, source, clock, versions=2, grace=0.0, keyframe_every=3)
    source.publish()
    settle(store)
    reader = Fetching(folder, Proof(None))
    reader.look()
    source.publish()
    settle(store)

    def publish_on():
        for _ in range(12):
            source.publish()
            settle(store)
            clock.now += 1

    reader._folder = Racing(folder, publish_on)
    old = {f.name for f in store.manifest.files}
    assert reader.look() and same(reader, source.state)
    assert not old & {*folder.sizes("patches"), *folder.sizes("keyframes")}
