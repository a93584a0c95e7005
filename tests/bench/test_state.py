"""The study of states: rivals are lossless, recordings replay bit for bit, sums are right."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from bench.pages_state import TABLES
from bench.state_record import Recording, Replay, record, words_of
from bench.state_rivals import rivals
from bench.state_worker import Weights, round_and_round, strides
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import pages, state, state_coding, state_links, state_others, state_record
from thinwire.lab.data.corpus import Corpus
from thinwire.lab.data.documents import Document
from thinwire.lab.models.tokenizer import trained_bpe
from thinwire.state.layout import Layout

TEXT = "some words to train on, and some more of them\n" * 60


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 399), st.integers(-(1 << 15), (1 << 15) - 1))), st.booleans())
def test_rivals_bring_the_words_forward(moves: list[tuple[int, int]], wide: bool):
    shapes = {"a": (7,), "b": (70_000 if wide else 300,), "c": (), "d": (2, 46)}
    g = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=g).bfloat16().float() for n, s in shapes.items()}
    layout = Layout.of(tensors, torch.bfloat16)
    before = np.empty(layout.numel, np.int16)
    words_of(tensors, before)
    after = before.copy()
    for at, value in moves:
        after[layout.numel - 1 - at * (layout.numel // 400)] = value
    after[np.isnan(torch.from_numpy(after).view(torch.bfloat16).float().numpy())] = 0
    flat, at = torch.from_numpy(after).view(torch.bfloat16).float(), 0
    for x in tensors.values():
        x.copy_(flat[at : at + x.numel()].view(x.shape))
        at += x.numel()
    for rival in rivals(layout):
        held = before.copy()
        rival.decode(rival.encode(tensors, before), held)
        assert np.array_equal(held, after), rival.name


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of four steps of a tiny model."""
    patch = pytest.MonkeyPatch()
    patch.setenv("THINWIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    trained_bpe(Corpus("t", (Document(TEXT),), (), "test"), vocab=300).save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    for name, value in (
        ("MODEL", str(folder)),
        ("DATA", str(folder / "text.txt")),
        ("BATCH", 2),
        ("SEQ", 16),
    ):
        patch.setattr(state_record, name, value)
    threads = torch.get_num_threads()
    out = tmp_path_factory.mktemp("recording")
    record(out, 1e-4, 4)
    torch.set_num_threads(threads)
    patch.undo()
    return out


def test_a_recording_is_kept_and_its_cells_come_from_it(recorded: Path, monkeypatch: pytest.MonkeyPatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(state_record, "MODEL", "nowhere")  # not needed any more
    record(recorded, 1e-4, 4)
    recording = Recording(recorded, 1e-4, 4)
    half = recording.views(torch.from_numpy(recording.base.copy()).view(torch.bfloat16))
    monkeypatch.setattr(state_coding, "Recording", partial(Recording, steps=4))
    monkeypatch.setattr(state_coding, "resolve_model", lambda *a: None)
    monkeypatch.setattr(state_coding, "base_model", lambda *a: Weights(half))
    cell = state_coding.measure(recorded, 1e-4, 2)
    torch.set_num_threads(threads)
    assert [row["step"] for row in cell["versions"]] == [2, 4]
    found = state.coded(cell)
    ours = found["ways"][state_coding.OURS]
    assert ours["bytes"] < found["ways"]["full zstd-1"]["bytes"]
    assert 0 < found["changed"] < 1
    assert found["fewer"] == pytest.approx(1 - ours["bytes"] / found["ways"][found["best_other"]]["bytes"])
    for name in ("state-ratios", "state-ways", "state-speeds"):
        assert TABLES[name]({"coding": [found]}, pages.table).count("\n") == 2


def test_strides_add_up_and_come_back(recorded: Path):
    recording = Recording(recorded, 1e-4, 4)
    replay = Replay(recording)
    words = recording.base.copy()
    changes = strides(recording, 2)
    for at, flips in changes:
        words[at] ^= flips
        replay.advance(2)
        assert np.array_equal(words, replay.words)
    walk = round_and_round(changes)
    for _ in range(2 * len(changes)):
        at, flips = next(walk)
        words[at] ^= flips
    assert np.array_equal(words, replay.words)


def test_ages_are_held_against_their_bounds():
    versions = [{"version": n, "published": 10.0 + n, "seconds": 0.1} for n in (1, 2, 3)]
    patches = [{"version": 2, "seconds": 0.2}, {"version": 3, "seconds": 0.2}]
    arrivals = [
        {"version": 2, "age": 1.4, "nbytes": 1000, "seconds": 1.0, "at": 5.0, "apply": 0.1},
        {"version": 3, "age": 3.0, "nbytes": 1000, "seconds": 1.0, "at": 7.0, "apply": 0.1},
    ]
    found = {
        "publish": {"versions": versions, "patches": patches},
        "follow": {"followers": [{"arrivals": arrivals, "pauses": [0.01, 0.02]}]},
    }
    rows = state_links.ages(found, 1000.0, 0.06)
    assert (rows[0]["encode"], rows[0]["apply"]) == (pytest.approx(0.3), 0.1)
    assert rows[0]["of_first_bound"] == pytest.approx(1.4 / 1.46)
    s = state_links.summary(found, rows, 0.5)
    assert (s["within_first"], s["within_second"]) == (0.5, 0.5)
    assert (s["published"], s["arrived"], s["pause"]) == (2, 2, 0.02)
    assert s["times_the_link"] == pytest.approx(0.5)
    row = {
        "mbit": 10,
        "rate": 1e-5,
        "stride": 1,
        "control": "bbr",
        "valid": True,
        "summary": s,
    }
    assert "50%" in TABLES["state-ages"]({"age": [row]}, pages.table)


def test_versions_go_the_others_way_and_their_ages_stand_beside_ours(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(state_others, "Recording", partial(Recording, steps=4))
    monkeypatch.setattr(state_others, "SKIPPED", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(state_others, "PORT", free.getsockname()[1])
    monkeypatch.setattr(state_others, "VERSIONS", (1, 2))
    monkeypatch.setattr(state_others, "WHOLE_RATE", 1e-4)
    order = {"folder": str(recorded), "rate": 1e-4, "pause": 0.01, "host": "127.0.0.1",
             "ready": str(tmp_path / "ready")}  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(end, order) for end in (state_others.publish, state_others.follow)]
        sent, came = (end.result(60) for end in both)  # the check sums of the words agreed
    rows = state_others.beside(sent, came)
    ways = ["xor zstd-1", "pulse zstd-1"]  # but for the one that warmed up
    assert [r["way"] for r in rows] == [*ways, "full zstd-1", *ways]
    assert [r["stride"] for r in rows] == [1, 1, 1, 2, 2] and len(sent) == 6
    assert all(r["age"] > r["encode"] + r["decode"] > 0 for r in rows)
    assert rows[0]["bytes"] < rows[2]["bytes"]
    place = {"mbit": 10, "rate": 1e-4, "valid": True}
    found = {"others": [place | {"rows": [{"way": "xor zstd-1", "stride": 1, "age": a} for a in (1.0, 2.0)]}]}
    ours = place | {"pace": "apart", "control": "bbr", "summary": {"age": {"median": 0.4, "worst": 0.5}}}
    found["age"] = [ours | {"stride": 4}, ours | {"stride": 1}]
    lines = TABLES["state-beside"](found, pages.table).splitlines()[2:]
    assert lines == [
        "| 10 Mbit/s | 0.0001 | 1 | 400 ms / 500 ms | 1.50 s |",
        "| 10 Mbit/s | 0.0001 | 4 | 400 ms / 500 ms | – |",
    ]
    found["others"][0]["valid"] = False
    assert "1.50 s (the machine was late)" in TABLES["state-beside"](found, pages.table)


def test_every_cell_has_a_file_of_its_own():
    names = [state.cell_file(cell).name for cell in state.cells()]
    assert len(names) == len(set(names)) == 67
    assert all(state.recordings_of(cell) for cell in state.cells())
    assert {steps for cell in state.cells() for _, steps in state.recordings_of(cell)} == {48, 192}
    assert state_links.interval("10x", state_links.carries(10), 10) == pytest.approx(0.1)
    assert state_links.interval("apart", 3 * state_links.carries(10), 10) == pytest.approx(6.0)
    assert state_links.interval("apart", 1000, 10) == state_links.TRAINED
