"""Faults in real runs: links cut, stalled and corrupted, ranks killed and frozen, runs stopped and resumed.

The faults are real: a proxy between the ranks' sockets, signals, small files. Two ranks of a small model.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from launchers import (
    TRAINING,
    Command,
    children,
    free_port,
    gone,
    hosted_store,
    listening,
    metrics,
    rank_environment,
    reached,
    record,
    sentence,
    tmpfs,
    until,
    warm,
)
from tcp_proxy import DOWN, UP, TcpProxy
from texts import write_text

STEPS = 24
CUT = 5.0  # seconds
DEAD = 30.0  # seconds within which the others must stop


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """A small run's arguments, but for its length."""
    text = write_text(tmp_path_factory.mktemp("data") / "text.txt")
    return [
        *("train", "--model", "gpt2-lab", "--data", text, "--batch", 4, "--microbatches", 2, "--seq", 32),
        *("--eval-samples", 4, "--no-save-model", "--threads", 1, "--quiet", "--no-tensorboard"),
        *("--dtype", "fp32"),
    ]


@pytest.fixture(scope="module")
def job(short: list[Any]) -> list[Any]:
    """Three passes over the same samples, so that references are used."""
    return [*short, "--steps", STEPS, "--epochs", 3]


@pytest.fixture(scope="module")
def whole(job: list[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of undisturbed runs, by recipe."""
    records = {}
    for recipe in ("thinwire", "step-delta"):
        place = tmp_path_factory.mktemp("whole")
        ranks = warm().ranks(place, *job, "--recipe", recipe, "--out", place / "out")
        assert [r.wait() for r in ranks] == [0, 0], ranks[0].err
        records[recipe] = record(place / "out")
    return records


def stop(*commands: Command) -> None:
    for c in commands:
        if c.poll() is None:
            c.signal(signal.SIGKILL)
            c.wait()


# -- links


def test_a_cut_a_stall_and_corruption_change_nothing(job: list[Any], whole: dict[str, Any], tmp_path: Path):
    port, out = free_port(), tmp_path / "out"
    with TcpProxy(port) as proxy:
        route = ("--port", port, "--advertise", f"127.0.0.1:{proxy.port}")
        ranks = warm().ranks(tmp_path, *job, "--out", out, each=lambda rank: () if rank else route)
        try:
            reached(out, 5, *ranks)
            before, booked = proxy.connections, len(metrics(out))
            proxy.cut()
            time.sleep(CUT)
            proxy.restore()
            at = len(reached(out, len(metrics(out)) + 2, *ranks))
            assert proxy.connections > before
            proxy.stall()
            time.sleep(2.0)
            proxy.resume()
            reached(out, at + 2, *ranks)
            for way in (UP, DOWN):
                for after in (200, 9_000, 30_000):
                    proxy.corrupt(way, after)
            assert [r.wait() for r in ranks] == [0, 0], ranks[0].err + ranks[1].err
        finally:
            stop(*ranks)
    found = record(out)
    slow = [m["seconds"] > 0.8 * CUT for m in metrics(out)[booked : booked + 2]]
    assert sum(slow) == 1  # the cut was in a step; on a busy machine the faults after it may last as long
    assert found["loss"] == whole["thinwire"]["loss"]
    assert [m["step"] for m in metrics(out)] == list(range(1, STEPS + 1))


# -- ranks that die or freeze, where nobody watches over them (torchrun on several machines)


FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which "
FILLED = f"""
import sys, torch
from thinwire.cli import main
from thinwire.uses.training.run.stepper import Stepper
plain = Stepper.step
def step(self, number, *rest):
    if self.world.rank == 1 and number == 3:
        raise torch.OutOfMemoryError({FULL!r} "1.25 GiB is free.")
    return plain(self, number, *rest)
Stepper.step = step
sys.argv[0] = "thinwire"
main()
"""


def test_a_rank_whose_card_is_full_says_so_and_is_named_by_the_others(job: list[Any], tmp_path: Path):
    out, store = tmp_path / "out", hosted_store()
    words = ("-c", FILLED, *job, "--out", out, "--deadline", DEAD)
    own = [rank_environment(rank, 2, store.port) for rank in range(2)]
    ranks = [warm().python(tmp_path / str(k), *words, needs=TRAINING, **own[k]) for k in range(2)]
    try:
        assert [r.wait(DEAD) for r in ranks] == [3, 2], ranks[0].err + ranks[1].err
    finally:
        stop(*ranks)
    assert sentence(ranks[1]).startswith("rank 1: cuda:0 is full: 2.00 GiB more were needed, 1.25 GiB")
    assert sentence(ranks[0]).startswith("rank 1 (127.0.0.1:")
    assert record(out)["status"] == "failed" and "rank 1" in record(out)["notes"][-1]


@pytest.mark.parametrize("recipe", ["thinwire", "step-delta"])
def test_a_killed_rank_is_named_and_the_run_resumes_to_the_same_losses(
    job: list[Any], whole: dict[str, Any], tmp_path: Path, recipe: str
):
    out = tmp_path / "out"
    args = [*job, "--recipe", recipe, "--out", out, "--checkpoint-every", 5]
    ranks = warm().ranks(tmp_path / "first", *args)
    try:
        reached(out, 13, *ranks)  # in the second pass
        ranks[1].signal(signal.SIGKILL)
        if recipe == "thinwire":
            start = time.monotonic()
            assert ranks[0].wait() == 3
            assert time.monotonic() - start < DEAD
            assert sentence(ranks[0]).startswith("rank 1 (127.0.0.1:")
            assert record(out)["status"] == "failed"
            assert "rank 1" in record(out)["notes"][-1]
    finally:
        stop(*ranks)
    booked = len(metrics(out))
    assert booked >= 13
    again = warm().ranks(tmp_path / "again", *args, "--resume")
    assert [r.wait() for r in again] == [0, 0], again[0].err + again[1].err
    found, expected = record(out), whole[recipe]
    assert found["loss"] == expected["loss"]
    assert [m["step"] for m in metrics(out)] == list(range(1, STEPS + 1))
    for name in ("forward", "backward"):  # small messages may share a frame
        assert found["bytes"][name] == pytest.approx(expected["bytes"][name], rel=1e-3)
    for name in ("raw_forward", "raw_backward"):
        assert found["bytes"][name] == expected["bytes"][name]
    assert found["totals"]["steps"] == STEPS
    assert found["status"] == "done"


def test_a_rank_that_freezes_while_others_evaluate_is_named(job: list[Any], tmp_path: Path):
    """Frozen, not killed: its kernel still answers, as a router's would. Evaluation starts with a vote."""
    out = tmp_path / "out"
    ranks = warm().ranks(
        tmp_path, *job, "--out", out, "--eval-every", 1, "--eval-samples", 32, "--deadline", 4
    )
    try:
        reached(out, 3, *ranks)
        ranks[1].signal(signal.SIGSTOP)
        start = time.monotonic()
        assert ranks[0].wait() == 3
        assert time.monotonic() - start < DEAD
        assert "rank 1 (127.0.0.1:" in sentence(ranks[0])
    finally:
        stop(*ranks)


def test_a_machine_too_busy_for_the_link_is_no_measurement(job: list[Any], tmp_path: Path):
    """A rank stopped again and again delivers late, as one that gets no processor; the model is kept."""
    out = tmp_path / "out"
    shape = ("--recipe", "fp32", "--steps", 9, "--link", "2mbit,20ms")
    ranks = warm().ranks(tmp_path, *job, *shape, "--out", out, "--save-model")
    try:
        reached(out, 2, *ranks)
        for _ in range(8):  # some of them while it sends
            ranks[0].signal(signal.SIGSTOP)
            time.sleep(0.7)
            ranks[0].signal(signal.SIGCONT)
            time.sleep(0.3)
        assert [r.wait() for r in ranks] == [4, 4]
        assert "ms late on average" in sentence(ranks[0])
    finally:
        stop(*ranks)
    assert record(out)["status"] == "invalid"
    assert record(out)["link"]["lateness_s"] > 0.01
    assert (out / "model" / "model.safetensors.index.json").exists()


def test_wrong_tokens_stop_both_ranks_before_anything_is_trained(job: list[Any], tmp_path: Path):
    ranks = warm().ranks(
        tmp_path,
        *(*job, "--out", tmp_path / "out", "--deadline", 3),
        each=lambda rank: {"THINWIRE_TOKEN": f"a long secret text, number {rank}"},
    )
    for r in ranks:
        assert r.wait() == 3
        assert "token" in sentence(r)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("extra", "words"), [(("--seed", 7), "--seed is 0 on rank 0 but 7 on rank 1"), (("--data",), "--data")]
)
def test_ranks_that_were_started_differently_say_so(
    job: list[Any], tmp_path: Path, extra: tuple[Any, ...], words: str
):
    other = (*extra, write_text(tmp_path / "other.txt", 2999)) if extra == ("--data",) else extra
    ranks = warm().ranks(tmp_path, *job, "--out", tmp_path / "out", each=lambda rank: other if rank else ())
    for r in ranks:
        assert r.wait() == 2
        assert words in sentence(r)
    assert not (tmp_path / "out").exists()


# -- runs whose ranks thinwire starts itself


@pytest.fixture
def spawned(short: list[Any], tmp_path: Path):
    """Start a long run; return its command, its ranks' process ids and its folder."""
    out = tmp_path / "out"
    args = [*short, "--steps", 3000, "--out", out]
    command = warm().start(tmp_path, *args)
    try:
        ranks = until(lambda: len(p := children(command.pid)) == 2 and p, "both ranks", 30)
        yield command, ranks, out
    finally:
        stop(command)
        gone(ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run(spawned, rank: int):
    command, ranks, out = spawned
    reached(out, 3, command)
    for pid in (command.pid, *ranks):
        assert set(listening(pid)) <= {"0100007F"}, "something listens off loopback"
    os.kill(ranks[rank], signal.SIGKILL)
    start = time.monotonic()
    assert command.wait() == 3
    assert time.monotonic() - start < DEAD / 2  # the launcher sees it at once
    assert f"rank {rank} was ended by SIGKILL" in sentence(command)
    gone(ranks, 5)
    assert record(out)["status"] == "failed"
    assert any(f"rank {rank} was ended by SIGKILL" in n for n in record(out)["notes"])
    booked = metrics(out)
    assert record(out)["totals"]["steps"] == len(record(out)["loss"]["train"]) == len(booked) >= 3
    assert record(out)["bytes"]["forward"] == sum(m["bytes"]["forward"] for m in booked)


@pytest.mark.parametrize(
    ("how", "group", "when"),
    [
        (signal.SIGINT, False, "training"),
        (signal.SIGINT, True, "training"),
        (signal.SIGINT, True, "starting"),
        (signal.SIGTERM, False, "training"),
    ],
)
def test_ctrl_c_leaves_records_and_no_process(spawned, how: signal.Signals, group: bool, when: str):
    if signal.getsignal(how) is signal.SIG_IGN:
        pytest.skip(f"{how.name} is ignored here, as under nohup, and so in what is started here")
    command, ranks, out = spawned
    if when == "training":
        reached(out, 3, command)
    for _ in range(1 if how is signal.SIGINT else 2):  # timeout tells a process twice
        command.signal(how, group)
    assert command.wait() == 130
    assert sentence(command) == "interrupted"
    gone(ranks, 5)
    if when == "training":
        assert record(out)["status"] == "interrupted"
        counts_its_steps(out)


def counts_its_steps(out: Path) -> None:
    """Check that a record which was broken off counts what its steps took, as far as they are booked."""
    found, steps = record(out), metrics(out)
    assert len(steps) >= 3
    assert found["totals"]["steps"] == len(steps)
    assert found["totals"]["tokens"] == len(steps) * 4 * 32
    assert found["totals"]["seconds"] == pytest.approx(sum(m["seconds"] for m in steps))
    for way in ("forward", "backward"):
        assert found["bytes"][way] == sum(m["bytes"][way] for m in steps)
        assert found["bytes"][f"raw_{way}"] == 4 * len(steps) * 4 * 32 * 256
        values = found["bytes"][f"raw_{way}"] / 4
        assert found["bits_per_value"][way] == pytest.approx(8 * found["bytes"][way] / values)


def test_a_rank_that_is_told_to_end_tells_the_others_at_once(short: list[Any], tmp_path: Path):
    """As torchrun, docker stop and batch systems tell it: no wait for the links' silence."""
    out = tmp_path / "out"
    args = [*short, "--steps", 3000, "--checkpoint-every", 2, "--out", out]
    for told, resumed in ((1, ()), (0, ("--resume",))):
        ranks = warm().ranks(tmp_path / f"told-{told}", *args, *resumed)
        try:
            reached(out, len(metrics(out)) + 3, *ranks)
            start = time.monotonic()
            ranks[told].signal(signal.SIGTERM)
            assert ranks[told].wait() == 130
            assert ranks[1 - told].wait() == 3, ranks[1 - told].err
            assert time.monotonic() - start < DEAD
        finally:
            stop(*ranks)
        assert sentence(ranks[told]) == "interrupted"
        assert f"rank {told} (127.0.0.1:" in sentence(ranks[1 - told])
        assert record(out)["status"] == ("failed" if told else "interrupted")
        counts_its_steps(out)


def test_ranks_leave_when_their_launcher_is_killed(spawned):
    command, ranks, out = spawned
    reached(out, 1, command)
    command.signal(signal.SIGKILL)
    gone(ranks, 20)
    assert record(out)["status"] == "running"
    assert metrics(out)


# -- checkpoints that cannot be used


@pytest.fixture(scope="module")
def stopped(short: list[Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """The arguments and the folder of a run of which there is a checkpoint after 2 and 4 steps."""
    place = tmp_path_factory.mktemp("stopped")
    args = [*short, "--steps", 4, "--checkpoint-every", 2, "--out", place / "out"]
    ranks = warm().ranks(place, *args)
    assert [r.wait() for r in ranks] == [0, 0]
    return args, place / "out"


def refused(place: Path, *args: Any, **more: Any) -> str:
    """Run ranks that must stop with bad input; return what the one that knows says."""
    ranks = warm().ranks(place, *args, **more)
    codes = [r.wait() for r in ranks]
    said = [sentence(r) for r in ranks]
    assert 2 in codes, said
    assert set(codes) <= {2, 3}
    return said[codes.index(2)]


def test_another_configuration_s_checkpoint_is_refused(stopped: tuple[list[Any], Path], tmp_path: Path):
    args, out = stopped
    said = refused(tmp_path, *args, "--resume", "--lr", 0.5)
    assert "made with --lr 0.001, this run asks for 0.5" in said
    assert len(metrics(out)) == 4  # nothing of the old run is lost


@pytest.mark.parametrize("damage", ["truncated", "garbage", "other"])
def test_a_broken_checkpoint_is_refused(stopped: tuple[list[Any], Path], tmp_path: Path, damage: str):
    args, out = stopped
    file = out / "checkpoints" / "step-00000004" / "rank-1.safetensors"
    before = file.read_bytes()
    other = (out / "checkpoints" / "step-00000004" / "rank-0.safetensors").read_bytes()
    file.write_bytes({"truncated": before[:-1000], "garbage": b"\xff" * 5000, "other": other}[damage])
    try:
        said = refused(tmp_path, *args, "--resume")
    finally:
        file.write_bytes(before)
    assert "step-00000004" in said
    assert "remove it" in said
    assert len(metrics(out)) == 4


def test_no_checkpoint_at_all(job: list[Any], tmp_path: Path):
    assert "no checkpoint" in refused(tmp_path, *job, "--out", tmp_path / "out", "--resume")


# -- full disks


def test_no_room_for_the_records(short: list[Any], tmp_path: Path):
    with tmpfs(tmp_path / "disk", 1 << 16) as disk:
        if disk is None:
            pytest.skip("mounting a small file system needs root")
        (disk / "filler").write_bytes(bytes((1 << 16) - 8192))
        said = refused(tmp_path, *short, "--steps", 900, "--out", disk / "out")
        assert "disk is full" in said
        assert not list(disk.rglob("*.part"))


def test_no_room_for_a_checkpoint(job: list[Any], tmp_path: Path):
    out = tmp_path / "out"
    said = refused(tmp_path, *job, "--out", out, "--checkpoint-every", 2, largest_file=1 << 20)
    assert "cannot write the checkpoint" in said
    assert not list(out.rglob("*.part"))
    assert not list(out.rglob("rank-*"))


def test_no_room_for_the_model(job: list[Any], tmp_path: Path):
    out = tmp_path / "out"
    said = refused(tmp_path, *job, "--steps", 3, "--save-model", "--out", out, largest_file=1 << 20)
    assert "model" in said
    assert "free space" in said
    assert not list(out.rglob("*.part"))
    assert record(out)["status"] == "failed"
