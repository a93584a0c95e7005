"""Runs that go on over another link, or from a run that was no measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from emulation_runs import SMALL
from launchers import Command, metrics, record, sentence, warm
from run_records import write_run

from thinwire.runs.records.run_record import EMULATED, KERNEL, LinkInfo
from thinwire.runs.records.writer import RUN, write_json
from thinwire.uses.kinds import load_run
from thinwire.uses.training.run import resume
from thinwire.uses.training.run.options import TrainConfig

GOOD = LinkInfo("10mbit", emulation=KERNEL, lateness_s=1e-4, emulator={"valid": True})


LATER = LinkInfo("10mbit", emulation=KERNEL, emulator={"valid": False})


CARRIED = f"{resume.SPOILT}for a reason"


def earlier(
    out: Path, link: LinkInfo, /, status: str = "done", notes: Sequence[str] = (), **config: Any
) -> None:
    """Leave the record of an earlier run."""
    made = write_run(out, "fp32", steps=4, status=status)
    made.link, made.notes = link, list(notes)
    made.config |= {"link": "10mbit", "emulate": True, "congestion": "auto"} | config
    write_json(out / RUN, made.to_dict())


@pytest.mark.parametrize(
    ("link", "more", "words"),
    [
        (LATER, {"status": "invalid", "notes": ["one", "it was late"]}, "is of an invalid run (it was late)"),
        (LATER, {"status": "invalid"}, "is of an invalid run"),
        (LATER, {"status": "failed", "notes": ["rank 1 is gone"]}, "did not keep its time up to step 4"),
        (GOOD, {"link": "20mbit"}, "--link was '20mbit' up to step 4 and is '10mbit' since then"),
        (GOOD, {"emulate": False}, "--emulate was False"),
        (GOOD, {"congestion": "bbr"}, "--congestion was 'bbr'"),
        (GOOD, {"status": "running", "notes": ["resumed after step 2", CARRIED]}, CARRIED),
    ],
)
def test_what_spoils_the_times_before_a_resume_is_found(
    link: LinkInfo, more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    earlier(tmp_path, link, **more)
    (note,) = resume.doubts(TrainConfig(out=str(tmp_path), link="10mbit", emulate=True), 4)
    assert note.startswith(resume.SPOILT) and words in note
    found = load_run(tmp_path)
    found.notes = [note]
    assert resume.inherited(found) == note


@pytest.mark.parametrize("emulation", [KERNEL, EMULATED])
def test_times_that_nobody_judged_get_a_note_alone(emulation: str, tmp_path: Path) -> None:
    earlier(tmp_path, LinkInfo("10mbit", emulation=emulation), "interrupted")
    (note,) = resume.doubts(TrainConfig(out=str(tmp_path), link="10mbit", emulate=True), 4)
    assert "how late the link was up to step 4 is not known" in note and resume.SPOILT not in note


def test_nothing_speaks_against_a_valid_run_or_one_without_a_link(tmp_path: Path) -> None:
    config = TrainConfig(out=str(tmp_path), link="10mbit", emulate=True)
    assert resume.doubts(config, 4) == []  # there is no record
    for link, status in ((GOOD, "done"), (GOOD, "interrupted"), (LinkInfo(), "interrupted")):
        earlier(tmp_path, link, status)
        assert resume.doubts(config, 4) == []


def trained(place: Path, starter: str, *arguments: Any) -> Command:
    """Run a job to its end as the launcher starts it, or as torchrun does; return what speaks for it."""
    if starter == "launcher":
        return warm().run(place, *arguments)
    ranks = warm().ranks(place, *arguments)
    assert ranks[1].wait() == 0, ranks[1].err
    ranks[0].wait()
    return ranks[0]


def test_a_run_that_goes_on_from_an_invalid_one_is_invalid(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = [*SMALL, "--data", text, "--out", out, "--checkpoint-every", 2]
    first = trained(tmp_path / "first", "torchrun", *job, "--steps", 2)
    assert first.code == 0, first.err
    made = load_run(out)
    made.status, made.notes = "invalid", [*made.notes, "packets were late"]
    write_json(out / RUN, made.to_dict())
    for steps, starter in ((2, "torchrun"), (4, "launcher")):  # nothing is left to train, then two steps more
        command = trained(tmp_path / starter, starter, *job, "--steps", steps, "--resume")
        assert command.code == 4, command.err
        assert "no measurement: " in sentence(command) and "(packets were late)" in sentence(command)
        assert len(metrics(out)) == steps
        assert record(out)["status"] == "invalid"
        assert any("(packets were late)" in note for note in record(out)["notes"])


def test_a_run_that_goes_on_over_another_link_is_invalid(text: Path, tmp_path: Path) -> None:
    """The first part's link is written into its record: over a real one, a busy machine would be late too."""
    out = tmp_path / "out"
    job = [*SMALL, "--data", text, "--out", out, "--checkpoint-every", 2, "--steps", 2]
    for options in ((), ("--resume",)):
        command = trained(tmp_path / "same", "torchrun", *job, *options)
        assert command.code == 0, command.err
    made = load_run(out)
    made.config["link"] = "1gbit"
    write_json(out / RUN, made.to_dict())
    command = trained(tmp_path / "other", "torchrun", *job, "--resume")
    assert command.code == 4, command.err
    assert "--link was '1gbit' up to step 2 and is 'none' since then" in sentence(command)
    assert record(out)["status"] == "invalid"
