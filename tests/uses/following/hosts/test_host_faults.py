"""Hosts whose trainer, rollouts or tensors are not what they were: told by name, or right bit for bit."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import vllm_stand_in
from fused_model import FusedModel, checkpoint
from torch import Tensor, nn
from waiting import HOST, LONG, free_port, until

from thinwire.files.checkpoint import write_checkpoint
from thinwire.types import InputError, LinkError
from thinwire.uses.following.hosts import vllm_engine, vllm_names
from thinwire.uses.following.hosts.rollout_messages import Sample
from thinwire.uses.following.hosts.rollout_pool import RolloutPool
from thinwire.uses.following.hosts.rollout_weights import RolloutWeights, TrainerAddress, VersionWanted
from thinwire.uses.following.hosts.rollout_worker import RolloutWorker
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher

NORM = "model.norm.weight"
Tensors = dict[str, Tensor]


def step(tensors: Tensors, by: float = 1.0) -> None:
    for name in (NORM, "model.embed.weight", "model.layers.0.attn.q_proj.weight"):
        tensors[name][0] += by


class Host:
    """A host whose model follows whoever publishes at a port."""

    def __init__(self, port: int, **more: Any) -> None:
        self.weights, self.model = RolloutWeights(TrainerAddress(f"{HOST}:{port}", **more)), FusedModel()

    def update(self, version: int = 0) -> int:
        """Bring the model up, and return the number of the version that it has then."""
        wanted = VersionWanted(version, LONG)
        return self.weights.update(self.model, self.model.load_weights, wanted).version.number

    def has(self, tensors: Tensors) -> bool:
        """Return whether the model has what its own loader would make of these tensors."""
        expected = FusedModel()
        expected.load_weights(tensors.items())
        pairs = zip(self.model.parameters(), expected.parameters(), strict=True)
        return all(torch.equal(x, y) for x, y in pairs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of: object) -> None:
        self.weights.close()


@pytest.mark.parametrize("published", [1, 3])
def test_a_trainer_that_starts_again_older_is_followed_and_its_numbers_are_not_taken_for_those_before(
    published: int,
) -> None:
    tensors = checkpoint()
    with Publisher(tensors) as first:
        port, old = first.port, {name: x.clone() for name, x in tensors.items()}
        with Host(port) as host:
            for number in range(1, published + 1):
                step(tensors)
                host.update(first.publish(step=100 + number).number)
            first.close()
            with Publisher(old, port=port) as second:
                told = second.publish(step=100).number  # perhaps before this end has said what it holds
                assert host.update(told) > published and host.has(old)
                assert host.weights.follower.held.meta["step"] == 100
                step(old, 3.0)
                host.update(second.publish(step=101).number)
                assert host.has(old)
            assert len(host.weights.pauses) == published + 2


def test_a_worker_waits_for_the_trainer_that_is_there_now() -> None:
    model, trained = (nn.Linear(1, 1, bias=False).requires_grad_(False) for _ in range(2))

    def generate(prompts: list[list[int]], settings: object) -> list[Sample]:
        return [Sample(prompt, [float(model.weight)]) for prompt in prompts]

    stop = threading.Event()
    first = Publisher(trained)
    with RolloutPool(max_age=0, timeout=LONG) as pool, Follower(HOST, first.port) as f:
        one = RolloutWorker(f, lambda: f.apply_to(model), generate, HOST, pool.port, patience=LONG)
        thread = threading.Thread(target=one.serve, args=(stop,))
        thread.start()
        try:
            for value in (1.0, 2.0, 0.5):
                if value == 0.5:
                    first.close()
                    first = Publisher(trained, port=first.port)
                trained.weight.fill_(value)
                assert pool.generate([[1]], first.publish().number)[0].logprobs == [value]
        finally:
            stop.set()
            thread.join(LONG)
            first.close()


def test_who_is_sent_to_another_trainer_of_the_same_tensors_gets_all_of_it(tmp_path: Path) -> None:
    one, other, saved = checkpoint(1), checkpoint(2), str(tmp_path / "held.safetensors")
    with Publisher(one) as p, Publisher(other) as q:
        for publisher, tensors in ((p, one), (q, other)) * 3:
            step(tensors)
            publisher.publish()  # the same numbers at both
        for publisher, tensors in ((p, one), (q, other), (p, one)):
            with Host(publisher.port, state=saved) as host:
                until(lambda w=host.weights: w.follower.current)
                host.update()
                assert host.has(tensors)


def test_a_rollout_that_starts_again_long_after_needs_no_more_than_the_state(tmp_path: Path) -> None:
    tensors, saved = checkpoint(), str(tmp_path / "held.safetensors")
    with Publisher(tensors, budget=0) as publisher:
        publisher.publish(step=0)
        with Host(publisher.port, state=saved) as host:
            host.update(1)
        with Follower(HOST, free_port(), state=saved) as alone:  # so that nothing newer comes
            assert alone.held.number == 1
        for number in range(1, 40):
            step(tensors)
            publisher.publish(step=number)
        with Host(publisher.port, state=saved) as host:
            host.update(publisher.newest.number)
            assert host.has(tensors)
            assert isinstance(host.weights.follower, Follower)
            (came,) = host.weights.follower.arrivals
            assert came.nbytes < publisher.history.layout.nbytes + 4096


def test_whatever_leaves_a_parameter_out_is_told_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, less = checkpoint(), checkpoint()
    del less[NORM]
    write_checkpoint(tmp_path / "base.safetensors", less, {})
    with Publisher(tensors) as publisher:
        publisher.publish()
        with (
            Host(publisher.port, base=str(tmp_path / "base.safetensors")) as host,
            pytest.raises(InputError, match=f"base does not fit what is published: {NORM}"),
        ):
            host.update()
        with pytest.raises(InputError, match=f"{NORM} is in the layout of this state, but was not given"):
            publisher.publish(tensors=less)

    class More(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.stays = (nn.Parameter(torch.zeros(2)) for _ in range(2))

    with Publisher({"w": torch.ones(2)}) as publisher, Follower(HOST, publisher.port) as follower:
        publisher.publish()
        follower.wait()
        model = More()
        with pytest.raises(InputError, match="nothing in the state fills the model's stays"):
            follower.apply_to(model)
        assert not model.w.any() and follower.apply_to(model, kept={"st*"}).new and model.w.all()

    vllm_stand_in.install(monkeypatch)
    vllm_engine.register()
    source = type(
        "Source", (vllm_stand_in.WeightSource,), {"iter_full": lambda self: iter(tensors.items())}
    )()
    trainers = vllm_names.factory().WeightTransferTrainerFactory._registry["thinwire"]()
    trainer = trainers.trainer_init(vllm_engine.TrainerInit(), client=vllm_stand_in.Workers(), source=source)
    try:
        trainer.send_weights()
        del tensors[NORM]
        with pytest.raises(InputError, match=NORM):
            trainer.send_weights()
    finally:
        trainer.shutdown()


@pytest.mark.parametrize("fused", [False, True])
def test_a_version_that_comes_while_a_generation_runs_is_used_by_the_next_one(fused: bool) -> None:
    tensors, model = {"weight": torch.zeros(64, 64)}, nn.Linear(64, 64, bias=False).requires_grad_(False)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, x in weights:
            model.get_parameter(name).copy_(x)

    with Publisher(tensors) as publisher, Follower(HOST, publisher.port) as f:

        def generate(prompts: list[list[int]], settings: object) -> list[Sample]:
            seen = []
            for more in range(3):
                if more:  # a whole version, and a small one, come meanwhile
                    tensors["weight"][: 64 if more == 1 else 1] += 1
                    f.wait(publisher.publish().number, LONG)
                f.replica.prepare()
                seen += model.weight.unique().tolist()
            return [Sample([len(set(seen))], [seen[0]])]

        bring_up = (lambda: f.load_into(model, load)) if fused else (lambda: f.apply_to(model))
        worker = RolloutWorker(f, bring_up, generate, HOST, 0)
        publisher.publish()
        for batch in range(3):
            f.wait(1 + 2 * batch, LONG)
            bring_up()
            assert torch.equal(model.weight, tensors["weight"])
            assert len(set(model.weight.unique().tolist())) <= 2
            before = model.weight.clone()
            made = worker.generate([[1]], {})
            assert torch.equal(model.weight, before), made


def test_who_stops_following_keeps_a_whole_version_and_is_told_so() -> None:
    tensors = checkpoint()
    with Publisher(tensors) as publisher, Host(publisher.port) as host:
        host.update(publisher.publish().number)
        held = {name: x.clone() for name, x in tensors.items()}
        closing = threading.Timer(0.05, host.weights.close)
        closing.start()
        with pytest.raises(LinkError, match="this end stopped following"):
            host.update(2)
        closing.join()
        step(tensors)
        publisher.publish()
        assert host.update() == 1 and host.has(held)
