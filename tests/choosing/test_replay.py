"""The replay of a schedule: what a step takes, by hand and in the order of torch's passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from torch.distributed.pipelining import schedules

from thinwire.types import InputError
from thinwire.uses.training.pipeline.choosing.replay import (
    Hop,
    Pipeline,
    Stage,
    operations,
    step_seconds,
    uncrowded_seconds,
    without_links,
)

MBIT = 125e3  # bytes/s
VALUES = 4 * 128 * 576


def hidden_seconds(pipeline: Pipeline) -> float:
    """Return the step's seconds were all communication hidden but the first way forth and the last way back.

    For two stages that is C + 2 (d + x / M) [derived]: C the step with free links, d the delay, x / M the
    transfer of one of M micro-batches. Equal stages cannot do better; a first stage that is longer than those
    after it has work to do meanwhile, and can.
    """
    ends = sum(hop.delay + hop.transfer for hop in (*pipeline.forward, *pipeline.backward))
    return step_seconds(without_links(pipeline)) + ends


def pipe(
    *,
    m: int = 4,
    stages: Sequence[tuple[float, float]] = ((0.5, 1.0), (0.5, 1.0)),
    x: float = 0.0,
    d: float = 0.0,
    schedule: str = "gpipe",
    update: float = 0.0,
) -> Pipeline:
    """Seconds are a step's: of all micro-batches, and of the transfer of one direction."""
    hops = (Hop(x / m, d),) * (len(stages) - 1)
    made = tuple(Stage(f / m, b / m, update) for f, b in stages)
    return Pipeline(made, hops, hops, m, schedule)


@pytest.mark.parametrize("m", [1, 2, 4, 8, 32])
@pytest.mark.parametrize(("x", "d"), [(0.0, 0.0), (0.1, 0.0), (0.3, 0.05), (0.0, 0.2)])
def test_hidden_communication_costs_two_delays_and_two_transfers(m: int, x: float, d: float) -> None:
    p = pipe(m=m, x=x, d=d)
    compute = 1.5 + 1.5 / m  # a step of one stage, and the fill and drain of the other
    assert step_seconds(without_links(p)) == pytest.approx(compute)
    assert step_seconds(p) == pytest.approx(compute + 2 * (d + x / m))
    assert hidden_seconds(p) == pytest.approx(uncrowded_seconds(p)) == pytest.approx(step_seconds(p))


def test_a_longer_first_stage_hides_even_the_ends() -> None:
    """It has forward passes to do while the others wait, and its gradients are there when it needs them."""
    p = pipe(m=8, stages=[(0.6, 1.1), (0.4, 0.9)], x=0.05, d=0.03, schedule="eager1f1b")
    assert step_seconds(p) == pytest.approx(1.7)
    assert step_seconds(p) < hidden_seconds(p)


def test_a_slow_link_sets_the_pace() -> None:
    """GPipe's phases follow each other, so both directions add up; 1F1B lets them overlap."""
    x, d, m = 10.0, 0.05, 8
    gpipe, f1b1 = (step_seconds(pipe(m=m, x=x, d=d, schedule=s)) for s in ("gpipe", "1f1b"))
    assert gpipe == pytest.approx(2 * (x + d) + 4 * 1.5 / (3 * m) + 2 * 0.5 / m, rel=0.02)
    assert x < f1b1 < gpipe


def test_one_microbatch_is_a_walk_to_the_end_and_back() -> None:
    for schedule in ("gpipe", "1f1b"):
        p = pipe(m=1, stages=[(1, 2), (3, 4), (5, 6)], x=0.5, d=0.25, schedule=schedule, update=0.125)
        assert step_seconds(p) == pytest.approx(21 + 4 * 0.75 + 0.125)


def test_1f1b_stalls_for_every_delay_and_gpipe_once() -> None:
    """At most two micro-batches are under way on the first of two stages."""
    m, d = 16, 0.4
    p = pipe(m=m, d=d, schedule="1f1b", stages=[(0.4, 0.4), (0.4, 0.4)])
    round_trip = 2 * d + 4 * 0.4 / m  # for one micro-batch; two share it
    assert step_seconds(p) == pytest.approx(m / 2 * round_trip, rel=0.1)
    assert step_seconds(replace(p, schedule="gpipe")) == pytest.approx(0.8 + 0.8 / m + 2 * d)


def test_coding_and_the_optimiser_count_as_compute() -> None:
    p = pipe(m=4, update=0.3)
    coded = replace(p, forward=(Hop(encode=0.01, decode=0.02),), backward=(Hop(encode=0.03, decode=0.04),))
    plain = 1.5 * 1.25
    assert step_seconds(p) == pytest.approx(plain + 0.3)
    # GPipe: a stage encodes or decodes once a micro-batch and phase, and the fill has each once more.
    assert step_seconds(coded) == pytest.approx(plain + 0.3 + 4 * 0.02 + 0.01 + 4 * 0.04 + 0.03)


def test_a_longer_anything_never_makes_a_shorter_step() -> None:
    rng = random.Random(0)
    for _ in range(200):
        n, m = rng.choice([2, 3, 4]), rng.choice([4, 6, 8])
        stages = [(rng.uniform(0.1, 1), rng.uniform(0.1, 1)) for _ in range(n)]
        p = pipe(m=m, stages=stages, x=rng.uniform(0, 2), d=rng.uniform(0, 0.1))
        p = replace(p, schedule=rng.choice(["eager1f1b", "gpipe", "1f1b"]))
        k = rng.randrange(n - 1)
        slower = [replace(h, transfer=h.transfer * 1.5) if i == k else h for i, h in enumerate(p.backward)]
        assert step_seconds(replace(p, backward=tuple(slower))) >= step_seconds(p) - 1e-12
        assert step_seconds(without_links(p)) <= uncrowded_seconds(p) <= step_seconds(p) + 1e-12


class FakeStage:
    """Stands where torch's schedules run a stage, and writes down its passes."""

    is_last, has_backward = False, True

    def __init__(self, index: int) -> None:
        self.stage_index, self.passes = index, list[tuple[int, bool, int]]()

    def __getattr__(self, name: str) -> Callable[..., list[object]]:
        if name.startswith(("get_", "perform_")):
            return lambda *_, **__: []  # no operations of communication
        raise AttributeError(name)

    def forward_one_chunk(self, m: int, *_: object, **__: object) -> None:
        self.passes.append((self.stage_index, False, m))

    def backward_one_chunk(self, m: int, *_: object, **__: object) -> None:
        self.passes.append((self.stage_index, True, m))


@pytest.mark.parametrize("m", [2, 4, 6, 8])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_order_of_passes_is_torch_s(name: str, ranks: int, m: int) -> None:
    cls = schedules.ScheduleGPipe if name == "gpipe" else schedules.Schedule1F1B
    for rank in range(ranks):
        schedule, stage = cls.__new__(cls), FakeStage(rank)
        vars(schedule).update(_stage=stage, _n_microbatches=m, _num_stages=ranks, scale_grads=True)
        vars(schedule).update(
            _check_inputs=lambda *_: ([()] * m, [{}] * m),
            **dict.fromkeys(("_initialize_stage", "_maybe_compute_loss", "_update_losses"), lambda *_: None),
            _maybe_get_loss=lambda *_: None,
        )
        schedule._step_microbatches()
        assert list(operations(name, rank, ranks, m)) == stage.passes


@pytest.mark.parametrize("m", [2, 4, 6, 8, 9])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_order_of_interleaved_passes_is_torch_s(ranks: int, m: int) -> None:
    rounds = max(1, m // ranks)
    if m % rounds:
        pytest.skip("torch refuses this number of micro-batches")
    cls = schedules.ScheduleInterleaved1F1B
    schedule = cls.__new__(cls)
    vars(schedule).update(pp_group_size=ranks, n_local_stages=2, _n_microbatches=m)
    vars(schedule).update(number_of_rounds=rounds, microbatches_per_round=m // rounds)
    back = {schedules._ComputationType.FORWARD: False, schedules._ComputationType.FULL_BACKWARD: True}
    for rank in range(ranks):
        actions = [a for a in schedule._calculate_single_rank_operations(rank) if a is not None]
        told = [(a.stage_index, back[a.computation_type], a.microbatch_index) for a in actions]
        assert list(operations("interleaved1f1b", rank, 2 * ranks, m)) == told


def test_interleaving_shortens_the_bubble() -> None:
    plain = pipe(m=4, stages=[(0.5, 1), (0.5, 1)], schedule="1f1b")
    chunks = pipe(m=4, stages=[(0.25, 0.5)] * 4, schedule="interleaved1f1b")
    assert step_seconds(chunks) < step_seconds(plain)


def test_a_pipeline_that_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="2 stages have 1 hops each way, not 0 and 1"):
        Pipeline((Stage(1, 1), Stage(1, 1)), (), (Hop(),), 4)
    with pytest.raises(InputError, match="no schedule 'zigzag'"):
        pipe(schedule="zigzag")
    with pytest.raises(InputError, match="5 micro-batches do not divide into 2 rounds"):
        step_seconds(pipe(m=5, stages=[(1, 1)] * 4, schedule="interleaved1f1b"))
