"""States and replicas of them, for tests."""

import zlib

import states

from thinwire.state.history import History
from thinwire.state.patches import body as bodies
from thinwire.state.patches.patch import HEAD, Patch
from thinwire.state.replica import Replica

LONG = 60.0  # seconds; a limit, not an expectation


def pair(share=0.1, **kwargs):
    """Return a history of one version, its tensors, and a replica of it."""
    state = states.tensors()
    history = History(states.layout(state), budget=1 << 20, **kwargs)
    history.publish(state, {"step": 1}, published=5.0)
    replica = Replica(history.layout)
    replica.apply(history.patch())
    assert replica.swap()
    return history, state, replica


def advance(history, state, seed, share=0.1):
    before = history.newest.number
    states.train(state, share, seed)
    history.publish(state, {"step": seed})
    return history.patch(before)


def changed(patch, **fields):
    return Patch(**(patch.__dict__ | fields))


def resealed(packed):
    """Return a damaged patch with a checksum that fits: what only bounds and contents can tell."""
    packed[8:12] = zlib.crc32(packed[HEAD.size :]).to_bytes(4, "little")
    return bytes(packed)


def cut(monkeypatch, n=3):
    """Return a history, a replica of it and the patch that leads on, of several sections."""
    states.in_sections(monkeypatch)
    history, state, replica = pair()
    patch = advance(history, state, n, 0.5)
    assert len(list(bodies.Sections(history.layout, bodies.CHANGES).through(patch.body))) > 4
    return history, state, replica, patch
