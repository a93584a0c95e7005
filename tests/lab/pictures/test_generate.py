"""``thinwire generate`` end to end: records, pictures, the report; ranks that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from thinwire.lab.engines import load_run

SMALL = ("--init", "random", "--sheet", "1x2", "--threads", "1")


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thinwire", "generate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pictures") / "out"
    done = generate("one", "fp16", "compact", "auto", "batch", *SMALL, "--steps", "4", "--pictures", "2",
                    "--repeat", "2", "--psnr", "30", "--out", str(out))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


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
    assert records["auto"]["predictions"] and records["auto"]["predicted_s"] > 0
    assert fp16["exchanges"] == 2 * 4 * 7  # pictures, steps, layers and the output


def test_the_report_needs_no_other_file(made: Path) -> None:
    page = (made / "report.html").read_text()
    assert (
        page.count("data:image/png;base64,") >= 5
        and "http" not in page.partition("<main>")[2].partition("<a")[0]
    )


def test_a_rank_that_dies_is_named_and_nothing_is_half_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "thinwire",
        "generate",
        "fp16",
        *SMALL,
        "--steps",
        "1000",
        "--out",
        str(out),
    ]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def workers() -> list[int]:
        """Return the process of rank 1: by its environment, which has the folder of this run."""
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                words = file.read_bytes().split(b"\0")
                if b"RANK=1" in words and any(str(out).encode() in word for word in words):
                    found.append(int(file.parent.name))
        return found

    until(workers, timeout=60)
    time.sleep(8)  # until it denoises, or still loads: it is lost all the same
    os.kill(workers()[0], signal.SIGKILL)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 3 and "rank 1" in said
    assert not (out / "compare.json").exists() and not list(out.glob("*/run.json"))
