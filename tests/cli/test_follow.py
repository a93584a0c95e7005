"""thinwire follow: files, stores, relays, bases and saved states, and what ends it."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import signal
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commanded import holds, invoke, one_sentence, running, trained, weights
from torch import Tensor
from waiting import LONG, free_port, until

from thinwire.files.checkpoint import read_checkpoint, write_checkpoint
from thinwire.runs.terminal.live import Live
from thinwire.state.patches.patch import Version
from thinwire.types import InputError
from thinwire.uses.following.commands.following import Taking, _keep_up, line
from thinwire.uses.following.pull.store_writer import ShelfWriter
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("zstandard")
pytest.importorskip("safetensors")


def test_a_file_that_changes_is_followed(tmp_path: Path):
    """Both ends as processes; the follower is killed and goes on; Ctrl-C ends both; --exec hears of each."""
    file, out, saved, heard = (tmp_path / n for n in ("m.safetensors", "o.safetensors", "s", "heard"))
    first = weights()
    write_checkpoint(file, first, {})
    tell = f"echo $THINWIRE_VERSION $THINWIRE_FILE >> {heard}"
    with running(tmp_path, "publish", file, "--port", 0, "--store", tmp_path / "store") as publisher:
        at = publisher.says(r"follow (127\.0\.0\.1:\d+)")[1]
        options = ("--out", out, "--state", saved, "--exec", tell)
        with running(tmp_path, "follow", at, *options) as follower:
            until(lambda: holds(out, first) and saved.exists() and heard.exists(), "the first version")
            taken = invoke("publish", file, "--port", at.rpartition(":")[2])
            assert taken.exit_code == 2 and "choose another host or port" in one_sentence(taken.stderr)
            second = trained(first)
            write_checkpoint(file, second, {})
            until(lambda: holds(out, second), "the second version")
            until(lambda: heard.read_text().count("\n") == 2, "the command after it")
            follower.end(signal.SIGKILL)
        assert heard.read_text().splitlines() == [f"{n} {out}" for n in (1, 2)]
        third = trained(second)
        write_checkpoint(file, third, {})
        publisher.says("version 3, 2.")
        again = invoke("follow", at, "--once", *options)
        assert again.exit_code == 0, again.output
        assert holds(out, third)
        received = re.search(r"version 3, .*?, ([\d.]+) (k?B) received", again.stderr)
        assert received is not None and float(received[1]) * (1e3 if received[2] == "kB" else 1) < 2500
        stored = invoke("follow", tmp_path / "store", "--once", "--out", tmp_path / "p.safetensors")
        assert stored.exit_code == 0 and holds(tmp_path / "p.safetensors", third)
        assert publisher.end() == 0
        assert "interrupted" not in publisher.said and "Traceback" not in publisher.said


def test_a_follower_ends_by_ctrl_c_and_goes_on_from_its_state(tmp_path: Path, published):
    publisher, state, at = published
    saved = tmp_path / "saved"
    with running(tmp_path, "follow", at, "--state", saved) as follower:
        follower.says("version 1")
        state |= trained(state)
        publisher.publish()
        follower.says("version 2")
        assert follower.end(signal.SIGTERM) == 0
        assert "Traceback" not in follower.said
    found = json.loads(invoke("inspect", saved, "--check", "--json").stdout)
    assert (found["kind"], found["version"], found["checked"]) == ("saved state", 2, True)
    sent, delivered = publisher.sent, publisher.history.patch().nbytes
    assert invoke("follow", at, "--state", saved, "--once").exit_code == 0
    assert publisher.sent - sent < delivered / 2  # it held the newest one


def leave_part(file: Path) -> Path:
    """Return what somebody who wrote ``file`` left when it was killed, some time ago."""
    part = file.with_name(f".{file.name}.0a1b2c3d.part")
    part.write_bytes(b"half")
    os.utime(part, (1e9, 1e9))
    return part


def test_what_killed_followers_and_publishers_left_of_their_files_goes(tmp_path: Path, published):
    _, state, at = published
    out, saved = tmp_path / "o.safetensors", tmp_path / "saved"
    left = [leave_part(out), leave_part(saved)]
    assert invoke("follow", at, "--once", "--out", out, "--state", saved).exit_code == 0
    assert holds(out, state) and saved.exists() and not any(part.exists() for part in left)
    part = leave_part(saved)
    with Publisher(dict(state), state=saved) as publisher:
        publisher.publish()
    assert saved.exists() and not part.exists()


def test_a_store_that_goes_meanwhile_is_a_link_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with ShelfWriter.of(tmp_path / "store", weights()) as writer:
        writer.publish()

    def gone(*_: object) -> None:
        raise OSError("no route")  # as web servers and fsspec have it: without a file's name

    monkeypatch.setattr("thinwire.uses.following.commands.following.look", gone)
    result = invoke("follow", tmp_path / "store", "--once")
    assert result.exit_code == 3 and "cannot be read any more: no route" in one_sentence(result.stderr)


def test_a_store_that_began_anew_at_the_same_number_is_told_from_the_old_one(tmp_path: Path):
    store, out = tmp_path / "store", tmp_path / "o.safetensors"
    args = ("follow", store, "--once", "--out", out, "--state", tmp_path / "held.safetensors")
    for release in (weights(), trained(weights())):
        shutil.rmtree(store, ignore_errors=True)
        with ShelfWriter.of(store, release) as writer:
            writer.publish()
        result = invoke(*args)
        assert out.exists()
    assert result.exit_code == 3 and "is older than version 1, which is held" in one_sentence(result.stderr)
    assert holds(out, weights())


def test_a_store_is_followed_to_its_publisher_s_goodbye(tmp_path: Path):
    file, store, out = tmp_path / "m.safetensors", tmp_path / "store", tmp_path / "o.safetensors"
    write_checkpoint(file, weights(), {})
    for _ in range(2):
        assert invoke("publish", file, "--store", store, "--once").exit_code == 0
        write_checkpoint(file, trained(weights()), {})
    followed = invoke("follow", store, "--out", out)
    assert followed.exit_code == 0 and holds(out, trained(weights()))
    found = json.loads(invoke("inspect", store, "--check", "--json").stdout)
    assert found["versions"][0]["number"] == 1 and not found["alive"]
    assert sum(f["base"] == 0 for f in found["files"]) == 1  # the second publisher went on from the first's
    patch = store / next(f["name"] for f in found["files"] if f["version"] == found["version"])
    read = json.loads(invoke("inspect", patch, "--json").stdout)
    assert (read["kind"], read["version"]) == ("patch", found["version"])
    assert "60 × 40" in invoke("inspect", store).stdout
    data = bytearray(patch.read_bytes())
    data[-1] ^= 1
    patch.write_bytes(data)
    broken = invoke("inspect", store, "--check")
    assert broken.exit_code == 3 and "is damaged" in one_sentence(broken.stderr)


def test_a_store_with_a_token_is_read_with_it_alone(tmp_path: Path):
    (tmp_path / "a").write_text("a long shared token")
    (tmp_path / "b").write_text("another long token")
    with ShelfWriter.of(tmp_path / "store", weights(), token=b"a long shared token") as writer:
        writer.publish()
    for token, words in ((tmp_path / "b", "signed with another token"), (None, "is signed with a token")):
        option = () if token is None else ("--token-file", token)
        for command in (["follow", tmp_path / "store", "--once"], ["inspect", tmp_path / "store"]):
            result = invoke(*command, *option)
            assert result.exit_code == 3 and words in one_sentence(result.stderr)
    assert invoke("follow", tmp_path / "store", "--once", "--token-file", tmp_path / "a").exit_code == 0


def test_a_publisher_with_a_token_admits_its_holders_alone(tmp_path: Path):
    with Publisher(weights(), token=b"a long shared token") as publisher:
        publisher.publish()
        at = f"127.0.0.1:{publisher.port}"
        wrong = invoke("follow", at, "--once", THINWIRE_TOKEN="another long token")
        assert wrong.exit_code == 3 and "refused this token" in one_sentence(wrong.stderr)
        assert invoke("inspect", at, THINWIRE_TOKEN="another long token").exit_code == 3
        assert invoke("follow", at, "--once", THINWIRE_TOKEN="a long shared token").exit_code == 0


def test_a_base_that_is_here_needs_one_patch(tmp_path: Path, published):
    publisher, state, at = published
    base, out = tmp_path / "base.safetensors", tmp_path / "o.safetensors"
    write_checkpoint(base, state | {"b": state["b"].double()}, {})  # cast to what the state has
    state |= trained(state)
    publisher.publish()
    result = invoke("follow", at, "--base", base, "--out", out, "--once")
    assert result.exit_code == 0 and holds(out, state)
    patches = publisher.history.patch(1).nbytes
    assert patches < publisher.sent < 0.75 * publisher.history.patch().nbytes, (publisher.sent, patches)
    write_checkpoint(base, {"w": state["w"][:3]}, {})
    wrong = invoke("follow", at, "--base", base, "--once")
    assert wrong.exit_code == 2 and "w: shape (3, 40), expected (60, 40)" in one_sentence(wrong.stderr)


def test_a_base_is_let_go_of_once_a_follower_has_begun_with_it(
    tmp_path: Path, published, monkeypatch: pytest.MonkeyPatch
):
    _, state, at = published
    base, relay = tmp_path / "base.safetensors", f"127.0.0.1:{free_port()}"
    write_checkpoint(base, state, {})
    kept, left = list[weakref.ref[Tensor]](), list[int]()
    taking = Taking.take

    def read(path: Path) -> dict[str, Tensor]:
        found = read_checkpoint(path)
        kept.extend(weakref.ref(x) for x in found.values())
        return found

    def take(self: Taking, number: int) -> None:
        gc.collect()
        left.append(sum(ref() is not None for ref in kept))
        taking(self, number)

    monkeypatch.setattr("thinwire.uses.following.commands.following.read_checkpoint", read)
    monkeypatch.setattr(Taking, "take", take)
    result = invoke("follow", at, "--base", base, "--relay", relay, "--once")
    assert result.exit_code == 0, result.output
    assert len(kept) == len(state) and left == [0]


def test_a_relay_begins_with_the_base_and_then_with_its_state(tmp_path: Path):
    state, relay, sent = {"w": torch.randn(500, 400)}, f"127.0.0.1:{free_port()}", 0
    base, held, out = (tmp_path / n for n in ("base.safetensors", "held", "o"))
    write_checkpoint(base, state, {})
    with Publisher(state) as publisher:
        publisher.publish()
        at = f"127.0.0.1:{publisher.port}"
        for begin in (("--base", base, "--state", held), ("--state", held)):
            state["w"][:2] += 1
            version = publisher.publish()
            with running(tmp_path, "follow", at, "--relay", relay, *begin) as near:
                near.says(f"version {version.number}, ")
                late = invoke("follow", relay, "--out", out, "--once")
                assert late.exit_code == 0 and holds(out, state), late.output
                assert near.end() == 0
            sent, before = publisher.sent, sent
            assert sent - before < publisher.history.layout.nbytes / 10


def test_a_state_file_that_is_none_is_bad_input(tmp_path: Path, published):
    _, _, at = published
    held = tmp_path / "held.safetensors"
    for place in (at, tmp_path):
        for write in (lambda: held.write_bytes(b"nothing of ours"), lambda: write_checkpoint(held, {}, {})):
            write()
            result = invoke("follow", place, "--once", "--state", held)
            assert result.exit_code == 2 and f"{held} is not a saved state" in one_sentence(result.stderr)


def test_another_layout_ends_the_follower_in_a_sentence(tmp_path: Path, published):
    _, _, at = published
    other = Publisher({"w": torch.zeros(3)})
    other.publish()
    assert invoke("follow", f"127.0.0.1:{other.port}", "--once", "--state", tmp_path / "s").exit_code == 0
    other.close()
    result = invoke("follow", at, "--once", "--state", tmp_path / "s")
    assert result.exit_code == 2
    assert "w is bfloat16 [60, 40] at the publisher and float32 [3] here" in one_sentence(result.stderr)


def test_a_command_that_fails_is_told(tmp_path: Path, published):
    _, _, at = published
    result = invoke("follow", at, "--once", "--exec", "exit 7")
    assert result.exit_code == 3  # for cron
    assert result.stderr.count("--exec ended with code 7 at version 1") == 1


def test_a_full_disk_leaves_the_file_that_was_there(
    tmp_path: Path, published, monkeypatch: pytest.MonkeyPatch
):
    publisher, state, at = published
    out = tmp_path / "o.safetensors"
    assert invoke("follow", at, "--once", "--out", out).exit_code == 0
    first = dict(state)
    state |= trained(state)
    publisher.publish()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("thinwire.files.checkpoint.os.fsync", full)
    result = invoke("follow", at, "--once", "--out", out)
    assert result.exit_code == 2
    assert f"the disk is full: cannot write {out}; free space" in one_sentence(result.stderr)
    assert holds(out, first) and list(tmp_path.iterdir()) == [out]


def test_what_cannot_be_written_is_told_once_and_written_later(
    tmp_path: Path, published, monkeypatch: pytest.MonkeyPatch
):
    """A folder that is removed, and comes back: neither --out nor --state ends who follows, nor is stale."""
    publisher, state, _ = published
    for name in ("RETRY", "STATE_EVERY"):
        monkeypatch.setattr(f"thinwire.uses.following.commands.following.{name}", 0.01)
    notes: list[str] = []
    monkeypatch.setattr("thinwire.runs.terminal.live.Live.note", lambda _, text: notes.append(text))
    (kept := tmp_path / "kept").mkdir()
    out, saved = kept / "o.safetensors", kept / "saved"

    def back() -> None:
        state["b"].add_(1)
        publisher.publish()  # meanwhile: it is the newest that is written then
        time.sleep(0.2)
        (tmp_path / "gone").rename(kept)

    with Follower("127.0.0.1", publisher.port, state=saved) as f:
        taking = Taking(f, out, saved, None, Live(str, quiet=True))
        taking.take(f.wait().number)
        kept.rename(tmp_path / "gone")
        state["b"].add_(1)
        newest = f.wait(publisher.publish().number).number
        later = threading.Timer(0.2, back)
        later.start()
        taking.take(newest)
        later.join()
        taking.take(f.wait(newest + 1).number)
        assert holds(out, state)
        kept.rename(tmp_path / "gone")
        taking._save()
        taking._save()
        (tmp_path / "gone").rename(kept)
        taking._save()
    lost, written, unsaved, again = notes
    assert re.fullmatch(f"note: cannot use {out}: No such file or directory; .*; it is tried again", lost)
    assert written == f"note: {out} can be written again"
    assert f"note: cannot save a state to {saved}: " in unsaved
    assert again == f"note: {saved} can be written again"


def test_versions_are_taken_at_most_so_often(monkeypatch: pytest.MonkeyPatch):
    taken: list[float] = []
    now = [100.0]

    class Recorder:
        def take(self, number: int) -> None:
            taken.append(now[0])
            now[0] += 0.01 if number < 3 else 5.0  # to write one may take longer than the pause

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr("thinwire.uses.following.commands.following.time", clock)
    _keep_up([Version(n) for n in (1, 2, 3, 4)], Recorder(), 2.0)  # type: ignore[arg-type]
    assert taken == pytest.approx([100.0, 102.0, 104.0, 109.0])


def test_a_state_that_is_not_written_is_held_once(published):
    publisher, state, _ = published
    with Follower("127.0.0.1", publisher.port) as f:
        taking = Taking(f, None, None, None, Live(str, quiet=True))
        for step in range(2, 4):
            taking.take(f.wait(publisher.publish(step, trained(state)).number).number)
            assert f.replica.held.number == step
        with pytest.raises(InputError, match="nothing is in front"):
            f.replica.tensors()


@pytest.mark.parametrize("once", [("--once",), ()], ids=["once", "on"])
def test_nobody_there_is_a_link_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: tuple[str, ...]):
    monkeypatch.setattr("thinwire.runs.terminal.live.FIRST", 0.1)
    monkeypatch.setattr("thinwire.runs.terminal.live.FRESH", 0.05)
    at = f"127.0.0.1:{free_port()}"
    result = invoke("follow", at, "--patience", "0.5", *once)
    told = one_sentence(result.stderr)
    assert result.exit_code == 3 and at in told and "nothing answered there" in told
    assert f"a firewall lets TCP port {at.rpartition(':')[2]} through" in told
    assert f"nothing yet; nothing answers at {at}\n" in result.stderr  # while it waited
    for place in (tmp_path, tmp_path / "missing"):
        result = invoke("follow", place, "--patience", "0.5", "--poll", "0.1", *once)
        told = one_sentence(result.stderr)
        assert result.exit_code == 3 and told.count(str(place)) == 1
        assert "no state is published there yet; check the path" in told and "Errno" not in told


@pytest.mark.parametrize("once", [("--once",), ()], ids=["once", "on"])
def test_a_publisher_is_no_web_server(published, monkeypatch: pytest.MonkeyPatch, once: tuple[str, ...]):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    _, _, at = published
    result = invoke("follow", f"http://{at}", *once)
    assert result.exit_code == 2 and f"follow it as {at}, without http://" in one_sentence(result.stderr)


def test_a_publisher_without_a_version_is_told_from_none_at_all(tmp_path: Path):
    with Publisher(weights()) as publisher:
        at = f"127.0.0.1:{publisher.port}"
        result = invoke("follow", at, "--once", "--patience", "3")
        assert result.exit_code == 3
        assert f"no version came from {at} within 3 s: it is connected; see" in one_sentence(result.stderr)
        with Follower("127.0.0.1", publisher.port) as follower:
            until(lambda: line(follower) == f"nothing yet; connected to {at}", "the connection")
            publisher.close()
            until(lambda: line(follower) == f"nothing yet; {at} is gone, dialling", "its end")
            assert follower.reached and "it answered before, and is gone" in follower.diagnosis()


def test_a_state_that_is_too_large_ends_the_command_at_once(tmp_path: Path, published):
    publisher, _, at = published
    store, held = tmp_path / "store", tmp_path / "held"
    with ShelfWriter(store, publisher.history) as writer:
        writer.offer()
        writer.flush()
    began = time.monotonic()
    for place in (store, at):
        for command in (("follow",), ("follow", "--once"), ("inspect",)):
            result = invoke(*command, place, "--max-gb", "0.000001")
            told = one_sentence(result.stderr)
            assert result.exit_code == 3 and told.startswith(f"thinwire: {place}: a state of "), told
            assert "is over the limit of 1000; " in told and told.endswith("take it with --max-gb 0.001")
            assert "max_nbytes" not in told
    assert time.monotonic() - began < LONG  # and not their patience
    assert invoke("follow", store, "--once", "--max-gb", "0.001", "--state", held).exit_code == 0
    result = invoke("follow", store, "--once", "--max-gb", "0.000001", "--state", held)
    assert result.exit_code == 2 and "--state: a state of " in one_sentence(result.stderr)


def test_what_links_lead_to_is_written(tmp_path: Path, published):
    _, state, at = published
    (tmp_path / "there").mkdir()
    out, saved = tmp_path / "out", tmp_path / "saved"
    for link in (out, saved):
        link.symlink_to(tmp_path / "there" / link.name)
    known = invoke("follow", at, "--once", "--out", out, "--state", saved)
    assert known.exit_code == 0, known.output
    assert holds(tmp_path / "there" / "out", state) and saved.is_file()
    assert out.is_symlink() and saved.is_symlink()
