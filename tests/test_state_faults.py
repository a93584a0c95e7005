"""Faults of publishers, followers and their commands: all stays as it was, or one sentence tells."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import states
from thinwire.cli.app import app
from thinwire.cli.command import Command
from thinwire.engines.sync import watch
from thinwire.engines.sync.checkpoint import INDEX, write_checkpoint
from thinwire.engines.sync.claim import read_manifest
from thinwire.engines.sync.folder import PlainFolder
from thinwire.engines.sync.follower import Follower
from thinwire.engines.sync.manifest import MAX_NUMBER, STATE
from thinwire.engines.sync.mirror import Mirror
from thinwire.engines.sync.proof import Proof
from thinwire.engines.sync.protocol import Begin, Chunk, Done, End, Message
from thinwire.engines.sync.publisher import Publisher
from thinwire.engines.sync.relay import Relay
from thinwire.engines.sync.serving import Serving
from thinwire.engines.sync.shelf_writer import ShelfWriter
from thinwire.engines.sync.watch import Watch
from thinwire.state import history as histories
from thinwire.state import intake
from thinwire.state import log as logs
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.replica import Replica
from thinwire.types import InputError, LinkError

pytest.importorskip("zstandard")
HOST = "127.0.0.1"
LONG = 60.0  # seconds; a limit, not an expectation
PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "110", "THINWIRE_TOKEN": None}


def invoke(*arguments: object) -> Any:
    return CliRunner(env=PLAIN).invoke(app, [str(a) for a in arguments])


def until(done: Callable[[], object]) -> None:
    ends = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < ends, "in vain"
        time.sleep(0.01)


# a version that fails


def fail_once(monkeypatch: pytest.MonkeyPatch, where: object, name: str, error: type[BaseException]) -> None:
    """Let a function do what it does and then raise, the first time."""
    doing, calls = getattr(where, name), []

    def failing(*args: object) -> object:
        found = doing(*args)
        calls.append(name)
        if len(calls) == 1:
            raise error
        return found

    monkeypatch.setattr(where, name, failing)


def published(n: int = 4) -> tuple[History, dict[str, Tensor]]:
    """Return a history of ``n`` versions, whose log has room for two, and what it last published."""
    state = states.tensors()
    history = History(states.layout(state), budget=0)
    for i in range(n):
        states.train(state, 0.1, i)
        history.publish(state)
    return history, state


def inside(history: History) -> tuple[object, ...]:
    log = history._log
    return history.newest, history._words.hash(), [e.base for e in log._entries], log.nbytes, history._known


FAULTS = [(histories, "logged", MemoryError), (logs, "merge", MemoryError)]
FAULTS += [(History, "_settle", KeyboardInterrupt), (intake, "take", KeyboardInterrupt)]
FAULTS += [(histories, "_note", KeyboardInterrupt)]


@pytest.mark.parametrize(("where", "name", "error"), FAULTS, ids=[name for _, name, _ in FAULTS])
@pytest.mark.parametrize("share", [0.05, 0.9])
def test_a_version_that_fails_after_the_words_are_taken_never_was(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, error: type[BaseException], share: float
) -> None:
    history, state = published()
    replica = Replica(history.layout)
    held = replica.apply(states.over_the_wire(history.patch()))
    before = inside(history)
    states.train(state, share, 9)
    fail_once(monkeypatch, where, name, error)
    with pytest.raises(error):
        history.publish(state)
    assert inside(history) == before and history._words.hash() == held.hash
    newest = history.publish(state)
    assert replica.apply(states.over_the_wire(history.patch(held.number))).hash == newest.hash
    assert replica.swap() and states.same(replica.tensors(), states.whole(history))


@pytest.mark.parametrize("keyframe", [False, True])
def test_a_relay_that_fails_to_move_on_is_where_it_was(
    monkeypatch: pytest.MonkeyPatch, keyframe: bool
) -> None:
    history, state = published()
    relay = History(history.layout)
    relay.adopt(states.over_the_wire(history.patch()))
    states.train(state, 0.1, 9)
    held, newest = relay.newest, history.publish(state)
    past, first = relay._remember(), relay._words.copy()
    before = inside(relay)
    patch = states.over_the_wire(history.patch(None if keyframe else held.number))
    fail_once(monkeypatch, histories, "logged", MemoryError)
    with pytest.raises(MemoryError):
        relay.adopt(patch)
    assert inside(relay) == before and relay._words.hash() == held.hash
    assert relay.adopt(patch).hash == newest.hash == relay._words.hash()
    for i, piece in enumerate(relay.layout.blocks()):  # whoever reads the version before still does
        assert (past.words(i, 0, piece.numel) == first[i]).all()


def test_a_number_that_cannot_be_given_leaves_one_entry_a_base(monkeypatch: pytest.MonkeyPatch) -> None:
    history, _ = published(2)
    before = inside(history)
    fail_once(monkeypatch, History, "_settle", MemoryError)
    with pytest.raises(MemoryError):
        history.outnumber(9)
    assert inside(history) == before and history.outnumber(9).number == 10


# bounds, and what a module keeps


ROUNDED = [(torch.bfloat16, 3.1), (torch.float16, 9.003), (torch.float8_e4m3fn, 3.1)]


@pytest.mark.parametrize(("dtype", "far"), ROUNDED, ids=lambda v: str(v))
def test_a_bound_that_the_dtype_rounds_away_is_refused(dtype: torch.dtype, far: float) -> None:
    state = {"w": torch.linspace(-0.01, 0.01, 300)}
    history = History(Layout.of(state, dtype, {"w": 1e-3}))
    history.publish(state)
    assert (states.whole(history)["w"].float() - state["w"]).abs().max() <= 2e-3
    newest, grown = history.newest, {"w": state["w"].clone()}
    grown["w"][3] = far
    with pytest.raises(InputError, match=rf"w has values up to .*{dtype} cannot hold within a bound of"):
        history.publish(grown)
    assert history.newest is newest and history._words.hash() == newest.hash
    exact = History(Layout.of(grown, torch.float32, 1e-3))
    exact.publish(grown)
    assert (states.whole(exact)["w"] - grown["w"]).abs().max() <= 1e-3 * 1.001


def test_publishing_within_a_bound_that_cannot_be_kept_ends_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    write_checkpoint(file, {"w": torch.linspace(-0.5, 0.5, 300)}, {})
    publish = ("publish", file, "--dtype", "bf16", "--once")
    result = invoke(*publish, "--store", tmp_path / "a", "--bound", "1e-4")
    assert result.exit_code == 2 and "torch.bfloat16 cannot hold within a bound of 0.0001" in result.stderr
    assert invoke(*publish, "--store", tmp_path / "b", "--bound", "1e-2").exit_code == 0


class Counting(nn.Linear):
    """A module that keeps something besides its tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: object) -> None:
        pass


def test_what_a_module_keeps_besides_tensors_is_not_published() -> None:
    model, copy = Counting(3, 2), Counting(3, 2)
    with Publisher(model) as p, Follower(HOST, p.port, into=copy) as f:
        p.publish()
        f.wait(1)
        f.apply_to(copy)
        assert set(f.tensors()) == {"weight", "bias"} and torch.equal(copy.weight, model.weight)


# bases, names, files


def test_a_base_that_does_not_fit_is_told_to_be_the_base() -> None:
    layout = Layout.of({"w": torch.zeros(3), "b": torch.zeros(2)})
    for base, why in (
        ({"w": torch.zeros(3)}, "b is in the layout of this state, but was not given"),
        ({"w": torch.zeros(4), "b": torch.zeros(2)}, r"w: shape \(4,\), expected \(3,\)"),
    ):
        with pytest.raises(InputError, match=f"^the base does not fit what is published: {why}; leave"):
            Mirror(base=base).agree(layout, "state")


def test_a_model_whose_weights_no_bound_can_hold_is_followed_without_a_base() -> None:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, float("nan"))
    mirror = Mirror(model)
    mirror.agree(Layout.of(dict(model.named_parameters()), bounds=1e-3), "state")
    assert mirror.replica is not None and not mirror.held.hash


def came(follower: Follower, version: int) -> bool:
    """Return whether a version is here; errors of the follower, and of its relay, are raised."""
    with suppress(LinkError):
        return bool(follower.wait(version, 0.05))
    return False


@pytest.mark.parametrize("relayed", [False, True])
def test_another_state_at_the_address_is_not_taken_for_the_one_that_is_followed(relayed: bool) -> None:
    first, other = Publisher({"w": torch.zeros(3)}, name="a"), {"w": torch.ones(3)}
    first.publish()
    own: dict[str, Any] = {"relay": (HOST, 0)} if relayed else {}
    with Follower(HOST, first.port, name="a", **own) as f:
        f.wait(1)
        first.close()
        with Publisher(other, port=first.port, name="b") as second:
            second.publish()
            with pytest.raises(InputError, match="publishes the state 'b', not 'a'; follow another address"):
                until(lambda: came(f, 2))
        assert f.held.number == 1 and f.held.hash == first.newest.hash


def test_a_relay_passes_on_no_other_state_than_it_told_its_followers_of() -> None:
    first = Publisher({"w": torch.zeros(3)}, name="a")
    first.publish()
    with Relay(HOST, first.port) as relay:
        relay.wait(1)
        first.close()
        with Publisher({"w": torch.ones(3)}, port=first.port, name="b") as second:
            second.publish()
            with pytest.raises(InputError, match="the state 'b', not 'a'"):
                relay.wait(2, LONG)
        assert relay.held.number == 1


def test_the_name_of_a_state_is_held_against_publishers_and_stores(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    with ShelfWriter.of(shelf, {"w": torch.zeros(3)}, name="policy") as writer:
        writer.publish()
    with Publisher({"w": torch.zeros(3)}, name="policy") as p:
        p.publish()
        for place in (shelf, f"{HOST}:{p.port}"):
            assert invoke("follow", place, "--once", "--name", "policy").exit_code == 0
            result = invoke("follow", place, "--once", "--name", "critic")
            assert result.exit_code == 2 and "the state 'policy', not 'critic'" in result.stderr


def test_a_publisher_goes_on_from_its_file_however_large_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.setattr(History.load.__func__, "__defaults__", (None, 100))  # type: ignore[attr-defined]
    state, file = {"w": torch.zeros(1000)}, tmp_path / "state"
    with Publisher(state, state=file) as p:
        p.publish()
    with Publisher(state, state=file) as p:
        assert p.newest.number == 1


def test_a_shard_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ATTEMPTS", 2)
    monkeypatch.setattr(watch, "LOOK", 0.0)
    write_checkpoint(tmp_path / "a.safetensors", {"a": torch.ones(3)}, {})
    found = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(found))
    with pytest.raises(InputError, match=r"b\.safetensors is not there, but the index names it"):
        Watch(tmp_path).first()


# commands


def test_a_check_takes_no_more_memory_than_the_state_can_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(3)}
    with ShelfWriter.of(tmp_path, state) as writer:
        writer.publish()
    folder = PlainFolder(tmp_path)
    found = read_manifest(folder, Proof(None))
    claimed = replace(found, files=tuple(replace(file, nbytes=MAX_NUMBER) for file in found.files))
    folder.write(STATE, claimed.pack(Proof(None)))
    limits, reading = list[int](), PlainFolder.read

    def noting(place: PlainFolder, name: str, limit: int) -> bytes:
        limits.append(limit)
        return reading(place, name, limit)

    monkeypatch.setattr(PlainFolder, "read", noting)
    result = invoke("inspect", tmp_path, "--check")
    assert result.exit_code == 3 and f"cannot be read ({MAX_NUMBER} bytes, at most" in result.stderr
    assert limits and max(limits) < 1 << 24


def gone(pid: int) -> bool:
    """Return whether a process has ended, read or not by whoever started it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    state, told = {"w": torch.zeros(3)}, tmp_path / "pid"
    hanging = f"sleep 600 & echo $! > {shlex.quote(str(told))}; wait"
    with Publisher(state) as p:
        p.publish()
        at = f"{HOST}:{p.port}"
        result = invoke("follow", at, "--once", "--exec", hanging, "--exec-timeout", "2")
        assert result.exit_code == 3, result.output
        assert "--exec took more than 2 s and was killed at version 1" in result.stderr
        if told.exists() and told.read_text().strip():  # a busy machine may not have come so far
            until(lambda: gone(int(told.read_text())))
        wrong = invoke("follow", at, "--once", "--exec-timeout", "0")
        assert wrong.exit_code == 2 and "--exec-timeout is 0; it must be above 0 seconds" in wrong.stderr


def test_what_a_command_leaves_in_the_background_goes_on(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    text = f"sleep 600 > {os.devnull} & echo $! > {shlex.quote(str(told))}"
    assert Command(text, LONG).run({}) == ""
    pid = int(told.read_text())
    try:
        os.kill(pid, 0)
        assert not gone(pid)
    finally:
        os.kill(pid, 9)


# a hub that takes no more


def test_what_the_link_does_not_take_is_sent_again() -> None:
    serving = Serving()
    serving.hello(0, None, 0.0)
    order = serving.order(1, 0.0, 0.0)
    assert order is not None
    serving.made(order, states.draft(0, 1, 20_000), 0.0)
    asked, total = list[Message](), 0

    def send(message: Message) -> bool:
        asked.append(message)
        return len(asked) % 2 == 0  # each message twice

    sent = list[Message]()
    for i in range(20):
        found = serving.messages(float(i), send)
        total += sum(len(m.data) for m in found if isinstance(m, Chunk))
        serving.pace.acked(total, i + 0.5)
        sent += found
    chunks = [m for m in sent if isinstance(m, Chunk)]
    assert isinstance(sent[0], Begin) and sent[1:-1] == chunks and isinstance(sent[-1], End)
    assert [c.at for c in chunks] == [sum(len(c.data) for c in chunks[:i]) for i in range(len(chunks))]
    assert total == 20_000 and not serving.sending and len(serving.unproved) == 1


def test_a_hub_that_has_no_room_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.randn(50_000)}
    with Publisher(state) as p, Follower(HOST, p.port) as f:
        hub, begun, refused = p._feed._hub, list[bool](), list[int]()
        sending, asked = hub.send, {Begin.KIND: 0, Chunk.KIND: 0}

        def send(peer: bytes, data: bytes) -> bool:
            kind = data[0]
            if kind in asked:
                asked[kind] += 1
                if asked[kind] == (1 if kind == Begin.KIND else 3):
                    refused.append(kind)
                    return False
                begun.append(kind == Begin.KIND)
            return sending(peer, data)

        monkeypatch.setattr(hub, "send", send)
        p.publish()
        f.wait(1, LONG)
        assert torch.equal(f.tensors()["w"], state["w"])
        assert refused == [Begin.KIND, Chunk.KIND] and sum(begun) == 1 and not f._reception.failures


def test_a_link_that_has_no_room_for_the_answer_to_a_patch_does_not_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {"w": torch.randn(500)}
    with Publisher(state) as p, Follower(HOST, p.port) as f:
        sending, refused = f._spoke.send, list[int]()

        def send(data: bytes) -> bool:
            if data[0] == Done.KIND and len(refused) < 2:
                refused.append(data[0])
                return False
            return sending(data)

        monkeypatch.setattr(f._spoke, "send", send)
        for step in range(1, 4):
            state["w"] += 1
            assert f.wait(p.publish(step).number, LONG).number == step
        assert len(refused) == 2
