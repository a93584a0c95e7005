"""What commands print under an emulation, and how an interrupt ends them."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.cli.emulate import _show
from thinwire.runs.machine import interrupts
from thinwire.runs.ranks.commands import run_ranks

SAVER = """
import os, pathlib, time
place, rank = pathlib.Path(os.environ["PLACE"]), os.environ["RANK"]
try:
    (place / f"ready-{rank}").touch()
    time.sleep(300)
except KeyboardInterrupt:
    (place / f"told-{rank}").touch()
    time.sleep(float(os.environ["SECONDS"]))
    (place / f"saved-{rank}").touch()
"""


class Here:
    """Two ranks where the test runs, and a Ctrl-C as soon as both are ready for it."""

    profiles = (None, None)

    def __init__(self, place: Path, seconds: int = 0) -> None:
        self._place, self._seconds = place, seconds
        self.started: list[subprocess.Popen[bytes]] = []

    def environment(self, rank: int) -> dict[str, str]:
        return {"RANK": str(rank), "PLACE": str(self._place), "SECONDS": str(self._seconds)}

    def popen(self, rank: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        self.started.append(subprocess.Popen(argv, **options))
        return self.started[-1]

    def both(self, what: str) -> bool:
        return all((self._place / f"{what}-{rank}").exists() for rank in range(2))

    def require_alive(self) -> None:
        if self.both("ready"):
            raise KeyboardInterrupt


def test_commands_may_save_what_they_have_at_an_interrupt(tmp_path: Path) -> None:
    net: Any = Here(tmp_path, seconds=1)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(net, [sys.executable, "-c", SAVER])
    assert net.both("saved")
    assert [p.returncode for p in net.started] == [0, 0]


def test_a_second_interrupt_ends_commands_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net: Any = Here(tmp_path, seconds=300)

    def sleep(seconds: float) -> None:
        if net.both("told"):
            raise KeyboardInterrupt
        time.sleep(seconds)

    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    monkeypatch.setattr(interrupts, "GRACE", 120.0)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(net, [sys.executable, "-c", SAVER])
    assert [p.returncode for p in net.started] == [-signal.SIGKILL] * 2
    assert not net.both("saved")


PRINTER = """
import os, pathlib, sys, time
for stream in (sys.stdout.buffer, sys.stderr.buffer):
    stream.write(b"0%\\r50%\\r100%\\na\\r\\nb\\r5")
    stream.flush()
seen = pathlib.Path(os.environ["PLACE"]) / "seen"
end = time.monotonic() + 60
while not seen.exists():
    time.sleep(0.02)
    if time.monotonic() > end:
        sys.exit(9)
"""


def test_a_line_that_is_to_be_written_over_is_seen_before_it_ends(tmp_path: Path) -> None:
    lines: dict[tuple[int, bool], list[bytes]] = {(rank, e): [] for rank in range(2) for e in (False, True)}

    def show(rank: int, is_error: bool, line: bytes) -> None:
        lines[rank, is_error].append(line)
        if all(b"b\r" in lines[rank, False] for rank in range(2)):
            (tmp_path / "seen").touch()

    net: Any = Here(tmp_path)
    assert run_ranks(net, [sys.executable, "-c", PRINTER], show, (True, False)) is None
    for rank in range(2):
        assert lines[rank, False] == [b"0%\r", b"50%\r", b"100%\n", b"a\r\n", b"b\r", b"5"]
        assert lines[rank, True] == [b"0%\r50%\r100%\n", b"a\r\n", b"b\r5"]


def test_on_a_terminal_a_line_takes_the_place_of_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "12")
    terminal, file = Terminal(), io.StringIO()
    show = _show((file, terminal))
    show(0, True, b"50% of a long bar\r")
    show(1, True, b"a line longer than that\n")
    show(1, False, b"50%\r100%\n")
    assert terminal.getvalue() == "\r\x1b[K[0] 50% of \r\x1b[K[1] a line longer than that\n"
    assert file.getvalue() == "[1] 50%\r100%\n"


def test_what_the_display_cannot_show_or_does_not_read_is_no_rank_s_fault() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show = _show((plain, Gone()))
    show(0, False, "done ✓\n".encode())
    show(0, True, b"lost\n")
    assert plain.buffer.getvalue() == b"[0] done ?\n"  # type: ignore[attr-defined]
