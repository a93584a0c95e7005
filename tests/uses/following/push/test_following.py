"""Followers over real sockets: bit-identity, order, bases, tokens, names, ages."""

from __future__ import annotations

import gc
import math
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from following import Model, publisher, same, small, train, used, weights
from torch import nn
from waiting import HOST, LONG, until

from thinwire.types import AuthError, InputError, LinkError, PayloadError
from thinwire.uses.following.push.follower import Follower, ask
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.push.state_relay import StateRelay


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
        with pytest.raises(InputError, match=text) as e:  # before anything comes
            f.wait(1, LONG)
        assert "\n" not in str(e.value)
        assert p.publish().number == 1


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


def test_ages_are_by_the_publisher_s_clock_whatever_this_one_says() -> None:
    w, ahead = weights(), 3600.0
    with publisher(w) as p:
        p._feed._hub._clock = lambda: time.time() + ahead
        with StateRelay(HOST, p.port) as relay:
            until(lambda: relay._spoke is not None and relay._spoke.clock.doubt < 1)
            with Follower(HOST, relay.port) as f:
                p.history.publish(w, published=time.time() + ahead)
                p._feed.wake()
                f.wait(1)
                until(lambda: abs(f.status.ahead - ahead) < 1)
                age = f.status.age
                assert age is not None and -1 < age < LONG


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


def test_close_leaves_no_thread() -> None:
    def once() -> None:
        w = weights(rows=3)
        with publisher(w) as p, StateRelay(HOST, p.port) as r, Follower(HOST, r.port) as f:
            p.publish()
            f.wait(1)

    once()
    gc.collect()
    threads = set(threading.enumerate())
    for _ in range(2):
        once()
    until(lambda: set(threading.enumerate()) <= threads)


def test_a_state_over_the_limit_is_refused_before_memory_is_taken() -> None:
    with Publisher(small()) as p:
        p.publish(1)
        size = p.history.layout.nbytes
        with Follower(HOST, p.port, max_nbytes=2 * size) as f:
            f.wait(1)
        with Follower(HOST, p.port, max_nbytes=size // 2) as f, pytest.raises(PayloadError, match="limit"):
            f.wait(1, LONG)
        with (
            StateRelay(HOST, p.port, max_nbytes=size // 2) as relay,
            pytest.raises(PayloadError, match="limit"),
        ):
            relay.wait(1, LONG)
        with pytest.raises(PayloadError, match="limit"):
            ask(HOST, p.port, max_nbytes=size // 2)
        assert ask(HOST, p.port, max_nbytes=2 * size).newest == 1


def test_who_starts_from_a_base_learns_the_meta_data_of_what_it_holds() -> None:
    w = small()
    with Publisher(w) as p:
        p.publish(7, loss=0.5)
        with StateRelay(HOST, p.port) as relay:
            relay.wait(1)
            for port in (p.port, relay.port):
                with Follower(HOST, port, base=small()) as f:
                    assert f.wait(1).meta == {"step": 7, "loss": 0.5} and not f.arrivals
                    f.replica.swap()
                    assert f.replica.meta == {"step": 7, "loss": 0.5}
