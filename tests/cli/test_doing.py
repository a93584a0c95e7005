"""What commands say they are doing: a bar on a terminal once it takes a while, else lines or nothing."""

from __future__ import annotations

import io
import time

import pytest

from thinwire.runs.terminal import activity


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, seconds: float = 0.0, **options: bool) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    with activity.Activity(**options) as told:
        told.tell("reading")
        end = time.monotonic() + seconds
        while time.monotonic() < end and "reading" not in stream.getvalue():
            time.sleep(0.01)
        told.tell("packing")
    return stream.getvalue()


def test_a_bar_comes_on_a_terminal_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert shown(monkeypatch, Terminal()) == ""  # it was quick
    monkeypatch.setattr(activity, "SOON", 0.01)
    text = shown(monkeypatch, Terminal(), 10.0)
    assert "reading" in text and "\x1b[2K" in text  # and it goes again
    assert shown(monkeypatch, Terminal(), 0.1, quiet=True) == ""


def test_elsewhere_there_are_lines_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")  # a terminal whose cursor does not move
    assert shown(monkeypatch, Terminal(), lines=True) == "reading\npacking\n"
    assert shown(monkeypatch, io.StringIO()) == ""
    assert shown(monkeypatch, io.StringIO(), lines=True) == "reading\npacking\n"
    assert shown(monkeypatch, io.StringIO(), lines=True, quiet=True) == ""
