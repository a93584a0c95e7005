"""The state demo with a tiny model: three processes, a late one, a cut, and what is said about it."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from launchers import children, gone, until, warm
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.runs.data.corpus import Corpus
from thinwire.runs.data.documents import Document
from thinwire.runs.models.model_source import resolve_model
from thinwire.runs.models.tokenizer import trained_bpe
from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.run_record import LinkInfo, RecipeText
from thinwire.runs.report.page import report_html
from thinwire.types import InputError
from thinwire.uses.following.run import cards, state_demo
from thinwire.uses.following.run.demo_ranks import Tuning, base_model, digest
from thinwire.uses.following.run.gate import Gate
from thinwire.uses.following.run.options import StateConfig
from thinwire.uses.following.run.record import FollowerLog, StateRecord
from thinwire.uses.following.run.state_demo import LATE, TRAINER, WRITER, Board, StateRecorder, rows
from thinwire.uses.kinds import load_runs

LONG = 90.0  # seconds; a limit, not an expectation
TEXT = "some words to train on, and some more of them\n" * 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, its tokenizer, and a text."""
    patch = pytest.MonkeyPatch()
    patch.setenv("THINWIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
    folder = tmp_path_factory.mktemp("model")
    tokenizer = trained_bpe(Corpus("t", (Document(TEXT),), (), "test"), vocab=300)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    patch.undo()
    return folder


def plan(model: Path, out: Path, **options: object) -> StateConfig:
    tiny = {"steps": 12, "batch": 2, "seq": 16, "tokens": 4, "every": 0.5, "emulate": False, "link": "none"}
    where = {"model": str(model), "data": str(model / "text.txt"), "out": str(out)}
    return StateConfig.from_dict(tiny | where | options)


@pytest.fixture
def play(model: Path, tmp_path: Path) -> Any:
    """Return what plays a tiny demo as a command."""
    small = tmp_path / "small.toml"
    small.write_text('batch = 2\nseq = 16\ntokens = 4\nevery = 0.5\nemulate = false\nlink = "none"\n')
    tiny = ("--model", model, "--data", model / "text.txt", "--out", tmp_path / "out", "--config", small)
    return lambda *more: warm().start(tmp_path / "said", "demo", "state", *tiny, *more)


@pytest.mark.slow
def test_both_followers_end_with_the_trainers_bits(play: Any, tmp_path: Path):
    command = play("--steps", 6, "--device", "cpu")
    processes = until(lambda: children(command.pid), "the trainer")
    assert command.wait() == 0, command.err
    gone(processes)
    (run,) = load_runs([tmp_path / "out"])
    record = run.record
    assert (record.status, record.identical) == ("done", True)
    assert [there["device"] for there in record.environment["devices"]] == ["cpu"] * 3
    assert [v.version for v in run.metrics] == list(range(2, 14))
    assert {v.rate for v in run.metrics} == {1e-6, 1e-5}
    for log in record.followers.values():
        versions = [a["version"] for a in log.arrivals]
        assert versions == sorted(set(versions))
        assert versions[-1] == 13
        assert log.finished is not None
        assert all(a["nbytes"] < record.nbytes for a in log.arrivals)  # the base never travels
    assert len(record.followers[WRITER].cut) == 2
    assert record.followers[WRITER].texts
    came = sum(log.wire_bytes for log in record.followers.values())
    assert (record.totals["versions"], record.bytes["changes"]) == (12, came)
    assert 0 < record.bits_per_value["changes"] < 16
    page = report_html([run], cards)
    assert "bit-identical at the end" in page
    assert "an emulated network could not be had: it was not asked for" in page
    assert not re.search(r"""(src|href)=["']?http""", page)


def test_a_process_that_dies_ends_the_demo_with_its_words(play: Any, tmp_path: Path):
    (short := tmp_path / "short.txt").write_text("a word\n")
    command = play("--data", short)
    processes = until(lambda: children(command.pid) or [command.poll()], "the trainer")
    assert command.wait() == 2, command.err
    assert "\nthinwire: the trainer process: data has 3 tokens" in command.err
    assert load_runs([tmp_path / "out"])[0].record.status == "failed"
    gone([p for p in processes if p])


def test_an_interrupt_leaves_nothing_running(play: Any):
    command = play()
    processes = until(lambda: children(command.pid), "the trainer")
    assert command.end() == 130, command.err
    gone(processes)


def test_wrong_input_is_refused_before_anything_starts(tmp_path: Path):
    runner = CliRunner()
    for arguments in (["--steps", "0"], ["--link", "10parsec"], ["--model", "nowhere/at/all"]):
        result = runner.invoke(app, ["demo", "state", "--out", str(tmp_path / "o"), *arguments])
        assert isinstance(result.exception, SystemExit)
        assert result.exit_code == 2
    assert "state" in runner.invoke(app, ["demo", "--help"]).output


def test_a_lossy_link_needs_the_emulator(model: Path, tmp_path: Path):
    with pytest.raises(InputError, match="without emulation"):
        state_demo.run(plan(model, tmp_path, link="10mbit,30ms,loss=1%"), lambda r: None)


def test_training_begins_at_bfloat16_values_and_moves_float32_ones(model: Path):
    source = resolve_model(str(model), None)
    job = Tuning(source, str(model / "text.txt"), 1e-3, 2, 2, 16, 0)
    half = base_model(source, torch.bfloat16)
    before = dict(half.named_parameters())
    assert digest(before) == digest(dict(job.model.named_parameters()))
    assert all(torch.equal(x, before[n].float()) for n, x in job.model.named_parameters())
    job.rate = 1e-4
    assert job.rate == 1e-4
    assert job.step() > 0
    assert digest(before) != digest(dict(job.model.named_parameters()))
    with pytest.raises(InputError, match="no weights"):
        base_model(resolve_model(str(model), "random"), torch.float32)


def echo() -> tuple[socket.socket, int]:
    """Return a server that sends back whatever comes, and its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            with peer:
                try:
                    while data := peer.recv(65536):
                        peer.sendall(data)
                except OSError:
                    pass

    threading.Thread(target=serve, daemon=True).start()
    return server, server.getsockname()[1]


def back(port: int, nbytes: int) -> float:
    """Send so many bytes through a gate and return the seconds until all are back."""
    with socket.create_connection(("127.0.0.1", port), timeout=LONG) as s:
        began = time.monotonic()
        threading.Thread(target=s.sendall, args=(bytes(nbytes),), daemon=True).start()
        got = 0
        while got < nbytes:
            data = s.recv(65536)
            if not data:
                raise ConnectionError("closed")
            got += len(data)
        return time.monotonic() - began


def test_a_gate_has_a_rate_and_a_delay_and_can_be_shut():
    server, port = echo()
    gate = Gate("127.0.0.1", port, rate=400_000, delay=0.05)
    try:
        assert back(gate.port, 100_000) > 0.3  # 0.25 s of line, and a delay each way
        gate.shut()
        with socket.create_connection(("127.0.0.1", gate.port), timeout=0.2) as s:
            s.sendall(b"anybody?")
            with pytest.raises(TimeoutError):
                s.recv(1)
        gate.open()
        assert back(gate.port, 1000) > 0.1
    finally:
        gate.close()
        gate.close()
        server.close()


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[StateRecorder]:
    """Yield the recorder of a short demo of the throttled kind."""
    config = {"steps": 2, "rates": [1e-6, 1e-5], "model": "m", "data": "d", "prompt": "P <"}
    config |= {"batch": 1, "seq": 8}
    followers = {WRITER: FollowerLog("writes", joined=0.0), LATE: FollowerLog("late")}
    record = StateRecord(RecipeText("cast"), config=config, nbytes=1000, numel=500, followers=followers)
    record.link, record.notes = LinkInfo("10mbit,30ms"), ["<none> here"]
    found = StateRecorder(tmp_path, record)
    found._began = 100.0
    for i in range(2, 6):
        found.hear(TRAINER, {"kind": "published", "at": 100.0 + i, "version": i, "step": i - 1,
                             "loss": 1.0, "rate": 1e-6 if i < 4 else 1e-5, "changed": 5,
                             "sent": 10 * i, "training": 0.5, "publishing": 0.1})  # fmt: skip
        found.hear(WRITER, {"kind": "arrived", "at": 101.0 + i, "version": i, "age": 0.5, "nbytes": 10 * i,
                            "seconds": 0.1, "when": 100.5 + i})  # fmt: skip
    found.hear(WRITER, {"kind": "wrote", "at": 104.0, "version": 3, "step": 2, "text": "a <b>", "seconds": 1})
    found.hear(WRITER, {"kind": "status", "at": 105.0, "held": 5, "nbytes": 200, "age": 0.5, "pause": 0.001,
                        "connected": True})  # fmt: skip
    yield found
    found.close("done")


def test_ages_grow_and_fall(recorder: StateRecorder):
    xs, ys = recorder.record.ages(WRITER)
    assert ys == pytest.approx([0.5, 1.5, 0.5, 1.5, 0.5, 1.5, 0.5])
    assert xs == sorted(xs)


def test_a_report_says_what_is_wrong(recorder: StateRecorder):
    run = Run("cast", recorder.record, recorder.published)
    page = report_html([run], cards)
    assert "That is a fault" in page
    assert "a &lt;b&gt;" in page
    assert "&lt;none&gt; here" in page
    assert "40× fewer at 1e-06, 22× fewer at 1e-05" in cards.headline([run])
    recorder.hear(TRAINER, {"kind": "trained", "at": 107.0, "version": 5, "digest": "ab" * 32})
    for who in (WRITER, LATE):
        recorder.hear(who, {"kind": "finished", "at": 108.0, "version": 5, "digest": "ab" * 32, "pause": 0.1})
    recorder.close("done")
    assert recorder.record.identical
    page = report_html([run], cards)
    assert "bit-identical at the end" in page and "That is a fault" not in page
    recorder.record.link.emulator = {"valid": False}
    assert "This machine was busy" in report_html([run], cards)


def test_counts_are_of_what_came_to_those_who_followed(recorder: StateRecorder, tmp_path: Path):
    recorder.close("done")
    record = recorder.record
    assert load_runs([tmp_path]) == [Run("cast", record, recorder.published)]
    assert (record.totals["versions"], record.bytes["changes"]) == (4, 200)  # the late one never came
    assert record.bytes["raw_changes"] == 4 * 500 * 4
    assert record.bits_per_value["changes"] == 8 * 200 / (500 * 4)


def test_the_board_says_a_line_now_and_then(recorder: StateRecorder, capsys: pytest.CaptureFixture[str]):
    board = Board()
    board.update(recorder)
    board.update(recorder)
    board.close()
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and len(rows(recorder)) == 3
    assert "v5" in line
    assert "not here yet" in line
