"""Outputs whose encoding lacks characters: a command says what it did, in ASCII where it has to."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from run_records import write_run
from typer.testing import CliRunner

from thinwire.cli.app import app

PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "110", "THINWIRE_TOKEN": None}


@pytest.mark.parametrize("charset", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_every_encoding_takes_what_commands_print(tmp_path: Path, charset: str) -> None:
    write_run(tmp_path / "run", "fp32", (32.0, 32.0))
    strange = os.fsdecode("zu-früh→".encode() + b"\xff")  # no text in any encoding
    cases = [
        *([(["doctor"], 0, {"ascii": "processor"})] if charset == "ascii" else []),  # it takes a while
        (["recipes"], 0, {}),
        (["recipes", "--json"], 0, {}),
        (["report", str(tmp_path / "run")], 0, {"ascii": "sent", "utf-8": "sent"}),
        (["plan", "--help"], 0, {}),
        (
            ["train", "--out", strange],
            2,
            {"ascii": "fr?h->\\xff: its name is", "utf-8": "\\xff: its name is"},
        ),
        (
            ["inspect", f"./{strange}"],
            2,
            {"ascii": "fr?h->\\xff", "latin-1": "früh->\\xff", "utf-8": "früh→\\xff"},
        ),
    ]
    for arguments, code, shown in cases:
        result = CliRunner(charset=charset, env=PLAIN).invoke(app, arguments)
        assert result.exit_code == code, (arguments, result.output, result.exception)
        assert shown.get(charset, "") in result.output, result.output
        if "--json" in arguments:
            json.loads(result.stdout)
    (tmp_path / "run" / "report.html").read_bytes().decode("utf-8")
