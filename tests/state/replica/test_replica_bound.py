"""Every model that was bound: followed, let go, its own buffers left alone, on another device."""

import contextlib
import gc
import threading

import pytest
import states
import torch
from histories import follower, published
from replicas import LONG, advance

from thinwire.state import binding
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.replica import Replica


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


def two_models():
    """Return a model, another of its kind, their state and a history of that."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    state = {name: x.detach().clone() for name, x in models[0].state_dict().items()}
    history = History(Layout.of(state))
    history.publish(state)
    return models, state, history


def test_every_model_that_was_bound_follows():
    models, state, history = two_models()
    replica = follower(history)
    for i in range(2, 8):
        for model in models:
            replica.bind(model)  # as often as one likes
        for x in state.values():
            x += i
        history.publish(state)
        replica.apply(history.patch(i - 1))
        assert replica.swap()
        for model in models:
            assert states.same(dict(model.state_dict()), state)


def test_models_that_nobody_has_any_more_are_let_go():
    _, state, history = two_models()
    replica = follower(history)
    for _ in range(50):
        replica.bind(torch.nn.Linear(4, 3))
    gc.collect()
    model = torch.nn.Linear(4, 3)
    part = model.weight  # somebody has but this
    replica.bind(model)
    assert len(replica._bound._found) == 2
    del model
    gc.collect()
    state["weight"] += 1
    history.publish(state)
    replica.apply(history.patch(1))
    assert replica.swap() and torch.equal(part, state["weight"])


def test_what_a_model_writes_to_its_own_buffers_is_not_written_to_the_state():
    """Batch norm does, in the mode that a model is made in."""
    trained, model = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    state = trained.state_dict()  # shares the memory of the trained one
    history = History(Layout.of(state))
    history.publish(state)
    replica = follower(history)
    replica.bind(model)
    for _ in range(3):
        model(torch.randn(8, 3) + 5)
        assert not torch.equal(model.running_mean, trained.running_mean)
        replica.check()
        with torch.no_grad():
            trained.weight += 1  # and no buffer
        history.publish(state)
        replica.apply(history.patch(replica.held.number))
        assert replica.swap() and states.same(dict(model.state_dict()), state)


class Elsewhere:
    """A device that is not there: what was copied to it, by slot."""

    def __init__(self, monkeypatch, model):
        self._names = {id(x): name for name, x in model.named_parameters()}
        self.holds, self.copied, self.broken = {}, [], False
        monkeypatch.setattr(binding, "_copy", self._copy)
        monkeypatch.setattr(
            binding.tensor_kinds, "check_settable", lambda *_: None
        )  # meta stands for a device
        monkeypatch.setattr(binding, "_holds", lambda *_: True)

    def _copy(self, x, values):
        if self.broken:
            raise RuntimeError("out of memory")
        self.copied.append(self._names[id(x)])
        self.holds[self.copied[-1]] = values.clone()


def layers(device):
    return torch.nn.Sequential(*(torch.nn.Linear(3, 2, device=device) for _ in range(4)))


@pytest.fixture
def elsewhere(monkeypatch):
    state = {name: x.detach().clone() for name, x in layers("cpu").state_dict().items()}
    history = History(Layout.of(state), budget=1 << 20)
    history.publish(state)
    replica, model = follower(history), layers("meta")
    there = Elsewhere(monkeypatch, model)
    replica.bind(model)
    assert states.same(there.holds, state)
    there.copied.clear()
    return history, state, replica, there, model


@pytest.mark.parametrize("every", [1, 2, 3])
def test_another_device_gets_what_changed_and_nothing_else(elsewhere, every):
    history, state, replica, there, _model = elsewhere
    touched = set()
    for i in range(2, 40):
        name = f"{i % 4}.weight"
        touched.add(name)
        state[name][0, i % 3] = float(i)
        history.publish(state)
        whole = i % 13 == 0  # a keyframe may change anything
        replica.apply(history.patch(None if whole else replica.held.number))
        touched |= set(state) if whole else set()
        if i % every == 0:
            assert replica.swap()
            assert sorted(there.copied) == sorted(touched) and states.same(there.holds, state)
            there.copied.clear()
            touched.clear()


def test_after_a_copy_that_failed_everything_is_copied(elsewhere):
    history, state, replica, there, _model = elsewhere
    for i, broken in enumerate((True, False)):
        state[f"{i}.weight"] += 1.0
        history.publish(state)
        replica.apply(history.patch(replica.held.number))
        there.broken = broken
        with pytest.raises(RuntimeError) if broken else contextlib.nullcontext():
            replica.swap()
    assert sorted(there.copied) == sorted(state) and states.same(there.holds, state)
