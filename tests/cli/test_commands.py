"""The command line: exit codes, one-sentence refusals, wiring. Real training is tested elsewhere."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from run_records import write_run
from typer.testing import CliRunner

import thinwire
from thinwire.cli.app import app
from thinwire.runs.options import flag
from thinwire.types import LinkError, MeasurementError
from thinwire.uses.training.commands.demo import DEMO
from thinwire.uses.training.run.options import TrainConfig

PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "110", "RANK": "0"}


def invoke(*arguments: str, **environment: str):
    return CliRunner(env=PLAIN | environment).invoke(app, list(arguments))


def thinwire_process(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "thinwire"]
    environment = {k: v for k, v in os.environ.items() if k != "THINWIRE_DEBUG"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*start, *arguments], capture_output=True, text=True, timeout=240, check=False, env=environment
    )


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Stand in for the launcher alone: it records what it was given and leaves a finished run."""
    seen: list[TrainConfig] = []

    def launch(config: TrainConfig) -> Path:
        seen.append(config)
        if config.recipe == "bf16":
            raise LinkError("rank 1 (127.0.0.1:4567) has not answered for 20 s")
        if config.recipe == "direct:bits=2":
            raise KeyboardInterrupt
        if config.recipe == "direct:bits=3":
            raise MeasurementError("the clock went backwards")
        if config.recipe == "direct:bits=5":
            raise OSError(errno.ENOSPC, "No space left on device", "runs/x/model")
        write_run(Path(config.out), config.recipe, (32.0, 32.0) if config.recipe == "fp32" else (3.0, 2.5))
        return Path(config.out)

    module = types.ModuleType("thinwire.uses.training.run.training_launch")
    module.launch = launch  # type: ignore[attr-defined]
    module.under_torchrun = lambda config: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "thinwire.uses.training.run.training_launch", module)
    return seen


def one_sentence(text: str) -> str:
    (line,) = text.strip().splitlines()
    assert line.startswith("thinwire: ")
    return line


def test_every_option_is_there_and_documented():
    shown = invoke("train", "--help").stdout
    for f in dataclasses.fields(TrainConfig):
        assert flag(f.name) in shown
    assert invoke("train", "--help").exit_code == 0
    assert "--recipe " not in invoke("compare", "--help").stdout.replace("thinwire recipes", "")


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(TrainConfig)])
def test_every_option_reaches_the_configuration(
    launches: list[TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    values = {
        "out": str(tmp_path / "o"), "recipe": "direct:bits=4", "model": "gpt2-lab", "init": "random",
        "data": "x.txt", "text_field": "body", "prompt_field": "head", "bos": False, "seq": 64, "stages": 3,
        "cut": "1,1", "schedule": "gpipe", "microbatches": 2, "link": "10mbit,30ms", "steps": 7,
        "epochs": 2, "batch": 16, "lr": 0.001, "lr_schedule": "cosine", "warmup": 3, "weight_decay": 0.1,
        "grad_clip": 0.5, "dropout": 0.25, "dtype": "fp32", "device": "cpu", "seed": 9, "eval_samples": 4,
        "eval_every": 5,
        "checkpoint_every": 6, "resume": True, "save_model": False, "save_dtype": "bf16", "save_every": 3,
        "auto_resume": True, "host": "127.0.0.2", "port": 5000, "advertise": "127.0.0.3",
        "token_file": str(tmp_path / "token"), "deadline": 30.0, "threads": 1,
        "tensorboard": False, "quiet": True, "json": True, "emulate": True, "congestion": "bbr",
        "optimizer": "sgd:momentum=0.5", "references": "disk", "lora": 8, "relay": "127.0.0.1:7000",
        "overlap": False, "replicas": 2, "replica_recipe": "topk:ratio=0.5", "until_loss": 2.5,
        "until_sample": True,
    }  # fmt: skip
    one = {"stages": 1, "microbatches": 1}
    needs = {"until_loss": {"eval_every": 4}, "replicas": one, "replica_recipe": one | {"replicas": 2}}.get(
        name, {}
    )
    value = values[name]
    (tmp_path / "token").write_text("a long enough shared token")
    if name == "relay":  # what goes through it is always encrypted
        monkeypatch.setenv("THINWIRE_TOKEN", "a long enough shared token")
    spelled = (
        [flag(name) if value else flag(name).replace("--", "--no-", 1)] if isinstance(value, bool) else None
    )
    more = {"until_loss": ["--eval-every", "4"], "replica_recipe": ["--replicas", "2"]}.get(name, [])
    result = invoke("train", "--out", str(tmp_path / "run"), *(spelled or [flag(name), str(value)]), *more)
    assert result.exit_code == 0, result.output
    assert getattr(launches[0], name) == value != getattr(TrainConfig(), name)
    default = TrainConfig().to_dict() | {"out": str(tmp_path / "run"), name: value} | needs
    assert launches[0].to_dict() == default


def test_command_line_over_toml_over_defaults(launches: list[TrainConfig], tmp_path: Path):
    file = tmp_path / "job.toml"
    file.write_text(f'batch = 16\nsteps = 5\nlr-schedule = "linear"\nout = "{tmp_path / "run"}"\n')
    assert invoke("train", "--config", str(file), "--steps", "9").exit_code == 0
    (config,) = launches
    assert (config.batch, config.steps, config.lr_schedule, config.seq) == (16, 9, "linear", 128)


RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("arguments", "environment", "host"),
    [
        ([], RANK, "127.0.0.4"),
        (["--config", "job.toml"], RANK, "127.0.0.4"),
        (["--host", "127.0.0.6"], RANK, "127.0.0.6"),
        ([], RANK | {"THINWIRE_HOST": " "}, "127.0.0.1"),
        ([], {}, "127.0.0.1"),  # starts its ranks itself
    ],
)
def test_a_rank_s_address_may_be_in_its_environment(
    launches: list[TrainConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    environment: dict[str, str],
    host: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('host = "127.0.0.5"\n')
    result = invoke("train", *arguments, **{"THINWIRE_HOST": "127.0.0.4"} | environment)
    assert result.exit_code == 0, result.output
    assert launches[0].host == host


WRONG = [
    (["train", "--stages", "9"], "--stages is 9"),
    (["doctor", "--seconds", "5"], "--seconds is for --peer alone; give --peer too, or leave it out"),
    (["doctor", "--listen", "--seconds", "5"], "leave it out with --listen"),
    (["doctor", "--peer", "127.0.0.1", "--port", "7100"], "--port is for --listen alone"),
    (["doctor", "--token-file", "x"], "--token-file is for --listen and --peer alone"),
    (["doctor", "--peer", "192.0.2.1"], "needs a shared token"),
    (["emulate", "--ranks", "1"], "an emulation of 1 ranks is not possible; choose 2 to 16"),
    (["train", "--steps", "abc"], "--steps takes a whole number, not 'abc'"),
    (["train", "--lr", "fast"], "--lr takes a number, not 'fast'"),
    (["train", "--recipe", "teleport"], "teleport"),
    (["train", "--recipe", "direct:bits=99"], "99"),
    (["train", "--link", "10parsec"], "10parsec"),
    (["train", "--recipy", "fp32"], "--recipy"),
    (["train", "--config", "nowhere.toml"], "nowhere.toml"),
    (["trian"], "'trian', did you mean 'train'"),
    (["train", "--link", "trace:lte"], "add --emulate"),
    (["compare", "fp32"], "two recipes or more"),
    (["compare", "fp32", "fp32"], "'fp32' is given twice"),
    (["compare", "fp32", "teleport"], "teleport"),
    (["compare"], "RECIPE"),
    (["demo", "--steps", "20"], "take --steps 18"),
    (["report", "nowhere"], "nowhere holds no run.json"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), WRONG, ids=lambda v: " ".join(v) if isinstance(v, list) else ""
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    launches: list[TrainConfig], arguments: list[str], words: str
):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in one_sentence(result.stderr)
    assert launches == []


@pytest.mark.parametrize(
    ("recipe", "code", "words"),
    [
        ("bf16", 3, "rank 1 (127.0.0.1:4567)"),
        ("direct:bits=2", 130, "interrupted"),
        ("direct:bits=3", 4, "the clock went backwards"),
        ("direct:bits=5", 2, "the disk is full: cannot write runs/x/model"),
    ],
)
def test_failures_of_a_run_have_their_exit_code(
    launches: list[TrainConfig], tmp_path: Path, recipe: str, code: int, words: str
):
    result = invoke("train", "--recipe", recipe, "--out", str(tmp_path))
    assert result.exit_code == code
    assert words in one_sentence(result.stderr)
    assert "Traceback" not in result.output


def test_unexpected_errors_are_not_hidden(launches: list[TrainConfig], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("thinwire.cli.report.load_runs", lambda paths: 1 / 0)
    result = invoke("report", ".")
    assert isinstance(result.exception, ZeroDivisionError)


def test_train_prints_the_result(launches: list[TrainConfig], tmp_path: Path):
    result = invoke("train", "--recipe", "fp32", "--out", str(tmp_path / "run"))
    assert result.exit_code == 0
    assert "fp32: 21 steps sent" in result.stdout
    assert f"records in {tmp_path / 'run'}" in result.stderr


def test_json_is_all_that_is_on_stdout(launches: list[TrainConfig], tmp_path: Path):
    result = invoke("train", "--recipe", "fp32", "--out", str(tmp_path / "run"), "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "run" / "run.json").read_text())
    result = invoke("compare", "fp32", "thinwire", "--out", str(tmp_path / "c"), "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "c" / "compare.json").read_text())
    result = invoke("report", str(tmp_path / "c"), "--json")
    assert [r["recipe"]["name"] for r in json.loads(result.stdout)] == ["fp32", "thinwire"]


def test_later_ranks_under_torchrun_print_nothing(launches: list[TrainConfig], tmp_path: Path):
    job = ("train", "--recipe", "fp32", "--out", str(tmp_path / "run"))
    result = invoke(*job, **RANK)
    assert (result.exit_code, result.output) == (0, "")
    assert "fp32" in invoke(*job, RANK="1").stdout  # left over from something else: an ordinary run


def test_compare_runs_all_in_order_and_writes_both_files(launches: list[TrainConfig], tmp_path: Path):
    result = invoke("compare", "fp32", "direct:bits=4", "thinwire", "--out", str(tmp_path), "--seed", "3")
    assert result.exit_code == 0, result.output
    assert [c.recipe for c in launches] == ["fp32", "direct:bits=4", "thinwire"]
    assert {c.seed for c in launches} == {3}
    assert [Path(c.out).name for c in launches] == ["fp32", "direct-bits4", "thinwire"]
    names = [r["recipe"]["name"] for r in json.loads((tmp_path / "compare.json").read_text())]
    assert names == ["fp32", "direct:bits=4", "thinwire"]
    assert (tmp_path / "report.html").stat().st_size > 20_000
    assert "fewer bytes" in result.stdout


def test_compare_names_the_recipe_that_failed(launches: list[TrainConfig], tmp_path: Path):
    result = invoke("compare", "fp32", "bf16", "thinwire", "--out", str(tmp_path))
    assert result.exit_code == 3
    assert "recipe bf16 failed after 1 of 3 runs: rank 1" in result.stderr
    assert [c.recipe for c in launches] == ["fp32", "bf16"]
    assert [r["recipe"]["name"] for r in json.loads((tmp_path / "compare.json").read_text())] == ["fp32"]


def test_a_failed_compare_leaves_no_earlier_one(launches: list[TrainConfig], tmp_path: Path):
    assert invoke("compare", "fp32", "thinwire", "--out", str(tmp_path)).exit_code == 0
    assert invoke("compare", "bf16", "fp32", "--out", str(tmp_path)).exit_code == 3
    assert not (tmp_path / "compare.json").exists()
    assert not (tmp_path / "report.html").exists()


def checkpoint(out: Path, *ranks: int) -> None:
    folder = out / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    for rank in ranks:
        (folder / f"rank-{rank}.json").write_text("{}")


def test_a_compare_goes_on_where_it_was_ended(launches: list[TrainConfig], tmp_path: Path):
    assert invoke("compare", "fp32", "direct:bits=2", "--out", str(tmp_path)).exit_code == 130
    checkpoint(tmp_path / "fp32", 0, 1)
    checkpoint(tmp_path / "direct-bits2", 0)  # the other rank had not come that far
    launches.clear()
    recipes = ("fp32", "direct:bits=2", "thinwire")
    assert invoke("compare", *recipes, "--resume", "--out", str(tmp_path)).exit_code == 130
    assert [(c.recipe, c.resume) for c in launches] == [("fp32", True), ("direct:bits=2", False)]


def test_a_compare_that_cannot_go_on_costs_nothing(launches: list[TrainConfig], tmp_path: Path):
    assert invoke("compare", "fp32", "thinwire", "--out", str(tmp_path)).exit_code == 0
    assert invoke("compare", "bf16", "fp32", "--resume", "--out", str(tmp_path)).exit_code == 3
    assert launches[-1].resume  # no recipe has a checkpoint: the run says so
    assert (tmp_path / "compare.json").exists() and (tmp_path / "report.html").exists()


def test_a_compare_s_options_are_checked_before_they_are_used(launches: list[TrainConfig], tmp_path: Path):
    file = tmp_path / "job.toml"
    file.write_text("out = 5\n")
    result = invoke("compare", "fp32", "thinwire", "--config", str(file))
    assert result.exit_code == 2 and "--out takes" in one_sentence(result.stderr)


def test_an_interrupted_compare_keeps_what_finished(launches: list[TrainConfig], tmp_path: Path):
    result = invoke("compare", "fp32", "direct:bits=2", "--out", str(tmp_path))
    assert result.exit_code == 130
    assert invoke("report", str(tmp_path)).exit_code == 0


def test_demo_is_the_job_of_the_documentation(launches: list[TrainConfig], tmp_path: Path):
    assert invoke("demo", "--out", str(tmp_path)).exit_code == 0
    assert [c.recipe for c in launches] == ["fp32", "step-delta", "thinwire"]
    for config in launches:
        assert (config.link, config.steps, config.epochs) == ("10mbit,30ms", 18, 3)
    assert DEMO["out"] == "runs/demo"


def test_the_demo_s_help_speaks_of_what_it_has():
    shown = " ".join(invoke("demo", "--help").stdout.split())
    for absent in ("--resume", "--emulate", "default 100"):
        assert absent not in shown


def test_report_says_where_it_is(tmp_path: Path):
    write_run(tmp_path / "a", "fp32")
    result = invoke("report", str(tmp_path / "a"), "--out", str(tmp_path / "r.html"))
    assert result.exit_code == 0
    assert f"report: {tmp_path / 'r.html'}" in result.stderr
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_a_path_that_cannot_be_written(tmp_path: Path):
    write_run(tmp_path / "a", "fp32")
    result = invoke("report", str(tmp_path / "a"), "--out", str(tmp_path / "a" / "run.json" / "r.html"))
    assert result.exit_code == 2
    assert "run.json" in one_sentence(result.stderr)


def test_recipes_lists_the_registry():
    from thinwire.uses import listing

    assert listing.FILE.read_text("utf-8") == listing.text(), "run python -m thinwire.uses.listing"
    rows, text = json.loads(invoke("recipes", "--json").stdout), invoke("recipes").stdout
    assert rows == listing.listed() and len({r["engine"] for r in rows}) == 8
    assert all(r["summary"] and r["source"] for r in rows)
    assert text.startswith("pipeline ─") and "\nstate ─" in text
    assert all(r["name"] in text for r in rows)


def test_doctor_speaks_of_everything_and_a_torch_outside_the_range_is_broken(monkeypatch: pytest.MonkeyPatch):
    result = invoke("doctor", "--json")
    findings = {c["name"]: c for c in json.loads(result.stdout)}
    assert {"torch", "processor", "memory", "disk", "encryption", "SmolLM2-135M", "extra lm"} <= set(findings)
    assert all(c["status"] in ("ok", "lacks", "broken") and c["finding"] for c in findings.values())
    broken = any(c["status"] == "broken" for c in findings.values())
    assert result.exit_code == (2 if broken else 0)
    monkeypatch.setattr(
        "thinwire.runs.machine.processor.versions", lambda: {"python": "3.11.0", "torch": "2.10.0"}
    )
    result = invoke("doctor")
    assert all(name in result.stdout for name in findings)
    assert result.exit_code == 2
    assert "2.10.0 is older than the tested range 2.11 to 2.15" in " ".join(result.stdout.split())
    assert "torch" in one_sentence(result.stderr)


def test_processes_end_with_the_codes_too():
    version = thinwire_process("--version")
    assert (version.returncode, version.stdout) == (0, f"thinwire {thinwire.__version__}\n")


def test_no_command_lists_them_and_asks_for_one():
    asked = thinwire_process()
    assert asked.returncode == 2 and "publish" in asked.stdout
    assert one_sentence(asked.stderr) == "thinwire: say which command; see thinwire --help"


def test_without_the_extra_one_sentence_names_it():
    code = "import sys\nsys.modules['typer'] = None\nfrom thinwire.cli import main\nmain(['--help'])\n"
    result = thinwire_process(code=code)
    assert (result.returncode, result.stdout) == (2, "")
    assert "pip install 'thinwire[cli]'" in one_sentence(result.stderr)


def test_a_rank_ends_without_the_interpreter_s_own_end():
    code = "import atexit, thinwire.uses.training.run.training_rank\nfrom thinwire.cli import main\n"
    code += "atexit.register(print, 'late')\n"
    result = thinwire_process(code=f"{code}main(['--no-such-option'])\n")
    assert (result.returncode, result.stdout) == (2, "")


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("THINWIRE_DEBUG", "1")
    assert re.search(r"Traceback[\s\S]+InputError", invoke("report", "nowhere").stderr)
