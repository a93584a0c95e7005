"""Stages as processes that are killed, frozen and started again: what a client and the exit code say."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from emulated import lacking
from launchers import PATIENCE, Command, children, cold, gone
from waiting import free_port

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")
ASKED = {"prompt": "the ship", "max_tokens": 45, "temperature": 0.7, "seed": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    return tiny_models.write_llama(tmp_path_factory.mktemp("faults"), tiny_tokenizer, 100) / "model"


class Client:
    """Whoever asks an endpoint at a port."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def stream(self, **more: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of a text, to its end."""
        body = json.dumps(ASKED | {"stream": True} | more).encode()
        call = urllib.request.Request(f"{self._url}/v1/completions", body)
        with urllib.request.urlopen(call, timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]":
                    yield json.loads(line[6:])


def said(events: Iterator[dict[str, Any]]) -> str:
    """Return the text in events; those of errors fail."""
    return "".join(event["choices"][0]["text"] for event in events)


def words(model: Path, port: int, out: Path, *more: Any) -> tuple[Any, ...]:
    own = ("serve", "--model", model, "--stages", 2, "--dtype", "fp32", "--drafts", "none", "--threads", 1)
    return (*own, "--cache", 64, "--listen", f"127.0.0.1:{port}", "--out", out, *more)


def end(*commands: Command) -> None:
    for command in commands:
        if command.poll() is None:
            command.signal(signal.SIGKILL)
            command.wait()


def started(place: Path, *asked: Any) -> Command:
    """Return a server that listens, as a shell starts it."""
    found = cold(place, sys.executable, "-m", "thinwire", *asked)
    try:
        found.says("listening at http://127.0.0.1", 2 * PATIENCE)
    except BaseException:
        end(found)
        raise
    return found


def stages_of(server: Command) -> list[int]:
    """Return the processes of its stages, in order."""
    return sorted(
        (pid for pid in children(server.pid) if b"endpoint_program" in command_of(pid)), key=rank_of
    )


def test_a_stage_that_is_killed_is_named_to_clients_and_ends_the_server(model: Path, tmp_path: Path) -> None:
    client = Client(port := free_port())
    server = started(tmp_path, *words(model, port, tmp_path / "out", "--link", "100mbit,20ms"))
    try:
        events = client.stream()
        assert next(events)["choices"]
        stages = stages_of(server)
        os.kill(stages[1], signal.SIGKILL)
        (trouble,) = [event["error"] for event in events if "error" in event]
        assert trouble["message"] == "stage 1 is lost: it was ended by SIGKILL"
        assert server.wait(30) == 3 and "rank 1 was ended by SIGKILL" in server.err
        gone(stages)
    finally:
        end(server)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "failed"


def test_the_launcher_starts_a_killed_stage_again_also_in_an_emulated_network(
    model: Path, tmp_path: Path
) -> None:
    client = Client(port := free_port())
    asked = words(model, port, tmp_path / "out", "--link", "100mbit,20ms", "--resume-requests")
    try:
        server = started(tmp_path, *asked, "--emulate")
    except AssertionError as e:
        if not lacking(str(e)):
            raise
        server = started(tmp_path, *asked)  # so that at least the launcher is tried
    try:
        whole = said(client.stream())
        events = client.stream()
        begun = next(events)["choices"][0]["text"]
        before = stages_of(server)
        os.kill(before[1], signal.SIGKILL)
        assert begun + said(events) == whole and whole
        after = stages_of(server)
        assert before[0] == after[0] and before[1] != after[1]
        assert server.end(signal.SIGTERM) == 130
        gone(after)
    finally:
        end(server)


def command_of(pid: int) -> bytes:
    """Return how a process was started."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def rank_of(pid: int) -> int:
    """Return which stage a process is."""
    variables = dict(v.split(b"=", 1) for v in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if v)
    return int(variables[b"RANK"])
