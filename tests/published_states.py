"""Published states, for tests."""

import states
from thinwire.state.history import History
from thinwire.state.replica import Replica

LONG = 10.0  # seconds that nothing here takes


def published(share=0.1, n=1, **kwargs):
    """Return a history of ``n`` versions and what it last published."""
    state = states.tensors()
    history = History(states.layout(state), **kwargs)
    for i in range(n):
        if i:
            states.train(state, share, i)
        history.publish(state)
    return history, state


def advance(history, state, seed, share=0.1):
    before = history.newest.number
    states.train(state, share, seed)
    history.publish(state)
    return history.patch(before)


def follower(history, kind=Replica):
    replica = kind(history.layout)
    replica.apply(history.patch())
    assert replica.swap()
    return replica
