"""Recipes and schedules: which layers wait at which steps, who owns what, and what a slot reuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.types import InputError
from thinwire.uses.pictures.expert_parallel.recipes import EXPERTS, parse_experts_recipe, schedule_of
from thinwire.uses.pictures.expert_parallel.routing import Owners, Schedule, SlotOutputs


@pytest.mark.parametrize("name", EXPERTS.entries)
def test_a_recipe_is_read_back_from_its_print(name: str) -> None:
    recipe = EXPERTS.parse(name)
    assert EXPERTS.parse(recipe.spec).schemes == recipe.schemes
    assert recipe.summary and EXPERTS.entries[name].source


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dice:stride=0", "stride=0 is not a whole number in 1"),
        ("dice:synced=top", "synced=top is not none, shallow, deep, alternate or all"),
        ("dice:mode=sync", "mode=sync is not interweaved or displaced"),
        ("ep-sync:values=int2", "values=int2 is not own, fp16, int8 or int4"),
        ("dice-residual:bits=9", "bits=9 is not a whole number in 1..8"),
    ],
)
def test_a_wrong_parameter_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_experts_recipe(text)


def test_which_layers_wait() -> None:
    def waiting(synced: str, step: int = 5) -> list[int]:
        schedule = Schedule("interweaved", synced, warmup=2)
        return [layer for layer in range(5) if schedule.waits(layer, 5, step)]

    assert waiting("none") == [] and waiting("none", 1) == waiting("all") == [0, 1, 2, 3, 4]
    assert (waiting("shallow"), waiting("deep"), waiting("alternate")) == ([0, 1, 2], [3, 4], [0, 2, 4])
    assert [s for s in range(9) if Schedule(stride=3, warmup=2).sends_all(s)] == [0, 1, 3, 6]
    assert schedule_of("dice:stride=1,synced=none") == Schedule("interweaved")
    for wrong in ({"mode": "later"}, {"synced": "some"}, {"stride": 0}, {"warmup": 0}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))}="):
            Schedule(**wrong)


@given(st.integers(1, 5), st.integers(1, 12))
def test_each_expert_has_one_owner(world: int, experts: int) -> None:
    dealt = Owners(range(world)).of(experts)
    assert sorted(e for own in dealt.values() for e in own) == list(range(experts))
    assert max(map(len, dealt.values())) - min(map(len, dealt.values())) <= 1


def test_a_slot_reuses_what_its_expert_made_else_what_it_made_last() -> None:
    held = SlotOutputs(torch.tensor([[3, 5]]), torch.tensor([[[3.0], [5.0]]]))
    swapped = held.reused(torch.tensor([[5, 3]]))
    assert swapped.outputs.flatten().tolist() == [5, 3] and swapped.experts.tolist() == [[5, 3]]
    other = held.reused(torch.tensor([[5, 7]]))
    assert other.outputs.flatten().tolist() == [5, 5] and other.experts.tolist() == [[5, 5]]
    fresh = held.with_fresh(
        torch.tensor([[5, 7]]), torch.tensor([[False, True]]), torch.tensor([[[0.0], [7.0]]])
    )
    assert fresh.outputs.flatten().tolist() == [5, 7] and fresh.experts.tolist() == [[5, 7]]
