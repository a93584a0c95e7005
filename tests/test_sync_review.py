"""What a peer, a slow line, a missing package or a hostile manifest must not do to either end."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slow_proxy import SlowProxy
from thinwire.cli import publish
from thinwire.cli.follow import follow
from thinwire.cli.inspect import _print
from thinwire.cli.live import Live
from thinwire.engines.sync import feed, shelf_writer
from thinwire.engines.sync import relay as relays
from thinwire.engines.sync.callback import publish_callback
from thinwire.engines.sync.claim import read_manifest
from thinwire.engines.sync.feed import HIGHEST
from thinwire.engines.sync.folder import PlainFolder
from thinwire.engines.sync.follower import Follower
from thinwire.engines.sync.keeping import Keeping
from thinwire.engines.sync.manifest import MAX_VERSIONS, File, Manifest, Shelved
from thinwire.engines.sync.manifest import unpack as unpack_manifest
from thinwire.engines.sync.peek import ask
from thinwire.engines.sync.proof import Proof
from thinwire.engines.sync.protocol import (
    DOWN,
    MAGIC,
    MAX_NAME,
    NOTHING,
    PROTOCOL,
    UP,
    Ask,
    Hello,
    LayoutIs,
    Same,
    unpack,
)
from thinwire.engines.sync.publisher import Publisher
from thinwire.engines.sync.relay import Relay
from thinwire.engines.sync.route import cheapest, farthest
from thinwire.engines.sync.shelf_reader import ShelfReader
from thinwire.engines.sync.shelf_writer import ShelfWriter
from thinwire.engines.sync.shelving import Shelving
from thinwire.links.events import Kind
from thinwire.links.hub import Hub
from thinwire.links.inbox import renewed
from thinwire.links.spoke import Spoke
from thinwire.state import moves
from thinwire.state.binding import owned
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patch import MAX_VERSION
from thinwire.types import InputError, LinkError, MissingExtra, PayloadError

HOST = "127.0.0.1"
LONG = 30.0  # seconds; a limit, not an expectation


def weights(rows: int = 20) -> dict[str, Tensor]:
    return {"w": torch.arange(50.0 * rows).reshape(rows, 50), "b": torch.zeros(7)}


class Model(nn.Module):
    """A model that holds the state of ``weights``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(20, 50))
        self.b = nn.Parameter(torch.zeros(7))


def until(done: object, timeout: float = LONG) -> None:
    """Wait until ``done()`` is true."""
    end = monotonic() + timeout
    while not done():  # type: ignore[operator]
        assert monotonic() < end, "in vain"
        sleep(0.01)


@contextmanager
def stranger(port: int) -> Iterator[Spoke]:
    """A spoke that is there, and says what it likes."""
    spoke = Spoke.connect(HOST, port)
    try:
        until(lambda: spoke.joined)
        yield spoke
    finally:
        spoke.close(1.0)


def hello(session: int, layout: bytes, version: int = 0, content: int = 0, above: int = 0) -> bytes:
    return Hello(MAGIC, PROTOCOL, session, NOTHING, layout, version, content, above, 0, 0, 0, 0).pack()


def answer(spoke: Spoke, kind: type, timeout: float = LONG) -> object | None:
    """Return the next message of that kind; None where none comes."""
    end = monotonic() + timeout
    while (left := end - monotonic()) > 0:
        event = spoke.recv(left)
        if event is not None and event.kind is Kind.DATA:
            message = unpack(event.data, DOWN)
            if isinstance(message, kind):
                return message
    return None


@pytest.mark.parametrize("relayed", [False, True])
@pytest.mark.parametrize("above", [HIGHEST - 1, HIGHEST, 2**53, 2**64 - 1])
def test_a_number_that_cannot_be_costs_nobody_but_whoever_says_it(above: int, relayed: bool) -> None:
    w = weights()
    with Publisher(w) as p:
        p.publish(1)
        relay = Relay(HOST, p.port) if relayed else None
        if relay is not None:
            relay.wait(1)
        port, digest = relay.port if relay else p.port, bytes.fromhex(p.history.layout.digest)
        with stranger(port) as spoke, Follower(HOST, port) as f:
            f.wait(1)
            for version in (0, p.newest.number):  # the second is a number that is taken, of other contents
                spoke.send(hello(1, digest, version, 77, above))
                sleep(0.1)
            w["w"] += 1
            newest = p.publish(2)
            assert f.wait(newest.number, LONG).meta["step"] == 2
            assert torch.equal(f.tensors()["w"], w["w"])
        if relay is not None:
            relay.check()
            relay.close()


def test_a_state_over_the_limit_is_refused_before_memory_is_taken() -> None:
    with Publisher(weights()) as p:
        p.publish(1)
        size = p.history.layout.nbytes
        with Follower(HOST, p.port, max_nbytes=2 * size) as f:
            f.wait(1)
        with Follower(HOST, p.port, max_nbytes=size // 2) as f, pytest.raises(PayloadError, match="limit"):
            f.wait(1, LONG)
        with Relay(HOST, p.port, max_nbytes=size // 2) as relay, pytest.raises(PayloadError, match="limit"):
            relay.wait(1, LONG)
        with pytest.raises(PayloadError, match="limit"):
            ask(HOST, p.port, max_nbytes=size // 2)
        assert ask(HOST, p.port, max_nbytes=2 * size).newest == 1


@pytest.mark.parametrize("text", ["0", "-1", "nan"])
def test_a_limit_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--max-gb"):
        follow("127.0.0.1:1", max_gb=float(text))


def test_two_models_of_one_follower_stay_whole() -> None:
    w, (first, second) = weights(), (Model(), Model())
    with Publisher(w) as p, Follower(HOST, p.port, into=first) as f:
        for step in range(6):
            w["w"] += 1
            f.wait(p.publish(step).number)
            if step == 0:
                f.apply_to(first)
            f.apply_to(second)
            assert torch.equal(second.w, w["w"]) and torch.equal(first.w, w["w"])


def replaced(model: Model) -> None:
    model.w = nn.Parameter(model.w.detach().clone())


def assigned(model: Model) -> None:
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [replaced, assigned])
def test_a_model_whose_parameters_were_replaced_goes_on_following(change: Callable[[Model], None]) -> None:
    w, model = weights(), Model()
    with Publisher(w) as p, Follower(HOST, p.port) as f:
        p.publish(1)
        f.wait(1)
        assert f.apply_to(model).new and not f.apply_to(model).new
        change(model)
        assert f.apply_to(model).new and not f.apply_to(model).new
        w["w"] += 1
        f.wait(p.publish(2).number)
        assert f.apply_to(model).new
        assert torch.equal(model.w, w["w"]) and model.w.data_ptr() == f.tensors()["w"].data_ptr()


def test_what_a_model_has_besides_the_state_may_be_replaced() -> None:
    w, model = weights(), Model()
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    with Publisher(w) as p, Follower(HOST, p.port) as f:
        p.publish(1)
        f.wait(1)
        assert f.apply_to(model).new
        model.cache = torch.ones(1)
        assert not f.apply_to(model).new


def test_a_compiled_model_is_published_and_follows_under_its_own_names() -> None:
    part = torch.compile(nn.Linear(3, 2), backend="eager")
    trained, used = torch.compile(nn.Sequential(nn.Linear(3, 2)), backend="eager"), nn.Sequential(part)
    with Publisher(trained) as p, Follower(HOST, p.port, into=used) as f:
        assert [*p.history.layout.index] == ["0.weight", "0.bias"]
        p.publish(1)
        f.wait(1)
        f.apply_to(used)
        assert all(torch.equal(a, b) for a, b in zip(used.parameters(), trained.parameters(), strict=True))


@pytest.mark.parametrize("into", [False, True])
def test_a_model_without_memory_is_refused(into: bool) -> None:
    trained, empty = nn.Linear(3, 2), nn.Linear(3, 2, device="meta")
    with Publisher(trained) as p, Follower(HOST, p.port, into=empty if into else None) as f:
        p.publish(1)
        with pytest.raises(InputError, match=r"weight is on the meta device.*to_empty\(device=...\)"):
            f.wait(1)
            f.apply_to(empty)


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(InputError, match="weight is lazy and has no shape yet; run one batch"):
        Publisher(nn.LazyLinear(3))
    with Publisher(nn.Linear(3, 2)) as p, Follower(HOST, p.port) as f:
        p.publish(1)
        f.wait(1)
        with pytest.raises(InputError, match="weight is lazy"):
            f.apply_to(nn.LazyLinear(2))


def test_only_apply_to_touches_a_model(tmp_path: Path) -> None:
    w, model = weights(), Model()
    mine = model.w.data_ptr()
    with Publisher(w) as p, Follower(HOST, p.port, into=model, state=tmp_path / "state") as f:
        p.publish(1)
        f.wait(1)
        assert model.w.data_ptr() == mine and not model.w.any()
        f.apply_to(model)
        assert torch.equal(model.w, w["w"])
        other = Model()
        f.close()
        with Follower(HOST, p.port, into=other, state=tmp_path / "state") as again:
            again.wait(1)
            assert not other.w.any()
            again.apply_to(other)
            assert torch.equal(other.w, w["w"])
    with (
        ShelfWriter.of(tmp_path / "shelf", w) as writer,
        ShelfReader(tmp_path / "shelf", poll=0.05) as reader,
    ):
        writer.publish(1)
        reader.wait(1)
        third, fourth = Model(), Model()
        for model in (third, fourth):
            reader.apply_to(model)
        w["w"] += 1
        reader.wait(writer.publish(2).number)
        reader.apply_to(third)
        assert torch.equal(third.w, w["w"]) and torch.equal(fourth.w, w["w"])


def test_a_model_that_does_not_fit_is_named_before_anything_comes() -> None:
    class Other(Model):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.zeros(8))

    refused = pytest.raises(InputError, match="b is float32")
    with Publisher(weights()) as p, Follower(HOST, p.port, into=Other()) as f, refused:
        f.wait(1, LONG)


def test_the_last_version_reaches_who_follows_before_a_publisher_is_gone() -> None:
    w = weights(400)  # 80 kB of noise: seconds on this line
    p = Publisher(w)
    with SlowProxy(p.port, 80e3) as line, Follower(HOST, line.port) as f:
        with p:
            p.publish(0)
            f.wait(1)
            w["w"] = torch.randn(400, 50)
            last = p.publish(1)
        assert f.wait(last.number, LONG).hash == last.hash


def test_close_waits_only_where_told_and_says_who_is_behind() -> None:
    w = weights(400)
    p = Publisher(w)
    with SlowProxy(p.port, 20e3) as line, Follower(HOST, line.port):
        until(lambda: any(f.greeted for f in p.followers))
        line.rate = 4e3
        w["w"] = torch.randn(400, 50)
        p.publish(1)
        with pytest.raises(LinkError, match="to hold version 1"):
            p.close(0.2)
        p.close(LONG)  # harmless twice


def test_an_error_in_a_publishers_block_is_not_held_up() -> None:
    w = weights(400)
    began = monotonic()
    with (
        pytest.raises(RuntimeError),
        Publisher(w) as p,
        SlowProxy(p.port, 1e3) as line,
        Follower(HOST, line.port),
    ):
        until(lambda: any(f.greeted for f in p.followers))
        p.publish(1)
        raise RuntimeError
    assert monotonic() - began < LONG


def test_a_peer_that_never_greets_is_not_waited_for() -> None:
    with Publisher(weights()) as p, stranger(p.port) as spoke:
        p.publish(1)
        spoke.send(hello(1, NOTHING))
        assert answer(spoke, LayoutIs) is not None
        until(lambda: len(p.followers) == 1)
        p.flush(LONG / 10)


class Recorder:
    """What a callback publishes to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[int | None, dict[str, str | int | float]]] = []
        self.flushed, self.error = 0.0, error

    def publish(self, step: int | None = None, **meta: str | int | float) -> None:
        self.calls.append((step, meta))

    def flush(self, timeout: float = 0.0) -> None:
        self.flushed = timeout
        if self.error is not None:
            raise self.error


def end_of_training(recorder: Recorder, step: int = 1, **logged: object) -> None:
    pytest.importorskip("transformers")
    state = SimpleNamespace(global_step=step, is_world_process_zero=True, log_history=[logged])
    callback = publish_callback(recorder, timeout=7.0)
    callback.on_train_end(None, state, None)  # type: ignore[arg-type]


def test_the_end_of_training_lets_the_last_version_arrive_and_never_fails_for_it() -> None:
    end_of_training(recorder := Recorder())
    assert recorder.flushed == 7.0 and len(recorder.calls) == 1
    with pytest.warns(UserWarning, match="follower 7f3a"):
        end_of_training(Recorder(LinkError("follower 7f3a is away")))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: Publisher(weights()),
        lambda path: Relay(HOST, 1),
        lambda path: Follower(HOST, 1),
        lambda path: ShelfWriter.of(path / "shelf", weights()),
        lambda path: ShelfReader(path / "shelf"),
    ],
)
def test_a_missing_package_is_told_at_the_start(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    threads = threading.active_count()
    with pytest.raises(MissingExtra, match="zstandard"):
        make(tmp_path)
    assert threading.active_count() <= threads and not (tmp_path / "shelf").exists()


FOREIGN = (
    "patches/fix-1.safetensors",
    "patches/2024-01.safetensors",
    "patches/.download.part",
    "keyframes/model-00001-of-00002.safetensors",
    "keyframes/00000003.safetensors",
    "state.json.part",
    "state.json.12345678.bak",
    ".model.safetensors.12345678.part",
)
OWN = (
    "patches/00000001-00000002-aaaaaaaa.safetensors",
    "patches/.00000001-00000002-aaaaaaaa.safetensors.12345678.part",
    "keyframes/00000003-0123abcd.safetensors",
    ".state.json.12345678.part",
    "state.json.12345678.part",
    ".layout.json.12345678.part",
)


@pytest.mark.parametrize("deleted", [False, True])
def test_nobody_elses_files_go_from_a_shelf(tmp_path: Path, deleted: bool) -> None:
    folder, now = PlainFolder(tmp_path), [1000.0]
    for name in FOREIGN + OWN:
        folder.write(name, b"x")
    history = History(Layout.of(weights()))
    history.publish(weights())

    def shelving() -> Shelving:
        told = (lambda: None, lambda: now[0])
        return Shelving(folder, history, "state", "ab" * 16, Proof(None), Keeping(), 60.0, *told)

    def left() -> set[str]:
        return {*folder.sizes("patches"), *folder.sizes("keyframes"), *folder.sizes("")}

    shelf = shelving()  # there was no manifest: whose files these are, nobody knows
    shelf.write()
    now[0] += 1000
    shelf.sweep()
    assert left() >= {*FOREIGN, *OWN}
    if deleted:
        folder.delete("state.json")
    shelf = shelving()  # goes on from its own, or anew beside its own layout
    now[0] += 1000
    shelf.sweep()
    assert left() >= set(FOREIGN) and not left() & set(OWN)
    assert {f.name for f in shelf.manifest.files} <= left()


class Counted(list[File]):
    """Files that count how often they are gone through."""

    passes = 0

    def __iter__(self) -> Iterator[File]:
        self.passes += 1
        return super().__iter__()


def test_a_manifest_of_dead_ends_costs_one_pass() -> None:
    n = 4 * MAX_VERSIONS
    ends = [
        File(f"patches/{i}", 2 * i + 1, 2 * i + 2, 10, "") for i in range(n)
    ]  # none leads on from another
    files = Counted([*ends, File("keyframes/1", 0, 1, 100, "")])
    assert [f.name for f in farthest(files, 0)] == ["keyframes/1", "patches/0"] and files.passes == 1
    assert farthest(ends, 0) == [] and cheapest(files, 0, 2 * n) is None


def test_the_farthest_chain_is_the_cheapest_to_the_newest_that_can_be_reached() -> None:
    rng = random.Random(0)
    for _ in range(300):
        pairs = [sorted(rng.sample(range(9), 2)) for _ in range(rng.randrange(14))]
        files = [File("", a, b, rng.randrange(1, 40), "") for a, b in pairs]
        held = rng.randrange(6)
        best = next((c for goal in range(9, held, -1) if (c := cheapest(files, held, goal))), [])
        assert farthest(files, held) == best
        assert not best or best[0].base in (0, held)


def test_who_starts_from_a_base_learns_the_meta_data_of_what_it_holds() -> None:
    w = weights()
    with Publisher(w) as p:
        p.publish(7, loss=0.5)
        with Relay(HOST, p.port) as relay:
            relay.wait(1)
            for port in (p.port, relay.port):
                with Follower(HOST, port, base=weights()) as f:
                    assert f.wait(1).meta == {"step": 7, "loss": 0.5} and not f.arrivals
                    f.replica.swap()
                    assert f.replica.meta == {"step": 7, "loss": 0.5}


@pytest.mark.parametrize(
    ("number", "meta"),
    [
        *(
            (1, meta)
            for meta in (b"[1]", b"{", b'{"a": [1]}', b"\xff", b'{"a": "' + b"x" * (1 << 16) + b'"}')
        ),
        (MAX_VERSION, b""),  # which no patch may lead to, and no file may have
    ],
)
def test_what_a_publisher_calls_what_is_held_is_checked(number: int, meta: bytes) -> None:
    layout = Layout.of(weights())
    held = History(layout).publish(weights())
    hub = Hub.bind()
    try:
        with Follower(HOST, hub.port, base=weights()) as f, pytest.raises(PayloadError):
            end = monotonic() + LONG
            while monotonic() < end:
                event = hub.recv(0.05)
                if event is not None and event.kind is Kind.DATA and event.data[0] == Hello.KIND:
                    session = unpack(event.data, UP).session
                    digest, json = bytes.fromhex(layout.digest), layout.to_json()
                    known = (PROTOCOL, session, b"i" * 16, digest, 1, bytes(MAX_NAME), json)
                    hub.send(event.peer, LayoutIs(*known).pack())  # type: ignore[arg-type]
                    hub.send(event.peer, Same(number, held.hash, 1.0, meta).pack())
                f.wait(0)
    finally:
        hub.close(0.0)


@pytest.mark.parametrize("silence", [0.0, -1.0, float("nan")])
def test_a_silence_of_nothing_is_refused(silence: float) -> None:
    for make in (lambda: Hub.bind(silence=silence), lambda: Spoke.connect(HOST, 1, silence=silence)):
        with pytest.raises(InputError, match="silence"):
            make()


def test_ends_that_lose_patience_soon_ping_often_enough() -> None:
    hub = Hub.bind(silence=0.8)  # below the heartbeat there is otherwise
    spoke = Spoke.connect(HOST, hub.port, silence=0.8)
    try:
        until(lambda: len(hub.peers) == 1)
        peers, end = hub.peers, monotonic() + 2.5
        while (left := end - monotonic()) > 0:
            event = hub.recv(left)
            assert event is None or event.kind is not Kind.LOST
        assert spoke.joined and hub.peers == peers
    finally:
        spoke.close(0.0)
        hub.close(0.0)


@pytest.mark.parametrize(
    "loss", [float("nan"), float("inf"), "low", None, torch.ones(2), torch.tensor(torch.nan)]
)
def test_a_loss_that_is_no_number_does_not_end_the_training(loss: object) -> None:
    end_of_training(recorder := Recorder(), 3, loss=loss)
    assert recorder.calls == [(3, {})]


@pytest.mark.parametrize("loss", [0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5), np.array(0.5)])
def test_scalars_of_any_kind_are_numbers(loss: object) -> None:
    end_of_training(recorder := Recorder(), 3, loss=loss)
    assert recorder.calls == [(3, {"loss": 0.5})]
    with Publisher(weights()) as p:
        version = p.publish(np.int64(3), loss=loss, many=torch.tensor(7))  # type: ignore[arg-type]
        assert version.meta == {"step": 3, "loss": 0.5, "many": 7}
        with pytest.raises(InputError, match="loss"):
            p.publish(4, loss=torch.ones(2))  # type: ignore[arg-type]


class FullyShardedDataParallel(nn.Module):
    """Called like torch's."""


class Sharded(nn.Module):
    """One layer of which is wrapped, or whose parameters are like DeepSpeed's."""

    def __init__(self, zero: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2) if zero else FullyShardedDataParallel()
        for x in self.layer.parameters():
            x.ds_id = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("main", [True, False])
@pytest.mark.parametrize("zero", [True, False])
def test_a_sharded_model_is_refused_on_every_process(zero: bool, main: bool) -> None:
    pytest.importorskip("transformers")
    state = SimpleNamespace(global_step=0, is_world_process_zero=main, log_history=[])
    callback: Any = publish_callback(Recorder())
    callback.on_train_begin(None, state, None, model=nn.Linear(2, 2))
    callback.on_train_begin(SimpleNamespace(fsdp=[], world_size=2), state, None, model=nn.Linear(2, 2))
    with pytest.raises(InputError, match="sharded"):
        callback.on_train_begin(None, state, None, model=Sharded(zero))
    with pytest.raises(InputError, match="sharded"):
        callback.on_train_begin(SimpleNamespace(fsdp=["full_shard"], world_size=2), state, None)


@pytest.mark.parametrize("own", [True, False])
def test_a_publisher_that_is_gone_is_missed_behind_a_relay(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "SILENT", 0.3)
    with Publisher(weights()) as p:
        p.publish(1)
        with Relay(HOST, p.port) as relay:
            where = {"host": HOST, "port": p.port if own else relay.port, "relay": (HOST, 0) if own else None}
            with Follower(**where, patience=2.0) as f:  # type: ignore[arg-type]
                f.wait(1)
                p.close()
                began = monotonic()
                named = str(p.port if own else relay.port)
                with pytest.raises(LinkError, match=f"no sign of {HOST}:{named} for 2 s"):
                    for _ in f:
                        assert monotonic() - began < LONG
                if own:
                    until(lambda: not f.status.connected)


def test_a_publisher_that_comes_back_is_no_longer_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "SILENT", 0.3)
    w = weights()
    p = Publisher(w)
    p.publish(1)
    with Relay(HOST, p.port) as relay, Follower(HOST, relay.port) as f:
        f.wait(1)
        p.close()
        until(lambda: monotonic() - f._signed > 1.5)
        w["w"] += 1
        with Publisher(w, port=p.port) as again:
            again.publish(2)
            assert f.wait(2).meta == {"step": 2}
            until(lambda: monotonic() - f._signed < 1.5)


def test_a_publisher_that_never_came_is_missed_behind_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "SILENT", 0.3)
    nobody = Hub.bind()
    port = nobody.port
    nobody.close(0.0)
    with Relay(HOST, port) as relay, Follower(HOST, relay.port, patience=3.0) as f:
        with pytest.raises(LinkError, match=f"no sign of {HOST}:{relay.port} for 3 s"):
            next(iter(f))
        assert f.status.connected
        with Publisher(weights(), port=port) as p:  # and found when it comes
            p.publish(1)
            assert f.wait(1).number == 1
            until(lambda: monotonic() - f._signed < 2.0)


def test_a_feed_finds_the_reception_of_its_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout may come before the relay is done with being made."""

    class Slow(relays.Reception):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            sleep(1.0)

    monkeypatch.setattr(relays, "Reception", Slow)
    with Publisher(weights()) as p:
        p.publish(1)
        with Relay(HOST, p.port) as relay:
            assert relay.wait(1).number == 1
            relay.check()


def test_a_relay_answers_who_dials_before_it_is_done_with_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = Hub.bind

    def dialled(*args: Any, **options: Any) -> Hub:
        hub = bind(*args, **options)
        with stranger(hub.port) as spoke:
            until(lambda: spoke.clock.trip is not None, 10.0)  # it was told the time
        return hub

    with Publisher(weights()) as p:
        p.publish(1)
        monkeypatch.setattr(Hub, "bind", dialled)
        with Relay(HOST, p.port) as relay:
            assert relay.wait(1).number == 1


def test_what_a_module_keeps_besides_tensors_is_no_base() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 3}

        def set_extra_state(self, state: object) -> None:
            pass

    assert {*owned(Counting(2, 2))} == {"weight", "bias"}


def test_tensors_are_the_newest_even_while_words_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights()
    writing = moves.write

    def slow(words: Any, made: Any) -> None:
        sleep(0.2)  # far longer than a swap waits
        writing(words, made)

    monkeypatch.setattr(moves, "write", slow)
    with Publisher(w) as p, Follower(HOST, p.port) as f:
        p.publish(0)
        f.wait(1)
        for step in range(2, 8):
            w["b"] += 1
            p.publish(step)
            held = f.wait(step).number
            assert f.tensors()["b"][0] >= held - 1


def test_what_ends_a_relay_ends_its_port() -> None:
    p = Publisher(weights())
    p.publish(1)
    with Relay(HOST, p.port) as relay, Follower(HOST, relay.port) as f:
        f.wait(1)
        p.close()
        with Publisher({"other": torch.zeros(3)}, port=p.port) as other:
            other.publish(1)
            with pytest.raises(InputError, match="follow it anew"):
                relay.wait(2, LONG)
            until(lambda: not f.status.connected)


@pytest.mark.parametrize("reply", ["ask", "no layout"])
def test_a_feed_that_only_asks_is_not_greeted_as_fast_as_the_line_goes(reply: str) -> None:
    hub, greeted = Hub.bind(), 0
    try:
        with Follower(HOST, hub.port) as f:
            end = monotonic() + 1.5
            while (left := end - monotonic()) > 0:
                event = hub.recv(left)
                if event is None or event.kind is not Kind.DATA or event.data[0] != Hello.KIND:
                    continue
                greeted += 1
                session = unpack(event.data, UP).session
                known = (PROTOCOL, session, b"i" * 16, b"d" * 16, 1, bytes(MAX_NAME), b"")
                hub.send(event.peer, (Ask(PROTOCOL) if reply == "ask" else LayoutIs(*known)).pack())  # type: ignore[arg-type]
            assert 2 <= greeted <= 6
            if reply == "no layout":
                with pytest.raises(PayloadError, match="left out"):
                    f.wait(1, LONG)
    finally:
        hub.close(0.0)


def test_a_follower_that_counts_up_does_not_fill_the_log() -> None:
    with Publisher(weights()) as p, stranger(p.port) as spoke:
        p.publish(1)
        digest = bytes.fromhex(p.history.layout.digest)
        for i in range(300):
            spoke.send(hello(i, digest, above=2 * i + 10))
        spoke.send(hello(1000, NOTHING))  # is answered: it is still served otherwise
        while (found := answer(spoke, LayoutIs)) is not None and found.session != 1000:  # type: ignore[attr-defined]
            pass
        assert found is not None and 600 > p.newest.number > 100
        with Follower(HOST, p.port) as f:
            f.wait(p.publish(2).number)


class SlowUploads(PlainFolder):
    """A folder to which one patch takes much longer than a lease."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def write(self, name: str, data: bytes) -> None:
        if name.startswith("patches/"):
            self.begun.set()
            assert self.go_on.wait(LONG)
        super().write(name, data)


def test_a_lease_outlives_a_long_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w, folder = weights(), SlowUploads(tmp_path)
    monkeypatch.setattr(shelf_writer, "open_folder", lambda url: folder)
    with ShelfWriter.of(tmp_path, w, lease=1.0) as writer:
        writer.publish(1)
        writer.flush(LONG)
        w["w"] += 1
        writer.publish(2)
        assert folder.begun.wait(LONG)
        end = monotonic() + 2.5
        while monotonic() < end:
            manifest = read_manifest(folder, Proof(None))
            assert time.time() - manifest.written < manifest.lease
            sleep(0.05)
        folder.go_on.set()
        writer.flush(LONG)
    assert read_manifest(folder, Proof(None)).lease == 0.0  # said goodbye, and nobody took that back


def test_who_waits_for_a_dead_publishers_lease_is_told_the_way_out(tmp_path: Path) -> None:
    def shelving(instance: str, at: float) -> Shelving:
        history, told = History(Layout.of(weights())), (lambda: None, lambda: at)
        return Shelving(
            PlainFolder(tmp_path), history, "state", instance, Proof(None), Keeping(), 60.0, *told
        )

    shelving("ab" * 16, 960.0)
    with pytest.raises(InputError, match=r"wait .* s or delete state\.json"):
        shelving("cd" * 16, 1000.0)
    (tmp_path / "state.json").unlink()
    shelving("cd" * 16, 1000.0)


def test_what_others_say_does_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2J\x07\r\u202eb\x9b1m"
    tensors = [{"name": evil, "shape": [2], "published": 1e308}]
    _print({"name": evil, "published": 1e308, "meta": {evil: evil}, "tensors": tensors})
    with Live(lambda: evil) as live:
        live.note(evil)
    shown = "".join(capsys.readouterr())
    assert shown.count("a?[2J???b?1m") == 6 and "1e+308" in shown
    assert not {*"\x1b\x07\r\u202e\x9b"} & {*shown}


@pytest.mark.parametrize("published", [1e308, -1.0, float(1 << 40)])
def test_a_manifest_with_a_time_that_is_none_is_refused(published: float, tmp_path: Path) -> None:
    layout = Layout.of(weights())
    file = File("layout.json", 0, 0, 10, "a" * 64)
    version = Shelved(1, 7, published)
    manifest = Manifest("state", "ab" * 16, 1.0, 60.0, layout.digest, file, (version,))
    with pytest.raises(PayloadError, match="published at"):
        unpack_manifest(manifest.pack(Proof(None)), Proof(None), "here")


@pytest.mark.parametrize("followed", [True, False])
def test_publishing_once_says_what_it_waited_for(followed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "PATIENCE", 0.5)
    w = weights(400)
    outlets = publish.Outlets(dict(w), None, None, "state", None)
    outlets.listen(HOST, 0)
    push = outlets._push
    assert push is not None
    try:
        with SlowProxy(push.port, 20e3) as line, Follower(HOST, line.port if followed else 1):
            if followed:
                until(lambda: any(f.greeted for f in push.followers))
            line.rate = 4e3
            outlets.publish()
            with pytest.raises(LinkError, match="holds version 0" if followed else "nobody follows"):
                outlets.finish()
    finally:
        outlets.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_link_that_fails_inside_does_not_say_that_this_end_closed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = Hub.bind()
    monkeypatch.setattr(hub, "_check", lambda now, excused: 1 // 0)
    with pytest.raises(LinkError, match="failed: ZeroDivisionError"):
        hub.recv(LONG)
        hub.recv(LONG)
    hub.close(0.0)


class Odd(Exception):
    """Cannot be made from what it keeps."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_errors_of_any_kind_are_told_again() -> None:
    many = UnicodeDecodeError("utf-8", b"x", 0, 1, "odd")
    for error in (LinkError("away"), many, FileNotFoundError(2, "gone", "a"), Odd(1, 2)):
        again = renewed(error)
        assert again is not error and again.__traceback__ is None and str(error) in str(again)
        assert type(again) in (type(error), RuntimeError)
    assert isinstance(renewed(many), UnicodeDecodeError)
