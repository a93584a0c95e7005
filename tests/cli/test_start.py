"""What the command line loads before it has anything to compute: nobody waits seconds for a help text."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "numpy", "transformers", "matplotlib", "asyncio")
WRONG = [
    "train --steps x",
    "train --no-such",
    "compare fp32",
    "federate fedavg --clients 0",
    "federate-join 127.0.0.1",
    "publish m --dtype int4",
    "publish m --rest 0",
    "publish m --bound x",
    "follow ./s --relay 127.0.0.1:7201",
    "follow 127.0.0.1:9 --every -1",
    "inspect nowhere",
    "inspect m --patience 0",
    "pack",
    "pack m -o m --layers 0",
    "doctor --listen --peer host",
    "relay --port 99999999",
    "emulate --link 0mbit",
    "no-such-command",
]
CODE = f"""
import sys
import typer
from typer.testing import CliRunner
from thinwire.cli.app import app

def paths(command, path=()):
    yield path
    for name, under in getattr(command, "commands", {{}}).items():
        yield from paths(under, (*path, name))

def light(arguments, code):
    result = CliRunner(env={{"THINWIRE_TOKEN": None}}).invoke(app, arguments)
    loaded = [name for name in {HEAVY} if name in sys.modules]
    assert result.exit_code == code and not loaded, (arguments, loaded, result.output)

light(["--version"], 0)
light(["recipes"], 0)
found = list(paths(typer.main.get_command(app)))
assert len(found) > 20
for path in found:
    light([*path, "--help"], 0)
for text in {WRONG}:
    light(text.split(), 2)
"""


def test_help_version_and_refusals_of_options_load_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
