"""Random publishers and followers: bit for bit the same, whatever the order."""

import contextlib

import pytest
import states
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from replicas import changed, resealed

from thinwire.state.history import History
from thinwire.state.patches.patch import HEAD, Patch
from thinwire.state.replica import Replica
from thinwire.types import DesyncError, PayloadError


class Followers(RuleBasedStateMachine):
    """A publisher, a log too small for all, patches of both codes in any order, damage, replicas, a relay."""

    patches = Bundle("patches")
    which = st.integers(0, 2)

    def __init__(self):
        super().__init__()
        self.monkeypatch = pytest.MonkeyPatch()

    def teardown(self):
        self.monkeypatch.undo()

    @initialize(budget=st.sampled_from([0, 300, 1 << 20]), by_class=st.booleans(), cut=st.booleans())
    def begin(self, budget, by_class, cut):
        if by_class:
            states.by_class(self.monkeypatch)
        if cut:
            states.in_sections(self.monkeypatch)
        self.state = states.tensors()
        self.history = History(states.layout(self.state), budget=budget)
        self.versions = {}
        self.relay = History(self.history.layout, budget=budget)
        self.replicas = [Replica(self.history.layout) for _ in range(3)]
        self.last = [0, 0, 0]
        self.seed = 0
        self.note(self.history.publish(self.state))

    def note(self, version):
        assert version.number not in self.versions
        self.versions[version.number] = version.hash, states.whole(self.history)

    @rule(share=st.sampled_from([0.0, 0.002, 0.05, 0.4, 1.0]))
    def publish(self, share):
        self.seed += 1
        states.train(self.state, share, self.seed)
        self.note(self.history.publish(self.state))

    @rule(above=st.integers(0, 30))
    def count_anew(self, above):
        if above >= self.history.newest.number:
            self.note(self.history.outnumber(above))

    @rule(target=patches, data=st.data())
    def patch(self, data):
        older = [v for v in self.versions if v < self.history.newest.number]
        return self.history.patch(data.draw(st.sampled_from([None, *older])))

    @rule(i=which, patch=patches, seed=st.none() | st.integers(0, 99))
    def apply(self, i, patch, seed):
        replica = self.replicas[i]
        base, held = self.versions.get(patch.base, (0, {}))[0], replica.held
        fits = patch.version > held.number and (not patch.base or base == held.hash)
        if fits and seed is not None:
            assert states.piecemeal(patch, replica, seed).number == patch.version
        elif fits:
            assert replica.apply(states.over_the_wire(patch)).number == patch.version
        else:
            with pytest.raises(DesyncError):
                replica.apply(states.over_the_wire(patch))
            assert replica.held is held

    @rule(i=which, relayed=st.booleans())
    def catch_up(self, i, relayed):
        source = self.relay if relayed else self.history
        replica, newest = self.replicas[i], source.newest
        if replica.held.number < newest.number:
            base = source.find(replica.held.number, replica.held.hash)
            if base == newest.number:
                replica.confirm(newest)
            else:
                replica.apply(states.over_the_wire(source.patch(base)))
        assert replica.held.number == newest.number or relayed

    @rule(patch=patches)
    def hand_on(self, patch):
        newest = self.relay.newest
        base = self.versions.get(patch.base, (0, {}))[0]
        if patch.version > newest.number and (not patch.base or base == newest.hash):
            assert self.relay.adopt(states.over_the_wire(patch)).hash == patch.hash
        else:
            with pytest.raises(DesyncError):
                self.relay.adopt(patch)
            assert self.relay.newest is newest

    @rule()
    def hand_on_the_newest(self):
        held, newest = self.relay.newest, self.history.newest
        if held.number < newest.number:
            states.piecemeal(self.history.patch(held.number), self.relay, newest.number)

    @rule(
        i=which,
        patch=patches,
        at=st.floats(0, 1, exclude_max=True),
        by=st.integers(1, 255),
        seal=st.booleans(),
    )
    def damaged(self, i, patch, at, by, seal):
        packed = bytearray(patch.pack())
        packed[HEAD.size + int(at * (len(packed) - HEAD.size)) if seal else int(at * len(packed))] ^= by
        with contextlib.suppress(PayloadError, DesyncError):
            read = Patch.unpack(resealed(packed) if seal else packed)
            if read.hash in [h for h, _ in self.versions.values()] and read.version == patch.version:
                self.replicas[i].apply(read)

    @rule(i=which, patch=patches, share=st.floats(0, 1, exclude_max=True))
    def cut_short(self, i, patch, share):
        packed = patch.pack()
        with pytest.raises(PayloadError):
            self.replicas[i].apply(Patch.unpack(packed[: int(share * len(packed))]))
        with pytest.raises((PayloadError, DesyncError)):
            self.replicas[i].apply(changed(patch, body=patch.body[: int(share * patch.nbytes)]))

    @rule(i=which)
    def swap(self, i):
        ahead = self.replicas[i].held.number > self.replicas[i].version
        assert self.replicas[i].swap() or not ahead

    @rule(i=which)
    def prepare(self, i):
        self.replicas[i].prepare()

    @rule(i=which)
    def forget_all(self, i):
        self.replicas[i], self.last[i] = Replica(self.history.layout), 0

    @rule(i=which)
    def save_and_load(self, i):
        replica = self.replicas[i]
        if replica.held.number:
            newest = replica._back if replica._ready else replica._front
            words, version = newest.words.copy(), replica.held
            self.replicas[i] = Replica(self.history.layout)
            self.replicas[i]._install(words, version)
            self.replicas[i].swap()

    @invariant()
    def every_replica_is_a_published_version(self):
        relayed = self.relay.newest
        assert not relayed.number or self.versions[relayed.number][0] == relayed.hash
        for i, replica in enumerate(self.replicas):
            assert replica.held.number >= self.last[i] and replica.version <= replica.held.number
            self.last[i] = replica.held.number
            if replica.held.number:
                assert replica.held.hash == self.versions[replica.held.number][0]
            if replica.version:
                digest, tensors = self.versions[replica.version]
                assert replica.hash == digest and states.same(replica.tensors(), tensors)
                replica.check()


TestFollowers = Followers.TestCase


TestFollowers.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
