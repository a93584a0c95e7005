"""One transformer over several ranks: the picture of one device, the same bits on all ranks, fewer bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from meshes import Mesh, meshes, together
from picture_models import FAMILIES, flux, flux_inputs, on_ranks, one_device, sample, wan, wan_inputs

import thinwire

pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def rings() -> Iterator[dict[int, list[Mesh]]]:
    """Meshes of 2, 3 and 4 ranks, which the tests use one after another."""
    with meshes(2) as two, meshes(3) as three, meshes(4) as four:
        yield {2: two, 3: three, 4: four}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [64, 63])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_uncoded_it_is_the_picture_of_one_device(
    rings: dict[int, list[Mesh]], family: str, tokens: int, world: int
) -> None:
    make, inputs = FAMILIES[family]
    model, calls = make(), [inputs(tokens, time) for time in (0.9, 0.5)]
    wanted = one_device(model, calls)
    for made, tally in on_ranks(rings[world], model, "raw", calls):
        for x, y in zip(made, wanted, strict=True):
            assert (x - y).norm() <= 1e-6 * y.norm()
        assert tally.calls == 2
        assert tally.exchanges > 2 * 2


def test_each_rank_depends_on_what_the_others_send(rings: dict[int, list[Mesh]]) -> None:
    """So equality with one device is none of a model that ignores other tokens."""
    model, inputs = wan(), wan_inputs()
    other = inputs | {"hidden_states": inputs["hidden_states"].clone()}
    other["hidden_states"][..., -2:, -2:] += 5  # the last token, which the second rank has
    x, y = one_device(model, [inputs, other])
    assert not torch.allclose(x[..., :2, :2], y[..., :2, :2])


@pytest.mark.parametrize("family", FAMILIES)
def test_coded_all_ranks_have_the_same_bits(rings: dict[int, list[Mesh]], family: str) -> None:
    make, inputs = FAMILIES[family]
    model, errors, bytes_ = make(), {}, {}
    wanted = sample(model, inputs(63), 6)
    for recipe in ("fp16", "int8", "compact:bits=1", "compact:bits=2,warmup=2,order=2"):

        def rank(peers: Mesh, recipe: str = recipe) -> tuple[torch.Tensor, int]:
            own = copy.deepcopy(model)
            with thinwire.parallel(own, peers, recipe) as found:
                return sample(own, inputs(63), 6), found.tally.nbytes

        made = together([lambda peers=peers: rank(peers) for peers in rings[3]])
        assert all(torch.equal(x, made[0][0]) for x, _ in made)
        errors[recipe] = float((made[0][0] - wanted).norm() / wanted.norm())
        bytes_[recipe] = max(nbytes for _, nbytes in made)
    assert list(errors.values()) == pytest.approx([0, 0, 0, 0], abs=1e-3)
    assert errors["fp16"] < errors["compact:bits=2,warmup=2,order=2"] < errors["compact:bits=1"]
    assert bytes_["fp16"] > bytes_["int8"] > bytes_["compact:bits=1"]


def test_each_picture_begins_anew(rings: dict[int, list[Mesh]]) -> None:
    """Also after one of another size, and one that was left half way."""

    def rank(peers: Mesh) -> tuple[list[torch.Tensor], list[int]]:
        own, made, numbers = flux(), [], []
        with thinwire.parallel(own, peers, "compact") as found:
            for tokens, steps in ((64, 3), (63, 2), (64, 3), (64, 3)):
                made.append(sample(own, flux_inputs(tokens), steps))
                numbers.append(found.generation)
        return made, numbers

    for made, numbers in together([lambda peers=peers: rank(peers) for peers in rings[2]]):
        assert torch.equal(made[0], made[2])
        assert torch.equal(made[0], made[3])
        assert numbers == [1, 2, 3, 4]


def test_what_an_aborted_picture_left_is_not_taken(rings: dict[int, list[Mesh]]) -> None:
    def rank(peers: Mesh) -> torch.Tensor:
        own, is_last = flux(), 0 in peers
        with thinwire.parallel(own, peers, "compact") as found:
            sample(own, flux_inputs(seed=5), 2)
            if is_last:  # it sends the first message of a step that the other never makes
                gather: Any = found._gather
                gather._exchange.collect = None
                with pytest.raises(TypeError), torch.no_grad():
                    own(**flux_inputs(time=0.1, seed=5))
                del gather._exchange.collect
            return sample(own, flux_inputs(), 3)

    x, y = together([lambda peers=peers: rank(peers) for peers in rings[2]])
    assert torch.equal(x, y)
    assert torch.allclose(x, sample(flux(), flux_inputs(), 3), atol=1e-3)


def test_guidance_streams_have_references_of_their_own(rings: dict[int, list[Mesh]]) -> None:
    """By the name that a pipeline gives, or by place: both, and neither is mixed with the other."""

    def rank(peers: Mesh, named: bool) -> list[torch.Tensor]:
        own, made = flux(), []
        with torch.no_grad(), thinwire.parallel(own, peers, "compact") as found:
            for time in (1.0, 0.9, 0.8):
                for name, seed in (("cond", 1), ("uncond", 2)):
                    inputs = flux_inputs(time=time, seed=seed)
                    if named:
                        with own.cache_context(name):
                            made.append(own(**inputs)[0])
                    else:
                        made.append(own(**inputs)[0])
            assert found.generation == 1
        return made

    named, placed = (
        together([lambda peers=peers, named=named: rank(peers, named) for peers in rings[2]])
        for named in (True, False)
    )
    for one in (*named, *placed):
        assert all(torch.equal(x, y) for x, y in zip(one, named[0], strict=True))


def test_mode_one_sends_nothing(rings: dict[int, list[Mesh]]) -> None:
    model = flux()
    for made, tally in on_ranks(rings[2], model, "fp16", [flux_inputs()], mode="one"):
        assert torch.equal(made[0], one_device(model, [flux_inputs()])[0])
        assert tally.nbytes == tally.exchanges == 0


@pytest.mark.parametrize("backend", ["_native_math", "flex"])
def test_other_back_ends_serve(rings: dict[int, list[Mesh]], backend: str) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    model = flux()
    wanted = one_device(model, [flux_inputs()])[0]
    with attention_backend(backend):
        for made, _ in on_ranks(rings[2], model, "raw", [flux_inputs()]):
            assert torch.allclose(made[0], wanted, atol=1e-5)


def test_one_processor_for_all_layers(rings: dict[int, list[Mesh]]) -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    model = flux()
    model.set_attn_processor(FluxAttnProcessor())
    wanted = one_device(model, [flux_inputs()])[0]
    for made, _ in on_ranks(rings[2], model, "raw", [flux_inputs()]):
        assert torch.allclose(made[0], wanted, atol=1e-6)
