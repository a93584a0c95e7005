"""Tensors that are not plain ones: sharded models follow; all others, and what is no tensor, are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from following import publisher, small
from torch import Tensor, nn
from torch.distributed import HashStore, tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.masked import masked_tensor
from toy import in_processes, joined
from waiting import HOST

from thinwire.links.mesh import connect_mesh
from thinwire.links.pair.zmq_link import ZmqLink
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.types import InputError
from thinwire.uses.following.mirror import Mirror
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.push.state_relay import StateRelay

State = dict[str, Tensor]


def followed(state: State, into: nn.Module) -> Iterator[State]:
    """Yield two versions of ``state`` as ``into`` is shown them."""
    history, mirror = History(Layout.of(state)), Mirror(into)
    mirror.agree(history.layout, "")
    assert mirror.replica is not None
    for step in (1, 2):
        state = {name: x.clone() + step for name, x in state.items()}
        history.publish(state)
        mirror.apply(history.patch(mirror.held.number))
        assert mirror.show(mirror.replica, into) and not mirror.show(mirror.replica, into)
        yield state


def shard(rank: int, world: int, port: int) -> int:
    """Follow with a model of three kinds of parameters on one of the ranks; return the versions shown."""
    with joined(rank, world, port):
        mesh = init_device_mesh("cpu", (world,))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.BatchNorm1d(4))
        state = {name: x.clone() for name, x in model.state_dict().items()}
        model[0].weight = nn.Parameter(tensor.distribute_tensor(model[0].weight, mesh, [tensor.Shard(1)]))
        wrapped: Any = fully_shard(model[1], mesh=mesh, reshard_after_forward=False)
        shown = 0
        for now in followed(state, model):
            for name, x in model.state_dict().items():
                whole = x.full_tensor() if isinstance(x, tensor.DTensor) else x
                assert torch.equal(whole, now[name]), name
            assert isinstance(wrapped.weight, tensor.DTensor) and type(model[0].bias) is nn.Parameter
            with torch.no_grad():  # after which the second layer keeps what it has gathered
                assert torch.equal(wrapped(torch.zeros(2, 5))[0], now["1.bias"])
            assert not isinstance(wrapped.weight, tensor.DTensor)
            shown += 1
    return shown


def test_each_process_of_a_sharded_model_gets_its_shards() -> None:
    assert in_processes(2, shard) == [2, 2]


class Wrapping(Tensor):
    """A tensor with operations of its own, as quantised ones are."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if func is torch.ops.aten.detach.default else NotImplemented


def wrapping() -> Any:
    return torch.Tensor._make_wrapper_subclass(Wrapping, (2,))  # type: ignore[attr-defined]


class Deaf(nn.Parameter):
    data = property(lambda self: torch.zeros(2), lambda self, values: None)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("weight", "what"),
    [
        (wrapping(), "a Wrapping"),
        (Deaf(torch.zeros(2)), "a Deaf"),
        (torch.zeros(2).to_sparse(), "a tensor of torch.sparse_coo on cpu"),
    ],
)
def test_a_parameter_that_takes_no_values_is_named(weight: Any, what: str) -> None:
    model = nn.Module()
    model.register_buffer("weight", weight)
    with pytest.raises(InputError, match=f"weight is {what} in the model and takes no values; bind a model"):
        next(followed({"weight": torch.zeros(2)}, model))


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
def test_a_source_of_other_tensors_is_refused_in_one_sentence() -> None:
    kinds = {
        "a nested tensor": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "a NestedTensor": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        "a MaskedTensor": masked_tensor(torch.zeros(2), torch.tensor([True, False])),
        "a Wrapping": wrapping(),
        "ndarray": torch.zeros(2).numpy(),
    }
    with publisher(small()) as p:
        for what, x in kinds.items():
            for publish in (Publisher, lambda state: p.publish(1, state)):
                with pytest.raises(InputError, match=f"w: .*not of {what}; give a plain tensor"):
                    publish({**small(), "w": x})
        for publish in (Publisher, lambda state: p.publish(1, state)):
            with pytest.raises(InputError, match="w is lazy and has no shape yet"):
                publish({**small(), "w": nn.UninitializedParameter()})
            with pytest.raises(InputError, match="not a list; give a model"):
                publish([torch.zeros(2)])
            with pytest.raises(InputError, match="not a str; give a model"):
                publish("model.safetensors")


def test_a_sharded_source_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        part = tensor.distribute_tensor(torch.zeros(2), mesh, [tensor.Shard(0)])
        for source in ({"w": part}, nn.ParameterDict({"w": nn.Parameter(part)})):
            with pytest.raises(InputError, match=r"w: .*not of a DTensor; give .*full_tensor\(\)"):
                Publisher(source)
    finally:
        torch.distributed.destroy_process_group()


def test_what_a_follower_starts_from_is_a_model_or_a_mapping() -> None:
    for given, what in ({"into": "model"}, "into is a str; give a module"), ({"base": []}, "base is a list"):
        with pytest.raises(InputError, match=what):
            Follower(HOST, 1, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("port", [70_000, -1])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    for make in (
        lambda: Publisher(small(), port=port),
        lambda: Follower(HOST, port),
        lambda: Follower(HOST, 1, relay=(HOST, port)),
        lambda: StateRelay(HOST, port),
        lambda: connect_mesh(0, 2, HashStore(), port=port),  # type: ignore[arg-type]
        lambda: ZmqLink.connect(b"name", HOST, port),
    ):
        with pytest.raises(InputError, match=f"port is {port}; it must be at least 0 and below 65536"):
            make()
