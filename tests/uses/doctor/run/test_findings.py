"""What doctor says of a measured link: words, JSON, fragments for a plan, advice."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from commanded import invoke
from listeners import HERE, LONG, TOKEN, link_test, listening

from thinwire.links.profile import profiles
from thinwire.links.shape import MTU, SEGMENT
from thinwire.runs.machine import devices, network
from thinwire.uses.doctor.run.advice import advice
from thinwire.uses.doctor.run.check import LACKS, OK
from thinwire.uses.doctor.run.diagnosis import _gpus
from thinwire.uses.doctor.run.linktest import LinkTest, MeasuredWay
from thinwire.uses.training.planning.machines_file import read_machines


@pytest.mark.parametrize("as_json", [True, False])
def test_the_findings_as_words_and_as_json(as_json: bool) -> None:
    with listening() as (port, _, served):
        options = ["--peer", f"{HERE}:{port}", "--seconds", "0.5", *(["--json"] if as_json else [])]
        result = invoke("doctor", *options, THINWIRE_TOKEN=TOKEN.decode())
        assert result.exit_code == 0, result.stderr
        served.result(LONG)
    if as_json:
        found = json.loads(result.stdout)
        assert found["out"]["rate"] > 0 and found["links"].keys() == found["lines"].keys() == {"out", "back"}
        assert tomllib.loads(found["toml"])["link"][0]["link"] == found["links"]["out"]
    else:
        assert all(word in result.stdout for word in ("Mbit/s", "[[link]]", "round trip", "sent again"))
        assert "as --link to emulate" in result.stdout


def test_this_machines_addresses_and_the_way_out() -> None:
    assert all(i.name and not i.address.startswith("127.") for i in network.interfaces())
    out = network.way_out(HERE, 1)
    assert out is not None and out.address == HERE
    assert network.way_out("no.such.invalid", 1) is None


def test_a_fragment_says_where_tcp_keeps_its_window(tmp_path: Path) -> None:
    def said(congestion: str | None, **settings: str) -> list[bool | None]:
        test = link_test(MeasuredWay(1e6, 1000, 1.0, 0.0, congestion), **settings)
        file = tmp_path / "machines.toml"
        file.write_text('[[machine]]\nname = "a"\n[[machine]]\nname = "b"\n' + test.fragment())
        ways = read_machines(file).ways
        return [ways["a", "b"].restarts, ways["b", "a"].restarts]

    assert said("cubic", tcp_slow_start_after_idle="1") == [True, False]  # the way back has bbr
    assert said("cubic", tcp_slow_start_after_idle="0") == said("bbr") == [False, False]
    assert said(None) == said("cubic") == [True, False]  # not known: as most systems do


def test_a_link_to_be_emulated_is_told_with_its_headers() -> None:
    test = link_test(MeasuredWay(1e6, 1000, 1.0))
    assert (str(test.shape(test.out)), str(test.line(test.out))) == ("8mbit,25ms", "8.29mbit,25ms")
    assert _network_rate(test) == pytest.approx(1e6, rel=1e-3)


def _network_rate(test: LinkTest) -> float:
    """Return what TCP carries [bytes/s] on the emulated line that is printed."""
    (profile, _) = profiles([str(test.line(test.out))], 2)
    assert profile.up is not None
    return profile.up * SEGMENT / MTU


def test_advice_is_given_where_there_is_a_reason() -> None:
    fine = MeasuredWay(1e6, 1000, 1.0, 0.0, "cubic", 0.06)
    assert advice(link_test(fine, tcp_slow_start_after_idle="0", tcp_wmem="4096 16384 4194304")) == []
    assert "slow_start_after_idle=0" in advice(link_test(fine, tcp_slow_start_after_idle="1"))[0]
    near = advice(link_test(fine, rtt=0.001, tcp_slow_start_after_idle="1"))
    assert not any("slow_start_after_idle" in words for words in near)
    fast = MeasuredWay(100e6, 1000, 1.0, 0.05, "bbr", 0.5)
    wmem, lossy, bloated = advice(link_test(fast, tcp_wmem="4096 16384 4194304"))
    assert wmem.startswith("a: tcp_wmem allows 4.19 MB") and "20000000" in wmem
    assert "5.0% of the bytes were sent again" in lossy and "under load" in bloated
    assert advice(link_test(MeasuredWay(1e6, 1000, 1.0))) == []  # nothing is known without TCP_INFO


@pytest.mark.parametrize(
    ("there", "status", "said"),
    [
        ({}, OK, "none that torch can use"),
        (
            {"driver": "580.65.06", "built": None},
            LACKS,
            "driver 580.65.06, but torch .* is built without CUDA",
        ),
        ({"driver": "470.1", "built": "13.0"}, LACKS, r"driver 470\.1 does not serve CUDA 13\.0"),
        ({"driver": "580.65.06", "built": "13.0", "cards": 2, "triton": "3.6.0"}, OK, "Triton 3.6.0"),
        ({"driver": None, "built": "13.0", "cards": 1}, LACKS, "driver unknown, CUDA 13.0; no Triton"),
    ],
)
def test_gpus_are_listed_and_what_is_missing_is_said(
    there: dict[str, Any], status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {"name": "NVIDIA H100", "memory_bytes": 80_000_000_000, "capability": "9.0"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(there.get("cards")))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there["cards"])
    monkeypatch.setattr(torch.version, "cuda", there.get("built"))
    for name, found in {"driver": there.get("driver"), "triton": there.get("triton")}.items():
        monkeypatch.setattr(devices, name, lambda found=found: found)
    monkeypatch.setattr(devices, "facts", lambda _: about)
    monkeypatch.setattr(devices, "free_bytes", lambda _: 79_000_000_000)
    check = _gpus()
    assert (
        check.status == status and re.search(said, check.finding) and bool(check.remedy) == (status == LACKS)
    )
    for n in range(there.get("cards", 0)):
        assert f"cuda:{n} NVIDIA H100 (80 GB, 79 GB of it free, compute capability 9.0)" in check.finding
