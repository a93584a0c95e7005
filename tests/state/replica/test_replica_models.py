"""Models bound to a replica: they follow, or are told which tensor does not fit."""

import pytest
import torch
from replicas import LONG
from torch import nn

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.replica import Replica
from thinwire.types import InputError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.own = nn.Parameter(torch.ones(2))


def test_a_bound_model_follows_and_keeps_its_tensors():
    trained, model = Model(), Model()
    state = {n: x for n, x in trained.state_dict().items() if n != "own"}
    history = History(Layout.of(state))
    history.publish(state)
    replica = Replica(history.layout)
    replica.apply(history.patch())
    replica.bind(model)  # before the first swap: from then on
    own, parameters = model.own, list(model.parameters())
    assert replica.swap()
    for i in range(3):
        assert all(torch.equal(model.state_dict()[n], x) for n, x in state.items())
        assert model.head.weight is model.embed.weight and model.own is own
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert model.embed.weight.data_ptr() == replica.tensors()["embed.weight"].data_ptr()
        with torch.no_grad():
            trained.embed.weight[i] += 1
            trained.norm.running_mean += 1
            trained.norm.num_batches_tracked += 1
        history.publish(state)
        replica.apply(history.patch(replica.held.number))
        assert replica.swap() and replica.pause < LONG
    late = Model()
    replica.bind(late)
    assert torch.equal(late.head.weight, trained.head.weight)


class Untied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())


def test_a_model_that_does_not_fit_is_told_which_tensor():
    def bound(state, model):
        replica = Replica(Layout.of(state))
        before = [x.data_ptr() for x in model.parameters()]
        try:
            replica.bind(model)
        finally:
            assert before == [x.data_ptr() for x in model.parameters()]

    state = Model().state_dict()
    with pytest.raises(InputError, match=r"own is float32 \[2\] in the model and float32 \[3\] in the state"):
        bound(state | {"own": torch.zeros(3)}, Model())
    with pytest.raises(InputError, match=r"own is float32 \[2\] in the model and float16 \[2\] in the state"):
        bound(state | {"own": torch.zeros(2, dtype=torch.float16)}, Model())
    with pytest.raises(InputError, match="other is in the state but not in the model"):
        bound(state | {"other": torch.zeros(2)}, Model())
    wrapped = {f"module.{name}": x for name, x in state.items()}
    with pytest.raises(InputError, match=r"'module\.' is a wrapper's, .*; publish its \.module"):
        bound(wrapped, Model())
    with pytest.raises(InputError, match=r"'module\.' in the model is a wrapper's, .*; bind its \.module"):
        bound(state, torch.nn.ModuleDict({"module": Model()}))
    with pytest.raises(InputError, match=r"head.weight is tied in the model to embed.weight"):
        bound(Untied().state_dict(), Model())
    bound(state, Untied())
