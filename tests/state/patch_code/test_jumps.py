"""States that change all over: no patch larger than the state, and followers come along."""

import contextlib

import numpy as np
import pytest
import torch
from histories import follower
from replicas import LONG

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patch_code import blocks, changes
from thinwire.uses.following.pull.store_reader import ShelfReader
from thinwire.uses.following.pull.store_writer import ShelfWriter
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.push.state_relay import StateRelay


@pytest.mark.parametrize("most", [1, 300, 1000, 5000])
def test_blocks_of_more_elements_than_a_stream_may_have_share_several(monkeypatch, most):
    numels, word = [100, 400, 5000, 250, 1, 3000], np.dtype(np.int16)
    rng, found = np.random.default_rng(0), []
    for i, n in enumerate(numels):
        at = np.flatnonzero(rng.random(n) < (0.9 if i == 2 else 0.2)).astype(np.int32)
        found.append(changes.Block(n, at, rng.choice(np.array([1, -1, 7], word), at.size)))
    as_one = changes.pack_blocks(found, word)
    monkeypatch.setattr(blocks, "MOST", most)
    body = changes.pack_blocks(found, word)
    assert (body == as_one) == (most == 5000)  # what fits is as it always was
    back = changes.unpack_blocks(body, numels, word)
    for a, b in zip(found, back, strict=True):
        assert np.array_equal(a.positions, b.positions) and np.array_equal(a.diffs, b.diffs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_after_a_jump_a_patch_is_no_larger_than_the_state(dtype):
    g = torch.Generator().manual_seed(0)
    history = History(Layout.of({"w": torch.zeros(1 << 18)}, dtype), budget=1 << 24)
    first = torch.randn(1 << 18, generator=g)
    for x in (first, first + 0.01 * first, torch.randn(1 << 18, generator=g), torch.zeros(1 << 18)):
        held = follower(history) if history.newest.number else None
        history.publish({"w": x})
        if held is not None:
            patch = history.patch(held.version)
            assert patch.base and patch.nbytes <= 1.001 * history.patch(None).nbytes + 64
            held.apply(patch)
            assert held.swap() and torch.equal(held.tensors()["w"], x.to(dtype))


def test_each_tensor_travels_as_what_is_smaller(monkeypatch):
    g = torch.Generator().manual_seed(0)
    n = 1 << 17
    x = {name: torch.randn(n, generator=g) for name in ("jumps", "moves", "steps", "stays")}
    history = History(Layout.of(x, torch.bfloat16))
    history.publish(x)
    held = follower(history)
    x["jumps"] = torch.randn(n, generator=g)  # new words
    x["moves"] *= 1 + 0.01 * torch.randn(n, generator=g)  # a difference for each
    x["steps"][::100] *= 1.5  # positions and differences
    history.publish(x)
    patch = history.patch(1)
    held.apply(patch)
    assert held.swap() and all(torch.equal(held.tensors()[k], v.bfloat16()) for k, v in x.items())
    monkeypatch.setattr(changes, "jumped", lambda blocks, look: [False] * len(blocks))
    history.publish(x)  # no cached patch
    without = history.patch(1)
    assert patch.nbytes < without.nbytes - 0.01 * n * 2  # the one tensor
    monkeypatch.setattr(changes, "jumped", lambda blocks, look: [b.positions is None for b in blocks])
    history.publish(x)
    assert patch.nbytes < history.patch(1).nbytes - 0.2 * n * 2  # the other one as differences


@pytest.mark.parametrize("way", ["link", "relay", "store"])
def test_followers_come_along_over_a_jump(tmp_path, way):
    weights = {"w": torch.randn(1 << 17, generator=torch.Generator().manual_seed(0)).bfloat16()}
    with contextlib.ExitStack() as open_:
        if way == "store":
            publisher = open_.enter_context(ShelfWriter.of(str(tmp_path), weights, name="jumps"))
            reader = open_.enter_context(ShelfReader(str(tmp_path), poll=0.05))
        else:
            publisher = open_.enter_context(Publisher(weights))
            port = publisher.port
            if way == "relay":
                port = open_.enter_context(StateRelay("127.0.0.1", port, ("127.0.0.1", 0))).port
            reader = open_.enter_context(Follower("127.0.0.1", port))
        for step, scale in enumerate((1.0, 0.0, 3.0, 1.001)):
            weights["w"] *= scale
            weights["w"] += (scale == 3.0) * torch.randn(1 << 17).bfloat16()
            version = publisher.publish(step=step)
            if way == "store":
                publisher.flush()
            assert reader.wait(version.number, timeout=LONG).number == version.number
            assert torch.equal(reader.tensors()["w"], weights["w"])


def test_a_patch_that_is_smaller_than_the_state_is_kept():
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    history = History(Layout.of({"w": x}), budget=1 << 24)
    history.publish({"w": x})
    x[: 1 << 17] = torch.randn(1 << 17, generator=torch.Generator().manual_seed(1))
    history.publish({"w": x})
    assert history.patch(1).base == 1
