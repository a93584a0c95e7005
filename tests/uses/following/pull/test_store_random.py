"""A store under random faults: readers hold published versions, in order, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from stores import LEASE, Clock, Source, damage, same, settle, writing

from thinwire.files.local_folder import PlainFolder
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.types import LinkError
from thinwire.uses.following.pull.manifest import Proof
from thinwire.uses.following.pull.store_fetching import AVOID, Fetching, resume

pytest.importorskip("zstandard")


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
        self.store = writing(self.folder, self.source, self.clock, **self.keeping)

    def reader(self):
        return Fetching(self.folder, Proof(None), clock=self.clock)

    def publish(self):
        for _ in range(self.rng.integers(1, 4)):
            self.note(self.source.publish())

    def note(self, version):
        self.seen[version.hash] = {n: x.clone() for n, x in self.source.state.items()}
        self.published.append(version.hash)
        self.store.offers = True

    def save(self):
        settle(self.store)
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
            settle(self.store)
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
