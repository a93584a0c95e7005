"""What a run computes: its learning rates, and its losses against a plain loop in one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import record, warm
from texts import write_text

from thinwire.runs.data.task import inputs, next_token_loss, targets
from thinwire.runs.models.split import build_stage
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.stepper import scheduled_rate
from thinwire.uses.training.run.training_job import Job, prepare

STEPS, WARMUP = 8, 2
RATE, CLIP, DECAY = 3e-4, 0.5, 5.0  # each changes the losses by itself, which the plain loop is asked


@pytest.mark.parametrize("warmup", [0, 4])
def test_learning_rates_are_those_of_the_formulas(warmup: int):
    """24 steps after the warm-up: begun at the peak, at half of it in the middle, and nearly at 0 last."""
    steps = warmup + 24
    first, middle, last = warmup + 1, warmup + 13, steps

    def rates(schedule: str, *at: int) -> list[float]:
        config = TrainConfig(lr=0.5, warmup=warmup, lr_schedule=schedule, steps=steps)
        return [scheduled_rate(config, step, steps) for step in at]

    for schedule in ("constant", "linear", "cosine"):
        assert rates(schedule, *range(1, warmup + 1)) == [0.5 * k / 4 for k in range(1, warmup + 1)]
    assert rates("constant", first, middle, last) == [0.5] * 3
    assert rates("linear", first, middle, last) == pytest.approx([0.5, 0.25, 0.5 / 24])
    assert rates("linear", first + 6) == pytest.approx([0.375])
    ends = (1 + math.cos(math.pi * 23 / 24)) / 4
    assert rates("cosine", first, middle, last) == pytest.approx([0.5, 0.25, ends])
    assert rates("cosine", first + 8) == pytest.approx([0.375])  # cos(60 degrees) is a half


def test_a_run_that_is_all_warm_up_has_a_rate_at_each_step():
    config = TrainConfig(lr=1.0, warmup=4, lr_schedule="cosine", steps=4)
    assert [scheduled_rate(config, step, 4) for step in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    text = write_text(tmp_path_factory.mktemp("data") / "text.txt")
    return [
        *("train", "--model", "gpt2-lab", "--data", text, "--batch", 4, "--microbatches", 2, "--seq", 32),
        *("--steps", STEPS, "--epochs", 2, "--eval-samples", 4, "--threads", 1, "--dtype", "fp32"),
        *("--lr", RATE, "--lr-schedule", "cosine", "--warmup", WARMUP, "--grad-clip", CLIP),
        *("--weight-decay", DECAY, "--no-tensorboard", "--quiet"),
    ]


def trained(place: Path, *arguments: Any, world: int = 2) -> dict[str, Any]:
    """Train in ``place``; return the run's record."""
    ranks = warm().ranks(place, *arguments, "--out", place / "out", world=world)
    assert [r.wait() for r in ranks] == [0] * world, [r.err for r in ranks]
    return record(place / "out")


@pytest.fixture(scope="module")
def plain(short: list[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two stages that send float32."""
    return trained(tmp_path_factory.mktemp("plain"), *short, "--recipe", "fp32", "--no-save-model")


@pytest.fixture(scope="module")
def coded(short: list[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two stages that send changes since the last pass."""
    return trained(tmp_path_factory.mktemp("coded"), *short, "--no-save-model")


def one_process(job: Job, clip: float = CLIP, decay: float = DECAY, cosine: bool = True) -> list[float]:
    """Train the whole model as a textbook does, and return the losses."""
    model = build_stage(job.source, [range(job.source.config.num_hidden_layers)], 0, job.config.seed)
    optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=decay)
    losses = []
    for step, ids in enumerate(job.batches):
        warming, falling = step < WARMUP, (step - WARMUP) / (STEPS - WARMUP)
        factor = (step + 1) / WARMUP if warming else (1 + math.cos(math.pi * falling)) / 2 if cosine else 1
        optimiser.param_groups[0]["lr"] = RATE * factor
        block = job.train[ids]
        logits, wanted = model(inputs(block)), targets(block)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimiser.step()
        losses.append(loss.item())
    return losses


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / y for x, y in zip(a, b, strict=True))


@pytest.mark.usefixtures("one_thread")
def test_two_stages_in_float32_train_as_one_process_does(plain: dict[str, Any]):
    job, losses = prepare(TrainConfig.from_dict(plain["config"])), plain["loss"]["train"]
    assert len(losses) == STEPS
    assert apart(losses, one_process(job)) < 1e-5
    for other in ({"clip": 0.0}, {"decay": 0.0}, {"cosine": False}):  # that each of them has acted
        assert apart(losses, one_process(job, **other)) > 1e-4, other


@pytest.mark.usefixtures("one_thread")
def test_answers_count_alike_in_all_micro_batches(short: list[Any], tmp_path: Path):
    """Micro-batches with little to learn beside others with much."""
    data = tmp_path / "answers.jsonl"
    lines = [{"ask": "What is it? " * (1 + 9 * (k % 3)), "text": f"It is {k}." * (k % 5)} for k in range(600)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = ("--data", data, "--prompt-field", "ask", "--eval-samples", 12, "--recipe", "fp32")
    run = trained(tmp_path, *short, *own, "--no-save-model")
    job = prepare(TrainConfig.from_dict(run["config"]))
    assert apart(run["loss"]["train"], one_process(job)) < 1e-5
    assert any("prompts are read but not learnt" in note for note in run["notes"])
    learnt = [(targets(job.train[ids]) >= 0).sum(1).reshape(2, 2).sum(1) for ids in job.batches]
    assert all(float(a) != float(b) for a, b in learnt)
    for blocks, found in zip(job.eval_blocks(), ("eval_first", "train_eval_first"), strict=True):
        model = build_stage(job.source, [range(job.source.config.num_hidden_layers)], 0, job.config.seed)
        with torch.no_grad():
            loss = next_token_loss(model(inputs(blocks)), targets(blocks)).item()
        assert len(blocks) == 12 and apart([run["loss"][found]], [loss]) < 1e-5, found


def test_without_overlap_a_run_is_the_same(short: list[Any], coded: dict[str, Any], tmp_path: Path):
    again = trained(tmp_path, *short, "--no-overlap", "--no-save-model")
    assert again["loss"] == coded["loss"]
    assert again["boundaries"] == coded["boundaries"]


def test_references_on_disk_go_on_from_a_checkpoint(short: list[Any], coded: dict[str, Any], tmp_path: Path):
    """In its first pass: the second one's changes are to references that the checkpoint brought."""
    disk = ["--references", f"disk:{tmp_path / 'references'},memory=1kb", "--no-save-model"]
    whole = trained(tmp_path, *short, *disk, "--checkpoint-every", 3)
    assert whole["loss"] == coded["loss"]
    for step in range(6, STEPS + 1):  # as a run that was killed on the way leaves it
        for file in (tmp_path / "out" / "checkpoints").glob(f"step-{step:08d}/*"):
            file.unlink()
    resumed = trained(tmp_path, *short, *disk, "--checkpoint-every", 3, "--resume")
    assert any("resumed after step 3" in note for note in resumed["notes"])
    assert resumed["loss"] == coded["loss"]


def exported_loss(found: dict[str, Any], model: Path) -> float:
    """Return the loss of the saved model on the run's held-out samples."""
    from transformers import AutoModelForCausalLM

    blocks = prepare(TrainConfig.from_dict(found["config"])).eval_blocks()[0]
    with torch.no_grad():
        y = AutoModelForCausalLM.from_pretrained(model).eval()(blocks[:, :-1]).logits
    return torch.nn.functional.cross_entropy(y.flatten(0, 1), blocks[:, 1:].flatten()).item()


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(3, ("--stages", 3), marks=pytest.mark.long),
        (2, ("--stages", 4, "--schedule", "interleaved1f1b")),
    ],
    ids=["three ranks", "two stages a rank"],
)
def test_more_than_two_stages(
    short: list[Any], plain: dict[str, Any], tmp_path: Path, world: int, options: tuple[Any, ...]
):
    """In float32, where a cut changes nothing; begun, gone on from a checkpoint, and exported."""
    args = [*short, "--microbatches", 4, "--recipe", "fp32", *options, "--checkpoint-every", 4]
    trained(tmp_path, *args, world=world)
    for file in (tmp_path / "out" / "checkpoints").glob("step-00000008/*"):
        file.unlink()
    found = trained(tmp_path, *args, "--resume", world=world)
    assert any("resumed after step 4" in note for note in found["notes"])
    assert apart(found["loss"]["train"], plain["loss"]["train"]) < 1e-5
    assert found["loss"]["eval_final"] == pytest.approx(plain["loss"]["eval_final"], rel=1e-5)
    assert exported_loss(found, tmp_path / "out" / "model") == pytest.approx(
        found["loss"]["eval_final"], rel=1e-5
    )
    counted = {(b["boundary"], b["direction"]): b["bytes"] for b in found["boundaries"]}
    pairs = {f"{i}-{i + 1}" for i in range(world - 1)}  # of processes, however many stages each has
    assert set(counted) == {(pair, way) for pair in pairs for way in ("forward", "backward")}
    alone = {b["direction"]: b["bytes"] for b in plain["boundaries"]}
    crossed = (options[1] - 1) / len(pairs)  # boundaries of stages between two processes
    for (_, way), n in counted.items():  # the same samples cross each
        assert n == pytest.approx(crossed * alone[way], rel=0.01)
