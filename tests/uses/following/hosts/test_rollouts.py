"""Rollouts elsewhere: prompts are shared out, samples come back in order, with the age of their weights."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thinwire.types import InputError, LinkError, PayloadError, ThinwireError
from thinwire.uses.following.hosts import rollout_messages as messages
from thinwire.uses.following.hosts.rollout_messages import Sample
from thinwire.uses.following.hosts.rollout_pool import RolloutPool
from thinwire.uses.following.hosts.rollout_worker import Generate, RolloutWorker
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher

SOON = 20.0
TOKENS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=4)


def linear() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


@contextmanager
def worker(pool: RolloutPool, publisher: Publisher, make: Generate | None = None) -> Iterator[RolloutWorker]:
    """Let a worker serve beside; by default a sample is the prompt, and the weight that the worker has."""
    model, stop = linear(), threading.Event()

    def generate(prompts: list[list[int]], settings: dict[str, float]) -> list[Sample]:
        value = float(model.weight.detach()) + settings.get("more", 0.0)
        return [Sample(prompt, [value] * len(prompt)) for prompt in prompts]

    with Follower("127.0.0.1", publisher.port) as follower:
        one = RolloutWorker(
            follower,
            lambda: follower.apply_to(model),
            make or generate,
            "127.0.0.1",
            pool.port,
            patience=SOON,
        )
        thread = threading.Thread(target=one.serve, args=(stop,))
        thread.start()
        try:
            yield one
        finally:
            stop.set()
            thread.join(SOON)


def published(model: nn.Linear, publisher: Publisher, value: float) -> int:
    with torch.no_grad():
        model.weight.fill_(value)
    return publisher.publish().number


def test_prompts_are_shared_out_and_come_back_in_order_made_by_the_version_that_is_told() -> None:
    model = linear()
    prompts = [[i, i + 1] for i in range(7)]
    own = Publisher(model), RolloutPool(max_age=0, timeout=SOON)
    with own[0] as publisher, own[1] as pool, worker(pool, publisher), worker(pool, publisher):
        while len(pool._ready) < 2:
            pool.generate([[1]], published(model, publisher, 0.5))
        pool.ages.clear()
        for value in (1.0, 2.0):
            made = pool.generate(prompts, published(model, publisher, value), {"more": 0.25})
            assert made == [Sample(p, [value + 0.25] * 2) for p in prompts]
        assert sum(age.samples for age in pool.ages) == 14 and len({a.worker for a in pool.ages}) == 2
        assert all(a.behind == 0 and 0 <= a.age < SOON for a in pool.ages)
        assert [row["batch"] for row in pool.rows()] == sorted(row["batch"] for row in pool.rows())


def test_older_weights_are_used_within_max_age_and_beyond_it_the_worker_waits_and_says_so() -> None:
    model = linear()
    own = Publisher(model), RolloutPool(max_age=1, timeout=SOON)
    with own[0] as publisher, own[1] as pool, worker(pool, publisher):
        first = published(model, publisher, 1.0)
        assert pool.generate([[3]], first + 1)[0].logprobs == [1.0]  # one more, which never comes
        assert pool.ages[-1].behind == 1 and pool.ages[-1].version == first
        later = threading.Timer(0.5, published, (model, publisher, 2.0))
        later.start()
        assert pool.generate([[3]], first + 2)[0].logprobs == [2.0]
        later.join()
        assert pool.ages[-1].waited > 0.3 and pool.ages[-1].version == first + 1


def test_a_worker_that_goes_leaves_its_prompts_to_the_others() -> None:
    model, begun = linear(), threading.Event()

    def never(prompts: list[list[int]], settings: dict[str, float]) -> list[Sample]:
        begun.set()
        sleep(1.5)  # and is gone before it answers
        return []

    with Publisher(model) as publisher, RolloutPool(timeout=SOON) as pool:
        version = published(model, publisher, 1.0)
        with worker(pool, publisher):
            pool.generate([[1]], version)
            with worker(pool, publisher, never):
                while not begun.is_set():
                    assert len(pool.generate([[1], [2]], version)) == 2


def test_what_fails_at_a_worker_and_nobody_there_are_told_by_name() -> None:
    def fails(prompts: list[list[int]], settings: dict[str, float]) -> list[Sample]:
        raise RuntimeError("out of memory")

    model = linear()
    told = pytest.raises(ThinwireError, match=r"rollout worker .*127.0.0.1.*: out of memory")
    own = Publisher(model), RolloutPool(timeout=SOON)
    with own[0] as publisher, own[1] as pool, worker(pool, publisher, fails), told:
        pool.generate([[1]], published(model, publisher, 1.0))
    with (
        RolloutPool(timeout=0.2) as pool,
        pytest.raises(LinkError, match=f"dialled port {pool.port} within 0.2"),
    ):
        pool.generate([[1]], 1)
    for wrong in ({"max_age": -1}, {"timeout": 0.0}):
        with pytest.raises(InputError):
            RolloutPool(**wrong)


@given(TOKENS, st.dictionaries(st.text(max_size=4), st.integers(), max_size=3), st.data())
def test_sequences_go_through_messages_and_damage_is_an_error(
    prompts: list[list[int]], settings: dict[str, int], data: st.DataObject
) -> None:
    packed = messages.pack_prompts(prompts, settings)
    assert messages.unpack_prompts(packed) == (prompts, settings)
    samples = [Sample(p, [0.5] * len(p)) for p in prompts]
    body = messages.pack_samples(samples)
    assert messages.unpack_samples(body) == samples
    place = data.draw(st.integers(0, len(body) - 1))
    for hurt in (body[:place], body + b"\0", body[:place] + bytes([body[place] ^ 255]) + body[place + 1 :]):
        try:
            assert len(messages.unpack_samples(hurt)) <= messages.MOST
        except PayloadError:
            pass
