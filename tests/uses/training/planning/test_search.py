"""The search for a plan against trying everything, and what cannot be planned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from machine_files import everywhere

from thinwire.types import InputError
from thinwire.uses.training.pipeline.choosing.pipeline_plan import (
    Option,
    StageMachine,
    Way,
    Ways,
    Work,
    foretell,
    pipeline_of,
    propose,
)
from thinwire.uses.training.pipeline.choosing.replay import step_seconds
from thinwire.uses.training.pipeline.recipes import parse_recipe
from thinwire.uses.training.planning.planner import option

FP32, BF16 = Option("fp32", 32, 32), Option("bf16", 16, 16)


def cuts(layers: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(layers,)]
    return [(k, *rest) for k in range(1, layers - parts + 2) for rest in cuts(layers - k, parts - 1)]


def exhaustive(
    machines: Sequence[StageMachine], ways: Ways, work: Work, option: Option, schedule: str
) -> float:
    bits = [(option.forward, option.backward)] * (len(machines) - 1)
    return min(
        step_seconds(pipeline_of(order, ways, work, cut, bits, schedule))
        for order in permutations(machines)
        for cut in cuts(work.layers, len(machines))
    )


@pytest.mark.parametrize("schedule", ["eager1f1b", "1f1b", "gpipe"])
def test_the_search_finds_the_best_there_is(schedule: str) -> None:
    rng = random.Random(0)
    for _ in range(12):
        n, layers = rng.choice([2, 3]), rng.choice([5, 9])
        machines = [
            StageMachine(f"m{i}", rng.uniform(0.005, 0.03), rng.uniform(0, 0.1), rng.uniform(0, 0.005))
            for i in range(n)
        ]
        ways = {
            pair: Way(rng.choice([None, 1e6, 1e7]), rng.choice([0.001, 0.05]))
            for pair in permutations([m.name for m in machines], 2)
        }
        work = Work(layers, rng.choice([4, 8]), 30_000)
        found = propose(machines, ways, work, [BF16], [schedule])[0].seconds
        assert found <= exhaustive(machines, ways, work, BF16, schedule) * 1.01


def test_a_slow_machine_gets_few_layers_and_the_head_goes_where_it_is_cheap() -> None:
    fast, slow = StageMachine("fast", 0.01, 0.05), StageMachine("slow", 0.03, 0.15)
    best = propose([slow, fast], everywhere(["slow", "fast"], Way()), Work(16, 8, 1000), [FP32])[0]
    assert best.order == ("slow", "fast")
    shares = dict(zip(best.order, best.cut, strict=True))
    assert sum(best.cut) == 16 and shares["fast"] > 2 * shares["slow"]


def test_a_bad_link_is_kept_out_of_the_pipeline() -> None:
    machines = [StageMachine(n, 0.02) for n in "abc"]
    ways = everywhere("abc", Way(1e8, 0.001)) | {("a", "b"): Way(1e5, 0.1), ("b", "a"): Way(1e5, 0.1)}
    best = propose(machines, ways, Work(12, 4, 70_000), [FP32])[0]
    assert best.order[1] == "c"


def test_the_most_exact_recipe_that_costs_nothing_is_proposed() -> None:
    machines = [StageMachine("a", 0.05), StageMachine("b", 0.05)]
    options = [FP32, BF16, option(parse_recipe("auto")), option(parse_recipe("thinwire"))]
    found = {
        mbit: propose(machines, everywhere("ab", Way(mbit * 125e3, 0.03)), Work(16, 8, 128 * 576), options)
        for mbit in (1000, 2)
    }
    assert found[1000][0].recipe == "fp32"
    (settled,) = (p for p in found[1000] if p.recipe == "auto")
    assert [leg.bits for leg in settled.legs] == [32, 32]  # not what it begins with
    assert found[2][0].recipe == "auto"
    by_name = {p.recipe: p for p in found[2]}
    assert by_name["thinwire"].seconds <= by_name["auto"].seconds < by_name["bf16"].seconds
    assert by_name["bf16"].seconds < by_name["fp32"].seconds
    for p in found[2]:
        assert p.unlimited_s <= p.uncrowded_s <= p.seconds * (1 + 1e-12)  # sums in another order
        assert [(leg.source, leg.target) for leg in p.legs] == [p.order, p.order[::-1]]
    assert by_name["fp32"].legs[0].added > 0.1 > found[1000][0].legs[0].added


def test_the_schedule_of_least_memory_is_taken_where_it_is_as_fast() -> None:
    machines, work = [StageMachine("a", 0.05), StageMachine("b", 0.05)], Work(16, 8, 1000)
    near = propose(machines, everywhere("ab", Way(None, 1e-5)), work, [FP32])[0]
    far = propose(machines, everywhere("ab", Way(None, 0.1)), work, [FP32])[0]
    assert (near.schedule, far.schedule) == ("1f1b", "eager1f1b")


@pytest.mark.parametrize(
    ("names", "layers", "missing", "message"),
    [
        ("a", 4, None, "1 machines; a pipeline takes 2 to 4"),
        ("abcde", 9, None, "5 machines; a pipeline takes 2 to 4"),
        ("aba", 4, None, "two machines of one name"),
        ("abc", 2, None, "3 machines for 2 layers"),
        ("abc", 4, ("c", "a"), "no link from c to a"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    names: str, layers: int, missing: tuple[str, str] | None, message: str
) -> None:
    ways = {pair: way for pair, way in everywhere(names, Way(1e6)).items() if pair != missing}
    with pytest.raises(InputError, match=message):
        propose([StageMachine(n, 0.01) for n in names], ways, Work(layers, 4, 100), [FP32])


def test_a_settled_run_is_foretold_as_it_stands() -> None:
    machines = [StageMachine("a", 0.01), StageMachine("b", 0.03)]
    ways, work = everywhere("ab", Way(1e6, 0.01)), Work(12, 4, 30_000)
    found = foretell(machines, ways, work, [FP32, BF16], (4, 8), "eager1f1b")
    assert {(p.order, p.cut, p.schedule) for p in found} == {(("a", "b"), (4, 8), "eager1f1b")}
    for p, sent in zip(found, (BF16, FP32), strict=True):  # the proposed one first
        bits = [(sent.forward, sent.backward)]
        pipeline = pipeline_of(machines, ways, work, (4, 8), bits, "eager1f1b")
        assert (p.recipe, p.seconds) == (sent.name, step_seconds(pipeline))
    for cut in ((12,), (12, 0), (4, 4)):
        with pytest.raises(InputError, match="does not fit 2 machines and 12 layers"):
            foretell(machines, ways, work, [FP32], cut, "gpipe")


def test_embedding_and_head_count_where_they_are() -> None:
    """The first stage has the embedding, the last the head, and each optimiser the matrix it updates."""
    plain = [StageMachine("a", 0.01, update=0.001), StageMachine("b", 0.01, update=0.001)]
    whole = [replace(m, head=0.06, embed=0.03, head_update=0.6, embed_update=0.3) for m in plain]
    ways, work, bits = everywhere("ab", Way()), Work(10, 4, 1000), [(32.0, 32.0)]
    before = pipeline_of(plain, ways, work, (6, 4), bits, "gpipe").stages
    after = pipeline_of(whole, ways, work, (6, 4), bits, "gpipe").stages
    more = [(b.forward + b.backward - a.forward - a.backward) for a, b in zip(before, after, strict=True)]
    assert more == pytest.approx([0.03, 0.06])
    assert [s.update for s in after] == pytest.approx([0.306, 0.604])
