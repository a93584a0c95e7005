"""Rollouts elsewhere: prompts are shared out, samples come back in order, with the age of their weights."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
from thinwire.uses.following.run.rollout_recorder import RolloutRecorder
from thinwire.uses.kinds import load_runs

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


def test_prompts_are_shared_out_and_come_back_in_order_made_by_the_version_that_is_told(
    tmp_path: Path,
) -> None:
    model = linear()
    prompts = [[i, i + 1] for i in range(7)]
    publisher = Publisher(model)
    pool = RolloutPool(max_age=0, timeout=SOON, record=RolloutRecorder(tmp_path, publisher))
    with publisher, pool, worker(pool, publisher), worker(pool, publisher):
        while len({age.worker for age in pool.ages}) < 2:
            pool.generate([[1], [2]], published(model, publisher, 0.5))
        before = len(pool.ages)
        for value in (1.0, 2.0):
            made = pool.generate(prompts, published(model, publisher, value), {"more": 0.25}, step=9)
            assert made == [Sample(p, [value + 0.25] * 2) for p in prompts]
        ages = pool.ages[before:]
        assert sum(age.samples for age in ages) == 14 and len({a.worker for a in ages}) == 2
        assert all(a.behind == 0 and 0 <= a.age < SOON and a.tokens == 2 * a.samples for a in ages)
        assert [row["batch"] for row in pool.rows()] == sorted(row["batch"] for row in pool.rows())
    (run,) = load_runs([tmp_path])
    assert [b.step for b in run.metrics] == [None] * (len(run.metrics) - 2) + [9, 9]
    told = [(a.batch, a.worker, a.version, a.behind, a.age, a.waited, a.samples) for a in pool.ages]
    kept = [
        (b.batch, p.worker, p.version, b.version - p.version, p.age_s, p.waited_s, p.samples)
        for b in run.metrics
        for p in b.parts
    ]
    assert kept == told and run.record.status == "done" and len(run.record.workers) == 2
    assert 0 < run.record.bytes["weights"] <= publisher.sent and run.record.bytes["samples"] > 8 * 28
    assert all(0 <= b.waited < b.busy and b.at >= 0 for b in run.metrics)


def test_older_weights_are_used_within_max_age_and_beyond_it_the_worker_waits_and_says_so(
    tmp_path: Path,
) -> None:
    model = linear()

    class Publishing(RolloutRecorder):
        """Publish what a worker waits for once it says that it waits."""

        def note(self, text: str) -> None:
            super().note(text)
            published(model, publisher, 2.0)

    publisher = Publisher(model)
    pool = RolloutPool(max_age=1, timeout=SOON, record=Publishing(tmp_path))
    with publisher, pool, worker(pool, publisher):
        first = published(model, publisher, 1.0)
        pool.generate([[3]], first)  # the first version of all is waited for, or was there
        assert pool.generate([[3]], first + 1)[0].logprobs == [1.0]  # one more, which never comes
        assert pool.ages[-1].behind == 1 and pool.ages[-1].version == first and pool.ages[-1].waited == 0
        assert pool.notes == []
        assert pool.generate([[3]], first + 2)[0].logprobs == [2.0]
        assert pool.ages[-1].waited > 0 and pool.ages[-1].version == first + 1
        pool.timeout = 0.2
        with pytest.raises(LinkError, match=f"which waits for version {first + 2}.* within 0.2 s"):
            pool.generate([[3]], first + 3)
        pool.timeout = SOON
        published(model, publisher, 3.0)  # else it would wait on
    assert len(pool.notes) == 1  # one a worker
    assert "had version 1, 2 behind, beyond max_age=1" in pool.notes[0]
    (run,) = load_runs([tmp_path])
    assert run.record.notes == pool.notes
    (found,) = run.record.workers
    assert (found.parts, found.waits) == (3, sum(age.waited > 0 for age in pool.ages))
    assert "weights" not in run.record.bytes  # nobody told


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # whose thread ends
@pytest.mark.parametrize("why", ["it left", "makes no sense"])
def test_a_worker_that_goes_leaves_its_prompts_to_the_others(why: str, tmp_path: Path) -> None:
    model, begun = linear(), threading.Event()

    def goes(prompts: list[list[int]], settings: dict[str, float]) -> list[Sample]:
        begun.set()
        if why == "it left":
            raise SystemExit  # which ends its thread alone
        return []

    with (
        Publisher(model) as publisher,
        RolloutPool(timeout=SOON, record=RolloutRecorder(tmp_path)) as pool,
    ):
        version = published(model, publisher, 1.0)
        with worker(pool, publisher):
            pool.generate([[1]], version)
            with worker(pool, publisher, goes):
                while not begun.is_set():
                    assert len(pool.generate([[1], [2]], version)) == 2
        (note,) = pool.notes
        assert why in note and "the 1 prompts that it had go to others" in note
    (run,) = load_runs([tmp_path])
    stayed, gone = run.record.workers
    assert (gone.lost, gone.samples, stayed.lost) == (1, 0, 0) and gone.spells[0][1] is not None
    assert stayed.samples == run.record.totals["samples"] and run.record.notes == [note]


def test_what_fails_at_a_worker_and_nobody_there_are_told_by_name(tmp_path: Path) -> None:
    def fails(prompts: list[list[int]], settings: dict[str, float]) -> list[Sample]:
        raise RuntimeError("out of memory")

    model = linear()
    told = pytest.raises(ThinwireError, match=r"rollout worker .*127.0.0.1.*: out of memory")
    own = Publisher(model), RolloutPool(timeout=SOON, record=RolloutRecorder(tmp_path))
    with told, own[0] as publisher, own[1] as pool, worker(pool, publisher, fails):
        pool.generate([[1]], published(model, publisher, 1.0))
    assert load_runs([tmp_path])[0].record.status == "failed"
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
