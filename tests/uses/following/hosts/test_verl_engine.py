"""verl's trainer and rollouts with thinwire between them: real links, transfers as verl makes them."""

import asyncio
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import verl_stand_in
from safetensors.torch import save_file
from torch import Tensor
from verl_stand_in import Ranks, received

from tests.uses.following.hosts.read_signatures import HERE
from thinwire.types import InputError, LinkError
from thinwire.uses.following.hosts import verl_engine
from thinwire.uses.following.hosts.host_signatures import lacking, parameters
from thinwire.uses.following.hosts.verl_engine import CALLED, VerlOptions


@pytest.fixture(autouse=True)
def _verl(monkeypatch: pytest.MonkeyPatch) -> None:
    verl_stand_in.install(monkeypatch)
    verl_engine.register()


def weights(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (40, 30), "norm.weight": (30,), "scale": ()}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()} | {
        "steps": torch.tensor([3])
    }


def large() -> dict[str, Tensor]:
    return {"w": torch.randn(300, 400, generator=torch.Generator().manual_seed(1))}


def cast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.bfloat16() if x.is_floating_point() else x for name, x in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(x.dtype == b[n].dtype and torch.equal(x, b[n]) for n, x in a.items())


@contextmanager
def ranks(monkeypatch: pytest.MonkeyPatch, *nodes: list[str], **options: Any) -> Iterator[Ranks]:
    found = Ranks(monkeypatch, *nodes, **options)
    try:
        yield found
    finally:
        found.close()
        found.close()


def test_what_is_relied_on_is_in_the_wheel_and_in_the_stand_in() -> None:
    wheel = json.loads((HERE / "verl.json").read_text("utf-8"))
    assert wheel["version"].startswith(verl_engine.TESTED) and verl_engine.version() in wheel["wheel"]
    assert list(lacking(CALLED, wheel["signatures"])) == []
    for owner, methods in CALLED.items():
        for method, names in methods.items():
            assert parameters(getattr(getattr(verl_engine.base(), owner), method)) == names, method
    known = set(inspect.signature(verl_engine.engine()).parameters)
    for given in wheel["calls"]["CheckpointEngineRegistry.new"]:
        assert given[0] == "*" and set(given[1:]) - {"**"} <= known
    assert {"backend", "engine_kwargs", "custom_backend_module"} <= set(
        wheel["fields"]["CheckpointEngineConfig"]
    )


def test_each_node_follows_once_and_all_ranks_get_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = weights()
    with ranks(monkeypatch, ["t", "t"], ["a", "a", "b", "a"]) as all_:
        for step in range(3):
            (first, second), found = (out := all_.transfer(tensors, step))[:2], out[2:]
            assert first["thinwire/version"] == step + 1 and second == {}
            assert all(same(own, cast(tensors)) for own in found)
            tensors["embed.weight"].view(-1)[:: step + 7] *= 2
        assert first["thinwire/changed"] == len(range(0, 1200, 8))
        publisher = all_.trainer[0]._publisher
        assert len(publisher.followers) == 2  # one a node
        assert publisher.newest.meta["step"] == 2


def test_ranks_that_come_and_a_trainer_that_restarts_are_followed_with_what_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = large()
    with ranks(monkeypatch, ["t"], ["a"]) as one:
        one.transfer(tensors)
        with ranks(monkeypatch, ["t"], ["a", "a"]) as two:
            two.rollouts[0].close()
            two.rollouts[0] = one.rollouts[0]
            assert all(same(found, cast(tensors)) for found in two.transfer(tensors)[1:])
            tensors["w"][3] += 1
            assert all(same(found, cast(tensors)) for found in two.transfer(tensors)[1:])
            sent = two.trainer[0]._publisher.sent
            one.rollouts.clear()
    assert sent < 2e4  # of 240,000 bytes


def test_with_a_base_the_first_version_does_not_cross(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tensors = large()
    save_file(cast(tensors), tmp_path / "model.safetensors")
    with ranks(monkeypatch, ["t"], ["a"], base=str(tmp_path)) as all_:
        assert same(all_.transfer(tensors, 0)[1], cast(tensors))
        assert all_.trainer[0]._publisher.sent < 2e4


def test_what_does_not_come_in_time_or_is_left_out_is_an_error_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = weights()
    with ranks(monkeypatch, ["t"], ["a"], timeout=0.3) as all_:
        with pytest.raises(InputError, match="call init_process_group first"):
            asyncio.run(received(all_.rollouts[0]))
        told = all_.prepare()[0]["source"]
        assert "secret" not in repr(told) and told.token not in repr(told)
        with pytest.raises(LinkError, match=f"version 1 from {told.address}"):
            asyncio.run(received(all_.rollouts[0]))
        trainer = all_.trainer[0]
        asyncio.run(trainer.send_weights(iter(tensors.items()), 0))
        left = {name: x for name, x in tensors.items() if name != "scale"}
        with pytest.raises(InputError, match="handed over no scale, which it did before"):
            asyncio.run(trainer.send_weights(iter(left.items()), 1))
        with pytest.raises(InputError, match=r"norm.weight: shape \(2,\), expected \(30,\)"):
            asyncio.run(trainer.send_weights(iter((tensors | {"norm.weight": torch.ones(2)}).items()), 1))
        with pytest.raises(InputError, match="publishes nothing"):
            type(trainer).build_topology(1, 1, [all_.rollouts[0].prepare()] * 2)
    for wrong in ({"dtype": "int3"}, {"timeout": 0.0}, {"adress": "x"}):
        with pytest.raises(InputError):
            VerlOptions.of(wrong)


def test_another_interface_of_verl_is_told_when_the_backend_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = verl_engine.base()
    monkeypatch.setattr(base.CheckpointEngineRegistry, "_registry", {})
    monkeypatch.setattr(base.CheckpointEngine, "finalize", lambda self, more: None)
    verl_engine.register()
    with pytest.raises(ValueError, match=r"CheckpointEngine.finalize is not as in 0.9"):
        base.CheckpointEngineRegistry.new("thinwire", bucket_size=1)
