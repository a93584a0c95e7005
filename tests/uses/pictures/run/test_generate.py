"""``thinwire generate`` end to end: records, pictures, the report; ranks that fail."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from launchers import Command, rank_environment, sentence, until, warm

from thinwire.uses.kinds import load_run

SMALL = ("--init", "random", "--sheet", "1x2", "--threads", "1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    ways, more = ("one", "fp16", "compact", "auto", "batch"), ("--pictures", "2", "--repeat", "2")
    asked = ["generate", *ways, *SMALL, "--steps", "4", *more, "--psnr", "30", "--out", place / "out"]
    done = warm().run(place, *asked)
    assert done.code == 0, done.err
    return place / "out"


def test_each_way_leaves_a_record_and_its_pictures(made: Path) -> None:
    records: dict[str, Any] = {}
    for values in json.loads((made / "compare.json").read_text()):
        records[values["recipe"]["name"].partition(" ")[0]] = values
    assert list(records) == ["one", "fp16", "compact", "auto", "batch"]
    for name, r in records.items():
        assert (r["kind"], r["status"], r["ranks"], r["totals"]["repeats"]) == ("pictures", "done", 2, 2)
        assert (made / name / "picture.png").read_bytes().startswith(b"\x89PNG") and r["totals"][
            "seconds"
        ] > 0
        assert load_run(made / name).kind == "pictures"
    one, fp16, compact = (records[name] for name in ("one", "fp16", "compact"))
    assert one["bytes"]["total"] - one["bytes"]["control"] == 0 and one["quality"]["psnr_db"] is None
    assert fp16["bytes"]["steady_step"] == pytest.approx(fp16["bytes"]["fp16_step"], rel=0.05)
    assert fp16["bytes"]["total"] == pytest.approx(fp16["bytes"]["fp16_total"], rel=0.05)
    assert compact["bytes"]["steady_step"] < fp16["bytes"]["steady_step"] / 4
    assert fp16["quality"]["psnr_db"] > compact["quality"]["psnr_db"] > 30
    assert records["batch"]["quality"]["psnr_db"] is None and records["batch"]["mode"] == "batch"
    for name in ("picture.png", "picture-2.png"):
        assert (made / "batch" / name).read_bytes() == (made / "one" / name).read_bytes()
    assert records["auto"]["predictions"] and records["auto"]["predicted_s"] > 0
    assert fp16["exchanges"] == 2 * 4 * 7  # pictures, steps, layers and the output


def test_the_report_needs_no_other_file(made: Path) -> None:
    page = (made / "report.html").read_text()
    assert (
        page.count("data:image/png;base64,") >= 5
        and "http" not in page.partition("<main>")[2].partition("<a")[0]
    )


def test_ranks_that_torchrun_starts_make_the_same(made: Path, tmp_path: Path) -> None:
    asked = ["generate", "compact", *SMALL, "--steps", "4", "--out", tmp_path / "out", "--json"]
    ranks = warm().ranks(tmp_path, *asked)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    assert json.loads(ranks[0].out)[0]["status"] == "done" and not ranks[1].out
    assert (tmp_path / "out/compact/picture.png").read_bytes() == (made / "compact/picture.png").read_bytes()


def test_a_rank_that_others_cannot_reach_is_refused_before_anything(tmp_path: Path) -> None:
    asked = ["generate", "compact", *SMALL, "--out", tmp_path / "out"]
    far = rank_environment(0, 2, 29500) | {"MASTER_ADDR": "node-1"}
    command = warm().start(tmp_path, *asked, **far)
    assert command.wait() == 2 and "the ranks meet at node-1, but others cannot reach" in sentence(command)
    assert not list(tmp_path.glob("out/*/run.json"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("fp61",), "no recipe 'fp61'; did you mean fp16"),
        (("one", "--model", "flux-fashoin"), "--model 'flux-fashoin' is unknown; did you mean flux-fashion"),
        (
            ("one", "--model", "wan-fashion", "--sheet", "2x2"),
            "is for flux-fashion and flux-fashion-moe, and",
        ),
        (("fp16", "--steps", "0"), "--steps is 0; it must be at least 1"),
        (("fp16", "--sheet", "2x3", "--classes", "0,1,2,3,4"), "5 garments are named for a sheet of 2x3"),
        (("ulysses", "--sheet", "1x1"), "has 1 tokens, too few for 2 ranks; use fewer ranks"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path: Path, asked: tuple[str, ...], said: str) -> None:
    command = warm().run(tmp_path, "generate", *SMALL, *asked, "--out", tmp_path / "out", "--quiet")
    assert command.code == 2 and said in sentence(command)
    assert not list(tmp_path.glob("out/*/run.json"))


def test_a_frozen_rank_is_named_and_nothing_is_half_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["generate", "fp16", *SMALL, "--steps", "300", "--deadline", "4", "--quiet", "--out", out]
    ranks = warm().ranks(tmp_path, *asked)
    until(lambda: denoises(ranks[1]), "rank 1 to denoise")
    ranks[1].signal(signal.SIGSTOP)
    try:
        assert ranks[0].wait() == 3 and "rank 1" in sentence(ranks[0])
    finally:
        ranks[1].signal(signal.SIGKILL)
    assert not (out / "compare.json").exists() and not list(out.glob("*/run.json"))


def denoises(rank: Command) -> bool:
    """Say whether a rank has computed for longer than it takes to begin."""
    fields = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK") > 1 or rank.poll() is not None
