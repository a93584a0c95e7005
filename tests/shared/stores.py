"""Sources, writers and folders in which something happens, for the tests of stores."""

from __future__ import annotations

import torch
from waiting import until

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.uses.following.pull.manifest import Proof, unpack
from thinwire.uses.following.pull.retention import RetentionPolicy
from thinwire.uses.following.pull.store_fetching import Fetching
from thinwire.uses.following.pull.store_writer import StoreWriting

LEASE = 60.0


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


def writing(folder, source, clock=None, instance="a" * 16, token=None, steady=None, **keeping):
    kept, clock = RetentionPolicy(**keeping), clock or Clock()
    return StoreWriting(
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


def settle(store):
    """Let a writer do all that is due, its keyframe included."""
    for _ in range(4):
        store.write()
        store.tend()
        until(lambda: store._keyframe is None or not store._keyframe.running)
    assert store._keyframe is None


def same(fetching, state):
    fetching.replica.swap()
    got = fetching.replica.tensors()
    return got.keys() == state.keys() and all(torch.equal(got[n], x) for n, x in state.items())


class Watching:
    """A folder that looks at its reader at each read, as whoever uses the tensors may at any time."""

    def __init__(self, folder, look):
        self.folder, self.where, self.look = folder, folder.where, look

    def read(self, name, limit):
        self.look()
        return self.folder.read(name, limit)


class Racing:
    """A folder in which something happens between the manifest and the first file that is read."""

    def __init__(self, folder, happens):
        self.folder, self.where, self.happens = folder, folder.where, happens

    def read(self, name, limit):
        if "/" in name and self.happens is not None:
            happens, self.happens = self.happens, None
            happens()
        return self.folder.read(name, limit)


def three_versions(folder):
    """Return the source of three versions in a folder, and a reader that has them."""
    source = Source()
    store, reader = writing(folder, source), Fetching(folder, Proof(None))
    for _ in range(3):
        source.publish()
        store.write()
    reader.look()
    return source, reader


def going_on(source):
    """Return a source with a history of its own that begins with the state of another."""
    again = Source(history=History(Layout.of(source.state)))
    again.state = source.state
    return again


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


def store_of(folder, versions, **options):
    source = Source()
    store = writing(folder, source, **options)
    for _ in range(versions):
        source.publish()
        store.write()
    return source, store


def damage(folder, name):
    data = bytearray(folder.read(name, 1 << 30))
    data[len(data) // 2] ^= 1
    folder.write(name, bytes(data))


def cut(folder, name):
    folder.write(name, folder.read(name, 1 << 30)[:-1])


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


def forged(folder, change, proof=None):
    """Let ``change`` edit the manifest's fields, and make its hash fit again."""
    manifest = unpack(folder.read("state.json", 1 << 22), Proof(proof), "here")
    folder.write("state.json", change(manifest).pack(Proof(proof)))


def begin_anew(folder):
    for name in ("state.json", *folder.sizes("patches"), *folder.sizes("keyframes")):
        folder.delete(name)


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


def versions_of(path):
    return unpack((path / "state.json").read_bytes(), Proof(None), "here").versions
