"""Whole runs through the command line: what they leave, here and under torchrun, and what they refuse."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launchers import (
    TRAINING,
    Command,
    cold,
    free_port,
    gone,
    metrics,
    rank_environment,
    record,
    sentence,
    warm,
)

from thinwire.runs.models.folder import shard_name
from thinwire.runs.ranks.world import World
from thinwire.runs.records.progress import megabytes
from thinwire.uses.training.run import training_rank as train
from thinwire.uses.training.run.export import remove_models
from thinwire.uses.training.run.options import TrainConfig

STEPS = 8


@pytest.fixture(scope="module")
def job(text: Path) -> list[Any]:
    return [
        *("train", "--model", "gpt2-lab", "--data", text, "--batch", 4, "--microbatches", 2, "--seq", 32),
        *("--eval-samples", 4, "--threads", 1, "--dtype", "fp32", "--no-tensorboard"),
    ]


@pytest.fixture(scope="module")
def plain(job: list[Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Path]:
    """A run on one machine, with two passes and an evaluation on the way."""
    place = tmp_path_factory.mktemp("plain")
    args = [*job, "--steps", STEPS, "--epochs", 2, "--eval-every", 5, "--json", "--out", place / "out"]
    return warm().run(place, *args), place / "out"


@pytest.fixture(scope="module")
def joined(job: list[Any], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Command, Path]]:
    """The same run by two real torchruns that share no folder."""
    place, port, commands = tmp_path_factory.mktemp("joined"), free_port(), []
    for node in range(2):
        torchrun = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1]
        torchrun += ["--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port]
        out = place / f"out-{node}"
        args = [*job, "--steps", STEPS, "--epochs", 2, "--eval-every", 5, "--quiet", "--out", out]
        words = (*torchrun, "-m", "thinwire", *args)
        command = warm().python(place / f"node-{node}", *words, needs=TRAINING)
        commands.append((command, out))
    for command, _ in commands:
        command.wait()
    return commands


def test_json_is_the_record_and_nothing_else(plain: tuple[Command, Path]):
    command, out = plain
    assert command.code == 0, command.err
    found = json.loads(command.out)
    assert found == record(out)
    assert found["status"] == "done"
    assert found["totals"]["steps"] == STEPS
    assert [e["step"] for e in found["loss"]["evaluations"]] == [5]
    assert found["loss"]["eval_final"] < found["loss"]["eval_first"]


def test_bytes_agree_from_the_steps_to_the_meters(plain: tuple[Command, Path]):
    _, out = plain
    counts, steps = record(out)["bytes"], metrics(out)
    boundaries = record(out)["boundaries"]
    for way in ("forward", "backward"):
        assert counts[way] == sum(m["bytes"][way] for m in steps)
        assert counts[way] == sum(b["bytes"] for b in boundaries if b["direction"] == way)
        assert counts[f"raw_{way}"] == 4 * STEPS * 4 * 32 * 256
    values = STEPS * 4 * 32 * 256
    assert record(out)["bits_per_value"]["forward"] == 8 * counts["forward"] / values


def test_the_record_of_steps_is_whole(plain: tuple[Command, Path]):
    _, out = plain
    steps = metrics(out)
    assert [m["step"] for m in steps] == list(range(1, STEPS + 1))
    assert [m["loss"] for m in steps] == record(out)["loss"]["train"]
    assert record(out)["totals"]["seconds"] == pytest.approx(sum(m["seconds"] for m in steps))
    parts = sum(m[k] for m in steps for k in ("compute_s", "encode_s", "decode_s", "wait_s"))
    assert parts <= 1.5 * sum(m["seconds"] for m in steps) + 0.5  # a busy machine stops one rank in a step


def test_torchrun_trains_the_same(plain: tuple[Command, Path], joined: list[tuple[Command, Path]]):
    assert [c.code for c, _ in joined] == [0, 0], joined[0][0].err + joined[1][0].err
    alone, together = record(plain[1]), record(joined[0][1])
    assert together["loss"] == alone["loss"]
    for way in ("forward", "backward"):
        assert together["bytes"][way] == alone["bytes"][way]
    assert not (joined[1][1] / "run.json").exists()


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(torch.arange(32)[None]).logits


def test_the_model_comes_whole_from_machines_that_share_no_folder(
    plain: tuple[Command, Path], joined: list[tuple[Command, Path]]
):
    here, there = plain[1] / "model", joined[0][1] / "model"
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < files(here)
    assert files(here) == files(there)
    assert torch.equal(logits(here), logits(there))
    part = (there / shard_name(1, 2)).stat().st_size
    assert part < record(joined[0][1])["bytes"]["saving"] < 1.02 * part
    assert not joined[1][1].exists() or not files(joined[1][1])  # a part of a model is none


def test_an_evaluation_says_what_it_sends(plain: tuple[Command, Path]):
    command, out = plain
    one = 4 * (4 + 4) * 32 * 256  # blocks of held-out and of training text, in float32
    assert command.err.count(f"evaluating: {megabytes(one)} uncompressed between stages") == 3
    assert 3 * one < record(out)["bytes"]["evaluation"] < 1.05 * 3 * one
    assert record(out)["bytes"]["saving"] == 0  # the ranks share a file system


def files(folder: Path) -> set[str]:
    return {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}


def test_a_new_run_removes_the_models_of_the_one_before_and_nothing_else(tmp_path: Path):
    ours = {
        *("model/model-00001-of-00003.safetensors", "model/.model-00001-of-00003.safetensors.1234abcd.part"),
        *("model/model.safetensors.index.json", "adapter/adapter_model.safetensors"),
        "adapter/adapter_config.json",
    }
    theirs = {"notes.txt", "model/readme.md", "model/model.safetensors", "checkpoint.safetensors"}
    for name in ours | theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    remove_models(tmp_path, str(tmp_path / "model"))  # what the new run began with
    assert files(tmp_path) == ours | theirs
    remove_models(tmp_path, "gpt2-lab")
    assert files(tmp_path) == theirs and not (tmp_path / "adapter").exists()
    remove_models(tmp_path / "none", "gpt2-lab")


def test_a_run_in_a_folder_of_somebody_else_leaves_what_is_there(job: list[Any], tmp_path: Path):
    theirs = {"model/model-00001-of-00002.safetensors", "adapter/adapter_model.safetensors"}
    theirs |= {"events/events.out.tfevents.1.machine.1.0"}
    out = tmp_path / "out"
    for name in theirs:
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text("x")
    short = [*job, "--quiet", "--steps", 1, "--no-save-model", "--out", out]
    for left in (theirs, set()):  # from then on what is beside the run's record is that run's
        run = warm().run(tmp_path, *short)
        assert run.wait() == 0, run.err
        assert theirs & files(out) == left


def test_a_model_that_would_be_read_in_its_place_is_refused_at_the_start(job: list[Any], tmp_path: Path):
    out = tmp_path / "out"
    (out / "model").mkdir(parents=True)
    (out / "model" / "model.safetensors").write_text("x")
    run = warm().run(tmp_path, *job, "--quiet", "--save-model", "--out", out)
    assert run.wait() == 2
    assert "would be read in the place of the model saved there; move it" in sentence(run)
    assert files(out) == {"model/model.safetensors"}


def test_the_saved_model_is_the_evaluated_one(plain: tuple[Command, Path]):
    from transformers import AutoModelForCausalLM

    from thinwire.uses.training.run.training_job import prepare

    saved = record(plain[1])
    blocks = prepare(TrainConfig.from_dict(saved["config"])).eval_blocks()[0]
    model = AutoModelForCausalLM.from_pretrained(plain[1] / "model").eval()
    with torch.no_grad():
        y = model(blocks[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(y.flatten(0, 1), blocks[:, 1:].flatten()).item()
    assert loss == pytest.approx(saved["loss"]["eval_final"], rel=1e-4)


def test_eight_bits_stay_within_a_thousandth_of_fp32(job: list[Any], tmp_path: Path):
    """At a tenth of the default rate: at 1e-3 without warm-up single steps overshoot and differ by more."""
    losses = {}
    for recipe in ("fp32", "direct:bits=8"):
        out = tmp_path / recipe.split(":")[0]
        args = [*job, "--recipe", recipe, "--steps", 20, "--eval-samples", 0, "--no-save-model", "--quiet"]
        args += ["--lr", 1e-4]
        ranks = warm().ranks(out, *args, "--out", out / "out")
        assert [r.wait() for r in ranks] == [0, 0], ranks[0].err + ranks[1].err
        losses[recipe] = record(out / "out")["loss"]["train"]
    plain, coded = losses.values()
    assert len(plain) == len(coded) == 20
    assert plain != coded
    assert max(abs(a - b) for a, b in zip(plain, coded, strict=True)) < 1e-3
    assert math.isfinite(plain[-1])


@pytest.mark.parametrize(("clip", "said"), [((), "gradient norm"), (("--grad-clip", 0), "loss")])
def test_numbers_that_ran_away_end_the_run(job: list[Any], tmp_path: Path, clip: tuple[Any, ...], said: str):
    args = [*job, "--recipe", "fp32", "--lr", 1e30, "--steps", 8, "--eval-samples", 0, "--quiet", *clip]
    ranks = warm().ranks(tmp_path, *args, "--out", tmp_path / "out")
    assert [r.wait() for r in ranks] == [3, 3]
    told = [sentence(r) for r in (ranks if said == "gradient norm" else ranks[:1])]
    for words in told:
        assert words.startswith(f"the {said} of step ") and "; lower --lr, now 1e+30" in words
    assert record(tmp_path / "out")["status"] == "failed"
    assert not (tmp_path / "out" / "model").exists()


BAD: dict[str, tuple[list[str], str]] = {
    "recipe parameter's name": (["--recipe", "direct:bots=4"], "bots"),
    "model folder": (["--model", "{place}/absent/model"], "absent/model"),
    "folder without a model": (["--model", "{place}/empty-folder"], "empty-folder"),
    "data file": (["--data", "{place}/absent.txt"], "absent.txt"),
    "empty data": (["--data", "{place}/empty.txt"], "empty.txt"),
    "binary data": (["--data", "{place}/binary.txt"], "binary.txt"),
    "short data": (["--data", "{place}/short.txt"], "text"),
    "cut": (["--cut", "3,3"], "3,3"),
    "cut of other stages": (["--cut", "2,1,1"], "2,1,1"),
    "too few samples": (["--batch", "4000"], "4000"),
    "too few samples for the steps": (["--steps", "4000", "--epochs", "1"], "4000 steps"),
    "sequence": (["--seq", "5000"], "5000"),
    "port": (["--port", "70000"], "70000"),
    "advertised address": (["--advertise", "example.org:port"], "example.org:port"),
    "advertised port": (["--advertise", "127.0.0.1:5000"], "--port"),
    "everywhere": (["--host", "0.0.0.0", "--token-file", "{place}/token"], "--advertise"),
    "token file": (["--token-file", "{place}/absent"], "absent"),
    "configuration file": (["--config", "{place}/bad.toml"], "bacth"),
    "configuration": (["--config", "{place}/broken.toml"], "broken.toml"),
    "out": (["--out", "{place}/short.txt/run"], "short.txt"),
    "warm-up of more than all passes": (["--epochs", "1", "--warmup", "4000"], "--warmup is 4000"),
    "adapters of a model that they replace": (
        ["--lora", "4", "--model", "{place}/x/model", "--out", "{place}/x"],
        "--no-save-model",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bad")
    (place / "empty-folder").mkdir()
    (place / "empty.txt").write_text(" \n")
    (place / "binary.txt").write_bytes(bytes(range(256)))
    (place / "short.txt").write_text("Much too short.\n")
    (place / "token").write_text("a long secret text")
    (place / "bad.toml").write_text("bacth = 4\n")
    (place / "broken.toml").write_text("batch = = 4\n")
    return place


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(job: list[Any], place: Path, tmp_path: Path, name: str):
    arguments, word = BAD[name]
    given = [a.format(place=place) for a in arguments]
    command = warm().run(tmp_path, *job, "--quiet", "--out", tmp_path / "out", *given)
    assert command.code == 2, command.err
    assert word in sentence(command)
    assert command.out == ""
    assert not (tmp_path / "out").exists()


def test_a_later_rank_that_could_not_keep_its_part_is_refused_before_it_trains(
    job: list[Any], place: Path, tmp_path: Path
):
    there = rank_environment(1, 2, free_port())
    command = warm().run(tmp_path, *job, "--quiet", "--out", place / "short.txt" / "run", **there)
    assert command.code == 2, command.err
    assert "short.txt is a file" in sentence(command)


def test_a_comparison_under_torchrun_runs_all_its_recipes(job: list[Any], tmp_path: Path):
    """The store at which ranks meet is torchrun's, and knows the addresses of the recipe before."""
    args = ["compare", "fp32", "direct:bits=8", *job[1:], "--steps", 2, "--deadline", 20, "--quiet"]
    ranks = warm().ranks(tmp_path, *args, each=lambda rank: ("--out", tmp_path / f"out-{rank}"))
    assert [r.wait() for r in ranks] == [0, 0], [r.err for r in ranks]
    names = [r["recipe"]["name"] for r in json.loads((tmp_path / "out-0" / "compare.json").read_text())]
    assert names == ["fp32", "direct:bits=8"]


def test_a_rank_that_others_could_not_reach_is_refused(job: list[Any], tmp_path: Path):
    """As under torchrun on two machines, or in ``thinwire emulate``: no wait for those who cannot come."""
    there = rank_environment(0, 2, free_port()) | {"MASTER_ADDR": "192.0.2.1"}
    start = time.monotonic()
    command = warm().run(tmp_path, *job, "--quiet", "--out", tmp_path / "out", **there)
    assert command.code == 2, command.err
    assert "192.0.2.1" in sentence(command) and "--host 127.0.0.1" in sentence(command)
    assert time.monotonic() - start < 60


def test_a_hub_name_without_a_network_is_refused_in_bounded_time(job: list[Any], tmp_path: Path):
    """A hub that takes the connection and says nothing: the slowest way to have no network."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        held: list[socket.socket] = []

        def hold() -> None:
            try:
                while True:
                    held.append(silent.accept()[0])
            except OSError:
                return

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        start = time.monotonic()
        command = cold(
            tmp_path,
            *(
                sys.executable,
                "-m",
                "thinwire",
                *job,
                "--model",
                "someone/something",
                "--out",
                tmp_path / "out",
            ),
            HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}",
            HF_HOME=tmp_path / "hub",
            HF_HUB_OFFLINE=0,
        )
        command.wait()
        silent.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        for s in held:
            s.close()
    assert held, "nobody asked the hub"
    assert command.code == 2
    assert "someone/something" in sentence(command)
    assert time.monotonic() - start < 60
    assert not (tmp_path / "out").exists()


def test_a_rank_s_own_error_is_the_only_sentence(job: list[Any], tmp_path: Path):
    """Rank 0 cannot use its port; rank 1, which loses its peer by that, stays silent."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = warm().run(tmp_path, *job, "--port", port, "--out", tmp_path / "out")
        assert command.code == 2
    assert f"127.0.0.1:{port}" in sentence(command)
    gone([command.pid])


@pytest.mark.parametrize("emulated", [True, False])
def test_after_evaluation_without_the_emulated_shape_tcp_begins_anew(
    monkeypatch: pytest.MonkeyPatch, emulated: bool
) -> None:
    events = list[str]()

    @contextmanager
    def lift() -> Iterator[bool]:
        events.append("lifted")
        yield emulated
        events.append("shaped")

    reliable = SimpleNamespace(forget_estimate=lambda: events.append("forgot"))
    peer = SimpleNamespace(lifted=contextlib.nullcontext, reliable=reliable)
    monkeypatch.setattr(train, "lifted", lift)
    run = object.__new__(train.TrainingRank)
    run.world = World(0, 2, {1: peer})  # type: ignore[dict-item]
    run.telemetry = SimpleNamespace(  # type: ignore[assignment]
        agree=lambda *_: events.append("agreed"), redial=lambda: events.append("redialled")
    )
    with run._unshaped():
        events.append("evaluated")
    anew = ["redialled"] if emulated else []
    assert events == ["agreed", "lifted", "evaluated", "shaped", "agreed", *anew, "forgot"]
