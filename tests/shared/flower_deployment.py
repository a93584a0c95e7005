"""Flower as it is deployed: a SuperLink and SuperNodes as processes on loopback, which run the example."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flower_apps import EXAMPLE
from waiting import free_port, until

ROOT = EXAMPLE.parents[1]
BIN = Path(sys.executable).parent
NODES, JOINED = 2, "Activated node_id"  # what the SuperLink logs of each
PATIENCE = 250.0  # seconds of a run; each message of Flower takes some on its own


class Deployment:
    """Processes of Flower, all below ``place``."""

    def __init__(self, place: Path) -> None:
        self.place, self._started = place, list[subprocess.Popen[bytes]]()
        self.port = free_port()
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(("FLWR", "THINWIRE"))}
        self._env |= {
            "FLWR_HOME": str(place / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        (place / "home").mkdir()
        connection = f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (place / "home" / "config.toml").write_text(connection)

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a program of Flower; what it prints is in a file."""
        with (self.place / f"{name}.log").open("wb") as log:
            command = [str(BIN / words[0]), *words[1:]]
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._env, cwd=self.place
            )
        self._started.append(process)
        return process

    def said(self, name: str) -> str:
        return (self.place / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        """End what was started and what that started, each by its id."""
        pids: set[int] = set()
        for sign, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
            pids |= {pid for process in self._started for pid in (process.pid, *below(process.pid))}
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, sign)
            end = time.monotonic() + patience
            while (pids := {pid for pid in pids if alive(pid)}) and time.monotonic() < end:
                time.sleep(0.05)
        assert not pids, pids
        for process in self._started:
            process.wait()


def alive(pid: int) -> bool:
    """Return whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def below(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(
                int(stat.parent.name)
            )
    found, left = [], [pid]
    while left:
        found += (children := parents.get(left.pop(), []))
        left += children
    return found


@contextmanager
def deployment(place: Path) -> Iterator[Deployment]:
    """Yield a SuperLink with two SuperNodes, each of which has a part of the data."""
    flower = Deployment(place)
    try:
        flower.start(
            "superlink",
            *("flower-superlink", "--insecure", "--disable-runtime-dependency-installation"),
            *("--host", "127.0.0.1", "--port", str(flower.port)),
        )
        for i in range(NODES):
            flower.start(
                f"supernode-{i}",
                *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{flower.port}"),
                *("--host", "127.0.0.1", "--port", str(free_port())),
                *("--node-config", f"partition-id={i}"),
            )
        until(lambda: flower.said("superlink").count(JOINED) == NODES, "both nodes", PATIENCE)
        yield flower
    finally:
        flower.stop()


def run(flower: Deployment, **config: object) -> bytes:
    """Run the example with this run config; return the final weights."""
    app, weights = flower.place / "app", flower.place / "weights.bin"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("__pycache__"))
    given = {**config, "weights": str(weights)}
    words = " ".join(f"{k}={json.dumps(v)}" for k, v in given.items())
    submit = flower.start("run", "flwr", "run", str(app), "here", "--run-config", words)
    until(lambda: weights.exists() or submit.poll(), "the weights of the run", PATIENCE)
    assert weights.exists(), flower.said("run")
    return weights.read_bytes()
