"""publish, follow and inspect: real processes over loopback where they talk, in process where they refuse."""

from __future__ import annotations

import errno
import gc
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from slow_proxy import SlowProxy
from thinwire.cli.app import app
from thinwire.cli.follow import Taking, _keep_up, line
from thinwire.cli.live import Live, warned
from thinwire.cli.places import Address, parse_place
from thinwire.cli.publish import parse_bounds
from thinwire.engines.sync.checkpoint import INDEX, read_checkpoint, read_header, write_checkpoint
from thinwire.engines.sync.folder import PlainFolder, open_folder
from thinwire.engines.sync.follower import Follower
from thinwire.engines.sync.peek import ask, look
from thinwire.engines.sync.publisher import Publisher
from thinwire.engines.sync.shelf import ShelfWriter
from thinwire.engines.sync.watch import PART_REST, REST, Watch
from thinwire.lab.network import Interface
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patch import Version
from thinwire.types import InputError, MissingExtra

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("zstandard")
pytest.importorskip("safetensors")
LONG = 90.0  # seconds; a limit, not an expectation
PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "110", "THINWIRE_TOKEN": None}
PORTS = iter(range(20_000 + os.getpid() % 10_000, 32_000))
KEPT = {k: v for k, v in os.environ.items() if k not in ("THINWIRE_DEBUG", "THINWIRE_TOKEN")}


def weights(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(60, 40, generator=g).bfloat16(),
        "b": torch.randn(7, generator=g),
        "one": torch.tensor(3),
        "none": torch.empty(0, 4),
        "mask": torch.tensor([True, False, True]),
    }


def trained(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"w": torch.where(torch.arange(40) == 7, state["w"] * 1.5, state["w"])}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(x.dtype == b[n].dtype and torch.equal(x, b[n]) for n, x in a.items())


def invoke(*arguments: object, **environment: str):
    return CliRunner(env=PLAIN | environment).invoke(app, [str(a) for a in arguments])


def one_sentence(text: str) -> str:
    line = text.strip().splitlines()[-1]
    assert line.startswith("thinwire: ") and "Traceback" not in text
    return line


def until(done: Callable[[], object], what: str) -> None:
    ends = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < ends, what
        time.sleep(0.05)


class Running:
    """A thinwire process, and what it has said on stderr so far."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.log = folder / f"{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "thinwire", *map(str, arguments)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=KEPT | {"OMP_NUM_THREADS": "1"}
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, words: str) -> re.Match[str]:
        until(lambda: re.search(words, self.said) or self.process.poll() is not None, f"{words}: {self.said}")
        found = re.search(words, self.said)
        assert found is not None, self.said
        return found

    def end(self, how: int = signal.SIGINT) -> int:
        self.process.send_signal(how)
        return self.process.wait(LONG)


def free_port() -> int:
    """Return another port that nobody listens at, of those that the system gives to nobody by itself."""
    for port in PORTS:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


Script = Generator[Callable[[], object], None, None]


def newest(shelf: Path) -> int:
    """Return the number of a store's newest version; 0 before the first."""
    try:
        found = look(open_folder(shelf))[0].newest
    except OSError:
        return 0
    return found.number if found is not None else 0


def meanwhile(monkeypatch: pytest.MonkeyPatch, script: Script) -> list[str]:
    """Play a script while ``publish`` looks after its file, in this process; return what it tells people.

    Whenever the command pauses, the script goes on if what it waits for is so; its end is a Ctrl-C.
    """
    notes: list[str] = []
    waits = [next(script), time.monotonic() + LONG]

    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, 0.02))
        assert time.monotonic() < waits[1], notes
        if waits[0]():
            try:
                waits[:] = [next(script), time.monotonic() + LONG]
            except StopIteration:
                raise KeyboardInterrupt from None

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr("thinwire.cli.publish.time", clock)
    monkeypatch.setattr("thinwire.cli.live.Live.note", lambda _, text: notes.append(text))
    return notes


@contextmanager
def running(folder: Path, *arguments: object) -> Iterator[Running]:
    found = Running(folder, *arguments)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()
            found.process.wait()


def holds(path: Path, state: dict[str, Tensor]) -> bool:
    return path.exists() and same(read_checkpoint(path), state)


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[Publisher, dict[str, Tensor], str]]:
    """A publisher in this process that has one version, its state and its address."""
    state = weights()
    with Publisher(state, name="policy") as publisher:
        publisher.publish(step=1)
        yield publisher, state, f"127.0.0.1:{publisher.port}"


def test_a_file_that_changes_is_followed(tmp_path: Path):
    """Both ends as processes; the follower is killed and goes on; Ctrl-C ends both; --exec hears of each."""
    file, out, saved, heard = (tmp_path / n for n in ("m.safetensors", "o.safetensors", "s", "heard"))
    first = weights()
    write_checkpoint(file, first, {})
    tell = f"echo $THINWIRE_VERSION $THINWIRE_FILE >> {heard}"
    with running(tmp_path, "publish", file, "--port", 0, "--store", tmp_path / "shelf") as publisher:
        at = publisher.wait_for(r"follow (127\.0\.0\.1:\d+)")[1]
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
        publisher.wait_for("version 3, 2.")
        again = invoke("follow", at, "--once", *options)
        assert again.exit_code == 0, again.output
        assert holds(out, third)
        received = re.search(r"version 3, .*?, ([\d.]+) (k?B) received", again.stderr)
        assert received is not None and float(received[1]) * (1e3 if received[2] == "kB" else 1) < 2500
        stored = invoke("follow", tmp_path / "shelf", "--once", "--out", tmp_path / "p.safetensors")
        assert stored.exit_code == 0 and holds(tmp_path / "p.safetensors", third)
        assert publisher.end() == 0
        assert "interrupted" not in publisher.said and "Traceback" not in publisher.said


def test_a_follower_ends_by_ctrl_c_and_goes_on_from_its_state(tmp_path: Path, published):
    publisher, state, at = published
    saved = tmp_path / "saved"
    with running(tmp_path, "follow", at, "--state", saved) as follower:
        follower.wait_for("version 1")
        state |= trained(state)
        publisher.publish()
        follower.wait_for("version 2")
        assert follower.end(signal.SIGTERM) == 0
        assert "Traceback" not in follower.said
    found = json.loads(invoke("inspect", saved, "--check", "--json").stdout)
    assert (found["kind"], found["version"], found["checked"]) == ("saved state", 2, True)
    sent, delivered = publisher.sent, publisher.history.patch().nbytes
    assert invoke("follow", at, "--state", saved, "--once").exit_code == 0
    assert publisher.sent - sent < delivered / 2  # it held the newest one


def test_a_publisher_saves_its_state_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, kept = tmp_path / "in.safetensors", tmp_path / "kept"
    kept.mkdir()
    saved = kept / "saved"
    write_checkpoint(file, weights(), {})
    monkeypatch.setattr("thinwire.cli.publish.SAVE_EVERY", 0.0)

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
        yield lambda: version() == 3

    notes = meanwhile(monkeypatch, script())
    result = invoke("publish", file, "--port", "0", "--state", saved, "--quiet")
    assert result.exit_code == 0, result.output
    assert json.loads(invoke("inspect", saved, "--check", "--json").stdout)["version"] == 3


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


def test_meta_data_does_not_pass_for_what_a_file_is(tmp_path: Path):
    names = ("kind", "where", "nbytes", "checked", "version", "hash", "base", "tensors", "files", "published")
    history = History(Layout.of(weights()))
    history.publish(weights(), dict.fromkeys(names, "evil") | {"x_nbytes": "evil"})
    with ShelfWriter(tmp_path / "shelf", history) as writer:
        writer.offer()
        writer.flush()
    history.save(tmp_path / "saved")
    patch = next((tmp_path / "shelf").rglob("*.safetensors"))
    write_checkpoint(
        tmp_path / "m.safetensors", weights(), dict.fromkeys(names, "evil") | {"x_nbytes": "evil"}
    )
    for path, kind in (
        (patch, "keyframe"),
        (tmp_path / "saved", "saved state"),
        (tmp_path / "m.safetensors", ""),
    ):
        found = json.loads(invoke("inspect", path, "--json").stdout)
        assert found["kind"] == (kind or "checkpoint") and found["where"] == str(path)
        assert found["nbytes"] == path.stat().st_size and "checked" not in found
        if kind:
            assert found["version"] == 1 and len(found["hash"]) == 16 and found["published"] != "evil"
        shown = invoke("inspect", path)
        assert shown.exit_code == 0 and "x nbytes: evil" in shown.stdout, shown.output


def damage(path: Path) -> None:
    """Turn a bit of the last tensor in a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("bounds", [None, {"b": 0.01}], ids=["exact", "bound"])
def test_a_check_of_a_followed_file_reads_its_tensors(tmp_path: Path, bounds: dict[str, float] | None):
    """The layout's order and bounds are not in the file, and its names are."""
    out, moved = tmp_path / "o.safetensors", tmp_path / "moved"
    with Publisher(weights(), bounds=bounds) as publisher:
        publisher.publish(reason="better")
        assert invoke("follow", f"127.0.0.1:{publisher.port}", "--once", "--out", out).exit_code == 0
    whole = json.loads(invoke("inspect", out, "--check", "--json").stdout)
    assert (whole["checked"], whole["reason"]) == (True, "better")
    data = out.read_bytes()
    for old, new in ((b'"w":', b'"v":'), (whole["thinwire.hash"].encode(), b"0" * 16)):
        moved.write_bytes(data.replace(old, new))
        assert invoke("inspect", moved, "--check").exit_code == 3, new
    damage(out)
    broken = invoke("inspect", out, "--check")
    assert broken.exit_code == 3 and "was damaged or written to" in one_sentence(broken.stderr)
    assert invoke("inspect", out).exit_code == 0


def test_a_check_says_where_there_is_no_hash_to_check(tmp_path: Path):
    file = tmp_path / "m.safetensors"
    write_checkpoint(file, weights(), {})
    result = invoke("inspect", file, "--check")
    assert result.exit_code == 0 and "checked: no, it carries no hash\n" in result.stdout
    found = json.loads(invoke("inspect", file, "--check", "--json").stdout)
    assert (found["checked"], found["reason"]) == (False, "it carries no hash")
    write_checkpoint(file, weights(), {"thinwire.hash": "0"})
    file.write_bytes(file.read_bytes().replace(b"thinwire.imprint", b"thinwire.another"))  # of an older one
    assert "checked: no, its hash needs an order" in invoke("inspect", file, "--check").stdout


def test_a_damaged_saved_state_is_exit_code_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved = tmp_path / "saved"
    history = History(Layout.of(weights()))
    history.publish(weights())
    history.save(saved)
    assert json.loads(invoke("inspect", saved, "--check", "--json").stdout)["checked"] is True
    damage(saved)
    broken = invoke("inspect", saved, "--check")
    assert broken.exit_code == 3 and "was damaged" in one_sentence(broken.stderr)

    def missing(_: Path) -> None:
        raise MissingExtra("saving a state needs safetensors: pip install 'thinwire[store]'")

    monkeypatch.setattr("thinwire.engines.sync.notes.Replica.load", missing)
    assert invoke("inspect", saved, "--check").exit_code == 2


def test_a_check_of_a_publisher_lasts_as_long_as_its_state_comes(tmp_path: Path, published):
    _, _, at = published
    found = json.loads(invoke("inspect", at, "--check", "--json", "--patience", "20").stdout)
    assert (found["checked"], found["version"]) == (True, 1)
    big = Publisher({"w": torch.randn(400_000)})
    with big, SlowProxy(big.port, 400e3) as proxy:
        slow = f"127.0.0.1:{proxy.port}"
        assert json.loads(invoke("inspect", slow, "--check", "--json").stdout)["checked"] is False
        big.publish()
        began = time.monotonic()
        result = invoke("inspect", slow, "--check", "--json", "--patience", "0.5")
        assert result.exit_code == 0, result.output
        assert time.monotonic() - began > 1.0  # longer than its patience


def test_a_store_that_goes_meanwhile_is_a_link_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with ShelfWriter.of(tmp_path / "shelf", weights()) as writer:
        writer.publish()

    def gone(*_: object) -> None:
        raise OSError("no route")  # as web servers and fsspec have it: without a file's name

    monkeypatch.setattr("thinwire.cli.follow.look", gone)
    result = invoke("follow", tmp_path / "shelf", "--once")
    assert result.exit_code == 3 and "cannot be read any more: no route" in one_sentence(result.stderr)


def test_what_the_library_warns_of_is_a_plain_line(capsys: pytest.CaptureFixture[str]):
    with warned():
        warnings.warn("the last publisher did not say goodbye\x1b[2J", stacklevel=1)
    assert capsys.readouterr().err == "the last publisher did not say goodbye?[2J\n"
    with pytest.warns(UserWarning, match="as before"):
        warnings.warn("as before", stacklevel=1)


def test_a_store_is_followed_to_its_publisher_s_goodbye(tmp_path: Path):
    file, shelf, out = tmp_path / "m.safetensors", tmp_path / "shelf", tmp_path / "o.safetensors"
    write_checkpoint(file, weights(), {})
    for _ in range(2):
        assert invoke("publish", file, "--store", shelf, "--once").exit_code == 0
        write_checkpoint(file, trained(weights()), {})
    followed = invoke("follow", shelf, "--out", out)
    assert followed.exit_code == 0 and holds(out, trained(weights()))
    found = json.loads(invoke("inspect", shelf, "--check", "--json").stdout)
    assert found["versions"][0]["number"] == 1 and not found["alive"]
    assert sum(f["base"] == 0 for f in found["files"]) == 1  # the second publisher went on from the first's
    patch = shelf / next(f["name"] for f in found["files"] if f["version"] == found["version"])
    read = json.loads(invoke("inspect", patch, "--json").stdout)
    assert (read["kind"], read["version"]) == ("patch", found["version"])
    assert "60 × 40" in invoke("inspect", shelf).stdout
    data = bytearray(patch.read_bytes())
    data[-1] ^= 1
    patch.write_bytes(data)
    broken = invoke("inspect", shelf, "--check")
    assert broken.exit_code == 3 and "is damaged" in one_sentence(broken.stderr)


def test_a_store_with_a_token_is_read_with_it_alone(tmp_path: Path):
    (tmp_path / "a").write_text("a long shared token")
    (tmp_path / "b").write_text("another long token")
    with ShelfWriter.of(tmp_path / "shelf", weights(), token=b"a long shared token") as writer:
        writer.publish()
    for token, words in ((tmp_path / "b", "signed with another token"), (None, "is signed with a token")):
        option = () if token is None else ("--token-file", token)
        for command in (["follow", tmp_path / "shelf", "--once"], ["inspect", tmp_path / "shelf"]):
            result = invoke(*command, *option)
            assert result.exit_code == 3 and words in one_sentence(result.stderr)
    assert invoke("follow", tmp_path / "shelf", "--once", "--token-file", tmp_path / "a").exit_code == 0


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

    monkeypatch.setattr("thinwire.cli.follow.read_checkpoint", read)
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
                near.wait_for(f"version {version.number}, ")
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


@pytest.mark.parametrize("outlet", [("--port", "0"), ()], ids=["push", "pull"])
def test_a_file_that_no_longer_fits_is_told_and_the_publisher_goes_on(tmp_path: Path, monkeypatch, outlet):
    file, shelf = tmp_path / "m.safetensors", tmp_path / "shelf"
    write_checkpoint(file, {"w": torch.zeros(3)}, {})
    others = [
        ({"w": torch.zeros(4)}, r"w: shape \(4,\), expected \(3,\); "),
        ({"w": torch.zeros(3), "v": torch.zeros(3)}, "v is not in the layout of this state; "),
        ({"w": torch.tensor([0.0, math.nan, 0.0])}, "w"),
    ]

    def script() -> Script:
        yield lambda: newest(shelf) == 1
        for tensors, why in others:
            told = len(notes)
            write_checkpoint(file, tensors, {})
            yield lambda told=told: len(notes) > told
            assert re.search(f"{file} does not fit what is published: {why}.*a new publisher", notes[-1])
            assert notes[-1].endswith("version 1 stays the newest")
        write_checkpoint(file, {"w": torch.ones(3)}, {})
        yield lambda: newest(shelf) == 2

    notes = meanwhile(monkeypatch, script())
    result = invoke("publish", file, "--store", shelf, "--bound", "1e-3", "--quiet", *outlet)
    assert result.exit_code == 0, result.output
    assert invoke("follow", shelf, "--once", "--out", tmp_path / "o").exit_code == 0
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
            patched.setattr("thinwire.cli.publish.interfaces", lambda found=found: found)
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

    monkeypatch.setattr("thinwire.cli.publish.Publisher", Known)
    meanwhile(monkeypatch, script())
    result = invoke("publish", file, "--port", "0", "--quiet")
    assert result.exit_code == 3, result.output
    assert f"the hub at 127.0.0.1:{made[0].port}" in one_sentence(result.stderr)


def test_half_a_file_is_never_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, whole, shelf = tmp_path / "m.safetensors", tmp_path / "whole", tmp_path / "shelf"
    write_checkpoint(file, weights(), {})
    write_checkpoint(whole, trained(weights()), {})
    data = whole.read_bytes()

    def script() -> Script:
        yield lambda: True
        with file.open("wb") as written:  # in place, and with a pause that is too long
            written.write(data[: len(data) // 2])
            written.flush()
            yield lambda: "note: cannot read" in notes[-1]
            written.write(data[len(data) // 2 :])
        yield lambda: newest(shelf) == 2

    notes = meanwhile(monkeypatch, script())
    result = invoke("publish", file, "--store", shelf)
    assert result.exit_code == 0, result.output
    assert re.search("cut short .* version 1 stays the newest", notes[-1])
    assert invoke("follow", shelf, "--once", "--out", tmp_path / "o").exit_code == 0
    assert holds(tmp_path / "o", trained(weights()))


def test_one_version_goes_to_the_followers_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, followers = tmp_path / "m.safetensors", []
    write_checkpoint(file, weights(), {})
    relay, port = f"127.0.0.1:{free_port()}", free_port()

    def script() -> Script:
        yield lambda: True
        found = ask("127.0.0.1", port).layout.slots
        assert {str(slot.dtype) for slot in found} == {"torch.float16", "torch.int64", "torch.bool"}
        followers.append(Running(tmp_path, "follow", f"127.0.0.1:{port}", "--relay", relay))
        yield lambda: False

    meanwhile(monkeypatch, script())
    try:
        result = invoke("publish", file, "--port", port, "--once", "--dtype", "fp16")
        assert result.exit_code == 0, result.output
        late = invoke("follow", relay, "--out", tmp_path / "o", "--once")  # from the relay alone
        assert late.exit_code == 0, late.output
        followers[0].wait_for(f"version 1, .* at {relay}")
        assert followers[0].end() == 0
    finally:
        for follower in followers:
            follower.process.kill()
            follower.process.wait()
    assert read_checkpoint(tmp_path / "o")["w"].dtype is torch.float16


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

    monkeypatch.setattr("thinwire.engines.sync.checkpoint.os.fsync", full)
    result = invoke("follow", at, "--once", "--out", out)
    assert result.exit_code == 2
    assert f"the disk is full: cannot write {out}; free space" in one_sentence(result.stderr)
    assert holds(out, first) and list(tmp_path.iterdir()) == [out]


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
    monkeypatch.setattr("thinwire.engines.sync.shelf_writer.RETRY", 0.1)
    result = invoke("publish", file, "--once", "--store", tmp_path / "shelf")
    if heals:
        assert result.exit_code == 0, result.stderr
    else:
        assert result.exit_code == 2
        assert one_sentence(result.stderr).endswith("shelf; free space there")


def test_nobody_to_inspect_is_said_at_once():
    port = free_port()
    result = invoke("inspect", f"127.0.0.1:{port}")
    said = one_sentence(result.stderr)
    assert result.exit_code == 3 and f"nothing listens at 127.0.0.1:{port} " in said
    assert "; start thinwire publish there" in said


def test_versions_are_taken_at_most_so_often(monkeypatch: pytest.MonkeyPatch):
    taken: list[float] = []
    now = [100.0]

    class Recorder:
        def take(self, number: int) -> None:
            taken.append(now[0])
            now[0] += 0.01 if number < 3 else 5.0  # to write one may take longer than the pause

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr("thinwire.cli.follow.time", clock)
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


def test_on_a_terminal_one_line_is_kept_fresh(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("thinwire.cli.live.FRESH", 0.01)
    with Live(lambda: "x" * 500) as live:
        until(lambda: terminal.getvalue().count("\r") > 3, "the line")
        live.note("look")
    lines = terminal.getvalue().split("\r\x1b[K")
    assert "look\n" in lines and lines[-1].endswith("\n")
    assert max(map(len, lines)) < 500 and terminal.getvalue().count("\n") == 2


@pytest.mark.parametrize("once", [("--once",), ()], ids=["once", "on"])
def test_nobody_there_is_a_link_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: tuple[str, ...]):
    monkeypatch.setattr("thinwire.cli.live.FIRST", 0.1)
    monkeypatch.setattr("thinwire.cli.live.FRESH", 0.05)
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
    shelf, held = tmp_path / "shelf", tmp_path / "held"
    with ShelfWriter(shelf, publisher.history) as writer:
        writer.offer()
        writer.flush()
    began = time.monotonic()
    for place in (shelf, at):
        for command in (("follow",), ("follow", "--once"), ("inspect",)):
            result = invoke(*command, place, "--max-gb", "0.000001")
            told = one_sentence(result.stderr)
            assert result.exit_code == 3 and told.startswith(f"thinwire: {place}: a state of "), told
            assert "is over the limit of 1000; " in told and told.endswith("take it with --max-gb 0.001")
            assert "max_nbytes" not in told
    assert time.monotonic() - began < LONG  # and not their patience
    assert invoke("follow", shelf, "--once", "--max-gb", "0.001", "--state", held).exit_code == 0
    result = invoke("follow", shelf, "--once", "--max-gb", "0.000001", "--state", held)
    assert result.exit_code == 2 and "--state: a state of " in one_sentence(result.stderr)


WRONG = [
    (["publish", "nowhere.safetensors"], "nowhere.safetensors is not there"),
    (["publish", "{no}"], "not safetensors"),
    (["publish", "{empty}"], "has no safetensors file"),
    (["publish", "{m}", "--dtype", "int3"], "one of bf16, fp16, fp32"),
    (["publish", "{m}", "--bound", "much"], "--bound 'much'"),
    (["publish", "{m}", "--bound", "nobody=0.1"], "no tensor here; there are "),
    (["publish", "{m}", "--bound", "1e-300"], "bound=1e-300 is not in "),
    (["publish", "{m}", "--port", "0", "--name", " "], "--name is empty"),
    (["publish", "{m}", "--port", "0", "--name", "a\x1b[1m"], r"the name 'a\x1b[1m' is no text"),
    (["publish", "{m}", "--store", "{empty}", "--name", ""], "--name is empty"),
    (["publish", "{m}", "--port", "70000"], "--port is 70000"),
    (["publish", "{m}", "--rest", "0"], "--rest is 0"),
    (["publish", "{m}", "--rest", "inf"], "--rest is inf"),
    (["publish", "{m}", "--host", "0.0.0.0", "--port", "0"], "needs a shared token"),
    (["publish", "{m}", "--store", "{no}/shelf"], "cannot write to"),
    (["publish", "{m}", "--store", "", "--once"], "--store is empty"),
    (["publish", "{m}", "--store", " ", "--once"], "--store is empty"),
    (
        ["publish", "{m}", "--port", "0", "--store", "{no}/shelf", "--state", " "],
        "--state is empty",
    ),
    (["publish", "{m}", "--state", ""], "--state is empty"),
    (["publish", "{m}", "--state", "nowhere/s"], "cannot write --state nowhere/s: nowhere is no folder"),
    (["publish", "{m}", "--state", "{empty}"], "it is a folder"),
    (["publish", "{m}", "--state", "{m}"], "is in what is published"),
    (
        ["publish", "{m}", "--port", "0", "--state", "{no}"],
        "delete it, and the state will come whole",
    ),
    (["publish"], "FILE"),
    (["follow", "nowhere"], "'nowhere' is not here, and it is not HOST:PORT"),
    (["follow", "127.0.0.1:x"], "127.0.0.1:x"),
    (["follow", "192.0.2.7:7200"], "needs a shared token"),
    (["follow", "./s", "--relay", "127.0.0.1:7201"], "a store needs no relay"),
    (["follow", "127.0.0.1:9", "--relay", "127.0.0.1:0"], "is not HOST"),
    (["follow", "127.0.0.1:9", "--out", "nowhere/o"], "nowhere is no folder"),
    (["follow", "127.0.0.1:9", "--out", "{empty}"], "is a folder"),
    (["follow", "127.0.0.1:9", "--every", "-1"], "--every is -1"),
    (["follow", "127.0.0.1:9", "--patience", "0"], "--patience is 0"),
    (["follow", "127.0.0.1:9", "--patience", "inf"], "--patience is inf; it must be above 0 seconds"),
    (["follow", "127.0.0.1:9", "--every", "nan"], "--every is nan; it must be at least 0 seconds"),
    (["follow", "127.0.0.1:9", "--exec-timeout", "2e9"], "--exec-timeout is 2e+09"),
    (["follow", "./s", "--poll", "inf"], "and at most 1e+09"),
    (["follow", "127.0.0.1:9", "--out", "{pipe}"], "no regular file; choose another --out"),
    (["follow", "127.0.0.1:9", "--state", "{link}"], "no regular file; choose another --state"),
    (["publish", "{m}", "--port", "0", "--state", "{pipe}"], "no regular file"),
    (["follow", "127.0.0.1:9", "--out", "{no}", "--state", "{empty}/../no"], "give each a file of its own"),
    (["follow", "127.0.0.1:9", "--base", "{no}"], "not safetensors"),
    (["inspect", "{no}"], "not safetensors"),
    (["inspect", "{empty}"], "holds no state"),
    (["inspect", "{m}", "--patience", "0"], "--patience is 0"),
    (["inspect", "{m}", "--patience", "inf"], "--patience is inf"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=lambda v: v if isinstance(v, str) else v[0])
def test_wrong_input_is_one_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
):
    monkeypatch.chdir(tmp_path)
    places = {"m": tmp_path / "m.safetensors", "no": tmp_path / "no", "empty": tmp_path / "empty"}
    write_checkpoint(places["m"], weights(), {})
    places["no"].write_text("not a model")
    places["empty"].mkdir()
    places |= {"pipe": tmp_path / "pipe", "link": tmp_path / "link"}
    os.mkfifo(places["pipe"])
    places["link"].symlink_to(places["pipe"])
    result = invoke(*[a.format(**places) for a in arguments])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert words in one_sentence(result.stderr)
    assert places["pipe"].is_fifo() and places["link"].is_symlink()


@pytest.mark.parametrize("early", ["Watch.first", "Outlets.listen", "Outlets.keep"])
def test_a_ctrl_c_before_the_first_version_ends_a_publisher_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: str
):
    file = tmp_path / "m.safetensors"
    write_checkpoint(file, weights(), {})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"thinwire.cli.publish.{early}", interrupted)
    command = ["publish", file, "--port", 0, "--store", tmp_path / "shelf", "--quiet"]
    result = invoke(*command)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert invoke(*command, "--once").exit_code == 130


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


def test_places_and_bounds_are_read():
    assert parse_place("[::1]:7200") == Address("::1", 7200)
    assert parse_place("C:\\" if os.sep == "\\" else "/a") in ("C:\\", "/a")
    assert parse_bounds([]) is None
    for wrong in (["1", "2=3"], ["0"], ["a="]):
        with pytest.raises(InputError, match="--bound"):
            parse_bounds(wrong)


def test_checkpoints_are_read_and_written_as_safetensors_does(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    state = weights()
    write_checkpoint(tmp_path / "ours", state, {"step": "7"})
    save_file(state, tmp_path / "theirs")
    assert same(load_file(tmp_path / "ours"), state)
    assert same(read_checkpoint(tmp_path / "theirs"), state)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours", "theirs"]  # nothing temporary is left


def test_a_folder_is_one_state(tmp_path: Path):
    write_checkpoint(tmp_path / "a.safetensors", {"a": torch.ones(3)}, {})
    write_checkpoint(tmp_path / "b.safetensors", {"b": torch.ones(2)}, {})
    assert read_checkpoint(tmp_path).keys() == {"a", "b"}
    index = {"weight_map": {"a": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_checkpoint(tmp_path).keys() == {"a"}
    (tmp_path / "model.safetensors.index.json").unlink()
    write_checkpoint(tmp_path / "c.safetensors", {"a": torch.ones(3)}, {})
    with pytest.raises(InputError, match="a is in two files"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("cut", [0, 7, 8, 40, -1])
def test_a_damaged_file_is_refused(tmp_path: Path, cut: int):
    file = tmp_path / "m.safetensors"
    write_checkpoint(file, weights(), {})
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(InputError, match="cannot read"):
        read_checkpoint(file)


@pytest.mark.parametrize("shape", [[0, 2**70], [0, 2**62, 8]])
def test_a_shape_that_no_tensor_has_is_refused(tmp_path: Path, shape: list[int]):
    file = tmp_path / "m.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InputError, match=r"cannot read .*w is not where the header says"):
        read_checkpoint(file)


def test_notes_of_any_name_leave_the_format_s_own(tmp_path: Path):
    file = tmp_path / "m.safetensors"
    write_checkpoint(file, weights(), {"format": "v3", "step": "1"})
    data = file.read_bytes()
    assert read_header(data, len(data))[1] == {"format": "pt", "step": "1"}


def test_a_watch_tells_each_change_once_it_rests(tmp_path: Path):
    file = tmp_path / "m.safetensors"
    write_checkpoint(file, weights(), {})
    watch = Watch(file, rest=0.05)
    assert watch.first().keys() == weights().keys()
    assert not watch.changed()
    write_checkpoint(file, trained(weights()), {})
    assert not watch.changed()  # it has just been seen
    time.sleep(0.06)
    assert watch.changed() and watch.take() is not None and not watch.changed()
    file.unlink()
    assert not watch.changed()


@pytest.mark.parametrize("rest", [None, 3.0])
def test_half_of_a_checkpoint_has_to_rest_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: float | None
):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr("thinwire.engines.sync.watch.time", clock)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (tmp_path / INDEX).write_text(json.dumps(index))

    def write(shard: int, value: float) -> None:
        write_checkpoint(tmp_path / names[shard], {f"w{shard}": torch.full((3,), value)}, {})

    def told_after(seconds: float) -> bool:
        """Say whether a change is told then, and not before."""
        before, now[0] = watch.changed(), now[0] + seconds - 0.01
        early, now[0] = watch.changed(), now[0] + 0.02
        return not before and not early and watch.changed()

    write(0, 1.0)
    write(1, 1.0)
    watch = Watch(tmp_path, rest)
    watch.first()
    write(0, 2.0)
    assert not watch.changed()
    now[0] += 2.5  # as long as a slow disk takes for the next one
    assert not watch.changed()
    write(1, 2.0)
    assert told_after(rest or REST)
    found = watch.take()
    assert found is not None and {float(x[0]) for x in found.values()} == {2.0}
    write(1, 3.0)  # and no other one
    assert not watch.changed()
    now[0] += 2.5
    (tmp_path / f".{names[0]}.a8Xk2").write_text("grows, as rsync's do")
    assert told_after(rest or PART_REST)
    assert watch.take() is not None and not watch.changed()


def test_what_comes_back_as_it_was_is_no_change(tmp_path: Path):
    file, aside = tmp_path / "m.safetensors", tmp_path / "aside"
    write_checkpoint(file, weights(), {})
    watch = Watch(file, rest=0.01)
    watch.first()
    file.rename(aside)
    file.write_bytes(b"8 bytes.")
    until(watch.changed, "the damaged file")
    with pytest.raises(InputError, match="cannot read"):
        watch.take()
    assert not watch.changed()
    file.unlink()
    aside.rename(file)
    for _ in range(5):
        assert not watch.changed()
        time.sleep(0.02)


def test_a_single_file_counts_before_the_index_that_an_earlier_checkpoint_left(tmp_path: Path):
    """As for from_pretrained; save_pretrained deletes the shards of earlier ones, and not their index."""
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    write_checkpoint(tmp_path / "model.safetensors", {"w": torch.ones(3)}, {})
    assert Watch(tmp_path).first().keys() == {"w"}


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / "b.safetensors").unlink(), r"b\.safetensors is not there, but the index"),
        (lambda folder: (folder / INDEX).write_text("{"), "is not a safetensors index"),
        (shutil.rmtree, "checkpoint is not there"),
    ],
    ids=["shard", "index", "folder"],
)
def test_a_checkpoint_that_is_lost_is_told_once_and_again_after_it_was_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], object], told: str
):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr("thinwire.engines.sync.watch.time", clock)
    folder = tmp_path / "checkpoint"

    def write() -> None:
        folder.mkdir(exist_ok=True)
        (folder / INDEX).write_text(json.dumps({"weight_map": {n: f"{n}.safetensors" for n in "ab"}}))
        for name in "ab":
            write_checkpoint(folder / f"{name}.safetensors", {name: torch.ones(3)}, {})

    write()
    watch = Watch(folder)
    watch.first()
    for _ in range(2):
        spoil(folder)
        assert not watch.changed()
        now[0] += PART_REST - 1.0  # whoever writes the next one may still be at it
        assert not watch.changed()
        now[0] += 1.0
        assert watch.changed()
        with pytest.raises(InputError, match=told):
            watch.take()
        now[0] += PART_REST
        assert not watch.changed()
        write()
        now[0] += PART_REST
        watch.changed()
        now[0] += PART_REST
        assert watch.changed() and watch.take() is not None
