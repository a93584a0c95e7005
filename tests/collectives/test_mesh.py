"""Exchanges over the mesh: every message and sum by step, whatever the order, and the peer that is silent."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from time import monotonic

import pytest
import torch
import torch.distributed as dist
from launchers import warm
from meshes import Mesh, meshes, together
from other_device import DEVICE, Elsewhere, Seen
from waiting import threads

from thinwire.collectives import MeshExchange, MeshReduction, reduce
from thinwire.links import LinkShape, connect_mesh
from thinwire.types import InputError, LinkError, PayloadError

LONG = 30.0
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _gathers(ranks: list[Mesh]) -> list[MeshExchange]:
    return [MeshExchange(r, peers) for r, peers in enumerate(ranks)]


def _sums(ranks: list[Mesh]) -> list[MeshReduction]:
    return [MeshReduction(r, peers) for r, peers in enumerate(ranks)]


def _body(rank: int, step: int, size: int) -> bytes:
    return random.Random(100 * rank + step).randbytes(size)


@pytest.mark.parametrize(("world", "largest"), [(2, 20_000_000), (4, 1_000_000)])
def test_each_gets_the_message_of_every_other_for_the_step_it_asks_for(world: int, largest: int) -> None:
    sizes = [0, 1, 5000, 131_072 - 30, 131_073, largest]
    before = threads()
    with meshes(world) as ranks:
        exchanges = _gathers(ranks)
        for r, exchange in enumerate(exchanges):
            order = random.Random(r).sample(range(len(sizes)), len(sizes))  # each rank posts in its own
            assert [exchange.post(s, _body(r, s, sizes[s])) for s in order] == [sizes[s] for s in order]
        for step in (3, 0, 5, 1, 4, 2):
            for r, exchange in enumerate(exchanges):
                expected = {p: _body(p, step, sizes[step]) for p in range(world) if p != r}
                assert exchange.collect(step, LONG) == expected
        for exchange in exchanges:
            exchange.drain(LONG)
            exchange.close()
    assert threads() <= before


def test_a_buffer_is_free_once_it_is_posted() -> None:
    with meshes(2) as ranks:
        a, b = _gathers(ranks)
        buffer = bytearray(b"x" * 300_000)
        a.post(1, memoryview(buffer))
        buffer[:] = bytes(300_000)
        b.post(1, b"")
        assert b.collect(1, LONG) == {0: b"x" * 300_000}


def test_sixteen_steps_are_on_their_way_while_the_caller_computes() -> None:
    with meshes(2, shape=LinkShape(delay=0.3)) as ranks:
        a, b = _gathers(ranks)
        begin = monotonic()
        for step in range(16):
            a.post(step, b"%d" % step)
            b.post(step, b"")
        posted = monotonic() - begin
        assert [b.collect(step, LONG) for step in range(16)] == [{0: b"%d" % s} for s in range(16)]
        assert posted < 16 * 0.3 / 2 and 0.3 <= monotonic() - begin < 16 * 0.3


def test_participants_are_some_of_the_mesh_and_exchanges_have_names() -> None:
    with meshes(3) as ranks:
        some = [MeshExchange(r, ranks[r], ranks=(0, 2), name=name) for name in ("a", "b") for r in (0, 2)]
        assert [e.ranks for e in some] == [(0, 2)] * 4
        for n, exchange in enumerate(some):
            exchange.post(7, b"%d" % n)
        assert [e.collect(7, LONG) for e in some] == [{2: b"1"}, {0: b"0"}, {2: b"3"}, {0: b"2"}]
        with pytest.raises(InputError, match="rank 5 is not in the mesh of rank 0"):
            MeshExchange(0, ranks[0], ranks=(0, 5))


def test_exchanges_of_one_name_are_told_apart_by_their_order() -> None:
    with meshes(3) as ranks:
        twice = [(_gathers(ranks), _sums(ranks)) for _ in range(2)]
        for n, (gathers, sums) in reversed(list(enumerate(twice))):
            for gather, total in zip(gathers, sums, strict=True):
                gather.post(0, b"%d" % n)
                total.post(0, torch.full((4,), float(n)))
        for n, (gathers, sums) in enumerate(twice):
            assert all(set(gather.collect(0, LONG).values()) == {b"%d" % n} for gather in gathers)
            assert all(total.collect(0, LONG).tolist() == [3.0 * n] * 4 for total in sums)
        MeshExchange(0, ranks[0], (0, 1), "pair")
        with pytest.raises(InputError, match=r"\(0, 1, 2\) have an exchange 'pair' already"):
            MeshExchange(0, ranks[0], (0, 1, 2), "pair")


def test_the_meters_count_an_exchange_with_its_headers() -> None:
    with meshes(2) as ranks:
        a, b = _gathers(ranks)
        a.post(3, bytes(200_000))
        b.post(3, b"")
        b.collect(3, LONG)
        sent, received = ranks[0][1].meter.sent["exchange"], ranks[1][0].meter.received["exchange"]
        assert sent == received
        assert sent.nbytes == ranks[0][1].wire_bytes(b"gather/message/" + bytes(8), 200_000)


def test_a_deadline_names_the_silent_peer_and_the_step() -> None:
    with meshes(3) as ranks:
        exchanges, sums = _gathers(ranks), _sums(ranks)
        for r in (0, 1):
            exchanges[r].post(4, b"here")
            sums[r].post(4, torch.ones(10))
        with pytest.raises(LinkError, match=r"^waited 0.3 s for the message of step 4 from rank 2 \(127"):
            exchanges[0].collect(4, 0.3)
        with pytest.raises(LinkError, match=r"^waited 0.3 s for its part of step 4 from rank 2 \(127"):
            sums[1].collect(4, 0.3)
        exchanges[2].post(5, b"left")
        assert exchanges[0].collect(5, LONG, final=lambda body: body == b"left") == {2: b"left"}
        exchanges[2].post(4, b"late")
        sums[2].post(4, torch.ones(10))
        assert sums[1].collect(4, LONG).tolist() == [3.0] * 10


def test_a_peer_that_is_gone_is_named_and_what_it_said_before_is_kept() -> None:
    with meshes(2) as ranks:
        (a, b), (sum_a, sum_b) = _gathers(ranks), _sums(ranks)
        b.post(1, b"last words")
        sum_a.post(1, torch.ones(3))
        with ThreadPoolExecutor(2) as pool:
            waits = pool.submit(a.collect, 2, LONG), pool.submit(sum_a.collect, 1, LONG)
            ranks[1][0].close()
            for waiting in waits:
                with pytest.raises(LinkError, match=r"rank 1 .* closed the link"):
                    waiting.result(LONG)
        assert a.collect(1, LONG) == {1: b"last words"}
        for post in (lambda: a.post(3, b""), lambda: sum_a.post(3, torch.ones(3))):
            with pytest.raises(LinkError, match=r"rank 1 .* closed the link"):
                post()
        begin = monotonic()
        sum_a.close()
        sum_b.close()
        assert monotonic() - begin < LONG


RANK = """
import sys, time
import torch.distributed as dist
from thinwire.collectives import MeshExchange
from thinwire.links import connect_mesh
exchange = MeshExchange(1, connect_mesh(1, 2, dist.FileStore(sys.argv[1], 2)))
exchange.post(1, b"alive")
time.sleep(600)
"""


def test_a_killed_process_is_named(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    other = warm().python(tmp_path / "other", "-c", RANK, place)
    peers = connect_mesh(0, 2, dist.FileStore(place, 2), deadline=2.0)
    exchange = MeshExchange(0, peers)
    exchange.post(1, b"")
    assert exchange.collect(1, LONG) == {1: b"alive"}
    other.end(signal.SIGKILL)
    with pytest.raises(LinkError, match=r"^rank 1 \(127.* has not answered for 2 s$"):
        exchange.collect(2, LONG)
    exchange.close()
    peers[1].close()


def test_a_drain_ends_when_the_peer_has_all_or_names_it() -> None:
    with meshes(2, shape=LinkShape(rate=800e3)) as ranks:
        a, b = _gathers(ranks)
        a.post(1, bytes(800_000))  # a second, and it moves all the time
        a.drain(0.6)
        assert ranks[0][1].reliable.idle
        a.post(2, bytes(800_000))
        ranks[1][0].close(0.0)
        with pytest.raises(LinkError, match=r"rank 1 .* closed the link"):
            a.drain(LONG)
        b.close()
        with pytest.raises(LinkError, match="the exchange 'gather' is closed"):
            b.post(3, b"")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_a_sum_is_that_of_fp32_in_the_order_of_the_ranks_on_every_rank(
    world: int, dtype: torch.dtype
) -> None:
    shapes = [(0,), (1,), (3,), (7, 11), (100_000,)]
    generator = torch.Generator().manual_seed(world)
    values = [[torch.randn(s, generator=generator).to(dtype) for s in shapes] for _ in range(world)]
    with meshes(world) as ranks:
        sums = _sums(ranks)
        for r, one in enumerate(sums):
            for step in random.Random(r).sample(range(len(shapes)), len(shapes)):
                mine = values[r][step].clone()
                one.post(step, mine)
                mine.zero_()  # it was copied
        for step in reversed(range(len(shapes))):
            expected = torch.zeros(shapes[step])
            for one in values:
                expected += one[step]
            for one in sums:
                assert torch.equal(one.collect(step, LONG), expected.to(dtype))
        for one in sums:
            one.drain(LONG)
            one.close()


@pytest.mark.parametrize("device", [DEVICE, pytest.param(torch.device("cuda"), marks=cuda)], ids=str)
def test_a_tensor_of_a_device_crosses_once_each_way_and_sums_to_the_bits_of_the_cpu(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces: each is summed while others cross."""
    monkeypatch.setattr(reduce, "PIECE", 1000)
    generator, pieces = torch.Generator().manual_seed(0), 3 * 2  # three parts of 1,501 values
    with meshes(3) as ranks, Elsewhere() if device == DEVICE else nullcontext(Seen()) as seen:
        sums = _sums(ranks)
        for step, dtype in enumerate(reduce.DTYPES):
            values = [torch.randn(3, 1501, generator=generator).to(dtype) for _ in ranks]
            there = values[0].to(device)
            seen.clear()
            sums[0].post(step, there)
            there.zero_()  # it was copied
            for one, mine in zip(sums[1:], values[1:], strict=True):
                one.post(step, mine)
            total = sums[0].collect(step, LONG)
            counts = seen.to_host, seen.to_device, len(seen.waits)
            assert device != DEVICE or counts == (pieces, pieces, pieces)
            assert total.device.type == device.type and total.shape == (3, 1501)
            expected = (values[0].float() + values[1].float() + values[2].float()).to(dtype)
            others = [one.collect(step, LONG) for one in sums[1:]]
            assert all(torch.equal(x.cpu(), expected) for x in (total, *others))


def test_a_sum_sends_two_n_minus_one_nths_of_the_tensor_and_needs_no_collect_to_go_on() -> None:
    with meshes(4) as ranks:
        sums = _sums(ranks)
        for one in sums:
            one.post(0, torch.ones(100_000))
        for one in sums:
            one.drain(LONG)  # nobody has collected
        sent = sum(peer.meter.sent["exchange"].nbytes for peer in ranks[0].values())
        assert 2 * 3 / 4 * 400_000 < sent < 1.01 * 2 * 3 / 4 * 400_000
        assert [one.collect(0, LONG).sum().item() for one in sums] == [400_000.0] * 4


def test_tensors_of_two_sizes_are_refused_by_the_name_of_the_peer() -> None:
    with meshes(2) as ranks:
        a, b = _sums(ranks)
        a.post(1, torch.ones(10))
        b.post(1, torch.ones(12))
        with pytest.raises(PayloadError, match=r"rank 1 .* sent 24 bytes for a part of 20"):
            a.collect(1, LONG)
        with pytest.raises(InputError, match=r"not of torch\.int64"):
            a.post(2, torch.ones(1, dtype=torch.int64))
        with pytest.raises(InputError, match="step 9 was not posted"):
            a.collect(9, LONG)


def test_sums_of_many_steps_at_once_from_many_threads_are_right() -> None:
    with meshes(4) as ranks:
        sums = _sums(ranks)

        def work(r: int) -> list[float]:
            for step in range(16):
                sums[r].post(step, torch.full((50,), float(step + r)))
            return [sums[r].collect(step, LONG)[49].item() for step in range(16)]

        expected = [4.0 * step + 6 for step in range(16)]
        assert together([lambda r=r: work(r) for r in range(4)]) == [expected] * 4
