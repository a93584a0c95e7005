"""Policies: the replayed step against closed forms and torch itself; the rule of ``auto`` by properties."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.distributed.pipelining import schedules

from thinwire.channel import Scheme, Sender
from thinwire.policies.base import Plan, Policy, Site
from thinwire.policies.ladder import Rung
from thinwire.policies.rate import HideBehindCompute
from thinwire.policies.schedule import (
    Hop,
    Pipeline,
    Stage,
    hidden_seconds,
    operations,
    step_seconds,
    uncrowded_seconds,
    without_links,
)
from thinwire.recipes import parse_recipe
from thinwire.types import InputError, Mode

MBIT = 125e3  # bytes/s
VALUES = 4 * 128 * 576


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


# -- the replay ----------------------------------------------------------------------------------------------


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


# -- the ladders of auto -------------------------------------------------------------------------------------


def auto(text: str = "auto", **changes: object) -> HideBehindCompute:
    policy = parse_recipe(text).policy
    assert isinstance(policy, HideBehindCompute) and isinstance(policy, Policy)
    return replace(policy, **changes)  # type: ignore[arg-type]


def heavy_tailed(*shape: int) -> torch.Tensor:
    normal = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    return normal * torch.randn(*shape, generator=torch.Generator().manual_seed(3)).abs()


def visits(values: str, *, way: str) -> Iterable[torch.Tensor]:
    """Yield a sample's tensors at two visits; activations have outlier channels and an attention sink."""
    make = heavy_tailed if values == "heavy-tailed" else torch.randn
    torch.manual_seed(1)
    x = make(2, 64, 256)
    for _ in range(2):
        sent = x.clone()
        if way == "forward":
            sent[..., [7, 100]] += 5
            sent[:, 0, 33] += 500
        yield sent
        x = x + 0.06 * torch.randn(x.shape)


def sent_by(rung: Rung, scheme: Scheme, tensors: Iterable[torch.Tensor]) -> list[tuple[float, float]]:
    """Return bits a value and relative error, the sink left out, of each visit, as a sender codes it."""
    sender, found = Sender(scheme), []
    for x in tensors:
        mode = Mode.DIRECT if rung.direct else None
        packet, x_hat = sender.encode(x, [0, 1], codec=rung.codec, keyframe=rung.keyframe, mode=mode)
        error = ((x_hat - x)[:, 1:].norm() / x[:, 1:].norm()).item()
        found.append((8 * packet.sections[0].payload.nbytes / x.numel(), error))
    return found


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("values", ["Gaussian", "heavy-tailed"])
@pytest.mark.parametrize("gdelta", [0, 1])
def test_finer_rungs_take_more_bits_and_err_less(gdelta: int, values: str, way: str) -> None:
    recipe, ladder = parse_recipe(f"auto:gdelta={gdelta}"), getattr(auto(f"auto:gdelta={gdelta}"), way)
    found = [sent_by(rung, getattr(recipe, way), visits(values, way=way)) for rung in ladder]
    for visit in zip(*found, strict=True):
        # Of a small change even a coarse code says all there is to say.
        assert all(b[0] > 1.01 * a[0] for a, b in pairwise(visit)), visit
        assert all(b[1] < 0.6 * a[1] for a, b in pairwise(visit)), visit
        assert visit[-2][1] < 0.002 and visit[-1][1] == 0
    for rung, (first, again) in zip(ladder[:-2], found, strict=False):
        assert first[0] == pytest.approx(rung.first, rel=0.1)  # as the policy foretells
        if way == "backward" and not gdelta:  # the same once more
            assert again == pytest.approx(first, rel=0.05)
        else:  # a delta: fewer bits, and no worse
            assert again[0] < 0.6 * rung.bits and again[1] < 1.1 * first[1]


def test_without_memory_a_rung_codes_every_visit_alike() -> None:
    recipe, policy = parse_recipe("auto:memory=none"), auto("auto:memory=none")
    for rung in policy.forward:
        assert rung.keyframe is None and rung.first == rung.bits
        first, again = sent_by(rung, recipe.forward, visits("Gaussian", way="forward"))
        assert again == pytest.approx(first, rel=0.05)


def test_the_floor_is_the_user_s_and_the_ladder_begins_there() -> None:
    for text, rungs in (("auto", (6, 6)), ("auto:first=8,fw=8,bw=8", (3, 3)), ("auto:fw=5,bw=6", (6, 5))):
        policy, recipe = auto(text), parse_recipe(text)
        assert (len(policy.forward), len(policy.backward)) == rungs
        assert policy.forward[0].codec == recipe.forward.codec
        assert policy.forward[0].keyframe == recipe.forward.keyframe
        assert policy.backward[0].codec == recipe.backward.codec
        assert [r.direct for r in policy.forward[-2:]] == [True, True]
        for ladder in (policy.forward, policy.backward):
            for fresh in (0.0, 1.0):
                bits = [r.expected(fresh) for r in ladder]
                assert bits == sorted(bits)


# -- the rule ------------------------------------------------------------------------------------------------


def both(rate: float, compute: float = 1.5, rtt: float = 0.06, m: int = 4, **more: object) -> list[Site]:
    site = Site(0, 1, VALUES, m, rate, rtt, 0.1, compute, compute)
    return [replace(site, **more), replace(site, sender=1, receiver=0, **more)]  # type: ignore[arg-type]


def after(sites: list[Site], plans: list[Plan]) -> list[Site]:
    """Return the sites of the next decision."""
    return [replace(s, rung=p.rung, streak=p.streak) for s, p in zip(sites, plans, strict=True)]


def steady(policy: HideBehindCompute, sites: list[Site]) -> list[Plan]:
    """Return the plans once nothing has changed for longer than the policy is patient."""
    plans: list[Plan] = []
    for _ in range(3 * policy.patience):
        plans = policy.plan(sites)
        sites = after(sites, plans)
    return plans


def rungs(plans: Iterable[Plan]) -> list[int]:
    return [p.rung for p in plans]


def predicted(policy: HideBehindCompute, sites: list[Site], levels: Sequence[int]) -> float:
    """Return the step's seconds with these rungs, worked out apart from the policy."""
    hops = []
    for site, level in zip(sites, levels, strict=True):
        bits = policy.ladder(site)[level].expected(site.fresh)
        assert site.rate and site.rtt
        hops.append(Hop(site.values * bits / 8 / site.messages / site.rate, site.rtt / 2))
    s = sites[0].sender_s or 0.0
    stages = (Stage(s / 3 / sites[0].messages, 2 * s / 3 / sites[0].messages),) * 2
    return step_seconds(Pipeline(stages, (hops[0],), (hops[1],), sites[0].messages, policy.schedule))


def test_any_decision_stays_within_the_tolerance_of_the_floor() -> None:
    rng, policy, seen = random.Random(1), auto(), set()
    for _ in range(150):
        p = replace(policy, schedule=rng.choice(["eager1f1b", "gpipe", "1f1b"]))
        sites = both(
            10 ** rng.uniform(4, 9),
            10 ** rng.uniform(-2, 1),
            rng.uniform(0.001, 0.3),
            rng.choice([1, 2, 4, 8]),
            fresh=rng.choice([0.0, 0.5, 1.0]),
        )
        held = [replace(s, rung=rng.choice([None, 0, 3, 5]), streak=p.patience) for s in sites]
        found = rungs(p.plan(held))
        assert min(found) >= 0
        assert predicted(p, sites, found) <= predicted(p, sites, [0, 0]) * (1 + 2 * p.tolerance) + 1e-9
        seen |= set(found)
    assert seen == set(range(6))  # else this shows nothing


def test_a_finer_rung_is_not_left_lying() -> None:
    """When it has risen, the next rung up would not fit at four fifths of the rate."""
    policy = auto(schedule="gpipe")
    for mbit in (0.3, 2, 7, 20, 60, 200, 900):
        sites = both(mbit * MBIT)
        found = rungs(steady(policy, sites))
        slower = [replace(s, rate=0.8 * (s.rate or 0)) for s in sites]
        for k, ladder in enumerate((policy.forward, policy.backward)):
            up = [*found]
            up[k] += 1
            if up[k] < len(ladder):
                floor, alone = predicted(policy, slower, [0, 0]), [*up]
                alone[k] = 0
                t = policy.tolerance
                bearable = min((1 + 2 * t) * floor, (1 + t) * predicted(policy, slower, alone))
                assert predicted(policy, slower, up) > bearable


@pytest.mark.parametrize("schedule", ["eager1f1b", "gpipe", "1f1b"])
@pytest.mark.parametrize("rung", [None, 0, 2, 5])
def test_more_rate_never_makes_a_coarser_code(rung: int | None, schedule: str) -> None:
    policy = auto(schedule=schedule)
    for compute in (0.05, 1.5):
        for fresh in (0.0, 1.0):
            before = [0, 0]
            for k in range(60):
                sites = both(10 ** (4 + k / 10), compute, fresh=fresh, rung=rung, streak=policy.patience)
                found = rungs(policy.plan(sites))
                assert all(b >= a for a, b in zip(before, found, strict=True)), (k, before, found)
                before = found
            assert before == [5, 5]


@pytest.mark.parametrize("schedule", ["eager1f1b", "gpipe", "1f1b"])
def test_a_wavering_rate_changes_next_to_nothing(schedule: str) -> None:
    rng, policy = random.Random(4), auto(schedule=schedule)
    for k in range(10):
        rate, sites, changes = 10 ** (4.5 + k / 2), both(1.0), -1
        held: list[int | None] = [None, None]
        for _ in range(200):
            noisy = [replace(s, rate=rate * rng.uniform(0.9, 1.1)) for s in sites]
            plans = policy.plan(noisy)
            changes += rungs(plans) != held
            held, sites = [*rungs(plans)], after(sites, plans)
        assert changes <= 4, (rate, changes)


def test_it_follows_a_link_that_drops_and_comes_back() -> None:
    policy, sites, seen = auto(schedule="gpipe"), both(1.0, compute=0.5), []
    for mbit in [500] * 10 + [20] * 10 + [500] * 10:
        sites = [replace(s, rate=mbit * MBIT) for s in sites]
        plans = policy.plan(sites)
        sites = after(sites, plans)
        seen.append(rungs(plans))
    fast, slow = seen[9], seen[-11]
    assert all(a > b for a, b in zip(fast, slow, strict=True))
    assert min(seen[0]) > 0 and seen[4:10] == [fast] * 6  # at once, but not all the way
    assert seen[10:20] == [slow] * 10  # coarser at once
    assert seen[20:22] == [slow] * 2 and seen[22:] == [fast] * 8  # finer when the link has proved itself


def test_a_fast_link_is_sent_values_as_they_are_and_it_says_so() -> None:
    for plan in steady(auto(), both(1e10, rtt=1e-4)):
        assert plan.direct and plan.bits == 32
        assert "compression would gain nothing" in plan.reason


def test_with_next_to_no_compute_it_stays_on_the_floor() -> None:
    assert rungs(steady(auto(), both(1e6, compute=1e-3))) == [0, 0]


def test_without_an_estimate_it_stays_where_it_is() -> None:
    policy = auto()
    assert rungs(policy.plan([replace(s, rate=None) for s in both(1e9)])) == [0, 0]
    assert rungs(policy.plan([replace(s, sender_s=None) for s in both(1e9)])) == [0, 0]
    for lost in ({"rate": None}, {"age": 61.0}, {"receiver_s": None}):
        sites = [replace(s, rung=2, **lost) for s in both(1e9)]  # type: ignore[arg-type]
        plans = policy.plan(sites)
        assert rungs(plans) == [2, 2]
        assert all(p.reason.endswith("as before") for p in plans)
    # One direction known: it moves, the other does not.
    known, unknown = both(1e9)
    assert rungs(steady(policy, [known, replace(unknown, rate=None)])) == [5, 0]


@pytest.mark.parametrize("missing", ["rate", "sender_s"])
def test_what_is_known_at_last_counts_at_once(missing: str) -> None:
    """Nobody has to be patient with a link that was never slow."""
    policy, sites = auto(), both(1e9)
    for _ in range(5):
        plans = policy.plan([replace(s, **{missing: None}) for s in sites])  # type: ignore[arg-type]
        assert rungs(plans) == [0, 0]
        sites = after(sites, plans)
    assert rungs(policy.plan(sites)) == [5, 5]


def test_a_first_step_may_be_a_disturbed_one() -> None:
    """Twice the compute makes room for finer codes at once only if the true one does, or nearly."""
    policy = auto(schedule="gpipe")
    for mbit in (2, 5, 10, 20, 40, 80, 160):
        first = rungs(policy.plan(both(mbit * MBIT, compute=3.0)))
        true = rungs(steady(policy, both(1.25 * mbit * MBIT, compute=1.5)))
        assert all(a <= b for a, b in zip(first, true, strict=True)), (mbit, first, true)


def test_two_slow_directions_do_not_hide_behind_each_other() -> None:
    """Both uncompressed on a slow link: neither alone is to blame, yet both must fall."""
    sites = [replace(s, rung=5) for s in both(1 * MBIT)]
    assert rungs(auto(schedule="1f1b").plan(sites)) == [0, 0]


def measured(policy: HideBehindCompute, mbit: float, factor: float, m: int = 4) -> list[Plan]:
    """Decide on the floor of a link, whose codes took ``factor`` times what was expected of them."""
    sites = both(mbit * MBIT, m=m, rung=0, streak=policy.patience)
    return policy.plan([replace(s, bits=factor * policy.ladder(s)[0].expected(0.0)) for s in sites])


def test_measured_bits_count_more_than_expected_ones() -> None:
    """Codes that take little leave room for finer ones; codes that take much have bf16 nearer."""
    policy = auto(schedule="gpipe")
    for mbit, m, factors in ((2.5, 32, (1.35, 0.3)), (66, 4, (0.3, 1.35))):
        coarse, fine = (sum(rungs(measured(policy, mbit, factor, m))) for factor in factors)
        assert coarse < fine, mbit


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.35])
def test_other_rungs_take_as_much_more_as_was_expected(factor: float) -> None:
    policy = auto(schedule="gpipe")
    for plan, ladder in zip(measured(policy, 7, factor), (policy.forward, policy.backward), strict=True):
        assert 0 < plan.rung < 4
        assert plan.bits == pytest.approx(factor * ladder[0].bits + ladder[plan.rung].bits - ladder[0].bits)
    held = [replace(s, rung=3, bits=0.2) for s in both(0.01 * MBIT)]
    assert all(p.rung < 3 and p.bits > 0 for p in policy.plan(held))  # none takes less than nothing


@pytest.mark.parametrize("schedule", ["eager1f1b", "gpipe", "1f1b"])
def test_codes_that_take_less_than_foretold_do_not_make_it_swing(schedule: str) -> None:
    """As deltas do. Right after a change nothing is measured, and the site brings what was foretold."""
    recipe, policy = parse_recipe("auto"), auto(schedule=schedule)
    taken = {
        way: [
            sent_by(rung, getattr(recipe, way), visits("Gaussian", way=way))[1][0]
            for rung in getattr(policy, way)
        ]
        for way in ("forward", "backward")
    }
    for k in range(20):
        sites, changes, last = both(10 ** (4.5 + k / 4)), -1, [0, 0]
        for step in range(60):
            plans = policy.plan(sites)
            if rungs(plans) != last or not step:
                changes, last = changes + 1, rungs(plans)
            sites = [
                replace(s, bits=p.bits if p.rung != s.rung else taken[w][p.rung])
                for (s, p, w) in zip(sites, plans, taken, strict=True)
            ]
            sites = after(sites, plans)
        assert changes <= 3, (k, changes)


def test_first_visits_cost_what_they_cost() -> None:
    policy = auto()
    for fresh in (0.0, 0.25, 1.0):
        forward, backward = policy.plan(both(1 * MBIT, fresh=fresh))
        floor = policy.forward[0]
        assert forward.bits == pytest.approx((1 - fresh) * floor.bits + fresh * floor.first)
        assert backward.bits == policy.backward[0].bits


def test_unequal_directions_get_unequal_rungs() -> None:
    up, down = both(100 * MBIT)
    found = rungs(steady(auto(schedule="gpipe"), [replace(up, rate=5 * MBIT), down]))
    assert found[0] < 3 < found[1]


@pytest.mark.parametrize("schedule", ["eager1f1b", "1f1b", "gpipe", "interleaved1f1b"])
def test_more_stages_are_weighed_together(schedule: str) -> None:
    sites = [
        replace(s, sender=s.sender + k, receiver=s.receiver + k) for k in range(3) for s in both(50 * MBIT)
    ]
    plans = steady(auto(schedule=schedule), sites)
    assert len(plans) == 6 and len({s.name for s in sites}) == 6
    slow = [replace(s, rate=MBIT) if s.boundary == 1 else s for s in sites]
    worse = steady(auto(schedule=schedule), slow)
    assert all(b.rung < a.rung for a, b in zip(plans[2:4], worse[2:4], strict=True))


def test_reasons_are_one_clause_with_the_numbers() -> None:
    policy = auto(schedule="gpipe")
    for mbit in (0.5, 5, 50, 500):
        for plan in policy.plan(both(mbit * MBIT)):
            assert plan.reason.startswith(f"60 ms and {mbit / 8:.2f} MB/s: ")
            assert f"{plan.bits:.1f} bits" in plan.reason and "\n" not in plan.reason
    waiting = policy.plan([replace(s, rung=0) for s in both(500 * MBIT)])
    assert all("fits 1 of 3 times" in p.reason for p in waiting)


def test_nothing_to_decide_is_no_decision() -> None:
    assert auto().plan([]) == []
    with pytest.raises(InputError, match=r"tolerance=1\.5 is not a share"):
        auto(tolerance=1.5)


def test_a_reason_is_worked_out_when_it_is_asked_for() -> None:
    """A decision is made between two steps, which wait for it; most change nothing, and need no reason."""
    step_seconds.cache_clear()
    plans = auto().plan(both(0.5 * MBIT))
    deciding = step_seconds.cache_info().misses
    assert all(plan.reason for plan in plans)
    assert step_seconds.cache_info().misses > deciding > 0
