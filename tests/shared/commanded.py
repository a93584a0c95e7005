"""Start publish, follow and inspect, in this process or in another, for the tests of these commands."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launchers import Command, warm
from torch import Tensor
from typer.testing import CliRunner
from waiting import LONG

from thinwire.cli.app import app
from thinwire.files.checkpoint import read_checkpoint
from thinwire.files.local_folder import open_folder
from thinwire.uses.following.pull.store_fetching import look

PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "110", "THINWIRE_TOKEN": None}


def weights(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(60, 40, generator=g).bfloat16(),
        "b": torch.randn(7, generator=g),
        "one": torch.tensor(3),
        "none": torch.empty(0, 4),
        "mask": torch.tensor([True, False, True]),
    }


def trained(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"w": torch.where(torch.arange(40) == 7, state["w"] * 1.5, state["w"])}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(x.dtype == b[n].dtype and torch.equal(x, b[n]) for n, x in a.items())


def invoke(*arguments: object, **environment: str):
    return CliRunner(env=PLAIN | environment).invoke(app, [str(a) for a in arguments])


def one_sentence(text: str) -> str:
    line = text.strip().splitlines()[-1]
    assert line.startswith("thinwire: ") and "Traceback" not in text
    return line


Script = Generator[Callable[[], object], None, None]


def newest(store: Path) -> int:
    """Return the number of a store's newest version; 0 before the first."""
    try:
        found = look(open_folder(store))[0].newest
    except OSError:
        return 0
    return found.number if found is not None else 0


def meanwhile(monkeypatch: pytest.MonkeyPatch, script: Script) -> list[str]:
    """Play a script while ``publish`` looks after its file, in this process; return what it tells people.

    Whenever the command pauses, the script goes on if what it waits for is so; its end is a Ctrl-C.
    """
    notes: list[str] = []
    waits = [next(script), time.monotonic() + LONG]

    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, 0.02))
        assert time.monotonic() < waits[1], notes
        if waits[0]():
            try:
                waits[:] = [next(script), time.monotonic() + LONG]
            except StopIteration:
                raise KeyboardInterrupt from None

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    for room in ("commands.publishing", "publish_targets"):
        monkeypatch.setattr(f"thinwire.uses.following.{room}.time", clock)
    monkeypatch.setattr("thinwire.runs.terminal.live.Live.note", lambda _, text: notes.append(text))
    return notes


@contextmanager
def running(folder: Path, *arguments: object) -> Iterator[Command]:
    """Run a command in another process, to the end of the block at most."""
    found = warm().start(folder / f"said-{time.monotonic_ns()}", *arguments)
    try:
        yield found
    finally:
        if found.poll() is None:
            found.end(signal.SIGKILL)


def holds(path: Path, state: dict[str, Tensor]) -> bool:
    return path.exists() and same(read_checkpoint(path), state)
