"""A blank word on the command line, as of a variable that is not set, is bad input wherever it stands."""

import pytest
from typer.testing import CliRunner

from thinwire.cli.app import app


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["follow", ""], "SOURCE"),  # else the folder where it is run would be waited for
        (["inspect", ""], "SOURCE"),
        (["publish", ""], "FILE"),
        (["publish", "model", "--store", ""], "--store"),
        (["publish", "model", "--state", " "], "--state"),
        (["report", "runs/mine", ""], "PATH"),
        (["compare", "fp32", ""], "RECIPE"),
        (["plan", ""], "MACHINES.toml"),
        (["relay", "--token-file", ""], "--token-file"),
        (["train", "--model="], "--model"),
    ],
)
def test_an_empty_word_is_refused(tmp_path, monkeypatch, arguments, name):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"thinwire: {name} is empty; give a value")
    assert not list(tmp_path.iterdir())


def test_help_is_shown_whatever_stands_beside_it():
    assert CliRunner().invoke(app, ["follow", "", "--help"]).exit_code == 0
