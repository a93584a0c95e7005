"""The progress display, the TensorBoard files and the machine's facts."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

import pytest
from run_records import metrics_of

from thinwire.runs.machine import devices
from thinwire.runs.machine import processor as machine
from thinwire.runs.records.progress import Progress, megabytes
from thinwire.runs.records.tensorboard import ABSENT, EventLog


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, quiet: bool = False) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress("thinwire", 5, quiet)
    progress.phase("loading the model")
    for metrics in metrics_of(5, (3.0, 2.5)):
        progress.step(dataclasses.asdict(metrics))
    progress.note("mind [the] gap")
    progress.close()
    progress.close()
    return stream.getvalue()


def test_plain_lines_off_a_terminal(monkeypatch: pytest.MonkeyPatch):
    lines = show(io.StringIO(), monkeypatch).splitlines()
    assert lines[0] == "thinwire: loading the model"
    assert lines[1].startswith("thinwire: step 1/5  loss 3.")
    assert lines[2].startswith("thinwire: step 5/5  loss 3.") and lines[2].endswith("0:00 left")
    assert lines[3] == "thinwire: note: mind [the] gap"
    assert len(lines) == 4


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    text = show(Terminal(), monkeypatch)
    assert "5/5" in text and "mind [the] gap" in text


def test_quiet_still_warns(monkeypatch: pytest.MonkeyPatch):
    assert show(io.StringIO(), monkeypatch, quiet=True) == "thinwire: note: mind [the] gap\n"


def test_megabytes():
    assert [megabytes(n) for n in (0, 999, 1500, 2_359_296, 3.2e9)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.36 MB",
        "3.2 GB",
    ]


def test_event_files_hold_the_metrics(tmp_path: Path):
    pytest.importorskip("tensorboard")
    log = EventLog(tmp_path)
    for metrics in metrics_of(3, (3.0, 2.5)):
        line = dataclasses.replace(metrics, loss=float("nan")) if metrics.step == 2 else metrics
        log.write(line.scalars(), line.step)
    log.write({"loss/heldout": 3.5, "loss/train_slice": None}, 3)
    log.close()
    log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [e.step for e in events.Scalars("loss/train")] == [1, 3]
    assert [e.step for e in events.Scalars("bytes/forward")] == [1, 2, 3]
    assert [(e.step, e.value) for e in events.Scalars("loss/heldout")] == [(3, 3.5)]
    assert "loss/train_slice" not in events.Tags()["scalars"]


def test_without_tensorboard_a_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = EventLog(tmp_path)
    log.write({"loss/train": 3.0}, 1)
    log.close()
    assert log.note == ABSENT
    assert list(tmp_path.iterdir()) == []
    assert EventLog(tmp_path, enabled=False).note is None


def test_the_machine():
    assert devices.pick_dtype("bf16") == ("bf16", "as asked")
    picked, reason = devices.pick_dtype("auto")
    assert picked == ("bf16" if devices.bf16_native() else "fp32") and "bf16 instructions" in reason
    assert machine.cores() >= 1 and machine.cpu_model()
    assert machine.peak_rss_bytes() > 10e6
