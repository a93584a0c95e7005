"""A run on images, as far as one rank has it: what is prepared, a step, an evaluation, a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clothes import write_clothes
from other_device import DEVICE, Elsewhere
from torch import Tensor

from thinwire.runs.data.task import next_token_loss
from thinwire.runs.machine import devices
from thinwire.runs.machine.compute import Compute
from thinwire.runs.models.cnn import build_cnn
from thinwire.runs.ranks.world import World
from thinwire.types import InputError
from thinwire.uses.training.run import options
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.resume import Checkpoints
from thinwire.uses.training.run.stepper import Stepper, build_parts
from thinwire.uses.training.run.training_job import Job, prepare
from thinwire.uses.training.run.warmup import warm_up

BATCH, STEPS, KEPT, MOMENTUM = 20, 6, 3, 0.9


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Return what prepares a run of one stage, which is refused where there is but one replica."""
    write_clothes(tmp_path, train=100, t10k=50)
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path))
    monkeypatch.setattr(options, "_pipeline", lambda config: None)
    given: dict[str, Any] = {"model": "cnn-fashion", "data": "fashion-mnist", "stages": 1, "microbatches": 1}
    given |= {"batch": BATCH, "steps": STEPS, "out": str(tmp_path / "out"), "schedule": "gpipe"}
    return lambda **options: prepare(TrainConfig(**given | {"dtype": "fp32"} | options))


@pytest.fixture
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, {})
    dist.destroy_process_group()


def stepper(job: Job, world: World, warm: bool = True) -> Stepper:
    parts = build_parts(job, world)
    made = Stepper(job, world, parts)
    if warm:
        warm_up(parts, made.optimiser, job.config, job.task, job.recipe, compute=job.compute)
    return made


def trained(steps: Stepper, first: int, last: int) -> list[Tensor]:
    """Do steps ``first`` to ``last`` and return the weights."""
    for step, ids in enumerate(steps.job.batches.starting_at(first - 1), first):
        if step <= last:
            steps.step(step, ids, torch.empty(0, dtype=torch.int64))
    return [p.detach().clone() for p in steps.parameters]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plain(job: Job) -> list[Tensor]:
    """Train by momentum as a textbook does: the mean over a batch, its norm at most 1, then p -= lr * m."""
    model = build_cnn(job.source.config, job.config.seed)
    weights = list(model.parameters())
    moments = [torch.zeros_like(p) for p in weights]
    for ids in job.batches:
        block = job.train[ids]
        loss = next_token_loss(model(job.task.inputs(block)), job.task.targets(block))
        grads = torch.autograd.grad(loss, weights)
        scale = min(1.0, 1.0 / float(torch.cat([g.flatten() for g in grads]).norm()))
        with torch.no_grad():
            for p, m, g in zip(weights, moments, grads, strict=True):
                m.mul_(MOMENTUM).add_(g, alpha=scale)
                p.sub_(m, alpha=job.config.learning_rate)
    return weights


@pytest.mark.usefixtures("one_thread")
def test_a_run_is_textbook_sgd_and_goes_on_bit_by_bit(job: Callable[..., Job], world: World) -> None:
    this = job(optimizer=f"sgd:momentum={MOMENTUM}")
    whole, begun, resumed = (stepper(this, world, warm) for warm in (True, True, False))
    found = trained(whole, 1, STEPS)
    for a, b in zip(found, plain(this), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    trained(begun, 1, KEPT)
    Checkpoints(this, 0, begun.stages, begun.optimiser).save(KEPT, {})
    Checkpoints(this, 0, resumed.stages, resumed.optimiser).load(KEPT)
    assert equal(trained(resumed, KEPT + 1, STEPS), found)
    for steps in (whole, begun, resumed):
        steps.close()


@pytest.mark.usefixtures("one_thread")
def test_evaluations_say_the_share_that_is_right(job: Callable[..., Job], world: World) -> None:
    """In micro-batches, by passes that leave the weights alone."""
    this = job(microbatches=2, eval_samples=35)
    steps, heldout = stepper(this, world), this.eval_blocks()[0]
    assert len(heldout) == 40
    trained(steps, 1, STEPS)
    with torch.no_grad():
        total, count, right = steps.evaluate(heldout)
        logits = steps.stages[0].submod(this.task.inputs(heldout))
    wanted = this.task.targets(heldout)
    assert count == len(heldout) and right == int((logits.argmax(-1) == wanted).sum())
    assert total / count == pytest.approx(next_token_loss(logits, wanted).item(), rel=1e-5)
    steps.close()


def test_a_batch_that_cannot_be_evaluated_is_refused(job: Callable[..., Job]) -> None:
    with pytest.raises(InputError, match=r"--batch 60 is more than the 50 images held out; use a smaller"):
        job(batch=60)
    assert job(batch=60, eval_samples=0).steps == STEPS


@pytest.mark.usefixtures("one_thread")
def test_a_step_on_a_device_of_its_own_is_the_same_bits_and_waits_twice(
    job: Callable[..., Job], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor of the processor meets the model's: loss and gradients' norm are all that comes back."""
    this = job(microbatches=2, optimizer=f"sgd:momentum={MOMENTUM}")
    whole = stepper(this, world)
    wanted = trained(whole, 1, STEPS)
    there = dataclasses.replace(this, compute=Compute(DEVICE))
    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "_device_dtype_check_for_fused", lambda _: None)
    with Elsewhere() as seen:
        steps = stepper(there, world)
        trained(steps, 1, 1)
        seen.clear()
        trained(steps, 2, 2)
        assert [wait.partition(" ")[0] for wait in seen.waits] == ["tolist", "item"]
        assert (seen.to_device, seen.to_host) == (2, 0)  # samples and targets
        found = trained(steps, 3, STEPS)
        assert equal([p.cpu() for p in found], wanted)
        assert steps.evaluate(this.eval_blocks()[0]) == whole.evaluate(this.eval_blocks()[0])


def test_a_model_that_a_card_has_no_room_for_is_one_sentence(
    job: Callable[..., Job], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """417,482 weights of float32, with a gradient and a momentum each."""
    monkeypatch.setattr(devices, "free_bytes", lambda _: 4 << 20)
    there = dataclasses.replace(job(optimizer="sgd:momentum=0.9"), compute=Compute(DEVICE))
    with pytest.raises(InputError, match=r"^training this rank's part .* needs at least 0\.00501 GB"):
        build_parts(there, world)
    build_parts(dataclasses.replace(there, config=there.config.replace(optimizer="sgd")), world)


@pytest.mark.usefixtures("one_thread")
def test_half_of_the_bits_train_nearly_the_same(job: Callable[..., Job], world: World) -> None:
    """Weights stay float32."""
    exact, half = (stepper(job(dtype=name, optimizer="sgd"), world) for name in ("float32", "bfloat16"))
    before = torch.cat([p.detach().flatten() for p in half.parameters])
    moved = [torch.cat([p.flatten() for p in trained(s, 1, STEPS)]) - before for s in (exact, half)]
    assert moved[1].dtype == torch.float32 and not torch.equal(*moved)
    assert float((moved[1] - moved[0]).norm() / moved[0].norm()) < 0.1


@pytest.mark.usefixtures("one_thread")
def test_what_the_loss_of_float16_is_multiplied_by_is_out_of_losses_and_gradients(
    job: Callable[..., Job], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compute, "autocast", lambda _: contextlib.nullcontext())
    plain_sgd = {"optimizer": "sgd", "grad_clip": 0.0}
    exact, half = (stepper(job(dtype=name, **plain_sgd), world) for name in ("float32", "float16"))
    assert half.job.compute.loss_scale > 1.0 and equal(*(trained(s, 1, STEPS) for s in (exact, half)))
    ids = next(iter(half.job.batches))
    losses = [s.step(STEPS + 1, ids, ids[:0]).loss for s in (exact, half)]
    assert losses[0] == losses[1]
