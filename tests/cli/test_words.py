"""What publish, follow and inspect say, and what wrong input makes them say."""

from __future__ import annotations

import io
import os
import sys
import warnings
from pathlib import Path

import pytest
from commanded import invoke, one_sentence, weights
from waiting import until

from thinwire.cli.inspecting import show
from thinwire.files.checkpoint import write_checkpoint
from thinwire.links.address import Address
from thinwire.runs.terminal.addresses import parse_place
from thinwire.runs.terminal.live import Live, warned
from thinwire.types import InputError
from thinwire.uses.following.commands.options import parse_bounds

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("zstandard")
pytest.importorskip("safetensors")


def test_what_the_library_warns_of_is_a_plain_line(capsys: pytest.CaptureFixture[str]):
    with warned():
        warnings.warn("the last publisher did not say goodbye\x1b[2J", stacklevel=1)
    assert capsys.readouterr().err == "the last publisher did not say goodbye?[2J\n"
    with pytest.warns(UserWarning, match="as before"):
        warnings.warn("as before", stacklevel=1)


def test_on_a_terminal_one_line_is_kept_fresh(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("thinwire.runs.terminal.live.FRESH", 0.01)
    with Live(lambda: "x" * 500) as live:
        until(lambda: terminal.getvalue().count("\r") > 3, "the line")
        live.note("look")
    lines = terminal.getvalue().split("\r\x1b[K")
    assert "look\n" in lines and lines[-1].endswith("\n")
    assert max(map(len, lines)) < 500 and terminal.getvalue().count("\n") == 2


WRONG = [
    (["publish", "nowhere.safetensors"], "nowhere.safetensors is not there"),
    (["publish", "{no}"], "not safetensors"),
    (["publish", "{empty}"], "has no safetensors file"),
    (["publish", "{m}", "--dtype", "int3"], "one of bf16, fp16, fp32"),
    (["publish", "{m}", "--bound", "much"], "--bound 'much'"),
    (["publish", "{m}", "--bound", "nobody=0.1"], "no tensor here; there are "),
    (["publish", "{m}", "--bound", "1e-300"], "bound=1e-300 is not in "),
    (["publish", "{m}", "--port", "0", "--name", " "], "--name is empty"),
    (["publish", "{m}", "--port", "0", "--name", "a\x1b[1m"], r"the name 'a\x1b[1m' is no text"),
    (["publish", "{m}", "--store", "{empty}", "--name", ""], "--name is empty"),
    (["publish", "{m}", "--port", "70000"], "--port is 70000"),
    (["publish", "{m}", "--rest", "0"], "--rest is 0"),
    (["publish", "{m}", "--rest", "inf"], "--rest is inf"),
    (["publish", "{m}", "--wait", "-1"], "--wait is -1; it must be at least 0 seconds"),
    (["publish", "{m}", "--wait", "nan"], "--wait is nan"),
    (["publish", "{m}", "--host", "0.0.0.0", "--port", "0"], "needs a shared token"),
    (["publish", "{m}", "--store", "{no}/store"], "cannot write to"),
    (["publish", "{m}", "--store", "", "--once"], "--store is empty"),
    (["publish", "{m}", "--store", " ", "--once"], "--store is empty"),
    (
        ["publish", "{m}", "--port", "0", "--store", "{no}/store", "--state", " "],
        "--state is empty",
    ),
    (["publish", "{m}", "--state", ""], "--state is empty"),
    (["publish", "{m}", "--state", "nowhere/s"], "cannot write --state nowhere/s: nowhere is no folder"),
    (["publish", "{m}", "--state", "{empty}"], "it is a folder"),
    (["publish", "{m}", "--state", "{m}"], "is in what is published"),
    (
        ["publish", "{m}", "--port", "0", "--state", "{no}"],
        "delete it, and the state will come whole",
    ),
    (["publish"], "FILE"),
    (["follow", "nowhere"], "'nowhere' is not here, and it is not HOST:PORT"),
    (["follow", "127.0.0.1:x"], "127.0.0.1:x"),
    (["follow", "192.0.2.7:7200"], "needs a shared token"),
    (["follow", "./s", "--relay", "127.0.0.1:7201"], "a store needs no relay"),
    (["follow", "127.0.0.1:9", "--relay", "127.0.0.1:0"], "is not HOST"),
    (["follow", "127.0.0.1:9", "--out", "nowhere/o"], "nowhere is no folder"),
    (["follow", "127.0.0.1:9", "--out", "{empty}"], "is a folder"),
    (["follow", "127.0.0.1:9", "--every", "-1"], "--every is -1"),
    (["follow", "127.0.0.1:9", "--patience", "0"], "--patience is 0"),
    (["follow", "127.0.0.1:9", "--patience", "inf"], "--patience is inf; it must be above 0 seconds"),
    (["follow", "127.0.0.1:9", "--every", "nan"], "--every is nan; it must be at least 0 seconds"),
    (["follow", "127.0.0.1:9", "--exec-timeout", "2e9"], "--exec-timeout is 2e+09"),
    (["follow", "./s", "--poll", "inf"], "and at most 1e+09"),
    (["follow", "127.0.0.1:9", "--out", "{pipe}"], "no regular file; choose another --out"),
    (["follow", "127.0.0.1:9", "--state", "{link}"], "no regular file; choose another --state"),
    (["publish", "{m}", "--port", "0", "--state", "{pipe}"], "no regular file"),
    (["follow", "127.0.0.1:9", "--out", "{no}", "--state", "{empty}/../no"], "give each a file of its own"),
    (["follow", "127.0.0.1:9", "--base", "{no}"], "not safetensors"),
    (["inspect", "{no}"], "not safetensors"),
    (["inspect", "{empty}"], "holds no state"),
    (["inspect", "{m}", "--patience", "0"], "--patience is 0"),
    (["inspect", "{m}", "--patience", "inf"], "--patience is inf"),
    (["publish", "{m}", "--config", "{file}"], "--dtype is 'norm=int3'"),  # the second of its list
    (["publish", "{m}", "--dtype", "bf16", "--config", "{file}"], "--bound 'much'"),  # one without a list
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=lambda v: v if isinstance(v, str) else v[0])
def test_wrong_input_is_one_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
):
    monkeypatch.chdir(tmp_path)
    places = {"m": tmp_path / "m.safetensors", "no": tmp_path / "no", "empty": tmp_path / "empty"}
    write_checkpoint(places["m"], weights(), {})
    places["no"].write_text("not a model")
    places["empty"].mkdir()
    places["file"] = tmp_path / "options.toml"
    places["file"].write_text('dtype = ["bf16", "norm=int3"]\nbound = "much"\n')
    places |= {"pipe": tmp_path / "pipe", "link": tmp_path / "link"}
    os.mkfifo(places["pipe"])
    places["link"].symlink_to(places["pipe"])
    result = invoke(*[a.format(**places) for a in arguments])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert words in one_sentence(result.stderr)
    assert places["pipe"].is_fifo() and places["link"].is_symlink()


def test_places_and_bounds_are_read():
    assert parse_place("[::1]:7200") == Address("::1", 7200)
    assert parse_place("C:\\" if os.sep == "\\" else "/a") in ("C:\\", "/a")
    assert parse_bounds([]) is None
    for wrong in (["1", "2=3"], ["0"], ["a="]):
        with pytest.raises(InputError, match="--bound"):
            parse_bounds(wrong)


@pytest.mark.parametrize("text", ["0", "-1", "nan"])
def test_a_limit_of_nothing_is_refused(text: str) -> None:
    result = invoke("follow", "127.0.0.1:1", "--max-gb", text)
    assert result.exit_code == 2 and "--max-gb" in one_sentence(result.stderr)


def test_what_others_say_does_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2J\x07\r\u202eb\x9b1m"
    tensors = [{"name": evil, "shape": [2], "published": 1e308}]
    show({"name": evil, "published": 1e308, "meta": {evil: evil}, "tensors": tensors})
    with Live(lambda: evil) as live:
        live.note(evil)
    shown = "".join(capsys.readouterr())
    assert shown.count("a?[2J???b?1m") == 6 and "1e+308" in shown
    assert not {*"\x1b\x07\r\u202e\x9b"} & {*shown}
