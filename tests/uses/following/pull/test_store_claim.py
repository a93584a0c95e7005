"""Whose a store is: leases, signs of life, takeovers, and whose files are left alone."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from following import small
from stores import LEASE, Clock, Interrupted, Source, forged, same, store_of, writing
from wired import Gone, Wired, thousand

from thinwire.files.local_folder import PlainFolder
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.types import InputError
from thinwire.uses.following.mirror import Mirror
from thinwire.uses.following.pull.claim import LOOKS
from thinwire.uses.following.pull.manifest import Proof, unpack
from thinwire.uses.following.pull.retention import RetentionPolicy
from thinwire.uses.following.pull.store_fetching import Fetching
from thinwire.uses.following.pull.store_writer import BEATS, LATE, ShelfWriter, StoreWriting

pytest.importorskip("zstandard")


@pytest.mark.parametrize("folder", ["plain", "memory"], indirect=True)
def test_a_second_publisher_is_refused_while_the_first_is_alive(folder):
    clock = Clock()
    store = writing(folder, Source(), clock)
    with pytest.raises(InputError, match="another publisher writes the state 'model'"):
        writing(folder, Source(), clock, instance="b" * 16)
    clock.now += LEASE + 1
    writing(folder, Source(), clock, instance="b" * 16)
    with pytest.raises(InputError, match="another publisher has taken over"):
        store.tend()


@pytest.mark.parametrize(
    "ahead", [LEASE + 1, 86400.0, -86400.0], ids=["a lease ahead", "a day", "a day behind"]
)
def test_a_life_is_not_told_by_comparing_clocks(folder, ahead):
    first, second = Clock(), Clock()
    store = writing(folder, Source(), first)

    def sleep(seconds):
        first.now += seconds
        store.tend()  # as often as it is due

    second.now, second.sleep = first.now + ahead, sleep
    with pytest.raises(
        InputError,
        match=r"another publisher writes the state 'model' .* wait (60|19) s or delete state\.json",
    ):
        writing(folder, Source(), second, instance="b" * 16)

    def alone(seconds):
        first.now += seconds

    began, second.now, second.sleep = first.now, first.now + ahead, alone  # it has died
    writing(folder, Source(), second, instance="b" * 16)
    assert first.now == pytest.approx(began + LEASE)


@pytest.mark.parametrize("end", ["goodbye", "deleted", "at the last moment"])
def test_what_is_seen_while_looking_counts(folder, end):
    first, second, slept = Clock(), Clock(), []
    store = writing(folder, Source(), first)
    second.now += 2 * LEASE

    def sleep(seconds):
        slept.append(seconds)
        if end == "goodbye":
            store.leave()
        elif end == "deleted":
            folder.delete("state.json")
        elif len(slept) == LOOKS:
            first.now += LEASE
            store.tend()

    second.sleep = sleep
    if end == "at the last moment":
        with pytest.raises(InputError, match="another publisher writes"):
            writing(folder, Source(), second, instance="b" * 16)
    else:
        writing(folder, Source(), second, instance="b" * 16)
        assert len(slept) == 1


@pytest.mark.parametrize("step", [-3600.0, 3600.0], ids=["back", "forward"])
def test_signs_of_life_come_in_time_whatever_the_clock_is_set_to(plain, step):
    wall, steady = Clock(), Clock()
    store = writing(plain, Source(), wall, steady=steady)
    for renew, share in ((store.tend, 1 / BEATS), (store.beat, LATE)):
        wall.now += step
        before = plain.read("state.json", 1 << 22)
        steady.now += 0.9 * share * LEASE
        renew()
        assert plain.read("state.json", 1 << 22) == before  # not due yet
        steady.now += 0.2 * share * LEASE
        renew()
        assert unpack(plain.read("state.json", 1 << 22), Proof(None), "here").written == wall.now


def test_nobody_waits_for_a_lease_of_years(folder):
    writing(folder, Source())
    forged(folder, lambda m: replace(m, lease=1e300, written=1e301))
    with pytest.raises(InputError, match="another publisher writes"):
        writing(folder, Source(), instance="b" * 16)


def test_a_publisher_whose_manifest_was_replaced_writes_nothing_more(folder):
    clock, source = Clock(), Source()
    store = writing(folder, source, clock)
    clock.now += LEASE + 1
    other = Source(seed=1)
    winner = writing(folder, other, clock, instance="b" * 16)
    source.publish()
    with pytest.raises(InputError, match="another publisher has taken over"):
        store.write()
    other.publish()
    winner.write()
    reader = Fetching(folder, Proof(None))
    assert reader.look() and same(reader, other.state)


def test_a_publisher_with_another_token_takes_over_too(folder):
    store = writing(folder, Source(), token=b"a")
    folder.delete("state.json")
    writing(folder, Source(), token=b"b")
    with pytest.raises(InputError, match="another publisher has taken over"):
        store.leave()


def test_a_publisher_that_said_goodbye_or_has_the_same_name_keeps_nobody_waiting(folder):
    clock = Clock()
    writing(folder, Source(), clock)
    writing(folder, Source(), clock).leave()
    writing(folder, Source(), clock, instance="b" * 16)


def test_another_state_in_the_folder_is_refused(folder):
    writing(folder, Source())
    with pytest.raises(InputError, match="of other names, shapes or dtypes"):
        writing(folder, Source(size=10))
    with pytest.raises(InputError, match="holds the state 'model', not 'other'"):
        StoreWriting(
            folder, Source().history, "other", "a" * 16, Proof(None), RetentionPolicy(), 1.0, lambda: None
        )
    with pytest.raises(InputError, match="holds the state 'model', not 'other'"):
        Fetching(folder, Proof(None), name="other").look()
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="w is in the state but not in the model"):
        Fetching(folder, Proof(None), Mirror(model)).look()


@pytest.mark.parametrize("file", ["layout.json", "state.json"])
def test_of_two_that_begin_at_the_same_time_one_stays_and_is_followed(folder, file):
    """Each has looked before the other wrote; in between, the second writes its layout and manifest."""
    first, second, stores = Source(), Source(size=10), []
    meanwhile = Interrupted(folder, file, lambda: stores.append(writing(folder, second, instance="b" * 16)))
    store = writing(meanwhile, first)
    first.publish()
    store.write()
    second.publish()
    with pytest.raises(InputError, match="taken over"):
        stores[0].write()
    reader = Fetching(folder, Proof(None))
    assert reader.look() and same(reader, first.state)


def test_of_two_that_begin_at_the_same_time_the_one_that_was_replaced_is_told_at_once(folder):
    class Late(Interrupted):
        def write(self, name, data):
            self._folder.write(name, data)
            if name == self._name:
                forged(self._folder, lambda manifest: replace(manifest, instance="b" * 16))

    with pytest.raises(InputError, match="taken over"):
        writing(Late(folder, "state.json", None), Source())


def test_a_manifest_that_is_away_for_a_moment_leaves_its_publisher_the_folder(folder):
    """As on servers where a file has to go aside before another gets its name."""
    store_of(folder, 1)
    away, clock = folder.read("state.json", 1 << 22), Clock()

    def later(seconds):
        clock.sleep(seconds)
        folder.write("state.json", away)

    for aside in ("patches/notes.txt", "state.json.12345678.part"):
        for name in ("state.json", *folder.sizes("patches"), *folder.sizes("keyframes")):
            folder.delete(name)
        folder.write(aside, b"x")
        known = Source().history, "model", "b" * 16, Proof(None), RetentionPolicy(), LEASE, lambda: None
        with pytest.raises(InputError, match="another publisher writes"):
            StoreWriting(folder, *known, clock=Clock(), sleep=later)
    assert clock.now < Clock.now + 2


FOREIGN = (
    "patches/fix-1.safetensors",
    "patches/2024-01.safetensors",
    "patches/.download.part",
    "keyframes/model-00001-of-00002.safetensors",
    "keyframes/00000003.safetensors",
    "state.json.part",
    "state.json.12345678.bak",
    ".model.safetensors.12345678.part",
)
OWN = (
    "patches/00000001-00000002-aaaaaaaa.safetensors",
    "patches/.00000001-00000002-aaaaaaaa.safetensors.12345678.part",
    "keyframes/00000003-0123abcd.safetensors",
    ".state.json.12345678.part",
    "state.json.12345678.part",
    ".layout.json.12345678.part",
)


@pytest.mark.parametrize("deleted", [False, True])
def test_nobody_elses_files_go_from_a_shelf(tmp_path: Path, deleted: bool) -> None:
    folder, now = PlainFolder(tmp_path), [1000.0]
    for name in FOREIGN + OWN:
        folder.write(name, b"x")
    history = History(Layout.of(small()))
    history.publish(small())

    def writing() -> StoreWriting:
        told = (lambda: None, lambda: now[0], lambda _: None)
        return StoreWriting(folder, history, "state", "ab" * 16, Proof(None), RetentionPolicy(), 60.0, *told)

    def left() -> set[str]:
        return {*folder.sizes("patches"), *folder.sizes("keyframes"), *folder.sizes("")}

    store = writing()  # there was no manifest: whose files these are, nobody knows
    store.write()
    now[0] += 1000
    store.sweep()
    assert left() >= {*FOREIGN, *OWN}
    if deleted:
        folder.delete("state.json")
    store = writing()  # goes on from its own, or anew beside its own layout
    now[0] += 1000
    store.sweep()
    assert left() >= set(FOREIGN) and not left() & set(OWN)
    assert {f.name for f in store.manifest.files} <= left()


def test_a_store_that_cannot_be_listed_refuses_a_publisher_in_a_sentence(url: str) -> None:
    with ShelfWriter.of(url, thousand()) as writer:
        writer.publish()
    Wired.outage["ls"] = Gone("no endpoint")
    with pytest.raises(InputError, match=r"cannot write to wired://store \(.* be listed: no endpoint\)"):
        ShelfWriter.of(url, thousand())


def test_who_waits_for_a_dead_publisher_says_so(tmp_path: Path) -> None:
    history = History(Layout.of(thousand()))
    dead = ("state", "ab" * 16, Proof(None), RetentionPolicy(), 0.3, lambda: None)
    StoreWriting(PlainFolder(tmp_path), history, *dead, clock=lambda: time.time() - 1000)
    with pytest.warns(UserWarning, match="did not say goodbye; this one begins in 0 s") as told:
        ShelfWriter(tmp_path, History(Layout.of(thousand()))).close()
    assert [warning.filename for warning in told] == [__file__]
