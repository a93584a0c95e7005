"""Ways to send weights to hosts of rollouts are compared fairly: all are lossless, and each part runs."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from waiting import free_port

pytest.importorskip("zstandard")

from bench.following.hosts import host_coding, loop_ranks
from bench.following.hosts.host_memory import STEPS, one_end, sending, taking
from bench.following.hosts.host_sources import Experts
from bench.following.hosts.hundred_versions import hundred
from bench.following.hosts.large_state import Copies, large, summed_up
from bench.following.hosts.sync_hosts_tables import TABLES, goals
from bench.following.worker import Weights

from thinwire.runs.records.writer import read_json
from thinwire.uses.following.hosts.rollout_messages import Sample


def test_every_way_brings_the_same_words_and_is_told_in_the_tables() -> None:
    found = host_coding.summed(host_coding.code(Experts(small=True), 4, 2))  # it raises where words differ
    assert found["compared"] == 2 and found["share"] < 1 and len(found["ways"]) == 7
    sparse = found["ways"]["vllm sparse"]["bytes"], found["ways"]["verl delta"]["bytes"]
    assert min(sparse) > 6 * found["changed"] * found["numel"]  # an index and a value a change, and more
    big = summed_up(large(Copies(Experts(small=True), 2), 2))
    found |= {"of": "experts", "met": False, "peak": None}
    results: dict[str, Any] = {
        "coding": [found],
        "loops": [],
        "versions": hundred(Experts(small=True), 2),
        "large": big,
    }
    assert results["versions"]["identical"] == 2
    assert goals(results).count("| yes |") == 3
    assert all(draw(results).count("\n") >= 1 for draw in TABLES.values())


@pytest.mark.parametrize("way", [host_coding.OURS, "verl delta"])
def test_the_peak_of_each_end_is_found(tmp_path: Path, way: str) -> None:
    for run in (sending, taking):
        one_end(run, partial(Experts, small=True), way, tmp_path)
        assert 0 <= read_json(tmp_path / "peak.json") < 1 << 28
    assert len(list(tmp_path.glob("*.npz"))) == STEPS


@pytest.mark.parametrize("way", [host_coding.OURS, "xor zstd-1"])
def test_the_loop_is_the_same_but_for_how_weights_travel(tmp_path: Path, way: str) -> None:
    order = {"kind": "small", "folder": "", "recorded": 0, "way": way, "max_age": 0, "steps": 2, "warm": 1,
             "pace": 0.0, "tokens": 2, "prompts": [[1], [2, 3]], "host": "127.0.0.1", "port": free_port(),
             "pool": free_port(), "token": "00" * 16, "ready": str(tmp_path / "ready")}  # fmt: skip
    found: dict[str, Any] = {}

    def train() -> None:
        found["trained"] = loop_ranks.trainer(order)

    thread = threading.Thread(target=train)
    thread.start()
    model = Weights(Experts(small=True).tensors)
    made = loop_ranks.worker(order, model, lambda prompts, _: [Sample([7, 8], [0.0] * 2) for _ in prompts])
    thread.join(20.0)
    assert made == {key: found["trained"][key] for key in ("version", "words")} and made["version"] == 4
    assert [row["tokens"] for row in found["trained"]["rows"]] == [4, 4]
    assert [age["behind"] for age in found["trained"]["ages"]] == [0, 0]
