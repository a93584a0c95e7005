"""The command thinwire plan: tables, JSON, command lines to start with, measuring."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from commanded import invoke
from machine_files import ATTIC, LINK, everywhere, written
from texts import write_text

from thinwire.runs.machine.compute import Compute
from thinwire.runs.models import cuts as cuts_module
from thinwire.uses.training.pipeline.choosing.pipeline_plan import Way
from thinwire.uses.training.planning import planner
from thinwire.uses.training.planning.machines_file import (
    MachineEntry,
    MachinesFile,
    MachineSpeed,
    read_machines,
)
from thinwire.uses.training.planning.planner import Planner
from thinwire.uses.training.run.options import TrainConfig


def plan(*arguments: str) -> tuple[int, str, str]:
    result = invoke("plan", *arguments, COLUMNS="160")
    return result.exit_code, result.stdout, result.stderr


GPT2 = ("--model", "gpt2", "--init", "random", "--seq", "32", "--batch", "4", "--microbatches", "4")


MACHINES = "".join(
    MachineSpeed("gpt2", 32, s, 5 * s, s / 10, s / 100).toml(name) + "\n"
    for name, s in (("desk", 0.01), ("attic", 0.03))
)


def test_the_command_prints_a_plan_and_how_to_start_it(tmp_path: Path) -> None:
    file = str(written(tmp_path, MACHINES.replace('"desk"', '"desk"\naddress = "192.0.2.7"', 1) + LINK))
    code, out, err = plan(file, *GPT2)
    assert code == 0, err
    assert "memory is not checked" in err
    assert all(name in out for name in ("fp32", "bf16", "auto", "thinwire", "of unlimited"))
    starts = [line for line in out.splitlines() if line.startswith("torchrun")]
    assert len(starts) == 2
    for k, line in enumerate(starts):
        assert f"--node-rank {k} " in line and "--cut " in line and "--init random" in line
        assert "-field" not in line
    assert "--host 192.0.2.7" in out and "--host ADDRESS_OF_attic" in out


def test_schedules_that_a_run_refuses_are_not_proposed(tmp_path: Path) -> None:
    third = MachineSpeed("gpt2", 32, 0.02, 0.1, 0.002, 0.0002).toml("shed") + "\n"
    links = LINK + LINK.replace("attic", "shed") + LINK.replace("desk", "shed")
    file = str(written(tmp_path, MACHINES + third + links))
    few = [*GPT2[:-1], "2"]
    code, out, err = plan(file, *few, "--json")
    assert code == 0, err
    assert {p["schedule"] for p in json.loads(out)} == {"gpipe"}
    code, _, err = plan(file, *few, "--schedule", "1f1b")
    assert code == 2 and "raise --microbatches from 2 to 3" in err and err.count("\n") == 1


def test_a_machine_s_name_is_printed_as_it_is(tmp_path: Path) -> None:
    code, out, err = plan(str(written(tmp_path, (MACHINES + LINK).replace("attic", "a[/x]"))), *GPT2)
    assert code == 0, err
    assert "→ a[/x]" in out or "a[/x] →" in out


def test_the_command_lines_carry_all_that_was_planned_with(tmp_path: Path) -> None:
    lora = MACHINES.replace("update", "lora = 8\nupdate")
    options = (*GPT2, "--lora", "8", "--dtype", "bf16", "--prompt-field", "ask", "--no-bos", "--data", "")
    (tmp_path / "my texts").mkdir()
    write_text(tmp_path / "my texts" / "a.txt")
    file = written(tmp_path, lora.replace('"desk"', '"my desk"') + LINK.replace("desk", "my desk"))
    code, out, err = plan(str(file), *options[:-1], f"{tmp_path}/my texts")
    assert code == 0, err
    starts = [shlex.split(line) for line in out.splitlines() if line.startswith("torchrun")]
    assert len(starts) == 2
    for words in starts:
        given = dict(pairwise(words))
        assert (given["--lora"], given["--dtype"], given["--prompt-field"]) == ("8", "bf16", "ask")
        assert given["--data"] == f"{tmp_path}/my texts" and words.count("--no-bos") == 1
    hosts = {words[words.index("--host") + 1] for words in starts}
    assert hosts == {"ADDRESS_OF_my desk", "ADDRESS_OF_attic"}


def test_each_rank_gets_the_threads_it_was_measured_with(tmp_path: Path) -> None:
    measured = MachineSpeed("gpt2", 32, 0.01, 0.05, 0.001, 0.0001, threads=3).toml("desk") + "\n"
    code, out, err = plan(str(written(tmp_path, measured + ATTIC + LINK)), *GPT2, "--threads", "1")
    assert code == 0, err
    starts = [shlex.split(line) for line in out.splitlines() if line.startswith("torchrun")]
    given = {words[words.index("--host") + 1]: words[words.index("--threads") + 1] for words in starts}
    assert given == {"ADDRESS_OF_desk": "3", "ADDRESS_OF_attic": "1"} and "bos" not in out
    code, out, err = plan(str(written(tmp_path, MACHINES + LINK)), *GPT2)
    assert code == 0 and "--threads" not in out, err


@pytest.mark.parametrize("lora", [0, 4])
def test_a_machine_is_measured_as_a_rank_of_the_job_runs(monkeypatch: pytest.MonkeyPatch, lora: int) -> None:
    if lora:
        pytest.importorskip("peft")
    job = TrainConfig(model="gpt2-lab", seq=16, batch=2, microbatches=2, threads=1, lora=lora)
    threads, before = [], torch.get_num_threads()
    timed = cuts_module.median_seconds

    def watched(work: Callable[[], None], compute: Compute) -> float:
        threads.append(torch.get_num_threads())
        return timed(work, compute)

    monkeypatch.setattr(cuts_module, "SPAN", 0.0)
    monkeypatch.setattr(cuts_module, "median_seconds", watched)
    monkeypatch.setattr(planner, "median_seconds", watched)
    made = Planner(job)
    found = made.measured()
    assert set(threads) == {1} and torch.get_num_threads() == before
    assert (found.tokens, found.lora, found.threads) == (16, lora, 1)
    assert (found.embed > 0) == (lora == 0)  # adapters leave it frozen
    text = MachinesFile((MachineEntry("a"), MachineEntry("b", 0.5)), everywhere("ab", Way()))
    bare, first = (made.foretell(text, cut, "gpipe")[0].seconds for cut in ((1, 3), (3, 1)))
    assert first < bare  # b is half as fast


def test_the_optimiser_s_time_goes_by_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(TrainConfig(model="gpt2-lab", seq=16, batch=2, microbatches=2))
    found = MachineSpeed("gpt2-lab", 16, 0.01, 0.02, 0.001, embed=0.004)
    a, b = planner._machines(
        MachinesFile((MachineEntry("a", measured=found), MachineEntry("b", measured=found)))
    )
    layer, matrix = 12 * 256**2 + 13 * 256, 4096 * 256
    assert a.head_update == b.head_update == pytest.approx(0.001 * matrix / layer)
    assert a.embed_update == pytest.approx(0.001 * (matrix + 1024 * 256) / layer)
    assert a.embed == 0.004


def test_the_command_speaks_json(tmp_path: Path) -> None:
    code, out, err = plan(str(written(tmp_path, MACHINES + LINK)), *GPT2, "--json", "--schedule", "gpipe")
    assert code == 0, err
    found = json.loads(out)
    assert {p["schedule"] for p in found} == {"gpipe"}
    assert {p["recipe"] for p in found} == {"fp32", "bf16", "auto", "thinwire"}
    for p in found:
        assert p["tokens_s"] == pytest.approx(128 / p["seconds"]) and sum(p["cut"]) == 12


def test_this_machine_is_measured_and_its_entry_reads_back(tmp_path: Path) -> None:
    small = ("--model", "gpt2-lab", "--seq", "16", "--batch", "2", "--microbatches", "2")
    code, out, err = plan("--measure", *small)
    assert code == 0, err
    file = written(tmp_path, out + ATTIC + LINK.replace("desk", read_name(out)))
    found = read_machines(file).machines[0].measured
    assert found is not None and found.tokens == 16
    assert 0 < found.layer < 60 and 0 < found.head < 60 and 0 < found.update < 60
    code, out, err = plan(str(file), *small)
    assert code == 0, err


def read_name(text: str) -> str:
    return next(line.split('"')[1] for line in text.splitlines() if line.startswith("name"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plan takes a file of machines, or --measure"),
        (["FILE", "--measure"], "plan takes a file of machines, or --measure"),
        (
            ["FILE", "--model", "gpt2-medium", "--init", "random"],
            "measured with gpt2, the plan is for gpt2-medium",
        ),
        (["FILE", *GPT2, "--lora", "8"], "measured with --lora 0, the plan is for --lora 8"),
        (["FILE", "--microbatches", "0"], "microbatches"),
        (
            ["FILE", "--schedule", "interleaved1f1b"],
            "plan does not foresee --schedule interleaved1f1b; give 1f1b",
        ),
        (["FILE", *GPT2, "--microbatches", "1", "--schedule", "1f1b"], "raise --microbatches from 1 to 2"),
    ],
)
def test_wrong_words_end_in_one_sentence(tmp_path: Path, arguments: list[str], message: str) -> None:
    file = str(written(tmp_path, MACHINES + LINK))
    code, _, err = plan(*[file if a == "FILE" else a for a in arguments])
    assert code == 2 and message in err and err.count("\n") == 1, err
