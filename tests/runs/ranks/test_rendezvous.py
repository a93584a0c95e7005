"""Where the ranks of a run meet: places that do not fit, and ranks that wait for others in vain."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from launchers import free_port, sentence, until, warm
from texts import write_text

from thinwire.links import names
from thinwire.runs.ranks import rendezvous
from thinwire.runs.ranks.rendezvous import telling, under_torchrun
from thinwire.types import InputError
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.training_launch import launch

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
PLACE = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set these of the variables that say where a rank is, and no others."""

    def place(**variables: str) -> None:
        for name in (*MASTER, *PLACE, "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return place


def test_a_rank_is_one_that_knows_its_place_and_where_the_others_are(environment: Any) -> None:
    config, relayed = TrainConfig(), TrainConfig(relay="127.0.0.1:7000", token_file=__file__)
    environment(**MASTER)
    assert not under_torchrun(config)
    environment(RANK="1")  # left over from something else
    assert not under_torchrun(config)
    environment(**MASTER, **PLACE)
    assert under_torchrun(config) and under_torchrun(relayed)
    environment(**PLACE)
    assert under_torchrun(relayed)


@pytest.mark.parametrize(
    ("known", "said"),
    [({}, "MASTER_ADDR and MASTER_PORT not"), ({"MASTER_ADDR": "127.0.0.1"}, "but MASTER_PORT not")],
)
def test_half_a_place_is_refused_instead_of_training_alone(environment: Any, known: Any, said: str) -> None:
    environment(**PLACE, **known)
    with pytest.raises(InputError, match=f"{said}, so this rank cannot find the others; set what is missing"):
        launch(TrainConfig())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2; ranks count from 0"),
        ({"RANK": "first"}, "RANK is 'first'; set it to a whole number"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'; set it to a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000, but ports end at 65535"),
    ],
)
def test_a_place_that_cannot_be_is_refused_at_once(environment: Any, wrong: Any, said: str) -> None:
    environment(**(MASTER | PLACE | wrong))
    with pytest.raises(InputError, match=said):
        launch(TrainConfig())


def test_the_last_rank_only_dials_and_needs_no_address(environment: Any) -> None:
    elsewhere = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500", "WORLD_SIZE": "3"}
    config = TrainConfig(stages=3, recipe="fp32", model="no-such-model-here", data=__file__, seq=16)
    for rank in "01":
        environment(**elsewhere, RANK=rank)
        with pytest.raises(InputError, match="give its address in their network as --host, on each rank but"):
            launch(config)
    environment(**elsewhere, RANK="2")
    with pytest.raises(InputError, match="'no-such-model-here'"):  # the next thing that is looked at
        launch(config)


def test_a_wait_says_what_it_is_for_unless_it_is_short(
    environment: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment(**MASTER)
    with telling(TrainConfig(), 0, 2):
        pass
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.0)
    with telling(TrainConfig(quiet=True), 0, 2):
        time.sleep(0.2)
    assert capfd.readouterr().err == ""
    with telling(TrainConfig(deadline=30.0), 1, 3):
        time.sleep(0.2)
    assert capfd.readouterr().err == "rank 1: waiting for ranks 0, 2 at 127.0.0.1:29500, up to 30 s\n"


@pytest.fixture
def job(tmp_path: Path) -> list[Any]:
    return [
        *("train", "--model", "gpt2-lab", "--data", write_text(tmp_path / "text.txt"), "--seq", 32),
        *("--batch", 4, "--steps", 2, "--eval-samples", 0, "--quiet", "--out", tmp_path / "out"),
    ]


def test_a_rank_that_finds_nobody_gives_up_at_its_deadline(job: list[Any], tmp_path: Path) -> None:
    begun = time.monotonic()
    first, other = (
        warm().start(
            *(tmp_path / str(rank), *job, "--deadline", 4),
            RANK=rank,
            WORLD_SIZE=2,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=free_port(),
        )
        for rank in range(2)
    )
    assert [rank.wait() for rank in (first, other)] == [3, 3]
    assert "rank 0 could not meet the others at 127.0.0.1:" in sentence(first)
    assert "for 4 s (Connection refused); start rank 0, or correct the address" in sentence(other)
    assert time.monotonic() - begun < 60  # torch's own waits took a minute each


def test_a_rank_that_waits_alone_hears_ctrl_c(job: list[Any], tmp_path: Path) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    waiting = warm().start(tmp_path / "1", *job[:-3], *job[-2:], RANK=1, WORLD_SIZE=2, **where)
    until(lambda: "rank 1: waiting for rank 0" in waiting.err, "the rank to say what it waits for")
    os.kill(waiting.pid, signal.SIGINT)
    assert waiting.wait() == 130
    assert "Traceback" not in waiting.err


def test_a_rank_that_waits_asks_often_where_nothing_answers(monkeypatch):
    """Packets that are dropped: one long attempt would hear nothing of a rank 0 that comes meanwhile."""
    asked = []

    def silent(host, port, timeout):
        asked.append(timeout)
        if len(asked) < 3:
            raise TimeoutError("timed out")
        return socket.socket()

    monkeypatch.setattr(names, "reach", silent)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    rendezvous._await_answer(TrainConfig(deadline=180.0), 1)
    assert len(asked) == 3 and max(asked) <= 3.0
