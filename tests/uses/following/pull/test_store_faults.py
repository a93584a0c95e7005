"""Files of a store that are damaged, lost, forged or begun anew: readers keep what they have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stores import (
    LEASE,
    Clock,
    Source,
    begin_anew,
    cut,
    damage,
    forged,
    same,
    settle,
    store_of,
    three_versions,
    writing,
)

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patches.patch import Patch
from thinwire.types import AuthError, InputError, LinkError, PayloadError
from thinwire.uses.following.mirror import Mirror
from thinwire.uses.following.pull.manifest import Proof
from thinwire.uses.following.pull.store_fetching import AVOID, Fetching

pytest.importorskip("zstandard")


@pytest.mark.parametrize("fault", [damage, lambda folder, name: folder.delete(name)])
def test_a_patch_that_is_damaged_or_gone_costs_a_keyframe_and_no_more(folder, fault):
    source, store = store_of(folder, 2, keyframe_every=1)
    settle(store)
    reader = Fetching(folder, Proof(None))
    reader.look()
    source.publish()
    settle(store)
    patch, keyframe = (
        next(f for f in store.manifest.files[::-1] if bool(f.base) == b) for b in (True, False)
    )
    assert patch.version == keyframe.version == 3
    fault(folder, patch.name)
    assert reader.look() and same(reader, source.state)


@pytest.mark.parametrize("fault", [damage, lambda folder, name: folder.delete(name)])
def test_without_another_way_a_reader_keeps_what_it_has_and_catches_up_later(folder, fault):
    source, store = store_of(folder, 1, keyframe_every=100)
    clock = Clock()
    reader = Fetching(folder, Proof(None), clock=clock)
    reader.look()
    before = dict(source.seen[1])
    source.publish()
    store.write()
    good = {f.name: folder.read(f.name, 1 << 30) for f in store.manifest.files}
    fault(folder, store.manifest.files[-1].name)
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
    source, store = store_of(folder, 3, clock=clock, keyframe_every=100)
    fault(folder, next(f.name for f in store.manifest.files if bool(f.base) == based))
    reader = Fetching(folder, Proof(None))
    with pytest.raises(LinkError):
        reader.look()
    clock.now += LEASE / 2
    settle(store)
    settle(store)
    late = Fetching(folder, Proof(None))
    assert late.look() and same(late, source.state)


@pytest.mark.parametrize("fault", [lambda folder, name: folder.delete(name), cut, damage])
def test_a_lost_layout_is_written_again_also_where_news_come_often(folder, fault):
    clock = Clock()
    source, store = store_of(folder, 1, clock=clock)
    fault(folder, "layout.json")
    with pytest.raises((LinkError, PayloadError), match=r"has lost layout\.json|layout\.json .* is damaged"):
        Fetching(folder, Proof(None)).look()
    for _ in range(3):
        clock.now += LEASE / 5
        source.publish()
        store.write()
        store.tend()
    newcomer = Fetching(folder, Proof(None))
    assert newcomer.look() and same(newcomer, source.state)


def test_a_manifest_that_lies_about_a_file_gets_nothing_in(folder):
    source, store = store_of(folder, 2)
    keyframe, patch = store.manifest.files
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
    _, store = store_of(folder, 2, token=b"t", keyframe_every=1)
    settle(store)
    reader = Fetching(folder, Proof(b"t"))
    files = store.manifest.files
    for f in files[1:]:
        folder.write(f.name, folder.read(files[0].name, 1 << 30))
    with pytest.raises(LinkError):
        reader.look()
    assert reader.held.number in (0, 1)


@pytest.mark.parametrize(("writes", "reads"), [(b"a", None), (None, b"a"), (b"a", b"b")])
def test_a_token_at_one_end_only_or_another_one_is_told(folder, writes, reads):
    store_of(folder, 1, token=writes)
    with pytest.raises(AuthError, match="token"):
        Fetching(folder, Proof(reads)).look()
    with pytest.raises(AuthError, match="token"):
        writing(folder, Source(), token=reads)


def test_who_deletes_the_manifest_strands_no_reader(folder):
    """What a publisher says of the way out is one: numbers go on from the names of the files there."""
    _, reader = three_versions(folder)
    folder.delete("state.json")
    source, store = store_of(folder, 1)
    assert [v.number for v in store.manifest.versions] == [4]
    assert reader.look() and reader.held.number == 4 and same(reader, source.state)


def test_a_shelf_that_began_anew_is_told_to_those_that_are_ahead(plain):
    source, _store = store_of(plain, 3)
    reader = Fetching(plain, Proof(None))
    reader.look()
    begin_anew(plain)
    store_of(plain, 1)
    with pytest.raises(LinkError, match="versions up to 1, and version 3 is held"):
        reader.look()
    assert same(reader, source.state)


def test_a_shelf_that_began_anew_is_followed_once_its_numbers_are_higher(plain):
    """Even where an older version there has the contents that are held: nobody goes back in numbers."""
    source, _store = store_of(plain, 3)
    reader = Fetching(plain, Proof(None))
    reader.look()
    begin_anew(plain)
    again = Source(seed=5, history=History(Layout.of(source.state)))
    again.state = dict(source.state)
    store = writing(plain, again, keyframe_every=1)
    again.history.publish(again.state)
    store.write()
    for _ in range(4):
        again.publish()
        settle(store)
    landed = []
    reader.look(lambda version: landed.append(version.number))
    assert landed[-1] == 5 and landed[0] > 3 and same(reader, again.state)
    assert not reader._bad  # nothing was fetched in vain


def test_a_state_that_changed_its_shapes_is_told(plain):
    store_of(plain, 1)
    reader = Fetching(plain, Proof(None))
    reader.look()
    plain.delete("state.json")
    writing(plain, Source(size=10))
    with pytest.raises(InputError, match=r"w is bfloat16 \[10\] at the publisher and bfloat16 \[3000\] here"):
        reader.look()


@pytest.mark.parametrize("name", ["state.json", "layout.json"])
@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 1000, bytes(1 << 23), b'{"format":"thinwire-shelf/1"}'])
def test_nonsense_in_the_folder_is_a_payload_error(plain, name, data):
    store_of(plain, 1)
    plain.write(name, data)
    with pytest.raises(PayloadError):
        Fetching(plain, Proof(None)).look()


def test_a_layout_that_would_take_too_much_memory_is_refused(plain):
    store_of(plain, 1)
    with pytest.raises(PayloadError, match="over the limit"):
        Fetching(plain, Proof(None), Mirror(max_nbytes=100)).look()


def test_a_state_is_followed_whose_patches_are_larger_than_any_by_default(plain, monkeypatch):
    """The layout was within ``max_nbytes``; its patches are, then."""
    source, _store = store_of(plain, 1)
    monkeypatch.setattr(Patch.unpack.__func__, "__defaults__", (100,))
    reader = Fetching(plain, Proof(None))
    assert reader.look() and same(reader, source.state)
