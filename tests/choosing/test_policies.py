"""What auto chooses: never below the floor, no finer than hides, steady where nothing changes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from thinwire.channels.channel import Scheme, Sender
from thinwire.choosing import policy as ladders
from thinwire.choosing.policy import Policy, Rung, gaussian_bits
from thinwire.codecs import DeadZone, Entropy
from thinwire.types import InputError, Mode
from thinwire.uses.training.pipeline.choosing.hide import HideBehindCompute
from thinwire.uses.training.pipeline.choosing.pipeline_policy import BoundarySite, Choice
from thinwire.uses.training.pipeline.choosing.replay import Hop, Pipeline, Stage, step_seconds
from thinwire.uses.training.pipeline.recipes import parse_recipe

MBIT = 125e3  # bytes/s
VALUES = 4 * 128 * 576

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
    found = [sent_by(rung, recipe.schemes[way], visits(values, way=way)) for rung in ladder]
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
        first, again = sent_by(rung, recipe.schemes["forward"], visits("Gaussian", way="forward"))
        assert again == pytest.approx(first, rel=0.05)


def test_the_floor_is_the_user_s_and_the_ladder_begins_there() -> None:
    for text, rungs in (("auto", (6, 6)), ("auto:first=8,fw=8,bw=8", (3, 3)), ("auto:fw=5,bw=6", (6, 5))):
        policy, recipe = auto(text), parse_recipe(text)
        assert (len(policy.forward), len(policy.backward)) == rungs
        assert policy.forward[0].codec == recipe.schemes["forward"].codec
        assert policy.forward[0].keyframe == recipe.schemes["forward"].keyframe
        assert policy.backward[0].codec == recipe.schemes["backward"].codec
        assert [r.direct for r in policy.forward[-2:]] == [True, True]
        for ladder in (policy.forward, policy.backward):
            for fresh in (0.0, 1.0):
                bits = [r.expected(fresh) for r in ladder]
                assert bits == sorted(bits)


# -- the rule ------------------------------------------------------------------------------------------------


def both(
    rate: float, compute: float = 1.5, rtt: float = 0.06, m: int = 4, **more: object
) -> list[BoundarySite]:
    site = BoundarySite(0, 1, VALUES, m, rate, rtt, 0.1, compute, compute)
    return [replace(site, **more), replace(site, sender=1, receiver=0, **more)]  # type: ignore[arg-type]


def after(sites: list[BoundarySite], plans: list[Choice]) -> list[BoundarySite]:
    """Return the sites of the next decision."""
    return [replace(s, rung=p.rung, streak=p.streak) for s, p in zip(sites, plans, strict=True)]


def steady(policy: HideBehindCompute, sites: list[BoundarySite]) -> list[Choice]:
    """Return the plans once nothing has changed for longer than the policy is patient."""
    plans: list[Choice] = []
    for _ in range(3 * policy.patience):
        plans = policy.choose(sites)
        sites = after(sites, plans)
    return plans


def rungs(plans: Iterable[Choice]) -> list[int]:
    return [p.rung for p in plans]


def predicted(policy: HideBehindCompute, sites: list[BoundarySite], levels: Sequence[int]) -> float:
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
        found = rungs(p.choose(held))
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
            for k in range(0, 60, 2):
                sites = both(10 ** (4 + k / 10), compute, fresh=fresh, rung=rung, streak=policy.patience)
                found = rungs(policy.choose(sites))
                assert all(b >= a for a, b in zip(before, found, strict=True)), (k, before, found)
                before = found
            assert before == [5, 5]


@pytest.mark.parametrize("schedule", ["eager1f1b", "gpipe", "1f1b"])
def test_a_wavering_rate_changes_next_to_nothing(schedule: str) -> None:
    rng, policy = random.Random(4), auto(schedule=schedule)
    for k in range(0, 10, 2):
        rate, sites, changes = 10 ** (4.5 + k / 2), both(1.0), -1
        held: list[int | None] = [None, None]
        for _ in range(200):
            noisy = [replace(s, rate=rate * rng.uniform(0.9, 1.1)) for s in sites]
            plans = policy.choose(noisy)
            changes += rungs(plans) != held
            held, sites = [*rungs(plans)], after(sites, plans)
        assert changes <= 4, (rate, changes)


def test_it_follows_a_link_that_drops_and_comes_back() -> None:
    policy, sites, seen = auto(schedule="gpipe"), both(1.0, compute=0.5), []
    for mbit in [500] * 10 + [20] * 10 + [500] * 10:
        sites = [replace(s, rate=mbit * MBIT) for s in sites]
        plans = policy.choose(sites)
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
    assert rungs(policy.choose([replace(s, rate=None) for s in both(1e9)])) == [0, 0]
    assert rungs(policy.choose([replace(s, sender_s=None) for s in both(1e9)])) == [0, 0]
    for lost in ({"rate": None}, {"age": 61.0}, {"receiver_s": None}):
        sites = [replace(s, rung=2, **lost) for s in both(1e9)]  # type: ignore[arg-type]
        plans = policy.choose(sites)
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
        plans = policy.choose([replace(s, **{missing: None}) for s in sites])  # type: ignore[arg-type]
        assert rungs(plans) == [0, 0]
        sites = after(sites, plans)
    assert rungs(policy.choose(sites)) == [5, 5]


def test_a_first_step_may_be_a_disturbed_one() -> None:
    """Twice the compute makes room for finer codes at once only if the true one does, or nearly."""
    policy = auto(schedule="gpipe")
    for mbit in (2, 5, 10, 20, 40, 80, 160):
        first = rungs(policy.choose(both(mbit * MBIT, compute=3.0)))
        true = rungs(steady(policy, both(1.25 * mbit * MBIT, compute=1.5)))
        assert all(a <= b for a, b in zip(first, true, strict=True)), (mbit, first, true)


def test_two_slow_directions_do_not_hide_behind_each_other() -> None:
    """Both uncompressed on a slow link: neither alone is to blame, yet both must fall."""
    sites = [replace(s, rung=5) for s in both(1 * MBIT)]
    assert rungs(auto(schedule="1f1b").choose(sites)) == [0, 0]


def measured(policy: HideBehindCompute, mbit: float, factor: float, m: int = 4) -> list[Choice]:
    """Decide on the floor of a link, whose codes took ``factor`` times what was expected of them."""
    sites = both(mbit * MBIT, m=m, rung=0, streak=policy.patience)
    return policy.choose([replace(s, bits=factor * policy.ladder(s)[0].expected(0.0)) for s in sites])


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
    assert all(p.rung < 3 and p.bits > 0 for p in policy.choose(held))  # none takes less than nothing


@pytest.mark.parametrize("schedule", ["eager1f1b", "gpipe", "1f1b"])
def test_codes_that_take_less_than_foretold_do_not_make_it_swing(schedule: str) -> None:
    """As deltas do. Right after a change nothing is measured, and the site brings what was foretold."""
    recipe, policy = parse_recipe("auto"), auto(schedule=schedule)
    taken = {
        way: [
            sent_by(rung, recipe.schemes[way], visits("Gaussian", way=way))[1][0]
            for rung in getattr(policy, way)
        ]
        for way in ("forward", "backward")
    }
    for k in range(20):
        sites, changes, last = both(10 ** (4.5 + k / 4)), -1, [0, 0]
        for step in range(60):
            plans = policy.choose(sites)
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
        forward, backward = policy.choose(both(1 * MBIT, fresh=fresh))
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
        for plan in policy.choose(both(mbit * MBIT)):
            assert plan.reason.startswith(f"60 ms and {mbit / 8:.2f} MB/s: ")
            assert f"{plan.bits:.1f} bits" in plan.reason and "\n" not in plan.reason
    waiting = policy.choose([replace(s, rung=0) for s in both(500 * MBIT)])
    assert all("fits 1 of 3 times" in p.reason for p in waiting)


def test_nothing_to_decide_is_no_decision() -> None:
    assert auto().choose([]) == []
    with pytest.raises(InputError, match=r"tolerance=1\.5 is not a share"):
        auto(tolerance=1.5)


def test_a_reason_is_worked_out_when_it_is_asked_for() -> None:
    """A decision is made between two steps, which wait for it; most change nothing, and need no reason."""
    step_seconds.cache_clear()
    plans = auto().choose(both(0.5 * MBIT))
    deciding = step_seconds.cache_info().misses
    assert all(plan.reason for plan in plans)
    assert step_seconds.cache_info().misses > deciding > 0


def test_torch_s_defaults_do_not_change_what_a_codec_is_said_to_take():
    codec = DeadZone(step=0.37)
    with torch.device("meta"):
        bits = gaussian_bits(Entropy(codec))
    ladders._gaussian_bits.cache_clear()
    assert gaussian_bits(Entropy(codec)) == bits
