"""Slow lines and slow readers: versions are merged, transfers given up, nobody is held up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import monotonic, sleep

import pytest
import torch
from following import publisher, same, train, used, weights
from slow_proxy import SlowProxy
from tcp_proxy import DOWN
from waiting import HOST, LONG, until

from thinwire.state.layout import Layout
from thinwire.state.patches import body
from thinwire.state.patches.draft import More
from thinwire.state.patches.patch import Patch
from thinwire.uses.following.push.follower import Follower


def test_on_a_slow_line_versions_are_merged_and_none_waits_for_long() -> None:
    """Counted in transfers: what the ages are in seconds is for false clocks to say (test_sync_pace)."""
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
