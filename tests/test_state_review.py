"""Faults that a review of the state package found, each with the test that shows it."""

import threading

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


class SwappedMeanwhile(Replica):
    """Somebody swaps just as the other thread has seen that the back buffer is ready."""

    armed = False

    @property
    def _back(self):
        if self.armed:
            self.armed = False
            user = threading.Thread(target=self.swap)
            user.start()
            user.join(LONG)
        return self._behind_the_front

    @_back.setter
    def _back(self, view):
        self._behind_the_front = view


def test_a_swap_while_a_buffer_is_chosen_does_not_show_the_older_one(tmp_path):
    history, state = published()
    replica = follower(history, SwappedMeanwhile)
    replica.apply(advance(history, state, 2, 1.0))
    patch = advance(history, state, 3, 1.0)
    replica.armed = True
    replica.apply(patch)
    replica.swap()
    replica.check()
    assert states.same(replica.tensors(), states.whole(history))
    replica.apply(advance(history, state, 4, 1.0))
    replica.armed = True
    replica.save(tmp_path / "held")
    assert states.same(Replica.load(tmp_path / "held").tensors(), states.whole(history))
