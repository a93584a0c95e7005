"""thinwire publish: its files, addresses and stores, and what ends it."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from commanded import Script, holds, invoke, meanwhile, newest, one_sentence, running, trained, weights
from launchers import Command
from waiting import free_port

from thinwire.files.checkpoint import read_checkpoint, write_checkpoint
from thinwire.files.local_folder import PlainFolder
from thinwire.runs.machine.network import Interface
from thinwire.uses.following.push.follower import ask
from thinwire.uses.following.push.publisher import Publisher

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("zstandard")
pytest.importorskip("safetensors")


def test_a_publisher_saves_its_state_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, kept = tmp_path / "in.safetensors", tmp_path / "kept"
    kept.mkdir()
    saved = kept / "saved"
    write_checkpoint(file, weights(), {})
    monkeypatch.setattr("thinwire.uses.following.publish_targets.SAVE_EVERY", 0.0)

    def version() -> int:
        return json.loads(invoke("inspect", saved, "--json").stdout)["version"] if saved.exists() else 0

    def script() -> Script:
        yield lambda: version() == 1
        write_checkpoint(file, trained(weights()), {})
        yield lambda: version() == 2
        kept.rename(tmp_path / "gone")  # a disk that is not there: a note, and it goes on
        write_checkpoint(file, weights(), {})
        yield lambda: any("cannot save a state" in note for note in notes)
        (tmp_path / "gone").rename(kept)
        yield lambda: version() == 3 and notes[-1] == "note: the state is saved again"

    notes = meanwhile(monkeypatch, script())
    result = invoke("publish", file, "--port", "0", "--state", saved, "--quiet")
    assert result.exit_code == 0, result.output
    assert json.loads(invoke("inspect", saved, "--check", "--json").stdout)["version"] == 3


@pytest.mark.parametrize("outlet", [("--port", "0"), ()], ids=["push", "pull"])
def test_a_file_that_no_longer_fits_is_told_and_the_publisher_goes_on(tmp_path: Path, monkeypatch, outlet):
    file, store = tmp_path / "m.safetensors", tmp_path / "store"
    write_checkpoint(file, {"w": torch.zeros(3)}, {})
    others = [
        ({"w": torch.zeros(4)}, r"w: shape \(4,\), expected \(3,\); "),
        ({"w": torch.zeros(3), "v": torch.zeros(3)}, "v is not in the layout of this state; "),
        ({"w": torch.tensor([0.0, math.nan, 0.0])}, "w"),
    ]

    def script() -> Script:
        yield lambda: newest(store) == 1
        for tensors, why in others:
            told = len(notes)
            write_checkpoint(file, tensors, {})
            yield lambda told=told: len(notes) > told
            assert re.search(f"{file} does not fit what is published: {why}.*a new publisher", notes[-1])
            assert notes[-1].endswith("version 1 stays the newest")
        write_checkpoint(file, {"w": torch.ones(3)}, {})
        yield lambda: newest(store) == 2

    notes = meanwhile(monkeypatch, script())
    result = invoke("publish", file, "--store", store, "--bound", "1e-3", "--quiet", *outlet)
    assert result.exit_code == 0, result.output
    assert invoke("follow", store, "--once", "--out", tmp_path / "o").exit_code == 0
    assert torch.allclose(read_checkpoint(tmp_path / "o")["w"], torch.ones(3), atol=2e-3)


def test_a_publisher_that_listens_everywhere_names_its_addresses(tmp_path: Path, monkeypatch):
    file, token = tmp_path / "m.safetensors", tmp_path / "token"
    write_checkpoint(file, weights(), {})
    token.write_text("a long shared token")
    own = [
        Interface("eth0", "192.0.2.7"),
        Interface("wlan0", "198.51.100.8"),
        Interface("eth0", "2001:db8::7"),
    ]
    for found, hosts in ((own, ["192.0.2.7", "198.51.100.8"]), ([], ["ADDRESS_OF_THIS_MACHINE"])):

        def script() -> Script:
            yield lambda: True

        with monkeypatch.context() as patched:
            patched.setattr("thinwire.runs.machine.network.interfaces", lambda found=found: found)
            notes = meanwhile(patched, script())
            result = invoke("publish", file, "--host", "0.0.0.0", "--port", "0", "--token-file", token)
        assert result.exit_code == 0, result.output
        assert re.findall(r"'thinwire follow (\S+):\d+'", notes[0]) == hosts and "0.0.0.0" not in notes[0]


def test_a_feed_that_died_ends_the_publisher_though_its_file_rests(tmp_path: Path, monkeypatch):
    file, made = tmp_path / "m.safetensors", list[Publisher]()
    write_checkpoint(file, weights(), {})

    class Known(Publisher):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    def script() -> Script:
        yield lambda: made[0].newest.number == 1
        made[0]._feed._hub.close(0.0)
        yield lambda: False

    monkeypatch.setattr("thinwire.uses.following.publish_targets.Publisher", Known)
    meanwhile(monkeypatch, script())
    result = invoke("publish", file, "--port", "0", "--quiet")
    assert result.exit_code == 3, result.output
    assert f"the hub at 127.0.0.1:{made[0].port}" in one_sentence(result.stderr)


def test_half_a_file_is_never_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And the whole one is, though it has the size and the time of the half; both are told once."""
    monkeypatch.setattr("thinwire.files.watch.RETRY", 0.02)
    file, whole, store = tmp_path / "m.safetensors", tmp_path / "whole", tmp_path / "store"
    write_checkpoint(file, weights(), {})
    write_checkpoint(whole, trained(weights()), {})
    data, before = whole.read_bytes(), file.read_bytes()

    def script() -> Script:
        yield lambda: True
        with file.open("wb") as written:  # in place, and with a pause that is too long
            written.write(data[: len(data) // 2])
            written.flush()
            yield lambda: "note: cannot read" in notes[-1]
            written.write(data[len(data) // 2 :])
        yield lambda: newest(store) == 2
        file.write_bytes(bytes(len(before)))  # as a file that gets its room first, and its contents later
        was = file.stat()
        yield lambda: "hold no header" in notes[-1]
        told = len(notes)
        for _ in range(20):
            yield lambda: len(notes) == told
        file.write_bytes(before)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
        yield lambda: newest(store) == 3

    notes = meanwhile(monkeypatch, script())
    result = invoke("publish", file, "--store", store)
    assert result.exit_code == 0, result.output
    first, mended, second, again = notes[-4:]
    assert re.search("cut short .* version 1 stays the newest", first)
    assert mended == again == f"note: {file} can be read again"
    assert second.endswith("version 2 stays the newest")
    assert invoke("follow", store, "--once", "--out", tmp_path / "o").exit_code == 0
    assert holds(tmp_path / "o", weights())


def test_one_version_goes_to_the_followers_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, near = tmp_path / "m.safetensors", list[Command]()
    write_checkpoint(file, weights(), {})
    relay, port = f"127.0.0.1:{free_port()}", free_port()
    with ExitStack() as stack:

        def script() -> Script:
            yield lambda: True
            found = ask("127.0.0.1", port).layout.slots
            assert {str(slot.dtype) for slot in found} == {"torch.float16", "torch.int64", "torch.bool"}
            following = running(tmp_path, "follow", f"127.0.0.1:{port}", "--relay", relay)
            near.append(stack.enter_context(following))
            yield lambda: False

        meanwhile(monkeypatch, script())
        result = invoke("publish", file, "--port", port, "--once", "--dtype", "fp16")
        assert result.exit_code == 0, result.output
        late = invoke("follow", relay, "--out", tmp_path / "o", "--once")  # from the relay alone
        assert late.exit_code == 0, late.output
        near[0].says(f"version 1, .* at {relay}")
        assert near[0].end() == 0
    assert read_checkpoint(tmp_path / "o")["w"].dtype is torch.float16


@pytest.mark.parametrize("heals", [False, True])
def test_a_store_that_is_full_ends_once_after_another_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heals: bool
):
    attempts: list[int] = []
    write = PlainFolder.write

    def full(self: PlainFolder, name: str, data: bytes) -> None:
        if name.startswith("keyframes/"):
            attempts.append(len(data))
            if len(attempts) == 1 or not heals:
                raise OSError(errno.ENOSPC, "No space left on device")
            time.sleep(0.5)  # longer than the pause between two attempts
        write(self, name, data)

    file = tmp_path / "m.safetensors"
    write_checkpoint(file, weights(), {})
    monkeypatch.setattr(PlainFolder, "write", full)
    monkeypatch.setattr("thinwire.uses.following.pull.store_writer.RETRY", 0.1)
    result = invoke("publish", file, "--once", "--store", tmp_path / "store")
    if heals:
        assert result.exit_code == 0, result.stderr
    else:
        assert result.exit_code == 2
        assert one_sentence(result.stderr).endswith("store; free space there")


@pytest.mark.parametrize("early", ["Watch.first", "PublishTargets.listen", "PublishTargets.keep"])
def test_a_ctrl_c_before_the_first_version_ends_a_publisher_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: str
):
    file = tmp_path / "m.safetensors"
    write_checkpoint(file, weights(), {})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"thinwire.uses.following.commands.publishing.{early}", interrupted)
    command = ["publish", file, "--port", 0, "--store", tmp_path / "store", "--quiet"]
    result = invoke(*command)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert invoke(*command, "--once").exit_code == 130


def test_a_checkpoint_that_is_still_to_be_written_is_waited_for(tmp_path: Path) -> None:
    file, store = tmp_path / "run" / "m.safetensors", tmp_path / "store"

    def train() -> None:
        file.parent.mkdir()
        file.write_bytes(b"half of a")  # and a rest that is too long
        time.sleep(1.0)
        write_checkpoint(file, weights(), {})

    training = threading.Timer(0.5, train)
    training.start()
    result = invoke("publish", file, "--once", "--store", store, "--wait", "60")
    training.join()
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(f"waiting for {file}, for up to 60 s\n")
    assert invoke("follow", store, "--once", "--out", tmp_path / "o").exit_code == 0
    assert holds(tmp_path / "o", weights())


def test_a_checkpoint_that_nobody_writes_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    result = invoke("publish", tmp_path / "m", "--store", tmp_path / "store", "--wait", "0.3")
    assert result.exit_code == 2
    assert "m is not there" in one_sentence(result.stderr.split("\n", 1)[1])
    assert not (tmp_path / "store").exists()


def test_tensors_are_cast_by_name(tmp_path: Path) -> None:
    file, store = tmp_path / "m.safetensors", tmp_path / "store"
    names = ("a.weight", "a.norm.weight", "b.norm.weight", "router")
    write_checkpoint(file, {name: torch.linspace(0, 1, 9) for name in names}, {})
    publish = ("publish", file, "--once", "--store")
    asked = ("--dtype", "bf16", "--dtype", "*.norm.*=fp32", "--dtype", "router=float16")
    assert invoke(*publish, store, *asked).exit_code == 0
    out = tmp_path / "out.safetensors"
    assert invoke("follow", store, "--out", out, "--once").exit_code == 0
    dtypes = [x.dtype for x in map(read_checkpoint(out).get, names) if x is not None]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.float16]
    result = invoke(*publish, tmp_path / "other", "--dtype", "norm=fp32")
    assert result.exit_code == 2 and "dtype names 'norm', which is no tensor here" in result.stderr
    result = invoke(*publish, tmp_path / "other", "--dtype", "router=int4")
    assert result.exit_code == 2 and "it must be one of bf16, fp16, fp32, or NAME= and" in result.stderr


def test_publishing_within_a_bound_that_cannot_be_kept_ends_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    write_checkpoint(file, {"w": torch.linspace(-0.5, 0.5, 300)}, {})
    publish = ("publish", file, "--dtype", "bf16", "--once")
    result = invoke(*publish, "--store", tmp_path / "a", "--bound", "1e-4")
    assert result.exit_code == 2 and "torch.bfloat16 cannot hold within a bound of 0.0001" in result.stderr
    assert invoke(*publish, "--store", tmp_path / "b", "--bound", "1e-2").exit_code == 0


def test_names_of_a_wrapper_are_said_to_be_that(tmp_path: Path):
    write_checkpoint(tmp_path / "m.safetensors", {f"module.{name}": x for name, x in weights().items()}, {})
    result = invoke("publish", tmp_path / "m.safetensors", "--store", tmp_path / "store", "--once")
    assert result.exit_code == 0 and "note: all names begin with 'module.'" in result.stderr
