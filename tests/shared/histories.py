"""Histories and followers of them, for tests."""

import numpy as np
import states
from hypothesis import strategies as st

from thinwire.state.history import History
from thinwire.state.replica import Replica


def published(n=1, share=0.1, **kwargs):
    """Return a history of ``n`` versions and what it last published."""
    state = states.tensors()
    history = History(states.layout(state), **kwargs)
    for i in range(n):
        if i:
            states.train(state, share, i)
        history.publish(state, {"step": i})
    return history, state


def forget(history):
    """Let nothing be left to patch from."""
    history._log._entries.clear()
    history._log.nbytes = 0


def follower(history, kind=Replica):
    """Return a replica of what a history published last."""
    replica = kind(history.layout)
    replica.apply(states.over_the_wire(history.patch()))
    assert replica.swap()
    return replica


positions = st.lists(st.integers(0, 199), unique=True, max_size=60).map(
    lambda p: np.array(sorted(p), np.int32)
)
