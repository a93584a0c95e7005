"""Every model that was bound: followed, let go, its own buffers left alone, on another device."""

import contextlib
import gc
import threading

import pytest
import states
import torch
from histories import follower, published
from replicas import LONG, advance
from state_devices import DEVICES, on

from thinwire.staging import put_together
from thinwire.state.devices import crossing
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


class Layers(torch.nn.Module):
    """Parameters and a buffer on a device, some in another order in memory than they are read."""

    def __init__(self, state, device):
        super().__init__()
        for name, x in state.items():
            x = x.to(device)
            if name == "turned":
                x = x.t().contiguous().t()
            if name == "mean":
                self.register_buffer(name, x)
            elif name != "head":
                setattr(self, name, torch.nn.Parameter(x, requires_grad=False))
        self.head = self.embed


def held(model, names):
    return {name: getattr(model, name).detach().cpu() for name in names}


@pytest.fixture(params=DEVICES)
def elsewhere(request, monkeypatch):
    """Return a history, its state, and a replica that brings a model on another device up to that."""
    device = request.param
    more = {"turned": torch.randn(14, 15), "mean": torch.randn(5), "complex": torch.randn(9) + 0j}
    state = states.tensors() | more
    with on(device, monkeypatch) as seen:
        history = History(Layout.of(state, None, {"lossy": states.BOUND}), budget=1 << 20)
        history.publish(state)
        replica, model = follower(history), Layers(state, device)
        replica.bind(model)
        assert states.same(held(model, state), replica.tensors())
        yield history, state, replica, model, seen


@pytest.mark.parametrize("every", [1, 3])
def test_another_device_gets_what_changed_in_one_copy(elsewhere, every, monkeypatch):
    history, state, replica, model, seen = elsewhere
    sent = []

    def counting(raw, *to):
        sent.append(sum(map(len, raw)))
        return put_together(raw, *to)

    monkeypatch.setattr(crossing, "put_together", counting)
    for i in range(2, 14):
        states.train({n: x for n, x in state.items() if n in states.tensors()}, 0.02, i)
        state["turned"][i, i] += 1
        state["complex"][i % 9] += 1
        history.publish(state)
        whole = i == 7  # a keyframe may change anything
        replica.apply(history.patch(None if whole else replica.held.number))
        if i % every:
            continue
        sent.clear()
        if seen:
            seen.clear()
        assert replica.swap()
        if seen:
            assert seen.to_device == 1 and not seen.waits and not seen.to_host
        assert states.same(held(model, state), replica.tensors())
        small = sent[0] < history.layout.nbytes / 2
        assert len(sent) == 1 and small == (i != (7 if every == 1 else 9))
    monkeypatch.setattr(crossing, "MOST", 100)
    for name, x in state.items():
        if name not in ("mask", "head"):
            x += 1
    history.publish(state)
    replica.apply(history.patch(replica.held.number))
    assert replica.swap() and states.same(held(model, state), replica.tensors()) and len(sent) > 9


def test_after_a_copy_that_failed_everything_is_copied(elsewhere, monkeypatch):
    history, state, replica, model, _seen = elsewhere

    def full(*_args):
        raise RuntimeError("out of memory")

    for i in range(2):
        state["mean"][i] += 1.0
        state["embed"][i] += 1.0
        history.publish(state)
        replica.apply(history.patch(replica.held.number))
        with monkeypatch.context() as m, pytest.raises(RuntimeError) if not i else contextlib.nullcontext():
            if not i:
                m.setattr(crossing, "put_together", full)
            replica.swap()
    assert states.same(held(model, state), replica.tensors())
