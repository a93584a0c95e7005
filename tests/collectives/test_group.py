"""The exchange over a torch process group: messages by step, what does not fit, and a peer that is silent."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from meshes import together

from thinwire.collectives import Exchange, GroupExchange, GroupReduction, Reduction
from thinwire.collectives.reduce import DTYPES
from thinwire.types import InputError, LinkError, PayloadError

LONG = 30.0


def _groups(world: int, capacity: int = 100) -> list[GroupExchange]:
    store = dist.HashStore()

    def join(r: int) -> GroupExchange:
        return GroupExchange(dist.ProcessGroupGloo(store, r, world, timedelta(seconds=60)), capacity)

    return together([lambda r=r: join(r) for r in range(world)])


@pytest.mark.parametrize("world", [2, 4])
def test_messages_come_by_step_and_what_does_not_fit_is_kept_by_the_sender(world: int) -> None:
    exchanges: list[GroupExchange] = _groups(world)
    _: Exchange = exchanges[0]
    for r, exchange in enumerate(exchanges):
        fit = [exchange.post(step, bytes([r]) * size) for step, size in enumerate((5, 0, 100, 250))]
        assert fit == [5, 0, 100, 100]
    for step, size in ((3, 100), (0, 5), (1, 0), (2, 100)):
        for r, exchange in enumerate(exchanges):
            assert exchange.collect(step, LONG) == {p: bytes([p]) * size for p in range(world) if p != r}
    for exchange in exchanges:
        exchange.drain(LONG)
        exchange.close()
        with pytest.raises(LinkError, match="closed"):
            exchange.post(4, b"")


def test_sums_come_by_step_on_all_ranks_the_same_bits() -> None:
    sums = [GroupReduction(exchange._group) for exchange in _groups(3)]
    _: Reduction = sums[0]
    values = {step: torch.randn(3, 5, 7).to(dtype) for step, dtype in enumerate(DTYPES)}
    for r, one in enumerate(sums):
        for step, rows in values.items():
            one.post(step, rows[r])
    for step in (1, 0):
        found = [one.collect(step, LONG) for one in sums]
        torch.testing.assert_close(found[0], values[step].sum(0))
        assert all(torch.equal(x, found[0]) for x in found)
    sums[0].post(2, values[0][0])
    with pytest.raises(LinkError, match=r"^waited 0.2 s for the sum of step 2 from rank 1, 2 of the group"):
        sums[0].drain(0.2)
    with pytest.raises(InputError, match="step 0 was not posted"):
        sums[0].collect(0, LONG)
    for r in (1, 2):
        sums[r].post(2, values[0][r])
    for one in sums:
        one.drain(LONG)
        one.close()


def test_a_silent_or_lost_peer_is_named() -> None:
    a, b = _groups(2)
    a.post(3, b"1")
    with pytest.raises(LinkError, match=r"^waited 0.2 s for the message of step 3 from rank 1 of the group"):
        a.collect(3, 0.2)
    b.post(3, b"2")
    assert a.collect(3, LONG) == {1: b"2"}
    assert b.collect(3, LONG) == {0: b"1"}
    a.post(4, b"1")
    del b
    with pytest.raises(LinkError, match=r"^lost the message of step 4 from rank 1 of the group: "):
        a.collect(4, LONG)
    a.close(0.2)


def test_bad_use_is_one_sentence() -> None:
    with pytest.raises(InputError, match="room for 0 bytes"):
        _groups(2, capacity=0)
    a, b = _groups(2)
    with pytest.raises(InputError, match="step 5 was not posted"):
        a.collect(5, LONG)
    a.post(1, b"")
    b.post(1, b"")
    b._posted[1].work.wait()
    b._posted[1].buffers[0][:8] = 255
    with pytest.raises(PayloadError, match="rank 0 sent 18446744073709551615 bytes where 100 fit"):
        b.collect(1, LONG)
    a.drain(LONG)
