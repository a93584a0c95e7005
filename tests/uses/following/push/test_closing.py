"""How publishers and followers close: the last version arrives, nobody is waited for in vain."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest
import torch
from following import answer, hello, publisher, small, stranger, train, used, weights
from slow_proxy import SlowProxy
from waiting import HOST, LONG, until

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.types import InputError, LinkError, MissingExtra
from thinwire.uses.following.pull.store_reader import ShelfReader
from thinwire.uses.following.pull.store_writer import ShelfWriter
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.protocol import NOTHING, LayoutIs
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.push.state_relay import StateRelay


def test_the_last_version_reaches_who_follows_before_a_publisher_is_gone() -> None:
    w = small(400)  # 80 kB of noise: seconds on this line
    p = Publisher(w)
    with SlowProxy(p.port, 80e3) as line, Follower(HOST, line.port) as f:
        with p:
            p.publish(0)
            f.wait(1)
            w["w"] = torch.randn(400, 50)
            last = p.publish(1)
        assert f.wait(last.number, LONG).hash == last.hash


def test_close_waits_only_where_told_and_says_who_is_behind() -> None:
    w = small(400)
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
    w = small(400)
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
    with Publisher(small()) as p, stranger(p.port) as spoke:
        p.publish(1)
        spoke.send(hello(1, NOTHING))
        assert answer(spoke, LayoutIs) is not None
        until(lambda: len(p.followers) == 1)
        p.flush(LONG / 10)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: Publisher(small()),
        lambda path: StateRelay(HOST, 1),
        lambda path: Follower(HOST, 1),
        lambda path: ShelfWriter.of(path / "store", small()),
        lambda path: ShelfReader(path / "store"),
    ],
)
def test_a_missing_package_is_told_at_the_start(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    threads = threading.active_count()
    with pytest.raises(MissingExtra, match="zstandard"):
        make(tmp_path)
    assert threading.active_count() <= threads and not (tmp_path / "store").exists()


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
        assert monotonic() - began < LONG / 3


@pytest.mark.parametrize("way", ["push", "store"])
def test_nothing_is_published_after_closing(way: str, tmp_path: Path):
    state = weights()
    history = History(Layout.of(state))
    open_one = Publisher(state, HOST, 0) if way == "push" else ShelfWriter(tmp_path / "store", history)
    open_one.publish(1, state)
    open_one.close()
    with pytest.raises(InputError, match="is closed"):
        open_one.publish(2, state)
    assert open_one.history.newest.number == 1
