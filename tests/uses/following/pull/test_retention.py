"""The cheapest way through a store's files, and what of them is kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from store_examples import example, leg

from thinwire.types import InputError
from thinwire.uses.following.pull.manifest import MAX_VERSIONS, File, StoredVersion
from thinwire.uses.following.pull.retention import RetentionPolicy, cheapest, farthest


def test_the_route_takes_what_costs_least():
    files = [leg(0, 1, 1000), leg(1, 2, 10), leg(2, 3, 10), leg(1, 3, 15), leg(0, 3, 1010)]
    assert cheapest(files, 2, 3) == [leg(2, 3, 10)]
    assert cheapest(files, 1, 3) == [leg(1, 3, 15)]
    assert cheapest(files, 0, 3) == [leg(0, 3, 1010)]
    assert cheapest([*files, leg(0, 3, 5)], 2, 3) == [leg(0, 3, 5)]  # a keyframe, whatever is held
    assert cheapest(files, 0, 4) is None
    assert farthest([*files, leg(4, 5, 1)], 1) == [leg(1, 3, 15)]
    assert farthest(files, 3) == []


def all_routes(files, at, goal):
    if at == goal:
        yield 0
    for f in files:
        if f.base == at:
            yield from (f.nbytes + rest for rest in all_routes(files, f.version, goal))


@settings(deadline=None)
@given(st.data())
def test_no_other_route_is_cheaper(data):
    goal = data.draw(st.integers(1, 6))
    pairs = st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 50)).filter(lambda t: t[0] < t[1])
    files = [leg(*t) for t in data.draw(st.lists(pairs, max_size=12))]
    held = data.draw(st.integers(0, goal - 1))
    chain = cheapest(files, held, goal)
    costs = [*all_routes(files, held, goal), *all_routes([f for f in files if f.version > held], 0, goal)]
    assert (chain is None) == (not costs)
    if chain is not None:
        assert sum(f.nbytes for f in chain) == min(costs)
        assert chain[0].base in (0, held) and chain[-1].version == goal
        assert all(a.version == b.base for a, b in pairwise(chain))


def chain(n, first=1000, each=10):
    """A manifest of one keyframe and a patch from each version to the next."""
    versions = tuple(StoredVersion(i, i, 0.0) for i in range(1, n + 1))
    files = (leg(0, 1, first), *(leg(i, i + 1, each) for i in range(1, n)))
    return example(versions=versions, files=files)


def test_trimming_keeps_the_newest_versions_and_a_way_to_them_from_nothing():
    kept = RetentionPolicy(versions=2, span=0).trimmed(chain(9))
    assert kept == chain(9)  # the way leads over all of them
    more = chain(9)
    more = replace(more, files=(*more.files, leg(0, 5, 1020)))
    kept = RetentionPolicy(versions=2, span=0).trimmed(more)
    assert [v.number for v in kept.versions] == [5, 6, 7, 8, 9]
    assert {(f.base, f.version) for f in kept.files} == {(0, 5), (5, 6), (6, 7), (7, 8), (8, 9)}
    assert RetentionPolicy().trimmed(example(versions=(), files=())).versions == ()


def test_trimming_keeps_a_way_on_from_a_version_whose_keyframe_is_on_its_way():
    across = replace(chain(9), files=(*chain(9).files, leg(1, 9, 1)))
    kept = RetentionPolicy(versions=2, span=0).trimmed(across, 4)
    assert [v.number for v in kept.versions] == [1, 4, 5, 6, 7, 8, 9]
    assert {(f.base, f.version) for f in kept.files} == {(0, 1), (1, 9), *((n, n + 1) for n in range(4, 9))}
    assert [v.number for v in RetentionPolicy(versions=2, span=0).trimmed(across).versions] == [1, 8, 9]
    assert [v.number for v in RetentionPolicy(versions=2, span=0).trimmed(across, 9).versions] == [1, 8, 9]
    dear = replace(across, files=(*across.files, leg(0, 4, 10**6)))  # which newcomers do not take
    assert [v.number for v in RetentionPolicy(versions=2, span=0).trimmed(dear).versions] == [
        1,
        4,
        5,
        6,
        7,
        8,
        9,
    ]


def test_a_keyframe_is_due_by_bytes_by_count_or_where_there_is_no_way():
    assert not RetentionPolicy(share=0.5).keyframe_due(chain(51))
    assert RetentionPolicy(share=0.5).keyframe_due(chain(52))
    assert [RetentionPolicy(keyframe_every=3).keyframe_due(chain(n)) for n in (1, 2, 3, 4, 5)] == [
        0,
        0,
        0,
        1,
        1,
    ]
    assert RetentionPolicy().keyframe_due(replace(chain(3), files=chain(3).files[1:]))
    tiny = {"first": 10**9, "each": 1}  # a manifest has no room for a way that is longer
    long = (MAX_VERSIONS, MAX_VERSIONS + 1)
    assert [RetentionPolicy().keyframe_due(chain(n, **tiny)) for n in long] == [False, True]
    assert not RetentionPolicy().keyframe_due(example(versions=(), files=()))
    dear = replace(chain(52), files=(*chain(52).files, leg(0, 52, 10**6)))
    assert not RetentionPolicy(share=0.5).keyframe_due(dear)  # nor is another like one that nobody would take


def test_one_patch_in_each_span_leads_across_it():
    keeping, manifest = RetentionPolicy(span=4), chain(5)
    assert RetentionPolicy(span=0).span_base(manifest) is None
    assert keeping.span_base(chain(4)) is None
    assert keeping.span_base(manifest).number == 1
    jump = leg(1, 5, 25)
    for n, base in ((5, None), (8, None), (9, 5)):
        longer = replace(chain(n), files=(*chain(n).files, jump))
        found = keeping.span_base(longer)
        assert (found and found.number) == base


@each(
    "wrong",
    [
        {"versions": 0},
        {"versions": 10**6},
        {"span": -1},
        {"keyframe_every": 0},
        {"keyframe_every": 10**5},
        {"share": 0},
        {"grace": -1},
    ],
)
def test_nonsense_to_keep_is_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        RetentionPolicy(**wrong)


class Counted(list[File]):
    """Files that count how often they are gone through."""

    passes = 0

    def __iter__(self) -> Iterator[File]:
        self.passes += 1
        return super().__iter__()


def test_a_manifest_of_dead_ends_costs_one_pass() -> None:
    n = 4 * MAX_VERSIONS
    ends = [
        File(f"patches/{i}", 2 * i + 1, 2 * i + 2, 10, "") for i in range(n)
    ]  # none leads on from another
    files = Counted([*ends, File("keyframes/1", 0, 1, 100, "")])
    assert [f.name for f in farthest(files, 0)] == ["keyframes/1", "patches/0"] and files.passes == 1
    assert farthest(ends, 0) == [] and cheapest(files, 0, 2 * n) is None


def test_the_farthest_chain_is_the_cheapest_to_the_newest_that_can_be_reached() -> None:
    rng = random.Random(0)
    for _ in range(300):
        pairs = [sorted(rng.sample(range(9), 2)) for _ in range(rng.randrange(14))]
        files = [File("", a, b, rng.randrange(1, 40), "") for a, b in pairs]
        held = rng.randrange(6)
        best = next((c for goal in range(9, held, -1) if (c := cheapest(files, held, goal))), [])
        assert farthest(files, held) == best
        assert not best or best[0].base in (0, held)
