"""Ranks that find each other through a store: in threads, and as processes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch.distributed as dist
from launchers import warm
from waiting import threads

from thinwire.links import LinkShape, Peer, connect_mesh
from thinwire.types import AuthError, InputError, LinkError

LONG = 30.0


def _mesh(world: int, tokens: list[bytes | None] | None = None, **options: object) -> list[dict[int, Peer]]:
    store = dist.HashStore()
    tokens = tokens or [None] * world
    with ThreadPoolExecutor(world) as pool:
        made = [
            pool.submit(connect_mesh, r, world, store, token=tokens[r], **options)  # type: ignore[arg-type]
            for r in range(world)
        ]
        return [m.result(60) for m in made]


def _close(ranks: list[dict[int, Peer]]) -> None:
    with ThreadPoolExecutor(8) as pool:
        for peer in [p for r in ranks for p in r.values()]:
            pool.submit(peer.close)


def test_every_rank_reaches_every_other_and_nothing_is_left() -> None:
    before = threads()
    ranks = _mesh(3)
    for me, peers in enumerate(ranks):
        assert sorted(peers) == [r for r in range(3) if r != me]
        for other, peer in peers.items():
            assert peer.rank == other
            assert peer.name.startswith(f"rank {other} (127.0.0.1:")
            peer.mailbox.send(b"hello", b"%d to %d" % (me, other), "forward")
    for me, peers in enumerate(ranks):
        for other, peer in peers.items():
            assert peer.mailbox.get(b"hello", LONG, "hello") == b"%d to %d" % (other, me)
            assert peer.meter.sent["forward"].messages == peer.meter.received["forward"].messages == 1
    _close(ranks)
    assert threads() <= before


def test_where_the_first_rank_dials_it_listens_nowhere() -> None:
    ranks = _mesh(3, first_dials=True)
    for me, other, listens in ((0, 1, False), (0, 2, False), (1, 0, True), (2, 0, True), (1, 2, True)):
        assert ranks[me][other].kernel._local is listens
        ranks[me][other].mailbox.send(b"hello", b"%d" % me)
        assert ranks[other][me].mailbox.get(b"hello", LONG, "hello") == b"%d" % me
    _close(ranks)


def test_shape_and_token_apply() -> None:
    token = b"a shared secret"
    ranks = _mesh(2, [token, token], shape=LinkShape(1e6, 0.03))
    a, b = ranks[0][1], ranks[1][0]
    assert a.meter.secure
    assert a.shaped.shape == LinkShape(1e6, 0.03)
    for _ in range(10):
        a.mailbox.send(b"x", bytes(20_000), "forward")
    for _ in range(10):
        b.mailbox.get(b"x", LONG, "x")
    for _ in range(300):
        if (seen := a.reliable.estimate()).rate is not None:
            break
        sleep(0.01)
    assert seen.rate == pytest.approx(1e6, rel=0.4)
    assert seen.rtt is not None and seen.rtt >= 0.06
    with a.lifted():
        a.mailbox.send(b"eval", bytes(1000), "evaluation")
    assert len(b.mailbox.get(b"eval", LONG, "evaluation")) == 1000
    _close(ranks)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts are Linux's")
def test_a_connection_made_anew_loses_nothing_and_knows_nothing_of_the_one_before() -> None:
    ranks = _mesh(2)
    a, b = ranks[0][1], ranks[1][0]
    before = [peer.kernel.read() for peer in (a, b)]
    for n in range(20):
        if n == 10:
            a.redial()
            b.redial()
        a.mailbox.send(b"x", b"%d" % n)
        b.mailbox.send(b"x", b"%d" % n)
    for peer in (a, b):
        assert [peer.mailbox.get(b"x", LONG, "a number") for _ in range(20)] == [b"%d" % n for n in range(20)]
    end = monotonic() + LONG
    for peer, counts in zip((a, b), before, strict=True):
        while (now := peer.kernel.read()) is not None and now.connections < 2 and monotonic() < end:
            sleep(0.05)
        assert counts is not None and now is not None
        assert (counts.connections, now.connections) == (1, 2)
    _close(ranks)


def test_what_moves_is_slow_and_not_late() -> None:
    ranks = _mesh(2, shape=LinkShape(rate=400e3))  # 800 kB take two seconds
    a, b = ranks[0][1], ranks[1][0]
    with ThreadPoolExecutor(2) as pool:
        a.mailbox.send(b"large", bytes(800_000), "control")
        waits = pool.submit(b.get, b"large", 0.5, "a large message"), pool.submit(a.get, b"answer", 0.5, "")
        assert len(waits[0].result(LONG)) == 800_000
        b.mailbox.send(b"answer", b"yes")
        assert waits[1].result(LONG) == b"yes"  # its own message was all that moved for two seconds
        for waits_in_vain in [pool.submit(peer.get, b"never", 1.5, "nothing") for peer in (a, b)]:
            with pytest.raises(LinkError, match=r"waited 1\.5 s for nothing from rank \d"):
                waits_in_vain.result(LONG)  # heartbeats each second are no move
    _close(ranks)


def test_a_deadline_counts_from_the_last_move() -> None:
    ranks = _mesh(2)
    a, b = ranks[0][1], ranks[1][0]
    threading.Timer(0.3, b.mailbox.send, (b"other", b"one")).start()
    start = monotonic()
    with pytest.raises(LinkError, match=r"waited 1 s for nothing from rank 1 .*; see what happens there"):
        a.get(b"never", 1.0, "nothing")
    assert 1.2 < monotonic() - start < LONG
    _close(ranks)


def test_a_wrong_token_is_an_auth_error_on_both_sides_and_leaves_nothing() -> None:
    before, store = threads(), dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(connect_mesh, r, 2, store, token=t, connect_timeout=3.0)
            for r, t in enumerate([b"right", b"wrong"])
        ]
        for r, m in enumerate(made):
            with pytest.raises(AuthError, match=f"rank {1 - r} .*THINWIRE_TOKEN"):
                m.result(60)
    assert threads() <= before


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(LinkError, match=r"rank 1 \(127.0.0.1:\d+\)"):
        connect_mesh(0, 2, dist.HashStore(), connect_timeout=0.3)
    with pytest.raises(LinkError, match="rank 0 to publish its address"):
        connect_mesh(1, 2, dist.HashStore(), connect_timeout=0.3)


class Answering:
    """A store that has this for an answer to everything."""

    def __init__(self, published: str) -> None:
        self._published = published

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        return self._published.encode()


@pytest.mark.parametrize(
    ("published", "told"),
    [
        *((text, "rank 0 published cannot be read") for text in ("", "{}", '["127.0.0.1"]', "[1, 2, 3, 4]")),
        ('["127.0.0.1", "x", "n"]', "rank 0 published cannot be read"),
        ('["192.0.2.1", 1, "n"]', "needs a shared token"),
    ],
)
def test_a_strange_address_in_the_store_is_refused(published: str, told: str) -> None:
    with pytest.raises((LinkError, InputError), match=told):
        connect_mesh(1, 2, Answering(published), connect_timeout=0.3)


class Bare:
    """A store that only waits, as the contract asks at least."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._store.set_timeout(timedelta(seconds=0.3))
        self.set, self.get = self._store.set, self._store.get


@pytest.mark.parametrize("make", [dist.HashStore, Bare])
@pytest.mark.parametrize("world", [2, 3])
def test_the_meshes_of_a_store_are_made_one_after_the_other_whatever_is_left_there(
    make: Callable[[], Any], world: int
) -> None:
    store = make()
    with pytest.raises(LinkError, match="rank 0 to publish"):  # its question stays there
        connect_mesh(1, world, store, connect_timeout=0.1)
    kept = []
    for mesh in range(3):
        first = mesh % world  # who comes before the others, and finds what the last mesh left there
        with ThreadPoolExecutor(world) as pool:
            made = {first: pool.submit(connect_mesh, first, world, store)}
            sleep(0.05)
            made |= {r: pool.submit(connect_mesh, r, world, store) for r in range(world) if r != first}
            ranks = [made[r].result(LONG) for r in range(world)]
        for r, peers in enumerate(ranks):
            for peer in peers.values():
                peer.mailbox.send(b"mesh", b"%d of %d" % (mesh, r))
        kept.append(ranks)
    for mesh, ranks in enumerate(kept):  # and no mesh has taken another's connections
        for peers in ranks:
            assert [p.get(b"mesh", LONG, "it") for p in peers.values()] == [
                b"%d of %d" % (mesh, r) for r in peers
            ]
        _close(ranks)


def test_two_processes_of_one_rank_are_told_at_once() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(connect_mesh, 1, 2, store, connect_timeout=2.0) for _ in range(2)]
        done = wait(made, 1.0).done
        assert len(done) == 1
        with pytest.raises(InputError, match="another process came as rank 1 to the mesh 'thinwire/links'"):
            done.pop().result()


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="rank 2"):
        connect_mesh(2, 2, dist.HashStore())
    with pytest.raises(InputError, match="THINWIRE_TOKEN"):
        connect_mesh(0, 2, dist.HashStore(), host="192.0.2.1")
    with pytest.raises(InputError, match=r"cannot reach 0\.0\.0\.0"):
        connect_mesh(0, 2, dist.HashStore(), host="0.0.0.0", token=b"a shared secret")
    assert connect_mesh(0, 1, dist.HashStore()) == {}


RANK = """
import sys, warnings
warnings.simplefilter("error")
import torch.distributed as dist
from thinwire.links import LinkShape, connect_mesh
rank = int(sys.argv[1])
peers = connect_mesh(rank, 2, dist.FileStore(sys.argv[2], 2), shape=LinkShape.parse("100mbit,5ms"))
box = peers[1 - rank].mailbox
box.send(b"x", bytes([rank]) * 300_000, "forward")
got = box.get(b"x", 30.0, "the body")
peers[1 - rank].close()
print(len(got), got[0])
"""


def test_two_processes(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ranks = [warm().python(tmp_path / str(r), "-c", RANK, r, store) for r in range(2)]
    for r, process in enumerate(ranks):
        assert (process.wait(), process.out, process.err) == (0, f"300000 {1 - r}\n", "")
