"""What members train on: handed out once a pass, again where it was lost, and read with care."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import torch

from thinwire.codecs import Raw
from thinwire.rounds.aggregation import Synchronous
from thinwire.rounds.aggregation_server import Accepted, Server
from thinwire.rounds.client_profile import ClientProfile, Fixed
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import Update
from thinwire.types import InputError, PayloadError
from thinwire.uses.training.swarm.own_blocks import OwnBlocks
from thinwire.uses.training.swarm.shares import RATIO, Share, ShareMessage, pack_share, read_share
from thinwire.uses.training.swarm.work_pool import WorkPool


def blocks(n: int = 50, seq: int = 16, vocabulary: int = 8000, seed: int = 0) -> torch.Tensor:
    found = torch.randint(0, vocabulary, (n, seq + 1), generator=torch.Generator().manual_seed(seed))
    found[::3, : seq // 2] = ~found[::3, : seq // 2]  # prompts
    return found


@pytest.mark.parametrize("seed", range(4))
def test_each_pass_takes_every_sample_once_whoever_is_lost_and_wherever_the_keeper_stops(seed: int) -> None:
    """Members answer, are lost, or ask again at random; the keeper is loaded anew from its state as JSON."""
    draw, data = random.Random(seed), blocks()
    pool, done = WorkPool(data, batch=2, seed=seed), Counter[int]()
    for _ in range(300):
        client, act = draw.randrange(6), draw.random()
        if act < 0.5:
            share = read_share(pool.give(client, steps=draw.randint(1, 7)))
            assert torch.equal(data[share.ids], share.blocks) and share.samples == pool.samples(client)
        elif act < 0.8:
            ids = pool._handed.under_way.get(client, [])
            pool.settle(client, done=True)
            done.update(ids)
            if ids:
                assert torch.equal(pool.assigned(client), data[torch.tensor(ids)])  # type: ignore[arg-type]
        elif act < 0.95:
            pool.settle(client, done=False)
        else:
            saved = json.loads(json.dumps(pool.state()))
            pool = WorkPool(data, batch=2, seed=seed)
            pool.load(saved)
    for client in range(6):
        pool.settle(client, done=False)
    waiting = Counter(pool._again)
    passes, begun = divmod(pool._passes.taken, len(data))
    found = {(done + waiting)[i] for i in range(len(data))}
    assert found <= {passes, passes + 1} and sum((done + waiting).values()) == pool._passes.taken
    assert passes > 3 and begun >= 0 and pool.counts.done == done.total() and pool.counts.again > 0
    first = pool._again[0]
    assert int(read_share(pool.give(9, steps=1)).ids[0]) == first


def test_a_server_hands_samples_out_with_versions_and_again_where_a_client_is_lost() -> None:
    """What is answered is settled; a client given up, or asked anew, lets go; the state has it all."""
    data = blocks()
    server = Server(torch.zeros(1, 4), Synchronous(), Fixed(steps=3), work=WorkPool(data, batch=2))
    for client in range(3):
        server.join(ClientProfile(client, 0.1, samples=100))
    server.begin(range(3))
    given = [read_share(server.issue(client).work).ids for client in range(3)]
    assert read_share(server.issue(0, after=1).work).ids.equal(given[0])
    packet = ClientResiduals().encode(1, 1, torch.ones(1, 4), Raw())
    assert isinstance(server.receive(1, Update(1, 1, 0, 6, 3, packet).pack()), Accepted)
    server.give_up(2)
    pool = WorkPool(data, batch=2)
    later = Server(torch.zeros(1, 4), Synchronous(), Fixed(steps=3), work=pool)
    later.load_state_dict(server.state_dict())
    assert pool.assigned(1).equal(data[given[1]]) and pool.assigned(2) is None  # type: ignore[union-attr]
    assert later.give_up(0) == 1 and (pool.counts.done, pool.counts.given) == (6, 24)
    later.begin([1])
    again = [*given[0].tolist(), *given[2].tolist()]
    assert read_share(later.issue(1).work).ids.tolist() == again[:6] and pool.passes == 18 / 50


def test_a_state_of_other_samples_or_one_that_is_broken_is_refused() -> None:
    pool = WorkPool(blocks(), batch=4, seed=1)
    pool.give(0, 2)
    state = pool.state()
    for other in (WorkPool(blocks(seed=1), 4, 1), WorkPool(blocks(), 4, 2), WorkPool(blocks(49), 4, 1)):
        with pytest.raises(InputError, match="give the same data and seed"):
            other.load(state)
    for wrong in ({"again": [50]}, {"shares": {"a": []}}, {"taken": None}, {"counts": {"x": 1}}):
        with pytest.raises(InputError):
            WorkPool(blocks(), 4, 1).load(state | wrong)
    for bad in (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), blocks(3)):
        with pytest.raises(InputError):
            WorkPool(bad, batch=4)


@pytest.mark.parametrize("vocabulary", [2, 128, 8000, 50257, 1 << 20])
def test_a_share_is_small_and_reads_back(vocabulary: int) -> None:
    data = blocks(40, 64, vocabulary)
    share = Share(torch.arange(40) << 20, data, batch=8)
    packed = pack_share(share)
    found = read_share(packed, vocabulary)
    assert torch.equal(found.ids, share.ids) and torch.equal(found.blocks, data) and found.batch == 8
    folded = -(-(2 * vocabulary - 1).bit_length() // 8)
    assert len(packed) <= ShareMessage.FORM.size + 40 * (4 + 65 * folded)
    with pytest.raises(PayloadError, match="and the model knows"):
        read_share(packed, int(torch.where(data < 0, ~data, data).max()))


def test_repetition_is_sent_as_it_is_rather_than_as_a_frame_that_asks_for_much() -> None:
    share = Share(torch.zeros(64, dtype=torch.int64), torch.zeros(64, 513, dtype=torch.int64), batch=8)
    packed = pack_share(share)
    assert len(packed) >= share.blocks.nbytes / RATIO and read_share(packed).samples == 64


def test_hostile_shares_are_refused_before_memory_is_taken() -> None:
    """Each change of a byte, each cut, and heads that claim much: refused, or a share of that size."""
    packed, draw = pack_share(Share(torch.arange(8), blocks(8, 8), batch=2)), random.Random(0)
    refused = 0
    for _ in range(3000):
        data = bytearray(packed)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(min(len(data), draw.choice((14, 20, 400))))] = draw.randrange(256)
        cut = bytes(data[: draw.randrange(len(data))]) if draw.random() < 0.2 else bytes(data)
        try:
            found = read_share(cut, vocabulary=8000)
            assert found.blocks.nbytes <= RATIO * len(cut) and found.blocks.max() < 8000
        except PayloadError:
            refused += 1
    assert refused > 1000
    for claims in ((1 << 31, 1 << 31, 1), (1 << 20, 64, 1), (0, 5, 1), (8, 1, 2), (8, 9, 0), (7, 9, 2)):
        with pytest.raises(PayloadError):
            read_share(ShareMessage(*claims, 1, 1, b"x" * 200).pack())


def test_own_samples_are_all_seen_before_one_comes_again() -> None:
    own = OwnBlocks(torch.arange(20).view(10, 2), batch=2, seed=3)
    seen = torch.cat([b for steps in (2, 3) for b in own.batches(steps)])
    assert sorted(seen[:, 0].tolist()) == list(range(0, 20, 2)) and own.samples == 6
    assert OwnBlocks(torch.zeros(1, 2, dtype=torch.int64), batch=8).batch == 1
