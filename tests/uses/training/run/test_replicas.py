"""Whole runs of replicas through the command line: what they leave, go on from, and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import metrics, record, sentence, until, warm
from safetensors.torch import load_file

STEPS = 6


@pytest.fixture(scope="module")
def job(text: Path) -> list[Any]:
    return [
        *("--model", "gpt2-lab", "--data", text, "--batch", 4, "--seq", 16, "--replicas", 2),
        *("--eval-samples", 4, "--threads", 1, "--dtype", "fp32", "--no-tensorboard", "--quiet"),
    ]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return {n: x for f in sorted((out / "model").glob("*.safetensors")) for n, x in load_file(f).items()}


def same(a: Path, b: Path) -> bool:
    ours, theirs = weights(a), weights(b)
    return ours.keys() == theirs.keys() and all(torch.equal(x, theirs[n]) for n, x in ours.items())


@pytest.fixture(scope="module")
def whole(job: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the recipe that plans for itself, with checkpoints and an evaluation on the way."""
    out = tmp_path_factory.mktemp("whole") / "out"
    options = ["--steps", STEPS, "--checkpoint-every", 3, "--eval-every", 2, "--out", out]
    command = warm().run(out.parent, "train", *job, *options)
    assert command.code == 0, command.err
    return out


def test_the_record_says_what_replicas_exchanged(whole: Path) -> None:
    found, steps = record(whole), metrics(whole)
    assert found["kind"] == "replicas" and found["recipe"]["name"] == "auto"
    assert found["replicas"]["count"] == 2 and found["replicas"]["equal"] is True
    assert found["replicas"]["exchanges"] >= 1
    counts = found["bytes"]
    assert 0 < counts["exchange"] < counts["raw_exchange"] / 20 and "forward" not in counts
    assert counts["exchange"] == pytest.approx(sum(m["bytes"]["exchange"] for m in steps), rel=0.05)
    assert found["decisions"][0]["outcome_s"] > 0
    assert found["decisions"][0]["boundary"] == "replicas" and found["decisions"][0]["local_steps"] >= 1
    seconds = [e["seconds"] for e in found["loss"]["evaluations"]]
    assert len(seconds) == 2 and 0 < seconds[0] < seconds[1] < found["totals"]["seconds"]
    assert found["loss"]["eval_final"] < found["loss"]["eval_first"]


def test_a_resumed_run_ends_with_the_same_bits(whole: Path, job: list[Any], tmp_path: Path) -> None:
    recipe = ["--replica-recipe", "dd-ef-sgd:ratio=0.05,staleness=2"]
    ends = []
    for name, parts in (("whole", [(STEPS, ())]), ("parts", [(3, ()), (STEPS, ("--resume",))])):
        out = tmp_path / name
        for steps, more in parts:
            options = ["--steps", steps, "--checkpoint-every", 3, "--out", out, *more]
            command = warm().run(tmp_path / f"{name}-{steps}", "train", *job, *recipe, *options)
            assert command.code == 0, command.err
        ends.append(out)
    assert same(*ends) and record(ends[0])["loss"]["eval_final"] == record(ends[1])["loss"]["eval_final"]


def test_pipelines_of_replicas_train_as_one_pipeline_does(job: list[Any], tmp_path: Path) -> None:
    """Two stages and two replicas, uncompressed: the losses of one pipeline over the whole batch."""
    options = ["--steps", 3, "--stages", 2, "--microbatches", 2, "--grad-clip", 0, "--warmup", 0]
    pair = [*options, "--recipe", "fp32", "--replica-recipe", "allreduce", "--out", tmp_path / "pair"]
    command = warm().run(tmp_path / "a", "train", *job, *pair)
    assert command.code == 0, command.err
    one = [*options, "--recipe", "fp32", "--replicas", 1, "--out", tmp_path / "one"]
    command = warm().run(tmp_path / "b", "train", *job, *one)
    assert command.code == 0, command.err
    ours, alone = record(tmp_path / "pair"), record(tmp_path / "one")
    assert ours["recipe"]["name"] == "fp32/allreduce" and ours["replicas"]["equal"] is True
    assert ours["loss"]["train"] == pytest.approx(alone["loss"]["train"], rel=1e-5)
    assert ours["loss"]["eval_final"] == pytest.approx(alone["loss"]["eval_final"], rel=1e-5)
    assert {"forward", "backward", "exchange"} <= ours["bytes"].keys()


def test_a_comparison_runs_to_a_loss(job: list[Any], tmp_path: Path) -> None:
    options = ["--steps", 3, "--reach", 8, "--eval-every", 1, "--no-save-model", "--out", tmp_path / "out"]
    command = warm().run(tmp_path, "compare", "allreduce", "thinwire:every=2,late=0", *job, *options)
    assert command.code == 0, command.err
    first, second = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert second["config"]["until_loss"] == first["loss"]["eval_final"] >= second["loss"]["eval_final"]
    assert second["totals"]["steps"] < 8 and "held-out loss" in command.out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Held-out loss against time" in page


def test_a_loss_counts_as_reached_by_all_held_out_samples(job: list[Any], tmp_path: Path) -> None:
    """The first held-out samples have the lower loss here, and the target lies between."""
    (tmp_path / "text.txt").write_text("".join(f"{i} bottles of {'beer' * (i % 3)}\n" for i in range(300)))
    small = ["--data", tmp_path / "text.txt", "--steps", 2, "--lr", 1e-9, "--no-save-model"]
    losses, ends = [], ([], ["--eval-samples", 10**6])
    for i, more in enumerate(ends):
        command = warm().run(tmp_path / str(i), "train", *job, *small, *more, "--out", tmp_path / f"o{i}")
        assert command.code == 0, command.err
        losses.append(record(tmp_path / f"o{i}")["loss"]["eval_first"])
    target = sum(losses) / 2
    assert losses[0] < target < losses[1]
    more = ["--eval-every", 1, "--until-loss", target, "--out", tmp_path / "out"]
    command = warm().run(tmp_path, "train", *job, *small, *more)
    assert command.code == 0, command.err
    ended = record(tmp_path / "out")
    assert ended["totals"]["steps"] == 2 and "of --eval-samples, which" in ended["unreached"]
    assert ended["unreached"] in command.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replicas", 0], "--replicas is 0"),
        (["--batch", 3], "--batch 3"),
        (["--replica-recipe", "topk:ratio=0"], "ratio=0.0"),
        (["--replica-recipe", "tahquant"], "no recipe 'tahquant'"),
        (["--replica-recipe", "dd-ef-sgd:staleness=99", "--steps", 5], "staleness"),
        (["--until-loss", 3], "--eval-every"),
        (["--stages", 2, "--batch", 8, "--recipe", "auto"], "--recipe auto"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    job: list[Any], tmp_path: Path, options: list[Any], words: str
) -> None:
    command = warm().run(tmp_path, "train", *job, *options, "--out", tmp_path / "out")
    assert command.code == 2 and words in sentence(command) and not (tmp_path / "out").exists()


def test_another_number_of_replicas_cannot_go_on(whole: Path, job: list[Any], tmp_path: Path) -> None:
    more = ["--replicas", 4, "--steps", STEPS, "--resume", "--out", whole]
    command = warm().run(tmp_path, "train", *job, *more)
    assert command.code == 2, command.err


def test_a_replica_that_dies_is_named(job: list[Any], tmp_path: Path) -> None:
    import os
    import signal

    options = ["--steps", 400, "--replica-recipe", "thinwire", "--out", tmp_path / "out"]
    command = warm().start(tmp_path, "train", *job, *options)
    until(lambda: (tmp_path / "out" / "metrics.jsonl").exists(), "the first step")
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert command.wait() == 3 and "rank 1" in command.err
