"""Publisher, followers and relays over real sockets: bit-identity, restarts, cuts, slow lines, strangers."""

from __future__ import annotations

import gc
import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from torch import Tensor, nn

import states
from slow_proxy import SlowProxy
from tcp_proxy import DOWN, TcpProxy
from thinwire.engines.sync import feed, pace, reception
from thinwire.engines.sync.follower import Follower
from thinwire.engines.sync.landing import Landing, most
from thinwire.engines.sync.protocol import (
    MAGIC,
    MAX_NAME,
    NOTHING,
    PROTOCOL,
    UP,
    Ack,
    Again,
    Ask,
    Begin,
    Chunk,
    Done,
    End,
    Hello,
    LayoutIs,
    Same,
    unpack,
)
from thinwire.engines.sync.publisher import Publisher
from thinwire.engines.sync.relay import Relay
from thinwire.links.events import Kind
from thinwire.links.hub import Hub
from thinwire.links.spoke import Spoke
from thinwire.state import body
from thinwire.state.history import History, More
from thinwire.state.layout import Layout
from thinwire.state.moves import Reading
from thinwire.state.patch import Patch
from thinwire.types import AuthError, InputError, LinkError, PayloadError

LONG = 60.0  # seconds; a limit, not an expectation
HOST = "127.0.0.1"


def weights(seed: int = 0, rows: int = 300) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(rows, 200, generator=g),
        "bias": torch.randn(50, generator=g),
        "steps": torch.zeros(3, dtype=torch.int64),
    }


def train(w: dict[str, Tensor], by: float = 1e-4) -> None:
    """Move some values of a state, as a step of an optimiser does."""
    w["embed"] += by * torch.randn(w["embed"].shape)
    w["bias"][:5] += by
    w["steps"] += 1


def used(w: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of a state as followers use it."""
    return {n: x.bfloat16().clone() if x.is_floating_point() else x.clone() for n, x in w.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def publisher(w: dict[str, Tensor], **options: object) -> Publisher:
    return Publisher(w, dtype=torch.bfloat16, **options)  # type: ignore[arg-type]


def until(done: object, timeout: float = LONG) -> None:
    """Wait until ``done()`` is true."""
    end = monotonic() + timeout
    while not done():  # type: ignore[operator]
        assert monotonic() < end, "in vain"
        sleep(0.01)


class Model(nn.Module):
    """A model that holds the state of ``weights``."""

    def __init__(self, rows: int = 300, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(rows, 200, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(50, dtype=dtype))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))


# following


def test_each_version_is_bit_identical_and_in_order() -> None:
    w, published = weights(), {}
    with publisher(w) as p, Follower(HOST, p.port) as f:
        for step in range(30):
            train(w, 10.0 ** random.Random(step).randrange(-6, -1))
            version = p.publish(step, loss=0.5)
            published[version.number] = used(w)
            if step % 3 == 0:
                got = f.wait(version.number)
                assert got.meta == {"step": step, "loss": 0.5} and got.hash == version.hash
                assert same(f.tensors(), published[version.number]) and f.replica.version == version.number
        assert f.wait(30).number == 30
        numbers = [a.version for a in f.arrivals]
        assert numbers == sorted(set(numbers))
        until(lambda: abs((status := f.status).ahead) <= status.doubt + 0.05)  # clocks are read one by one
        status = f.status
        assert status.connected and status.error is None and status.held == 30 and status.ratio > 0.5
        assert status.age is not None and -status.doubt - 0.05 <= status.age < LONG
        p.flush()
        assert p.followers[0].version == 30 and p.followers[0].delivered == len(f.arrivals)


def test_iteration_yields_the_newest_and_ends_with_close() -> None:
    w = weights()
    seen = []
    with publisher(w) as p, Follower(HOST, p.port) as f:
        for i in range(5):
            train(w)
            p.publish(i)
        f.wait(5)
        for version in f:
            seen.append(version.number)
            if version.number == 8:
                threading.Timer(0.05, f.close).start()
            elif version.number >= 5:
                train(w)
                p.publish(version.number)
    assert seen == [5, 6, 7, 8]


def test_who_waits_for_ever_is_served() -> None:
    with publisher(weights()) as p, Follower(HOST, p.port, patience=math.inf) as f:
        threading.Timer(0.1, p.publish).start()
        assert next(iter(f)).number == 1
        threading.Timer(0.1, p.publish).start()
        assert f.wait(2, math.inf).number == 2


def test_a_model_is_brought_forward_between_two_steps() -> None:
    w, model = weights(), Model()
    with publisher(w) as p, Follower(HOST, p.port) as f:
        p.publish()
        f.wait(1)
        applied = f.apply_to(model)
        assert (
            applied.pause > 0
            and applied.new
            and applied.version == f.held
            and same(dict(model.state_dict()), used(w))
        )
        before, first = model.embed.clone(), used(w)
        train(w)
        p.publish()
        f.wait(2)
        assert same(dict(model.state_dict()), first)  # nothing moves under the consumer
        f.apply_to(model)
        assert same(dict(model.state_dict()), used(w)) and not torch.equal(before, model.embed)


def test_lossy_tensors_stay_within_their_bound() -> None:
    w = {"table": torch.randn(500)}
    with Publisher(w, bounds={"table": 1e-3}) as p, Follower(HOST, p.port) as f:
        for _ in range(5):
            w["table"] += 0.01 * torch.randn(500)
            f.wait(p.publish().number)
            assert (f.tensors()["table"] - w["table"]).abs().max() <= 1e-3 * (1 + 1e-5)


def test_a_late_joiner_gets_one_keyframe_and_whoever_holds_the_base_one_patch() -> None:
    w, model = weights(rows=2000), Model(2000)
    with publisher(w) as p:
        model.load_state_dict(used(w))
        p.publish()
        for _ in range(5):
            train(w, 1e-5)
            p.publish()
        with Follower(HOST, p.port) as late, Follower(HOST, p.port, into=model) as based:
            late.wait(6)
            based.wait(6)
            assert same(late.tensors(), used(w)) and same(based.tensors(), used(w))
            whole = sum(x.numel() * x.element_size() for x in used(w).values())
            assert late.arrivals[0].nbytes > whole / 2 and len(late.arrivals) == 1
            assert based.arrivals[0].nbytes < whole / 10 and len(based.arrivals) == 1


def test_who_holds_the_newest_contents_already_is_told_their_number() -> None:
    w, model = weights(), Model()
    model.load_state_dict(used(w))
    with publisher(w) as p, Follower(HOST, p.port, into=model) as f:
        until(lambda: p.followers and f._reception._layout is not None)  # it is there before any version
        p.publish()
        assert f.wait(1).number == 1 and not f.arrivals
        train(w)
        p.publish()
        f.wait(2)
        assert same(f.tensors(), used(w))


def test_a_mapping_is_a_base_and_whoever_goes_on_knows_when_that_is_confirmed(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    w, state = weights(), tmp_path / "held.safetensors"
    base = used(w) | {"another": torch.zeros(1)}
    base["bias"] = base["bias"].float()  # cast to what the state has
    with publisher(w) as p:
        p.publish()
        with Follower(HOST, p.port, base=base, state=state) as f:
            f.wait(1)
            assert f.confirmed and not f.arrivals and f.replica.held.number == 1 == f.status.version
        f = Follower(HOST, p.port, base={}, state=state)  # what was saved goes before a base
        until(lambda: f.confirmed)
        f.close()
        port = p.port
    with Follower(HOST, port, state=state) as f:
        assert f.wait(1).number == 1 and not f.confirmed  # nobody is there
        with publisher(w, port=port) as p:
            train(w)
            p.publish()
            until(lambda: f.confirmed)
            assert same(f.tensors(), used(w))


def test_a_relay_calls_versions_as_its_publisher_does() -> None:
    w = weights()
    with publisher(w) as p, Relay(HOST, p.port) as relay, Follower(HOST, relay.port) as f:
        port, first = p.port, p.publish()
        f.wait(1)
        p.history.outnumber(6)
        p.close()
        with publisher(w, port=port) as again:
            again.history.outnumber(6)
            assert again.publish().hash == first.hash
            assert relay.wait(7).hash == first.hash and f.wait(7).hash == first.hash
            train(w)
            again.publish()
            assert f.wait(8).number == 8 and same(f.tensors(), used(w))


# faults at the start


def test_a_wrong_token_is_told_at_the_follower_and_hurts_nobody_else() -> None:
    w = weights()
    with publisher(w, token=b"right") as p, Follower(HOST, p.port, b"right") as good:
        p.publish()
        with Follower(HOST, p.port, b"wrong") as bad:
            with pytest.raises(AuthError, match="refused this token: set THINWIRE_TOKEN") as e:
                bad.wait(1, LONG)
            assert "\n" not in str(e.value)
            with pytest.raises(AuthError):
                next(iter(bad))
        assert good.wait(1).number == 1
        train(w)
        assert good.wait(p.publish().number).number == 2
        p.flush()


def test_a_wrong_token_is_told_at_once_at_a_follower_that_is_a_relay() -> None:
    with (
        publisher(weights(), token=b"right") as p,
        Follower(HOST, p.port, b"wrong", relay=(HOST, 0)) as bad,
    ):
        began = monotonic()
        with pytest.raises(AuthError, match=rf"{HOST}:{p.port} refused this token"):
            bad.wait(1, LONG)
        assert monotonic() - began < LONG / 2
        assert "refused this token" in (bad.status.error or "")
        with pytest.raises(AuthError):
            next(iter(bad))


def test_what_ends_a_relay_ends_the_wait_of_its_own_follower() -> None:
    with publisher(weights()) as p, Follower(HOST, p.port, relay=(HOST, 0)) as f:
        p.publish()
        f.wait(1, LONG)
        p.close()
        with publisher({"other": torch.zeros(3)}, port=p.port) as other:
            other.publish()
            began = monotonic()
            with pytest.raises(InputError, match="follow it anew"):
                f.wait(2, LONG)
            assert monotonic() - began < LONG / 2 and "follow it anew" in (f.status.error or "")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            Model(rows=299),
            r"embed is bfloat16 \[299, 200\] in the model and bfloat16 \[300, 200\] in the state",
        ),
        (Model(dtype=torch.float16), r"embed is float16 .* in the model and bfloat16"),
        (nn.Linear(2, 2), "embed is in the state but not in the model"),
    ],
    ids=["shape", "dtype", "names"],
)
def test_a_model_of_other_tensors_is_told_the_first_of_them(model: nn.Module, text: str) -> None:
    with publisher(weights()) as p, Follower(HOST, p.port, into=model) as f:
        p.publish()
        with pytest.raises(InputError, match=text) as e:
            f.wait(1, LONG)
        assert "\n" not in str(e.value)
        assert p.publish().number == 2


def test_nobody_there_and_nothing_published_are_link_errors_that_name_the_publisher() -> None:
    with publisher(weights()) as p:
        port = p.port
        with Follower(HOST, port) as f, pytest.raises(LinkError, match=rf"waited 0.2 s .* {HOST}:{port}"):
            f.wait(1, 0.2)
    with Follower(HOST, port, patience=0.3) as f:
        with pytest.raises(InputError, match="nothing has come"):
            f.tensors()
        with pytest.raises(LinkError, match=rf"no sign of {HOST}:{port} for 0.3 s"):
            next(iter(f))


def test_two_publishers_on_one_port() -> None:
    with publisher(weights()) as p, pytest.raises(InputError, match=f"cannot listen at {HOST}:{p.port}"):
        publisher(weights(), port=p.port)


# restarts


def test_a_publisher_that_restarts_with_the_same_weights_goes_on_by_patches() -> None:
    w = weights(rows=2000)
    with publisher(w) as p:
        port = p.port
        for _ in range(5):
            train(w)
            p.publish()
        f = Follower(HOST, port)
        f.wait(5)
    with f:
        with publisher(w, port=port) as p:
            p.publish()  # its version 1 has the contents of the follower's 5
            train(w, 1e-5)
            version = p.publish()
            until(lambda: f.held.hash == version.hash)
            assert f.held.number > 5 and same(f.tensors(), used(w))
            assert f.arrivals[-1].nbytes < f.arrivals[0].nbytes / 5
            assert f.status.restarts == 1
        with publisher(weights(seed=9, rows=2000), port=port) as p:  # other weights: a keyframe
            version = p.publish()
            until(lambda: f.held.hash == version.hash)
            assert f.arrivals[-1].nbytes > f.arrivals[0].nbytes / 2
            assert same(f.tensors(), used(weights(seed=9, rows=2000)))
        numbers = [a.version for a in f.arrivals]
        assert numbers == sorted(set(numbers))


def test_a_publisher_that_restarts_with_another_layout_is_refused_by_name() -> None:
    with publisher(weights()) as p:
        port = p.port
        p.publish()
        f = Follower(HOST, port)
        f.wait(1)
    with f, publisher(weights(rows=301), port=port) as p:
        p.publish()
        with pytest.raises(
            InputError,
            match=r"embed is bfloat16 \[301, 200\] at the publisher and bfloat16 \[300, 200\] here",
        ):
            f.wait(2, LONG)
        assert f.held.number == 1


def test_a_follower_goes_on_from_its_saved_state(tmp_path: Path) -> None:
    w, path = weights(rows=2000), tmp_path / "state.safetensors"
    with publisher(w) as p:
        p.publish()
        with Follower(HOST, p.port, state=path) as f:
            f.wait(1)
            first = f.arrivals[0].nbytes
        for _ in range(3):
            train(w, 1e-5)
            p.publish()
        with Follower(HOST, p.port, state=path) as f:
            assert f.wait(4).number == 4
            assert same(f.tensors(), used(w)) and f.arrivals[0].nbytes < first / 5


# lines


def test_a_transfer_that_was_cut_goes_on_where_it_broke_off() -> None:
    w = weights(rows=2000)
    with publisher(w) as p, SlowProxy(p.port, 1e6) as line:
        p.publish()
        whole = p.history.patch().nbytes
        with Follower(HOST, line.port) as f:
            for part in (0.3, 0.6):
                line.stall_at(DOWN, int(part * whole))
                until(lambda part=part: f.status.nbytes > (part - 0.1) * whole)
                line.cut()
                until(lambda: not f.status.connected)
                line.resume()
                line.restore()
            f.wait(1)
            assert same(f.tensors(), used(w)) and not f.status.abandoned
            assert f.status.nbytes < 1.1 * f.arrivals[0].nbytes  # heads and all


def test_a_transfer_that_was_cut_in_its_last_window_goes_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it has left the feed, which has made something else since: nobody else needs it."""
    monkeypatch.setattr(pace, "MIN_CHUNK", 1 << 14)  # and two of them at once
    w = {"w": torch.randint(-128, 127, (25_000,), dtype=torch.int8)}
    with (
        Publisher(w) as p,
        SlowProxy(p.port, 1e9) as line,
        Follower(HOST, line.port, base={"w": w["w"].clone()}) as f,
    ):
        p.publish()
        f.wait(1)
        w["w"].copy_(torch.randint(-128, 127, (25_000,), dtype=torch.int8))
        line.stall_at(DOWN, line.counts[DOWN] + 18_000)
        p.publish()
        until(lambda: (landing := f._reception._landing) is not None and len(landing.data) == 1 << 14)
        until(lambda: any(o.serving.unproved for o in p._feed._followers.values()))
        with Follower(HOST, p.port) as other:
            other.wait(2)
        begun, hear = list[Begin](), f._reception._hear
        monkeypatch.setattr(
            f._reception, "_hear", lambda m: (begun.append(m) if isinstance(m, Begin) else None, hear(m))
        )
        line.cut()
        until(lambda: not f.status.connected)
        line.resume()
        line.restore()
        assert f.wait(2).number == 2 and torch.equal(f.tensors()["w"], w["w"])
        assert [begin.start for begin in begun] == [1 << 14] and len(p._feed._parked) <= feed.PARKED


def test_a_patch_is_read_while_it_comes_and_a_relay_reads_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    states.in_sections(monkeypatch)
    unpack_section, read = body.unpack_section, dict[str, list[float]]()

    def noting(*args: object) -> object:
        read.setdefault(threading.current_thread().name, []).append(monotonic())
        return unpack_section(*args)  # type: ignore[arg-type]

    w = {f"w{i}": torch.randn(40_000) for i in range(20)}
    with (
        publisher(w) as p,
        SlowProxy(p.port, 1e6) as line,  # a second or more for each patch
        Relay(HOST, line.port) as r,
        SlowProxy(r.port, 1e6) as further,
        Follower(HOST, further.port) as f,
    ):
        p.publish()
        f.wait(1)
        monkeypatch.setattr(body, "unpack_section", noting)
        for x in w.values():
            x += torch.randn(40_000)
        p.publish()
        f.wait(2)
        assert same(f.tensors(), used(w))
        nbytes = f.arrivals[-1].nbytes
    assert len(read) == 2
    for times in read.values():
        assert len(times) == 8 and times[-1] - times[0] > 0.5 * nbytes / 1e6


def test_a_patch_that_is_applied_before_it_was_counted_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Landing.add

    def late(landing: Landing, chunk: Chunk) -> None:
        add(landing, chunk)
        sleep(0.2)  # by now the worker has taken it

    monkeypatch.setattr(Landing, "add", late)
    w = weights(rows=3)
    with publisher(w) as p, TcpProxy(p.port) as line, Follower(HOST, line.port) as f:
        for version in (1, 2):
            train(w)
            p.publish()
            f.wait(version)
            until(lambda: not f._reception._pending and f._reception._landing is None)
        line.cut()
        until(lambda: not f.status.connected)
        line.restore()
        train(w)
        p.publish()
        f.wait(3)  # so it has said hello
        assert same(f.tensors(), used(w))


def test_a_follower_may_be_closed_while_a_patch_comes() -> None:
    w = weights(rows=2000)
    with publisher(w) as p, SlowProxy(p.port, 1e7) as line:
        p.publish()
        f = Follower(HOST, line.port, base=used(w))
        f.wait(1)
        line.rate = 1e4
        train(w, 1.0)
        p.publish()
        until(lambda: f.status.nbytes > 20_000)
        began = monotonic()
        f.close()
        assert monotonic() - began < 5.0


def test_a_patch_of_which_some_was_read_is_cut_off_or_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    states.in_sections(monkeypatch)
    unpack_section, read = body.unpack_section, list[int]()
    monkeypatch.setattr(body, "unpack_section", lambda *args: read.append(1) or unpack_section(*args))
    w = {f"w{i}": torch.randn(100_000) for i in range(20)}
    base = {n: x.clone() for n, x in w.items()}
    with (
        publisher(w, budget=1 << 24) as p,
        SlowProxy(p.port, 3e5) as line,
        Follower(HOST, line.port, base=used(w)) as f,
    ):
        p.publish()
        f.wait(1)
        for x in w.values():
            x.copy_(torch.where(torch.rand(100_000) < 0.3, 1.1 * x, x))
        p.publish()
        for sections in (2, 4):
            until(lambda sections=sections: len(read) >= sections)
            line.cut()
            until(lambda: not f.status.connected)
            line.rate /= 3  # so that much is left in the end
            line.restore()
            read.clear()  # it is read anew, from the bytes that are there
        until(lambda: len(read) >= 2)
        for name, x in base.items():
            w[name].copy_(x)
        w["w3"][7] += 1
        p.publish()
        until(lambda: f.status.abandoned)
        line.rate = 1e6
        f.wait(3)
        assert same(f.tensors(), used(w)) and f.status.error is None


def test_a_follower_that_was_cut_off_for_a_while_gets_one_merged_patch() -> None:
    w = weights(rows=2000)
    with publisher(w) as p, TcpProxy(p.port) as line, Follower(HOST, line.port) as f:
        p.publish()
        f.wait(1)
        line.cut()
        for _ in range(20):
            train(w, 1e-5)
            p.publish()
        until(lambda: not f.status.connected)
        held = used(w)
        line.restore()
        f.wait(21)
        assert same(f.tensors(), held) and len(f.arrivals) == 2
        assert f.arrivals[1].nbytes < f.arrivals[0].nbytes / 2


def give_up(end: Publisher | Relay, line: TcpProxy) -> None:
    """Let all followers be lost for silence, and notice nothing of it."""
    assert end._feed is not None
    hub, patience = end._feed._hub, end._feed._hub._silence
    line.stall()
    hub._silence = 0.1
    until(lambda: not end.followers)
    hub._silence = patience


@pytest.mark.parametrize("relayed", [False, True])
def test_a_follower_that_was_lost_for_silence_over_a_connection_that_lives_is_served_again(
    relayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing by itself: for it nothing has happened."""
    monkeypatch.setattr(feed, "UNGREETED", 0.5)
    w = weights()
    with (
        publisher(w) as p,
        Relay(HOST, p.port) if relayed else nullcontext(p) as end,
        TcpProxy(end.port) as line,
        Follower(HOST, line.port) as f,
    ):
        p.publish()
        f.wait(1)
        until(lambda: [o.version for o in end.followers] == [1])  # it has nothing left to say
        give_up(end, line)
        line.resume()
        train(w)
        p.publish()
        assert f.wait(2).number == 2 and same(f.tensors(), used(w))
        assert line.connections == 1 and f.status.connected


def test_whoever_says_hello_by_itself_is_not_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at first nor over a new connection: saying it twice would cost what is on its way."""
    monkeypatch.setattr(feed, "UNGREETED", 0.5)
    asked = list[bytes]()
    with publisher(weights()) as p, TcpProxy(p.port) as line:
        send = p._feed._hub.send
        p._feed._hub.send = lambda peer, data: (  # type: ignore[method-assign]
            asked.append(data) if data[0] == Ask.KIND else None,
            send(peer, data),
        )[1]
        p.publish()
        with Follower(HOST, line.port) as f:
            f.wait(1)
            give_up(p, line)
            line.cut()
            line.resume()
            line.restore()
            until(lambda: [o.version for o in p.followers] == [1])
            assert not p._feed._ungreeted
            sleep(1.0)
            assert not asked


def test_on_a_slow_line_versions_are_merged_and_none_waits_for_long() -> None:
    """Counted in transfers: what the ages are in seconds is for false clocks to say (test_sync_serving)."""
    w, published, began = weights(rows=400), {}, {}
    with (
        publisher(w) as p,
        SlowProxy(p.port, 60e3) as line,
        Follower(HOST, line.port, base=used(w)) as f,
    ):
        p.publish()
        f.wait(1)
        end = monotonic() + LONG
        while len(f.arrivals) < 8:
            assert monotonic() < end, f"{len(f.arrivals)} arrivals"
            train(w, 2e-4)
            version = p.publish()
            published[version.number], began[version.number] = version.hash, len(f.arrivals)
            sleep(0.01)
            held = f.held
            assert published.get(held.number, held.hash) == held.hash
        assert f.wait(p.newest.number).hash == p.newest.hash and same(f.tensors(), used(w))
        numbers = [a.version for a in f.arrivals]
    assert numbers == sorted(set(numbers)) and len(numbers) < len(published) / 2
    for number, before in began.items():  # two are begun, or one is and one is made already
        came = next(i for i, n in enumerate(numbers) if n >= number)
        assert came - before <= 2, (number, before, numbers)


def test_a_line_slower_than_the_publisher_never_needs_a_second_keyframe() -> None:
    """What is being sent is what the next patch starts from, however often a fresh one is made to compare."""
    w, asked = weights(rows=1000), []
    with publisher(w) as p, SlowProxy(p.port, 1e5) as line:
        patch, stop = p.history.patch, monotonic() + LONG

        def noted(base: int | None = None, mark: bool = True, *more: More) -> Patch:
            found = patch(base, mark, *more)
            asked.append((base, mark, found.base))
            return found

        p.history.patch = noted  # type: ignore[method-assign]
        p.publish()
        with Follower(HOST, line.port, base=used(w)) as f:
            f.wait(1)
            while len(f.arrivals) < 3 or all(mark for _, mark, _ in asked):
                assert monotonic() < stop, asked
                hit = torch.rand_like(w["embed"]) < 0.2
                w["embed"] = torch.where(hit, w["embed"] * 1.01, w["embed"])
                p.publish()
                sleep(0.01)
            came = [a.version for a in f.arrivals]
            assert p.newest.number > 2 * len(came)
            assert all(base == found > 0 for base, _, found in asked), asked
            bound = p.history.layout.nbytes * 2
            assert p.history.log_nbytes <= bound or len(p.history._log.bases()) == 2
            assert f.wait(p.newest.number).hash == p.newest.hash and same(f.tensors(), used(w))


def test_a_transfer_is_given_up_where_going_back_is_shorter() -> None:
    w = weights(rows=8000)
    base = {n: x.clone() for n, x in w.items()}
    with (
        publisher(w, budget=1 << 24) as p,
        SlowProxy(p.port, 1e5) as line,
        Follower(HOST, line.port, base=used(w)) as f,
    ):
        p.publish()
        f.wait(1)
        hit = torch.rand_like(w["embed"]) < 0.3  # more of it, and a keyframe were smaller
        w["embed"] *= torch.where(hit, 1.1, 1.0)
        p.publish()  # many seconds of this line: a busy machine compares in that time too
        until(lambda: line.counts[DOWN] > 50e3)
        w["embed"].copy_(base["embed"])
        w["bias"] += 1
        p.publish()  # from what the follower holds this is 50 numbers
        until(lambda: p.followers[0].abandoned)
        line.rate = 1e6
        f.wait(3)
        assert same(f.tensors(), used(w)) and f.status.abandoned == 1
        assert p.followers[0].abandoned == 1 and [a.version for a in f.arrivals] == [3]


def test_who_stops_reading_holds_up_nobody_and_is_sent_no_more_than_a_window() -> None:
    w = weights(rows=6000)
    with (
        publisher(w, silence=600.0) as p,
        SlowProxy(p.port, 5e5) as line,
        Follower(HOST, line.port, silence=600.0) as stuck,
        Follower(HOST, p.port) as good,
    ):
        p.publish()
        stuck.wait(1)
        good.wait(1)
        until(lambda: [s.version for s in p.followers] == [1, 1])
        line.stall()
        before = {s.name: s.sent for s in p.followers}
        for _ in range(8):
            train(w, 1e-2)
            assert good.wait(p.publish().number)
        until(lambda: any(s.version == 1 and s.sent > before[s.name] + 4096 for s in p.followers))
        now = min(p.followers, key=lambda s: s.version)
        assert (
            now.version == 1 and now.sent - before[now.name] < good.arrivals[-1].nbytes / 2
        )  # not even a patch
        line.rate = 1e8
        line.resume()
        stuck.wait(9)
        assert same(stuck.tensors(), used(w)) and len(stuck.arrivals) <= 4


def test_damage_on_the_way_is_noticed_and_mended() -> None:
    w = weights(rows=3000)
    with publisher(w) as p, SlowProxy(p.port, 4e6) as line, Follower(HOST, line.port, silence=2.0) as f:
        for after in (100_000, 300_000, 500_000):
            line.corrupt(DOWN, after)
        p.publish()
        f.wait(1)
        for _ in range(3):
            train(w)
            line.corrupt(DOWN, 20_000)
            f.wait(p.publish().number)
            assert same(f.tensors(), used(w))
        assert not line._flips[DOWN]  # all of it happened


def test_ages_are_by_the_publisher_s_clock_whatever_this_one_says() -> None:
    w, ahead = weights(), 3600.0
    with publisher(w) as p:
        p._feed._hub._clock = lambda: time.time() + ahead
        with Relay(HOST, p.port) as relay:
            until(lambda: relay._spoke is not None and relay._spoke.clock.doubt < 1)
            with Follower(HOST, relay.port) as f:
                p.history.publish(w, published=time.time() + ahead)
                p._feed.wake()
                f.wait(1)
                until(lambda: abs(f.status.ahead - ahead) < 1)
                age = f.status.age
                assert age is not None and -1 < age < LONG


def test_a_publisher_that_starts_again_from_its_file_sends_a_patch(tmp_path: Path) -> None:
    w, path = weights(), tmp_path / "publisher.safetensors"
    with publisher(w, state=path) as p, Follower(HOST, p.port) as f:
        p.publish()
        f.wait(1)
        train(w)
        p.publish()
        f.wait(2)
        port = p.port
        p.close()
        assert path.is_file()
        train(w)
        with publisher(w, port=port, state=path) as again:
            assert again.newest.number == 2 and f.wait(2).number == 2
            again.publish()
            f.wait(3)
            assert same(f.tensors(), used(w)) and f.arrivals[-1].nbytes < f.arrivals[0].nbytes / 4


def test_a_publisher_offers_nothing_from_its_file_before_it_publishes(tmp_path: Path) -> None:
    w, path = weights(), tmp_path / "publisher.safetensors"
    with publisher(w) as p:
        p.publish()
        p.save(path)
        with Follower(HOST, p.port) as f:
            train(w)
            p.publish()
            newest = f.wait(2)
            port = p.port
            p.close()
            with publisher(w, port=port, state=path) as again:  # of version 1
                until(lambda: any(s.greeted for s in again.followers))
                sleep(0.1)
                assert f.held == newest and same(f.tensors(), used(w))
                assert f.wait(again.publish().number).hash == newest.hash


@pytest.mark.parametrize("content", [b"nothing of ours", None])
def test_a_publisher_s_file_of_anything_else_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "publisher.safetensors"
    if content is None:
        with publisher(weights(rows=3), state=path) as p:
            p.publish()
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match=str(path)):
        publisher(weights(), state=path)


def test_names_choose_what_is_published_and_what_it_is_called() -> None:
    w = weights()
    first = next(iter(w))
    with (
        publisher(w, names=lambda name: "mine" if name == first else None) as p,
        Follower(HOST, p.port) as f,
    ):
        p.publish(7)
        assert f.wait(1).meta == {"step": 7}
        assert list(f.tensors()) == ["mine"]
        p.publish(8, {first: torch.zeros_like(w[first]), "other": torch.ones(1)}, note="zeros")
        assert f.wait(2).meta == {"step": 8, "note": "zeros"}
        assert not f.tensors()["mine"].any()
    for names, reason in ((lambda name: "one", "two tensors"), (lambda name: None, "no tensor")):
        with pytest.raises(InputError, match=reason):
            publisher(w, names=names)


def test_whoever_joins_is_sent_the_keyframe_that_others_are_sent_at_once() -> None:
    w = weights(rows=2000)
    with publisher(w) as p, SlowProxy(p.port, 2e5) as line, Follower(HOST, line.port) as slow:
        p.publish()
        until(lambda: any(s.sent > 100_000 for s in p.followers))
        began = monotonic()
        with Follower(HOST, p.port) as late:
            late.wait(1)
            assert slow.held.number == 0 and monotonic() - began < LONG
            assert same(late.tensors(), used(w))
        line.rate = 1e8


def test_whoever_joins_late_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keyframe that takes for ever is made beside patches, and one is enough for all who join meanwhile."""
    w, making, go_on = weights(), threading.Event(), threading.Event()
    with publisher(w) as p, Follower(HOST, p.port) as f:
        p.publish()
        f.wait(1)
        whole = body.whole
        made = []

        def slow(layout: Layout, words: object) -> Iterator[list[bytes]]:
            made.append(1)
            making.set()
            assert go_on.wait(LONG)
            return whole(layout, words)  # type: ignore[arg-type]

        monkeypatch.setattr(body, "whole", slow)
        train(w)
        f.wait(p.publish().number)  # so that no keyframe of the newest version is at hand
        with Follower(HOST, p.port) as late, Follower(HOST, p.port) as later:
            assert making.wait(LONG)
            for _ in range(3):
                train(w)
                f.wait(p.publish().number)
                assert same(f.tensors(), used(w))
            go_on.set()
            for joined in (late, later):
                joined.wait(p.newest.number)
                assert same(joined.tensors(), used(w))
        assert len(made) == 1


@pytest.mark.parametrize(("seed", "versions", "relayed"), [(0, 200, 0), (1, 25, 0), (2, 25, 0), (3, 60, 1)])
def test_whatever_happens_each_version_held_is_one_that_was_published_and_none_is_older(
    seed: int, versions: int, relayed: int, tmp_path: Path
) -> None:
    """Cuts, stalls, restarts of either side, or of a relay between them, and late joiners, at random."""
    rng, w, path = random.Random(seed), weights(seed, rows=200), tmp_path / "state.safetensors"
    published: dict[int, dict[str, Tensor]] = {}  # by hash
    p = publisher(w, silence=2.0)
    port, line = p.port, SlowProxy(p.port, 3e5)
    relays = [Relay(HOST, line.port, (HOST, 0)) for _ in range(relayed)]
    near = relays[0].port if relays else line.port
    f = Follower(HOST, near, state=path)
    last, others = (0, 0), []

    def publish() -> None:
        train(w, 10.0 ** rng.uniform(-5, -2))
        published[p.publish().hash] = used(w)

    def look() -> None:
        nonlocal last
        if not f.held.hash:
            return
        tensors = f.tensors()
        assert same(tensors, published[f.replica.hash])
        now = f.replica.version, list(published).index(f.replica.hash)  # whatever contents are called
        assert now[0] >= last[0] and now[1] >= last[1]
        last = now

    while len(published) < versions:
        what = rng.choices(
            ["publish", "look", "cut", "restore", "publisher", "follower", "joiner", "relay"],
            [9, 4, 2, 3, 1, 1, 1, relayed],
        )
        if what == ["publish"]:
            publish()
        elif what == ["cut"]:
            line.cut()
        elif what == ["restore"]:
            line.restore()
        elif what == ["publisher"]:
            p.close()
            state = rng.choice(
                [None, tmp_path / "publisher.safetensors"]
            )  # which may be of a life before the last
            p = publisher(w, port=port, silence=2.0, state=state)
            publish()
        elif what == ["follower"]:
            f.close()
            f = Follower(HOST, near, state=path)
        elif what == ["relay"]:
            relays.pop().close()
            held: dict[str, object] = {"base": rng.choice([None, *published.values()])}
            held = {"state": path} if rng.random() < 0.5 else held  # the base may be of any life
            relays.append(Relay(HOST, line.port, (HOST, near), **held))  # type: ignore[arg-type]
        elif what == ["joiner"] and len(others) < 3:
            others.append(Follower(HOST, port))
        look()
        sleep(rng.uniform(0, 0.03))
    line.restore()
    publish()
    newest = p.newest.hash
    for follower in [f, *others]:
        until(lambda follower=follower: follower.held.hash == newest)
        assert same(follower.tensors(), used(w))
        follower.close()
    for relay in relays:
        relay.close()
    p.flush()  # one that left while it was cut off counts until it has been silent for a while
    p.close()
    line.__exit__()


# relays


def test_eight_followers_through_one_relay_cost_the_publisher_what_one_costs() -> None:
    w = weights(rows=1000)
    with publisher(w, token=b"t") as p, Relay(HOST, p.port, token=b"t") as relay:
        followers = [Follower(HOST, relay.port, b"t") for _ in range(8)]
        for _ in range(6):
            train(w)
            version = p.publish()
            for f in followers:
                f.wait(version.number)
        relay.wait(version.number)
        for f in followers:
            assert same(f.tensors(), used(w))
            until(lambda f=f: abs(f.clock - relay.now()) <= f.status.doubt + 0.05)
        one = followers[0].status.nbytes
        assert p.sent < 1.2 * one and len(p.followers) == 1
        assert relay.sent > 7 * one and len(relay.followers) == 8
        for f in followers:
            f.close()


def test_a_follower_may_be_a_relay_itself_and_relays_may_follow_relays() -> None:
    w = weights()
    with (
        publisher(w) as p,
        Follower(HOST, p.port, relay=(HOST, 0)) as near,
        Relay(HOST, near.relay.port if near.relay else 0) as relay,
        Follower(HOST, relay.port) as far,
    ):
        for _ in range(4):
            train(w)
            version = p.publish(3)
            assert far.wait(version.number).meta == {"step": 3}
            near.wait(version.number)
        assert same(near.tensors(), used(w)) and same(far.tensors(), used(w))
        assert len(p.followers) == 1


def test_after_publisher_and_relay_restart_versions_still_go_forward() -> None:
    w = weights()
    with publisher(w) as p, Relay(HOST, p.port) as relay:
        ports = p.port, relay.port
        for _ in range(7):
            train(w)
            p.publish()
        f = Follower(HOST, relay.port)
        f.wait(7)
    with f, publisher(w, port=ports[0]) as p, Relay(HOST, p.port, (HOST, ports[1])) as relay:
        p.publish()
        train(w)
        version = p.publish()  # number 2 here, until the relay hears of 7
        until(lambda: f.held.hash == version.hash)
        assert f.held.number > 7 and same(f.tensors(), used(w))
        assert p.newest.number == f.held.number == relay.held.number


# strangers


@contextmanager
def stranger(port: int) -> Iterator[Spoke]:
    spoke = Spoke.connect(HOST, port)
    try:
        until(lambda: (e := spoke.recv(0.1)) is not None and e.kind is Kind.JOINED)
        yield spoke
    finally:
        spoke.close(0.5)


def test_hostile_followers_do_not_disturb_the_publisher() -> None:
    rng, w = random.Random(1), weights()
    with publisher(w) as p, Follower(HOST, p.port) as good, stranger(p.port) as spoke:
        p.publish()
        good.wait(1)
        digest = bytes.fromhex(p.history.layout.digest)
        greeting = Hello(MAGIC, PROTOCOL, 1, NOTHING, digest, 0, 0, 0, 0, 0, 0, 0)
        odd = [
            Hello(b"odd!", PROTOCOL, 1, NOTHING, digest, 0, 0, 0, 0, 0, 0, 0),
            Hello(MAGIC, PROTOCOL, 1, NOTHING, digest, 2**64 - 1, 7, 2**64 - 1, 0, 0, 0, 0),
            Hello(MAGIC, PROTOCOL, 1, NOTHING, digest, 0, 0, 0, 0, 1, p.newest.hash, 2**64 - 1),
            Ack(1, 2**64 - 1),
            Done(1, 1, 99, 99),
            Again(1, 2**32 - 1, 5, 5),
            Ask(PROTOCOL),
        ]
        for message in odd:
            spoke.send(greeting.pack())
            spoke.send(message.pack())
            spoke.send(rng.randbytes(rng.randrange(1, 200)))
        for _ in range(200):
            spoke.send(bytes([rng.choice([1, 2, 3, 4])]) + rng.randbytes(rng.randrange(0, 120)))
        for _ in range(3):
            train(w)
            good.wait(p.publish().number)
        assert same(good.tensors(), used(w)) and p.newest.number == 4


class Liar:
    """A publisher that says what it is told to, after a proper greeting."""

    def __init__(self) -> None:
        self.layout = Layout.of(used(weights()))
        self.hub = Hub.bind()
        self.peer = b""

    def answer(self, session: int, json: bytes | None = None, digest: bytes | None = None) -> None:
        found = self.layout.to_json() if json is None else json
        digest = bytes.fromhex(self.layout.digest) if digest is None else digest
        name = b"liar".ljust(MAX_NAME, b"\0")
        self.hub.send(
            self.peer, LayoutIs(PROTOCOL, session, b"i" * 16, digest, 1, name, memoryview(found)).pack()
        )

    def hear(self) -> object:
        while True:
            event = self.hub.recv(LONG)
            assert event is not None, "the follower fell silent"
            if event.kind is Kind.DATA:
                self.peer = event.peer
                return unpack(event.data, UP)

    def transfer(self, begin: Begin, head: bytes, body: bytes) -> None:
        """Send a patch, and hear that its bytes came."""
        self.hub.send(self.peer, begin.pack())
        for at in range(0, len(body), 1 << 16):
            self.hub.send(self.peer, Chunk(begin.transfer, at, bytes(body[at : at + (1 << 16)])).pack())
            assert isinstance(self.hear(), Ack)
        self.hub.send(self.peer, End(begin.transfer, len(body), head).pack())

    def greet(self) -> Hello:
        """Get to where the follower knows the layout and waits for patches."""
        hello = self.hear()
        assert isinstance(hello, Hello) and hello.layout == NOTHING
        self.answer(hello.session)
        again = self.hear()
        assert isinstance(again, Hello) and again.layout.hex() == self.layout.digest
        self.answer(again.session, b"")
        return again


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.hub.close(0.5)


def test_hostile_publishers_change_nothing_and_end_in_a_payload_error(liar: Liar) -> None:
    amid = Begin(1, 0, 0, 1, 2, 500)  # goes on with what never began
    begin = Begin(1, 0, 0, 1, 2, 0)
    nothing = begin, End(1, 0, b"head")
    longer = begin, Chunk(1, 0, b"body"), End(1, 5, b"head")
    more = begin, Chunk(1, 0, b"body"), End(1, 4, bytes(1 << 20))  # than any head has
    far = begin, Chunk(1, 5, b"body")
    with Follower(HOST, liar.hub.port) as f:
        hello = liar.greet()
        for message in (Chunk(5, 0, b"of no transfer"), End(5, 14, b"head"), Same(9, 1234, 0.0)):
            liar.hub.send(liar.peer, message.pack())
        assert isinstance(liar.hear(), Ack)
        for messages in (nothing, longer, more, far):
            for message in messages:
                liar.hub.send(liar.peer, message.pack())
            again = liar.hear()
            while isinstance(again, Ack):
                again = liar.hear()
            assert isinstance(again, Hello) and again.version == 0 and f.status.error is None
            liar.answer(again.session, b"")
        liar.hub.send(liar.peer, amid.pack())  # one too many
        with pytest.raises(PayloadError):
            f.wait(1, LONG)
        assert f.held.number == 0 and hello.version == 0


def test_a_patch_longer_than_the_state_can_need_is_refused_as_it_grows(liar: Liar) -> None:
    with Follower(HOST, liar.hub.port) as f:
        liar.greet()
        liar.hub.send(liar.peer, Begin(1, 0, 0, 1, 2, 0).pack())
        limit, at, answer = most(liar.layout), 0, None
        while not isinstance(answer, Hello):
            assert at <= limit + (1 << 20)
            liar.hub.send(liar.peer, Chunk(1, at, bytes(1 << 20)).pack())
            at, answer = at + (1 << 20), liar.hear()
        assert at > limit and f.held.number == 0 and f.status.error is None


def test_a_patch_of_garbage_or_with_a_wrong_hash_is_never_held(liar: Liar) -> None:
    w = used(weights())
    history = History(liar.layout)
    history.publish(w)
    head, data = history.patch(None).head(), history.patch(None).body
    newest = history.newest
    with Follower(HOST, liar.hub.port) as f:
        liar.greet()
        wrong = bytearray(data)
        wrong[len(data) // 2] ^= 1
        for number, payload in enumerate((bytes(wrong), random.Random(3).randbytes(500)), start=1):
            liar.transfer(Begin(number, 0, 0, 1, newest.hash, 0), head, payload)
            again = liar.hear()
            assert isinstance(again, Again) and again.transfer == number and again.version == 0
            assert f.held.number == 0
        liar.transfer(Begin(3, 0, 0, 1, newest.hash, 0), head, data)
        assert f.wait(1).hash == newest.hash and same(f.tensors(), w)


def test_a_patch_that_goes_wrong_while_it_is_read_is_never_held(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    states.in_sections(monkeypatch)
    base, w = used(weights()), used(weights(1))
    history = History(liar.layout)
    first = history.publish(base)
    newest = history.publish(w)
    head, data = history.patch(first.number).head(), history.patch(first.number).body
    ends = (first.number, first.hash, newest.number, newest.hash)
    with Follower(HOST, liar.hub.port, base=base) as f:
        liar.greet()
        wrong, feed, spoiled = bytearray(data), Reading.feed, list[int]()
        wrong[body.HEAD.size] = 9  # bytes of a word

        def noting(reading: Reading, came: bytearray) -> None:
            try:
                feed(reading, came)
            except PayloadError:
                spoiled.append(len(came))
                raise

        monkeypatch.setattr(Reading, "feed", noting)
        for number, payload in enumerate((wrong, wrong, data), start=1):
            liar.transfer(Begin(number, *ends, 0), head, payload)
            if payload is wrong:
                again = liar.hear()
                assert isinstance(again, Again) and again.transfer == number and f.held.number == 0
        assert f.wait(newest.number).hash == newest.hash and same(f.tensors(), w)
        assert spoiled and len(spoiled) <= 2  # at once where that section was here


def test_a_layout_that_comes_later_than_a_follower_waits_is_taken(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of its answers would be too late over a slow line, and it would never be sent a patch."""
    monkeypatch.setattr(reception, "TURN", 0.05)
    monkeypatch.setattr(reception, "ANSWER", 0.5)
    with Follower(HOST, liar.hub.port) as f:
        first, second = liar.hear(), liar.hear()
        assert isinstance(first, Hello) and isinstance(second, Hello)
        assert second.session == first.session + 1 and second.layout == NOTHING
        f._reception._patience = LONG
        liar.answer(first.session)
        heard = [liar.hear()]
        while heard[-1].layout == NOTHING and len(heard) < 4:  # type: ignore[attr-defined]
            heard.append(liar.hear())
        third = heard[-1]
        assert isinstance(third, Hello) and third.layout.hex() == liar.layout.digest
        liar.answer(second.session)  # is on its way still
        liar.hub.send(liar.peer, Begin(1, 0, 0, 1, 2, 0).pack())  # and this is of no session
        liar.answer(third.session, b"")
        liar.hub.send(liar.peer, Begin(2, 0, 0, 1, 2, 0).pack())
        liar.hub.send(liar.peer, Chunk(2, 0, b"body").pack())
        assert liar.hear() == Ack(third.session, 4) and not f._reception.failures
        assert f._reception._patience == 0.5


def test_a_layout_from_before_this_connection_is_not_taken(liar: Liar) -> None:
    with TcpProxy(liar.hub.port) as line, Follower(HOST, line.port) as f:
        first = liar.hear()
        line.cut()
        line.restore()
        second = liar.hear()
        assert isinstance(first, Hello) and isinstance(second, Hello)
        other = Layout.of({"other": torch.zeros(3)})
        for session in (first.session, second.session + 1):  # nor one that nobody asked for
            liar.answer(session, other.to_json(), bytes.fromhex(other.digest))
        liar.answer(second.session)
        third = liar.hear()
        assert isinstance(third, Hello) and third.session == second.session + 1
        assert third.layout.hex() == liar.layout.digest and f._reception._layout is not None


def test_hello_is_said_again_less_and_less_often(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "TURN", 0.01)
    monkeypatch.setattr(reception, "ANSWER", 0.1)
    monkeypatch.setattr(reception, "LONGEST", 0.4)
    began = monotonic()
    with Follower(HOST, liar.hub.port) as f:
        for _ in range(6):
            hello = liar.hear()
        assert isinstance(hello, Hello)
        assert f._reception._asked_at - began >= 0.1 + 0.2 + 3 * 0.4 and f._reception._patience == 0.4


def test_another_protocol_is_told(liar: Liar) -> None:
    with Follower(HOST, liar.hub.port) as f:
        liar.hear()
        liar.hub.send(liar.peer, Ask(PROTOCOL + 1).pack())
        with pytest.raises(InputError, match=f"speaks protocol {PROTOCOL + 1}, this end {PROTOCOL}"):
            f.wait(1, LONG)


def test_close_leaves_no_thread() -> None:
    def once() -> None:
        w = weights(rows=3)
        with publisher(w) as p, Relay(HOST, p.port) as r, Follower(HOST, r.port) as f:
            p.publish()
            f.wait(1)

    once()
    gc.collect()
    threads = set(threading.enumerate())
    for _ in range(2):
        once()
    until(lambda: set(threading.enumerate()) <= threads)
