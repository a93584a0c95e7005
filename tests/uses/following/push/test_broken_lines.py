"""Lines that are cut, stalled or damaged, and links without room: transfers go on, nothing is lost."""

from __future__ import annotations

from contextlib import nullcontext
from time import monotonic, sleep

import pytest
import states
import torch
from following import give_up, publisher, same, train, used, weights
from slow_proxy import SlowProxy
from tcp_proxy import DOWN, TcpProxy
from waiting import HOST, LONG, until

from thinwire.state.patches import body
from thinwire.uses.following.push import feed, send_schedule
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.protocol import Ask, Begin, Chunk, Done
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.push.reception import PartialPatch
from thinwire.uses.following.push.state_relay import StateRelay


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
    monkeypatch.setattr(send_schedule, "MIN_CHUNK", 1 << 14)  # and two of them at once
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
        until(lambda: (partial := f._reception._partial) is not None and len(partial.data) == 1 << 14)
        until(lambda: any(o.schedule.unproved for o in p._feed._followers.values()))
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
    unpack_section, read = body.unpack_section, dict[int, list[float]]()

    def noting(*args: object) -> object:
        read.setdefault(id(args[0]), []).append(monotonic())  # the relay's layout, or the follower's
        return unpack_section(*args)  # type: ignore[arg-type]

    w = {f"w{i}": torch.randn(40_000) for i in range(20)}
    with (
        publisher(w) as p,
        SlowProxy(p.port, 1e6) as line,  # a second or more for each patch
        StateRelay(HOST, line.port) as r,
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
        assert len(times) == 20 and times[-1] - times[0] > 0.5 * nbytes / 1e6


def test_a_patch_that_is_applied_before_it_was_counted_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    add = PartialPatch.add

    def late(partial: PartialPatch, chunk: Chunk) -> None:
        add(partial, chunk)
        sleep(0.2)  # by now the worker has taken it

    monkeypatch.setattr(PartialPatch, "add", late)
    w = weights(rows=3)
    with publisher(w) as p, TcpProxy(p.port) as line, Follower(HOST, line.port) as f:
        for version in (1, 2):
            train(w)
            p.publish()
            f.wait(version)
            until(lambda: not f._reception._pending and f._reception._partial is None)
        line.cut()
        until(lambda: not f.status.connected)
        line.restore()
        train(w)
        p.publish()
        f.wait(3)  # so it has said hello
        assert same(f.tensors(), used(w))


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


@pytest.mark.parametrize("relayed", [False, True])
def test_a_follower_that_was_lost_for_silence_over_a_connection_that_lives_is_served_again(
    relayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing by itself: for it nothing has happened."""
    monkeypatch.setattr(feed, "UNGREETED", 0.5)
    w = weights()
    with (
        publisher(w) as p,
        StateRelay(HOST, p.port) if relayed else nullcontext(p) as end,
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
        p._feed._hub.send = lambda peer, head, *data: (  # type: ignore[method-assign]
            asked.append(head) if head[0] == Ask.KIND else None,
            send(peer, head, *data),
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


def test_a_hub_that_has_no_room_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.randn(50_000)}
    with Publisher(state) as p, Follower(HOST, p.port) as f:
        hub, begun, refused = p._feed._hub, list[bool](), list[int]()
        sending, asked = hub.send, {Begin.KIND: 0, Chunk.KIND: 0}

        def send(peer: bytes, head: bytes, *data: bytes) -> bool:
            kind = head[0]
            if kind in asked:
                asked[kind] += 1
                if asked[kind] == (1 if kind == Begin.KIND else 3):
                    refused.append(kind)
                    return False
                begun.append(kind == Begin.KIND)
            return sending(peer, head, *data)

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
