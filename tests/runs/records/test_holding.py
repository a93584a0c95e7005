"""One run at a time in a folder: the second is refused, and a killed one holds nobody up."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.runs.records.folder_lock import LOCK, holding
from thinwire.types import InputError

KEEP = (
    "import sys, time; from thinwire.runs.records.folder_lock import holding\n"
    "with holding(sys.argv[1]): print('held', flush=True); time.sleep(600)"
)
RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["train"], {}),
        (["train"], RANK),
        (["train", "--resume"], {}),
        (["compare", "fp32", "bf16"], {}),
        (["demo"], {}),
        (["demo", "state"], {}),
        (["demo", "federated"], {}),
    ],
)
def test_the_second_run_in_a_folder_is_refused_by_name(
    tmp_path: Path, words: list[str], environment: dict[str, str]
) -> None:
    out = tmp_path / "a" / "run"
    with holding(out):
        result = CliRunner(env=environment).invoke(app, [*words, "--out", str(out)])
        assert result.exit_code == 2
        assert f"--out {out} is in use by process {os.getpid()} on " in result.stderr
        assert " since 20" in result.stderr and "choose another --out" in result.stderr
        assert [*out.iterdir()] == [out / LOCK]
    assert [*tmp_path.iterdir()] == []  # what was made for nothing


def test_a_run_that_was_killed_holds_nobody_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEEP, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=rf"in use by process {other.pid} .* \(-c "), holding(tmp_path):
            raise AssertionError
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert (tmp_path / LOCK).exists()
    with holding(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


def test_there_is_one_holder_at_a_time(tmp_path: Path) -> None:
    inside, most = threading.Semaphore(1), []

    def hold(_: int) -> bool:
        try:
            with holding(tmp_path / "run"):
                most.append(inside.acquire(blocking=False))
                inside.release()
                return True
        except InputError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert any(pool.map(hold, range(300)))
    assert all(most)


def test_where_there_are_no_locks_nobody_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with holding(tmp_path), holding(tmp_path):
        pass
