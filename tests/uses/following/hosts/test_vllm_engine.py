"""vLLM's workers and trainer with thinwire between them: real links, models as it keeps them."""

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm_stand_in
from fused_model import FusedModel, checkpoint
from torch import Tensor, nn
from vllm_stand_in import Worker, Workers

from tests.uses.following.hosts.read_signatures import HERE
from thinwire.types import InputError, LinkError
from thinwire.uses.following.hosts import vllm_engine, vllm_names
from thinwire.uses.following.push.publisher import Publisher

SOON = 20.0


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stand_in.install(monkeypatch)
    vllm_engine.register()


class Source(vllm_stand_in.WeightSource):
    """A trainer's tensors by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


def expected(tensors: dict[str, Tensor], rank: int) -> FusedModel:
    model = FusedModel(rank)
    model.load_weights(tensors.items())
    return model


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(model.parameters(), other.parameters(), strict=True))


def test_what_is_relied_on_is_in_the_wheel_and_in_the_stand_in() -> None:
    wheel = json.loads((HERE / "vllm.json").read_text("utf-8"))
    assert wheel["version"].startswith(vllm_names.TESTED)
    assert list(vllm_names.lacking(wheel["signatures"])) == []
    for owner in (*vllm_stand_in.BASES, *vllm_stand_in.FACTORIES):
        for method, parameters in vllm_names.CALLED[owner.__name__].items():
            own = inspect.signature(getattr(owner, method)).parameters
            assert tuple(n for n in own if n not in ("self", "cls")) == parameters, owner


def test_a_trainer_engine_brings_all_workers_to_each_version() -> None:
    tensors = checkpoint()
    workers = Workers(*(Worker(FusedModel(rank)) for rank in range(2)))
    told = vllm_engine.TrainerInit(token="secret", timeout=SOON)
    trainers = vllm_names.factory().WeightTransferTrainerFactory._registry["thinwire"]()
    trainer = trainers.trainer_init(told, client=workers, source=Source(tensors))
    places = [[x.data_ptr() for x in w.model.parameters()] for w in workers.all]
    try:
        for step in range(4):
            tensors["model.norm.weight"][step] += 1
            tensors["lm_head.weight"] += step % 2
            trainer.send_weights()
            for rank, worker in enumerate(workers.all):
                assert same(worker.model, expected(tensors, rank)) and not worker.updating
                assert worker.engine.applied.version.number == step + 1
        assert [w.versions for w in workers.all] == [["1", "2", "3", "4"]] * 2
        for worker in workers.all:  # the engine stood still for what was there already
            assert [p.version for p in worker.engine.weights.pauses] == [1, 2, 3, 4]
            assert all(p.waited < 0.5 and p.seconds > 0 for p in list(worker.engine.weights.pauses)[1:])
        assert places == [[x.data_ptr() for x in w.model.parameters()] for w in workers.all]
    finally:
        for worker in workers.all:
            worker.engine.shutdown()
        trainer.shutdown()
        trainer.shutdown()


def test_ranks_that_do_not_send_go_through_the_source_and_nothing_else() -> None:
    seen: list[str] = []

    class Gathers(Source):
        def iter_full(self) -> Iterator[tuple[str, Tensor]]:
            seen.append("gathered")
            return super().iter_full()

    engine = vllm_engine.trainer_engine()
    trainer: Any = engine.trainer_init(vllm_engine.TrainerInit(rank=1), client=None, source=Gathers({}))  # type: ignore[attr-defined]
    trainer.send_weights()
    trainer.shutdown()
    assert seen == ["gathered"] * 2 and trainer.publisher is None


def test_a_state_that_leaves_parameters_out_is_refused_by_name_and_leaves_the_model_as_it_was() -> None:
    tensors = checkpoint()
    del tensors["model.layers.0.attn.v_proj.weight"]
    worker = Worker(FusedModel())
    before = [x.clone() for x in worker.model.parameters()]
    with Publisher(tensors) as publisher:
        publisher.publish()
        worker.init_weight_transfer_engine({"address": f"127.0.0.1:{publisher.port}"})
        with pytest.raises(InputError, match=r"of 96 values of the host's qkv, which would stay old"):
            worker.update_weights({})
        worker.engine.shutdown()
    assert all(torch.equal(x, y) for x, y in zip(before, worker.model.parameters(), strict=True))


def test_an_update_before_a_trainer_is_known_or_to_a_version_that_never_comes_is_an_error() -> None:
    worker, tensors = Worker(FusedModel()), checkpoint()
    with pytest.raises(InputError, match="call init_weight_transfer_engine first"):
        worker.update_weights({})
    with Publisher(tensors) as publisher:
        publisher.publish()
        worker.init_weight_transfer_engine({"address": f"127.0.0.1:{publisher.port}", "timeout": SOON})
        worker.update_weights({})
        with pytest.raises(LinkError, match=f"version 7 from 127.0.0.1:{publisher.port}"):
            worker.update_weights({"version": 7, "timeout": 0.2})
        assert same(worker.model, expected(tensors, 0))
        worker.engine.shutdown()
    for wrong in ({"version": -1}, {"version": "x"}, {"timeout": 0}):
        with pytest.raises(InputError):
            worker.update_weights(wrong)


def test_another_interface_of_vllm_leaves_it_as_it_is_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    base = vllm_names.base()

    def other(self: Any, update_info: Any, more: Any) -> None: ...

    registry = vllm_names.factory().WeightTransferEngineFactory._registry
    registry.pop("thinwire")
    monkeypatch.setattr(base.WeightTransferEngine, "receive_weights", other)
    with pytest.warns(UserWarning, match=r"WeightTransferEngine.receive_weights is not as in 0.33"):
        vllm_engine.register()
    assert "thinwire" not in registry
