"""Patches read by sections as they come; damage in one changes nothing."""

import pytest
import states
import torch
from replicas import advance, changed, cut, resealed

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patches import body as bodies
from thinwire.state.patches.pages import Pages
from thinwire.state.patches.patch import Patch
from thinwire.state.replica import Replica
from thinwire.types import DesyncError, PayloadError


def test_a_patch_is_read_section_by_section_as_it_comes(monkeypatch):
    history, _, replica, patch = cut(monkeypatch)
    read, unpack = [], bodies.unpack_section
    monkeypatch.setattr(bodies, "unpack_section", lambda *args: read.append(1) or unpack(*args))
    packed, reading = bytearray(patch.body), replica.reading(patch.base_hash)
    reading.feed(packed[:10])
    assert not read
    reading.feed(packed[: len(packed) // 2])
    reading.settle()
    half = len(read)
    reading.feed(packed[:-1])
    reading.settle()
    assert 0 < half < len(read)
    before, held = len(read), replica.held
    reading.feed(packed)
    reading.settle()
    assert len(read) == before + 1 and replica.held is held and not replica.swap()
    replica.apply(Patch.join(patch.head(), packed), reading)
    assert len(read) == before + 1  # nothing twice
    assert replica.swap() and states.same(replica.tensors(), states.whole(history))


def test_a_keyframe_is_read_as_it_comes_and_counts_whole_or_not_at_all(monkeypatch):
    monkeypatch.setattr(bodies, "PAGE", 50)
    history, _, replica, _ = cut(monkeypatch)
    patch, read, unpack = history.patch(), [], bodies.unpack_pieces
    monkeypatch.setattr(bodies, "unpack_pieces", lambda *args: read.append(1) or unpack(*args))
    for target in (replica, Replica(history.layout), History(history.layout)):
        read.clear()
        head, data, reading, held = patch.head(), Pages(), target.reading(0), states.held(target)
        for at in range(0, patch.nbytes, 99):
            before = len(read)
            data.add(patch.body[at : at + 99])
            reading.feed(data)
            reading.settle()
        assert 3 < before <= len(read) and states.held(target) == held
        wrong = bytearray(patch.body)
        wrong[-1] ^= 1
        for body in (wrong, patch.body[:-1]):
            with pytest.raises((PayloadError, DesyncError)):
                states.move(target, changed(patch, body=bytes(body)), None)
            assert states.held(target) == held
        count = len(read)
        states.move(target, Patch.join(head, data), reading)
        assert len(read) == count and states.held(target) == history.newest.hash  # nothing twice
    assert replica.swap() and states.same(replica.tensors(), states.whole(history))


def test_what_was_read_for_another_version_does_not_count(monkeypatch):
    history, state, replica, second = cut(monkeypatch)
    assert replica.reading(second.hash) is None and Replica(history.layout).reading(second.hash) is None
    stale = replica.reading(second.base_hash)
    stale.feed(bytearray(second.body))
    replica.apply(second)
    third = advance(history, state, 4, 0.5)
    replica.apply(third, stale)
    with pytest.raises(DesyncError, match="came out different"):
        replica.apply(changed(advance(history, state, 5, 0.5), hash=1), replica.reading(third.hash))
    assert replica.held.number == third.version
    assert replica.swap() and replica.hash == third.hash
    replica.check()


def test_what_was_read_for_older_contents_of_the_same_buffer_does_not_count(monkeypatch):
    """Versions that nobody swaps in are written over each other: only the hash tells them apart."""
    history, state, replica, second = cut(monkeypatch)
    replica.apply(second)
    third = advance(history, state, 4, 0.5)
    stale = replica.reading(third.base_hash)
    stale.feed(bytearray(third.body))
    words = replica._newest().words
    replica.apply(third)
    assert replica._newest().words is words and not stale.of(words, replica.held)
    relay = History(history.layout)
    relay.adopt(history.patch())
    fourth = advance(history, state, 5, 0.5)
    of_relay = relay.reading(fourth.base_hash)
    of_relay.feed(bytearray(fourth.body))
    replica.apply(fourth, stale)
    relay.adopt(history.patch(), of_relay)  # all words come anew
    fifth = advance(history, state, 6, 0.5)
    assert relay.reading(fourth.base_hash) is None
    assert relay.adopt(fifth, of_relay).hash == replica.apply(fifth, of_relay).hash == fifth.hash
    assert replica.swap() and states.same(replica.tensors(), states.whole(relay))


def test_damage_in_a_section_shows_as_it_is_read_and_changes_nothing(monkeypatch):
    history, _, replica, patch = cut(monkeypatch)
    start, wrong, harmless = len(patch.pack()) - patch.nbytes, 0, 0
    for at in range(start, start + patch.nbytes, 7):
        packed, other = bytearray(patch.pack()), states.copy_of(replica)
        packed[at] ^= 255
        reading = other.reading(patch.base_hash)
        try:
            reading.feed(packed[start:])
            reading.settle()
        except PayloadError:
            wrong += 1
            assert not reading.of(other._newest().words, other.held)
        try:
            other.apply(Patch.unpack(resealed(packed)), reading)
            harmless += other.held.hash == patch.hash
        except (PayloadError, DesyncError):
            assert other.held.number == 1 and not other.swap()
            other.check()
            other.apply(patch, reading)  # which went wrong, and does not count
        assert other.swap() and states.same(other.tensors(), states.whole(history))
    assert wrong > 10 and harmless < 10


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ([], "without 2 pieces"),
        ([(2, 1, b"x")], "without 1 pieces"),
        ([(2, 0, b"x")], "0 pieces"),
        ([(2, 3, b"x")], "3 pieces"),
        ([(4, 1, b"x")], "4-byte words"),
        ([(2, 1, b"")], "0 bytes for 1 pieces"),
        ([(2, 1, b"x"), (2, 1, b"x"), (2, 1, b"x")], "1 sections too many"),
    ],
)
def test_sections_that_do_not_fit_the_state(sections, match):
    layout = Layout.of({"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(4, dtype=torch.bfloat16)})
    packed = bodies.HEAD.pack(bodies.CHANGES, len(sections))
    for itemsize, pieces, data in sections:
        packed += bodies.SECTION.pack(itemsize, pieces, len(data)) + data
    with pytest.raises(PayloadError, match=match):
        list(bodies.Sections(layout, bodies.CHANGES).through(packed))


def test_a_body_has_a_section_for_so_many_changes_and_no_more_than_60(monkeypatch):
    state = {f"w{i}": torch.zeros(100) for i in range(80)}
    history = History(Layout.of(state))
    history.publish(state)
    for changes, expected in ((100_000, 1), (3200, 2), (1000, 8), (1, 60)):
        states.in_sections(monkeypatch, changes)
        for x in state.values():
            x += 1
        patch = history.patch(history.publish(state).number - 1)
        found = [len(s.pieces) for s in bodies.Sections(history.layout, bodies.CHANGES).through(patch.body)]
        assert len(found) == expected and sum(found) == 80 and max(found) <= min(found) + 1
    states.in_sections(monkeypatch, 750)
    for x in [*state.values()][:60]:  # the last ones stay as they are
        x += 1
    patch = history.patch(history.publish(state).number - 1)
    found = [len(s.pieces) for s in bodies.Sections(history.layout, bodies.CHANGES).through(patch.body)]
    assert len(found) == 8 and sum(found) == 80
