"""Runs over the kernel's TCP in emulated networks, and runs whose recipe follows the link."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from emulated import BUSY, TURN, lacking
from launchers import Command, metrics, record, sentence, warm

from thinwire.codecs import Cast, parse_codec
from thinwire.links import LinkShape, ZmqLink
from thinwire.links.link import LinkEstimate
from thinwire.links.mesh import Peer, stack
from thinwire.links.pair import probe
from thinwire.links.tcp import congestion
from thinwire.links.tcp.counts import KernelTotals
from thinwire.uses.training.pipeline.recipes import parse_recipe
from thinwire.uses.training.run import autopilot

JOB: list[Any] = [
    *("train", "--model", "gpt2-lab", "--batch", 4, "--microbatches", 2, "--seq", 32),
    *("--threads", 1, "--dtype", "fp32", "--no-tensorboard", "--no-save-model", "--quiet"),
]
PLAIN = {"Raw()", repr(Cast("bfloat16"))}
KERNEL = "network namespaces: the kernel's TCP over an emulated link"


def train(place: Path, text: Path, *options: Any) -> tuple[Command, Path]:
    """Run to the end; an emulation waits its turn, and skips the test where none is to be had."""
    end = time.monotonic() + TURN
    while True:
        out = place / "out"
        command = warm().run(place, *JOB, "--data", text, "--out", out, *options)
        if command.code != 2 or "--emulate" not in options or not lacking(command.err):
            return command, out
        if BUSY not in command.err or time.monotonic() > end:
            pytest.skip(sentence(command))
        time.sleep(0.5)


@pytest.fixture(scope="module")
def emulated(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Path]:
    """A run over kernel TCP: uncompressed, with evaluations, over 20 Mbit/s and 20 ms."""
    place = tmp_path_factory.mktemp("emulated")
    options = ("--steps", 8, "--recipe", "fp32", "--eval-samples", 4, "--emulate", "--link", "20mbit,20ms")
    return train(place, text, *options)


def require_valid(command: Command) -> None:
    """Skip where the machine was too busy, which is what it should say; fail for any other failure."""
    if command.code == 4:
        pytest.skip(sentence(command))
    assert command.code == 0, command.err


def test_an_emulated_run_says_what_its_network_was(emulated: tuple[Command, Path]):
    command, out = emulated
    require_valid(command)
    link = record(out)["link"]
    assert (link["emulation"], link["asked"]) == (KERNEL, "20mbit,20ms")
    assert (link["rate_bytes_s"], link["delay_s"]) == (2.5e6, 0.02)
    assert 0.04 <= link["rtt_s"] < 0.08
    found = link["emulator"]
    assert found["congestion"]["found"] == found["congestion"]["asked"] == "cubic"
    assert found["valid"] and link["lateness_s"] < found["lateness_limit"]
    assert found["check"]["links"][0]["rate_found"] == pytest.approx(2.5e6 * 1448 / 1500, rel=0.03)


def test_kernel_emulator_and_our_own_count_agree(emulated: tuple[Command, Path]):
    command, out = emulated
    require_valid(command)
    run = record(out)
    steps = metrics(out)
    for way in run["wire"]:
        links = [k for m in steps for k in m["links"] if k["source"] == way["source"]]
        assert sum(k["payload_bytes"] for k in links) == way["payload_bytes"]
        assert sum(k["wire_bytes"] for k in links) == way["wire_bytes"]
        assert way["counted"] == "kernel, TCP_INFO" and way["congestion"] == "cubic"
        assert 0.04 <= way["min_rtt_s"] < 0.08
        # Encryption, acknowledgements and headers come on top of the payload; evaluation passes, at full
        # speed, are in neither; the emulator also saw the moments before and after the steps.
        sent_again = way["retransmitted_bytes"]
        assert 1.03 * way["payload_bytes"] < way["wire_bytes"] < 1.15 * way["payload_bytes"] + sent_again
        line = run["link"]["emulator"]["counters"][way["source"]]["up"]
        seen = line["passed"]["nbytes"] + line["dropped"]["nbytes"]
        assert way["wire_bytes"] == pytest.approx(seen, rel=0.05)
    sent = run["bytes"]["forward"] + run["bytes"]["backward"]
    assert sent < sum(way["payload_bytes"] for way in run["wire"]) < 1.05 * sent + run["bytes"]["control"]


def test_evaluation_is_not_slowed(text: Path, emulated: tuple[Command, Path], tmp_path: Path):
    command, out = emulated
    require_valid(command)
    plain, there = train(tmp_path, text, "--steps", 8, "--recipe", "fp32", "--eval-samples", 4)
    assert plain.code == 0, plain.err
    assert record(out)["loss"] == record(there)["loss"]
    passes = record(out)["bytes"]["evaluation"]
    assert passes > 0
    seen = sum(c["up"]["passed"]["nbytes"] for c in record(out)["link"]["emulator"]["counters"])
    assert seen < 1.3 * sum(way["wire_bytes"] for way in record(out)["wire"])


def test_a_link_too_slow_to_be_probed_is_as_good_as_unknown(monkeypatch: pytest.MonkeyPatch):
    here = ZmqLink.bind(b"slow")
    links = ((here, LinkShape(rate=1e3)), (ZmqLink.connect(b"slow", "127.0.0.1", here.port), LinkShape()))
    slow, other = (stack(1, link, shape, 0, 60.0, 60.0) for link, shape in links)
    slow.reliable.wait_alive(60.0)
    monkeypatch.setattr(probe, "PATIENCE", 0.5)  # the first train alone takes eight seconds
    found = slow.measure()
    assert found.rate is None or found.rate < 50e3
    for peer in (slow, other):
        peer.close(0.0)


@pytest.mark.parametrize(
    ("control", "settings", "link", "shuts"),
    [
        ("cubic", ["1"], "none", True),
        ("htcp", ["1"], "none", True),
        ("bbr", ["1"], "none", False),
        ("cubic", ["0"], "none", False),
        ("cubic", ["1"], "10mbit", False),  # shaped above TCP, in this process
        ("cubic", [], "none", False),
        (None, ["1"], "none", False),
    ],
)
def test_whether_a_window_shuts_is_asked_of_the_system(
    monkeypatch: pytest.MonkeyPatch, control: str | None, settings: list[str], link: str, shuts: bool
) -> None:
    monkeypatch.setattr(congestion, "_listed", lambda name: settings)
    kernel = SimpleNamespace(read=lambda: KernelTotals(congestion=control))
    peer = SimpleNamespace(kernel=kernel, shaped=SimpleNamespace(shape=LinkShape.parse(link)))
    assert Peer.restarts.fget(peer) is shuts  # type: ignore[attr-defined]
    kernel.read = lambda: None  # no TCP_INFO
    assert not Peer.restarts.fget(peer)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shuts", [True, False])
def test_a_link_is_told_that_its_window_shuts_before_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, shuts: bool
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(Peer, "restarts", shuts)
    probed = LinkEstimate(rate=1e6, rtt=0.1, age=0.5)
    monkeypatch.setattr(probe, "measure", lambda *links: done.append("probed") or probed)
    reliable = SimpleNamespace(expect_restarts=done.append)
    peer = Peer(1, *[cast(Any, part) for part in (None, reliable, None, None, None)])
    pilot = autopilot.Autopilot.__new__(autopilot.Autopilot)
    pilot._world = SimpleNamespace(rank=0)  # type: ignore[assignment]
    found = pilot._measured(peer)
    assert done == [shuts, "probed"]
    rates = {"rate_bytes_s": 1e6, "rtt_s": 0.1, "age_s": 0.5, "restarts": shuts}
    assert found == {"source": 0, "destination": 1} | rates


def test_what_a_step_reports_leaves_it_standing_that_the_window_shuts() -> None:
    pilot = autopilot.Autopilot.__new__(autopilot.Autopilot)
    pilot._directions = [autopilot._Direction(0, 1), autopilot._Direction(1, 0)]
    pilot._world = SimpleNamespace(size=2)  # type: ignore[assignment]
    ends = {"source": 0, "destination": 1}
    pilot._note(ends | {"rate_bytes_s": 1e6, "rtt_s": 0.1, "age_s": 0.0, "restarts": True})
    pilot._note(ends | {"rate_bytes_s": 2e6, "rtt_s": 0.1, "age_s": 0.5, "payload_bytes": 7})
    assert pilot._directions[0].estimate["restarts"] and pilot._directions[0].estimate["rate_bytes_s"] == 2e6
    assert not pilot._directions[1].estimate


def share_of_cores() -> float:
    """Return what share of a second each of two busy processes got of a core, the lesser of the two."""
    code = (
        "from time import monotonic, process_time\n"
        "end, before = monotonic() + 1, process_time()\n"
        "while monotonic() < end: pass\n"
        "print(process_time() - before)"
    )
    spins = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    return min(float(spin.communicate()[0]) for spin in spins)


def last_choices(out: Path) -> dict[str, Any]:
    """Return the codec that each direction ended with."""
    ends = {d["direction"]: d["choice"].partition(", first visits")[0] for d in record(out)["decisions"]}
    return {way: parse_codec(text) for way, text in ends.items()}


def ended_plainly(out: Path) -> bool:
    """Say whether nothing was compressed in the end; a decision after the last step comes too late."""
    codecs = {repr(codec) for codec in last_choices(out).values()}
    return codecs <= PLAIN and metrics(out)[-1]["bits"]["forward"] > 15


def test_auto_sends_plainly_where_the_link_is_fast(text: Path, tmp_path: Path):
    shares = []
    for attempt in range(3):  # where other work holds the processes up, loopback is no fast link
        place = tmp_path / str(attempt)
        # Threads are late by two milliseconds at times: 3 % of a step of 32 tokens, 1 % of one of 128.
        job = ("--seq", 128, "--steps", 10, "--recipe", "auto:tolerance=0.05", "--eval-samples", 0)
        command, out = train(place, text, *job)
        assert command.code == 0, command.err
        if ended_plainly(out):
            break
        shares.append(share_of_cores())
    else:
        if min(shares) < 0.9:
            pytest.skip(f"other work takes {1 - min(shares):.0%} of the cores, so loopback is no fast link")
    decisions = record(out)["decisions"]
    assert [d["step"] for d in decisions[:2]] == [0, 0]
    assert all(d["reason"] and d["boundary"] == "0-1" and d["bits"] > 0 for d in decisions)
    assert set(last_choices(out)) == {"forward", "backward"}
    assert ended_plainly(out)
    assert any("compression would gain nothing" in d["reason"] for d in decisions)
    assert metrics(out)[0]["bits"]["forward"] < 15


def test_auto_stays_on_its_floor_where_the_link_is_slow(text: Path, tmp_path: Path):
    options = (
        "--steps",
        8,
        "--epochs",
        2,
        "--recipe",
        "auto:fw=3",
        "--link",
        "1mbit,20ms",
        "--eval-samples",
        0,
    )
    command, out = train(tmp_path, text, *options)
    assert command.code == 0, command.err
    run = record(out)
    assert {d["step"] for d in run["decisions"]} == {0}
    floor = parse_recipe("auto:fw=3")
    chosen = {d["choice"].partition(", first visits")[0] for d in run["decisions"]}
    assert chosen == {repr(floor.schemes["forward"].codec), repr(floor.schemes["backward"].codec)}
    steps = metrics(out)
    assert max(m["bits"]["backward"] for m in steps) < 5
    rates = [k["rate_bytes_s"] for m in steps[2:] for k in m["links"] if k["rate_bytes_s"]]
    assert sorted(rates)[len(rates) // 2] == pytest.approx(125e3, rel=0.25)


def test_a_resumed_run_keeps_its_decisions_and_counts(text: Path, tmp_path: Path):
    options = ("--recipe", "auto", "--link", "2mbit,10ms", "--eval-samples", 0, "--checkpoint-every", 4)
    first, out = train(tmp_path, text, "--steps", 4, *options)
    assert first.code == 0, first.err
    before = record(out)
    again, out = train(tmp_path, text, "--steps", 8, *options, "--resume")
    assert again.code == 0, again.err
    after = record(out)
    assert after["decisions"][: len(before["decisions"])] == before["decisions"]
    for then, now in zip(before["wire"], after["wire"], strict=True):
        assert now["payload_bytes"] > 1.5 * then["payload_bytes"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--link", "0mbit"), "the rate '0mbit' in link '0mbit' is zero"),
        (("--link", "trace:nowhere"), "nowhere"),
        (("--link", "7=10mbit"), "rank 7"),
        (("--congestion", "vegas"), "--congestion 'vegas' is unknown"),
        (("--relay", "127.0.0.1:7000"), "leave --relay out"),
    ],
)
def test_wrong_networks_are_one_sentence(text: Path, tmp_path: Path, options: tuple[str, ...], words: str):
    command = warm().run(tmp_path, *JOB, "--data", text, "--out", tmp_path / "out", "--emulate", *options)
    assert command.code == 2
    assert words in sentence(command)
    assert not (tmp_path / "out").exists()
