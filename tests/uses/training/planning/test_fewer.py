"""Plans that had better do without a machine, and without a text."""

from __future__ import annotations

from pathlib import Path

import pytest
from commanded import invoke

from thinwire.runs.data import corpus as data
from thinwire.runs.models.model_source import model_config
from thinwire.uses.training.planning.machines_file import MachineSpeed

JOB = ("--model", "gpt2-lab", "--seq", "32", "--batch", "4", "--microbatches", "4")


def link(a: str, b: str, shape: str) -> str:
    return f'[[link]]\nfrom = "{a}"\nto = "{b}"\nlink = "{shape}"\n'


def planned(folder: Path, attic: str) -> str:
    """Return what a plan for three machines says beside its table; ``attic`` is the third one's link."""
    file = folder / "machines.toml"
    names = ("desk", "shed", "attic")
    machines = "".join(MachineSpeed("gpt2-lab", 32, 0.01, 0.05, 0.001, 0.0001).toml(n) + "\n" for n in names)
    links = link("desk", "shed", "1gbit,1ms") + link("desk", "attic", attic) + link("shed", "attic", attic)
    file.write_text(machines + links)
    result = invoke("plan", file, *JOB)
    assert result.exit_code == 0, result.stderr
    return result.stderr


def test_a_machine_that_costs_more_than_it_helps_is_named(tmp_path: Path) -> None:
    assert "without attic a step takes" in planned(tmp_path, "1mbit,300ms")
    assert "without" not in planned(tmp_path, "1gbit,1ms")


def test_a_plan_needs_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_shakespeare_folders", lambda: pytest.fail("the text is looked for"))
    planned(tmp_path, "10mbit,10ms")


def test_the_help_says_that_schedules_are_tried() -> None:
    shown = " ".join(invoke("plan", "--help").stdout.split())
    assert "Without it all three" in shown and "[default: eager1f1b]" not in shown


def test_a_config_alone_is_that_of_the_model() -> None:
    assert (model_config("gpt2-lab", None).n_embd, model_config("gpt2", "random").n_layer) == (256, 12)
