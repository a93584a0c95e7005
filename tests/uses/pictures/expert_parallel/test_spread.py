"""Experts over several ranks: the pictures of one device, and what staleness and coding take from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from expert_models import (
    BY_PICTURE,
    batch,
    flux_moe,
    hidream,
    hidream_inputs,
    nucleus,
    nucleus_inputs,
    on_ranks,
    sampled,
    shares,
)
from meshes import Mesh
from picture_models import Inputs
from torch import Tensor, nn

from thinwire.uses.pictures.expert_parallel.routing import Experts

pytest.importorskip("diffusers")

Meshes = dict[int, list[Mesh]]


def test_pictures_of_one_step_never_use_what_was_kept_of_others(ranks: Meshes) -> None:
    """Calls of one time are passes of one step, as many as there are keys for: then pictures are new ones."""
    model = flux_moe()

    def use(own: nn.Module, found: Experts, rank: int) -> list[Tensor]:
        return [own(**batch([2 * k + rank], 1.0))[0] for k in range(20)]

    found = on_ranks(ranks[2], model, "dice:values=own", use)
    with torch.no_grad():
        for rank, pictures in enumerate(found):
            for k, x in enumerate(pictures):
                assert error(x, model(**batch([2 * k + rank], 1.0))[0]) < 1e-6


def made(ranks: list[Mesh], model: nn.Module, recipe: str, pictures: int, steps: int) -> tuple[Tensor, int]:
    """Return the pictures of all ranks, in order, and the most bytes that one sent."""
    parts = shares(pictures, len(ranks))

    def use(own: nn.Module, found: Experts, rank: int) -> tuple[Tensor, int]:
        return sampled(own, parts[rank], steps), found.tally.nbytes

    whole: dict[int, Tensor] = {}
    found = on_ranks(ranks, model, recipe, use)
    for own, (x, _) in zip(parts, found, strict=True):
        whole |= dict(zip(own, x, strict=True))
    return torch.stack([whole[k] for k in range(pictures)]), max(n for _, n in found)


def error(x: Tensor, wanted: Tensor) -> float:
    return float((x - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_uncoded_and_awaited_they_are_the_pictures_of_one_device(ranks: Meshes, world: int) -> None:
    """Also where ranks have unequal shares: of five pictures."""
    model = flux_moe()
    found, _ = made(ranks[world], model, "ep-sync:values=own", 5, 3)
    assert error(found, sampled(model, range(5), 3)) < 5e-7


@pytest.mark.parametrize("world", [2, 4])
def test_a_layer_is_exact_to_its_own_rounding(ranks: Meshes, world: int) -> None:
    """The rest of what a batch of another size is off by is that of one device too."""
    model: Any = flux_moe()
    x = torch.randn(world, 24, 64, generator=torch.Generator().manual_seed(2))

    def layer(own: Any, k: int) -> Tensor:
        made: Tensor = own.transformer_blocks[0].ff(x[k : k + 1])
        return made

    with torch.no_grad():
        wanted = torch.cat([layer(model, k) for k in range(world)])
    found = torch.cat(on_ranks(ranks[world], model, "ep-sync:values=own", lambda own, _, k: layer(own, k)))
    assert error(found, wanted) < 2e-7  # two roundings of float32


def test_one_expert_of_a_token_or_three_as_well(ranks: Meshes) -> None:
    for chosen in (1, 3):
        model = flux_moe(1, 5, chosen)
        for recipe in ("ep-sync:values=own", "ep-displaced:warmup=3,values=own"):
            found, _ = made(ranks[2], model, recipe, 2, 3)
            assert error(found, sampled(model, range(2), 3)) < 5e-7


def test_each_part_of_dice_brings_it_nearer_or_sends_less(ranks: Meshes) -> None:
    model = flux_moe()
    wanted = sampled(model, range(4), 8)
    found = {name: made(ranks[2], model, recipe, 4, 8) for name, recipe in DICE.items()}
    off = {name: error(x, wanted) for name, (x, _) in found.items()}
    sent = {name: nbytes for name, (_, nbytes) in found.items()}
    assert off["sync"] < 1e-5 < off["interweaved"] < off["displaced"] < 0.05
    assert off["deep"] < off["interweaved"] and off["shallow"] < off["interweaved"]
    assert off["both"] < 1e-5  # every layer waits
    assert sent["stride"] < 0.85 * sent["interweaved"]
    assert off["interweaved"] < off["stride"] < 0.05


DICE = {
    "sync": "ep-sync",
    "displaced": "ep-displaced",
    "interweaved": "dice:synced=none,stride=1",
    "deep": "dice:synced=deep,stride=1",
    "shallow": "dice:synced=shallow,stride=1",
    "both": "dice:synced=all,stride=1",
    "stride": "dice:synced=none,stride=4",
}


def test_at_rest_a_stale_schedule_is_exact_in_the_end(ranks: Meshes) -> None:
    """Where inputs stay: the first layer after one more step, or two; the second after as many again."""
    model, times = flux_moe(), (1.0, *[0.5] * 6)
    with torch.no_grad():
        wanted = model(**batch([0], 0.5))[0]

    def use(own: nn.Module, found: Experts, rank: int) -> list[float]:
        with own.cache_context("cond"):  # type: ignore[operator]
            return [error(own(**batch([0], time))[0], wanted) for time in times]

    for recipe, steps in (("dice:synced=none,stride=1,values=own", 2), ("ep-displaced:values=own", 4)):
        for off in on_ranks(ranks[2], model, recipe, use):
            assert off[steps] > 1e-5
            assert off[steps + 1] < 1e-6


def test_residuals_are_nearer_than_values_of_as_many_bits(ranks: Meshes) -> None:
    model, steps = flux_moe(), 12
    wanted = sampled(model, range(2), steps)
    direct, most = made(ranks[2], model, "ep-sync:values=int4", 2, steps)
    residual, sent = made(ranks[2], model, "dice-residual:mode=sync,stride=1", 2, steps)
    assert error(residual, wanted) < error(direct, wanted) / 2.5
    assert sent < 1.2 * most
    stale, half = made(ranks[2], model, "dice:mode=displaced,synced=none", 2, steps)
    coded, few = made(ranks[2], model, "dice-residual:mode=displaced,synced=none", 2, steps)
    assert error(coded, wanted) < 1.2 * error(stale, wanted)
    assert few < 0.45 * half


def test_half_precision(ranks: Meshes) -> None:
    """As near as the model's own rounding leaves it."""
    model = flux_moe().to(torch.bfloat16)

    def half(pictures: Sequence[int], time: float = 0.5) -> Inputs:
        inputs = batch(pictures, time)
        return inputs | {k: inputs[k].to(torch.bfloat16) for k in BY_PICTURE if k != "timestep"}

    wanted = sampled(model, range(2), 3, half)
    for recipe in ("ep-sync:values=own", "dice-residual:mode=sync,stride=1"):
        found = torch.cat(on_ranks(ranks[2], model, recipe, lambda own, _, k: sampled(own, [k], 3, half)))
        assert found.dtype == torch.bfloat16
        assert error(found, wanted) < 0.02


@pytest.mark.parametrize("recipe", ["ep-sync:values=own", "ep-sync", "dice-residual:mode=sync,stride=1"])
def test_experts_that_choose_tokens(ranks: Meshes, recipe: str) -> None:
    """NucleusMoE's: each expert has so many tokens, of each picture."""
    model, steps = nucleus(), 4
    wanted = sampled(model, range(3), steps, nucleus_inputs)
    parts = shares(3, 2)
    found = on_ranks(ranks[2], model, recipe, lambda own, _, k: sampled(own, parts[k], steps, nucleus_inputs))
    bound = {"ep-sync:values=own": 1e-6, "ep-sync": 1e-4}.get(recipe, 2e-2)
    for own, x in zip(parts, found, strict=True):
        assert error(x, wanted[own]) < bound


@pytest.mark.parametrize(
    ("model", "inputs", "recipes"),
    [
        (flux_moe, batch, ("ep-displaced", "dice", "dice-residual:synced=none")),
        (hidream, hidream_inputs, ("dice",)),  # whose times have another name
    ],
)
def test_pictures_after_others_begin_anew(ranks: Meshes, model: Any, inputs: Any, recipes: Any) -> None:
    """And nothing of the first ones stays unread."""
    model = model()

    def use(own: nn.Module, found: Experts, rank: int) -> int:
        first, again = (sampled(own, [rank], 3, inputs) for _ in range(2))
        assert torch.equal(first, again)
        assert torch.isfinite(sampled(own, [rank, 2, 3], 2, inputs)).all()  # a larger batch
        return found.generation

    for recipe in recipes:
        assert on_ranks(ranks[3], model, recipe, use) == [3, 3, 3]
    for mailbox in (peer.mailbox for peers in ranks[3] for peer in peers.values()):
        filed: Any = mailbox._filed
        assert not [tag for tag, bodies in filed.items() if len(bodies[0]) > 100]


@pytest.mark.parametrize("recipe", ["dice", "dice-residual"])
def test_two_passes_a_step_are_kept_apart(ranks: Meshes, recipe: str) -> None:
    model = flux_moe()

    def passes(own: Any, pictures: list[int]) -> Tensor:
        x, y = (batch(pictures, 1.0)["hidden_states"] for _ in range(2))
        for i in range(5):
            inputs = batch(pictures, 1 - i / 5)
            with own.cache_context("cond"):
                x = x - own(**inputs | {"hidden_states": x})[0] / 5
            with own.cache_context("uncond"):
                y = y + own(**inputs | {"hidden_states": y})[0] / 5
        return torch.cat((x, y))

    with torch.no_grad():
        wanted = [passes(model, [k]) for k in range(2)]
    for x, y in zip(
        on_ranks(ranks[2], model, recipe, lambda own, _, k: passes(own, [k])), wanted, strict=True
    ):
        assert error(x, y) < 0.02


def test_the_model_is_left_as_it_was(ranks: Meshes) -> None:
    model = flux_moe()

    def use(own: nn.Module, found: Experts, rank: int) -> nn.Module:
        own(**batch([rank]))
        return own

    for own in on_ranks(ranks[2], model, "dice", use):
        for module, stock in zip(own.modules(), model.modules(), strict=True):
            assert vars(module).keys() == vars(stock).keys()


def test_experts_of_others_need_no_weights_here(ranks: Meshes) -> None:
    model = flux_moe()
    wanted = sampled(model, range(2), 2)

    def use(own: nn.Module, found: Experts, rank: int) -> Tensor:
        for block in own.transformer_blocks:  # type: ignore[union-attr]
            for expert in list(block.ff.experts)[1 - rank :: 2]:
                expert.to("meta")
        return sampled(own, [rank], 2)

    found = on_ranks(ranks[2], model, "ep-sync:values=own", use)
    assert error(torch.cat(found), wanted) < 5e-7


def test_outputs_of_experts_beyond_float16(ranks: Meshes) -> None:
    model: Any = flux_moe()
    for block in model.transformer_blocks:
        for expert in block.ff.experts:
            expert.w2.weight.data *= 2.0**20
    wanted = [sampled(model, [k], 1) for k in (0, 1)]
    for made, x in zip(
        on_ranks(ranks[2], model, "ep-sync", lambda own, _, k: sampled(own, [k], 1)), wanted, strict=True
    ):
        assert (made - x).norm() < 1e-3 * x.norm()
