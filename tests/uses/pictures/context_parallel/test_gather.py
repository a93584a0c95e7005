"""One transformer over several ranks: the picture of one device, the same bits on all ranks, fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshes import Mesh
from picture_models import (
    FAMILIES,
    flux,
    flux_inputs,
    on_ranks,
    one_device,
    qwen,
    qwen_inputs,
    sample,
    wan,
    wan_inputs,
)
from torch import Tensor, nn

from thinwire.types import InputError
from thinwire.uses.pictures.agreement import Parallel, check_whole

pytest.importorskip("diffusers")

Meshes = dict[int, list[Mesh]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tokens", "world"), [(64, 2), (63, 2), (64, 3), (63, 3), (64, 4)])
def test_uncoded_it_is_the_picture_of_one_device(ranks: Meshes, family: str, tokens: int, world: int) -> None:
    make, inputs = FAMILIES[family]
    model, calls = make(), [inputs(tokens, time) for time in (0.9, 0.5)]
    wanted = one_device(model, calls)
    for made in on_ranks(ranks[world], model, "raw", lambda own, _: one_device(own, calls)):
        for x, y in zip(made, wanted, strict=True):
            assert (x - y).norm() <= 1e-6 * y.norm()


@pytest.mark.parametrize(
    ("family", "tokens", "world"), [("flux", 63, 2), ("flux", 64, 4), ("wan", 63, 2), ("qwen", 64, 3)]
)
def test_ulysses_uncoded_as_well(ranks: Meshes, family: str, tokens: int, world: int) -> None:
    make, inputs = FAMILIES[family]
    model, calls = make(), [inputs(tokens, time) for time in (0.9, 0.5)]
    wanted = one_device(model, calls)
    use = lambda own, _: one_device(own, calls)  # noqa: E731
    for made in on_ranks(ranks[world], model, "raw", use, mode="ulysses"):
        for x, y in zip(made, wanted, strict=True):
            assert (x - y).norm() <= 1e-6 * y.norm()


@pytest.mark.parametrize(("family", "world"), [("flux", 3), ("wan", 3), ("qwen", 2)])
def test_ulysses_shares_heads_evenly_or_not_at_all(ranks: Meshes, family: str, world: int) -> None:
    """Also where ranks are more than heads."""
    make, inputs = FAMILIES[family]
    words = rf"blocks\.0\.attn\S* has \d heads, which {world} ranks cannot share evenly; use mode gather"
    with pytest.raises(InputError, match=words):
        on_ranks(ranks[world], make(), "ulysses", lambda own, _: one_device(own, [inputs()]))


def test_tokens_depend_on_what_other_ranks_have() -> None:
    """So equality with one device is none of a model that ignores other tokens."""
    model, inputs = wan(), wan_inputs()
    other = inputs | {"hidden_states": inputs["hidden_states"].clone()}
    other["hidden_states"][..., -2:, -2:] += 5  # the last token
    x, y = one_device(model, [inputs, other])
    assert not torch.allclose(x[..., :2, :2], y[..., :2, :2])


@pytest.mark.parametrize("family", FAMILIES)
def test_coded_all_ranks_have_the_same_bits(ranks: Meshes, family: str) -> None:
    make, inputs = FAMILIES[family]
    model, errors, sizes = make(), {}, {}
    wanted = sample(model, inputs(63), 4)

    def use(own: nn.Module, found: Parallel) -> tuple[Tensor, int]:
        return sample(own, inputs(63), 4), found.tally.nbytes

    for recipe in ("fp16", "int8", "compact:bits=2,warmup=2,order=2", "compact", "lowrank:rank=4"):
        made = on_ranks(ranks[3], model, recipe, use)
        assert all(torch.equal(x, made[0][0]) for x, _ in made)
        errors[recipe[:9]] = float((made[0][0] - wanted).norm() / wanted.norm())
        sizes[recipe[:9]] = made[0][1]
    assert errors["fp16"] < errors["compact:b"] < errors["compact"] < 0.01
    assert errors["lowrank:r"] < 0.01
    assert sizes["fp16"] > sizes["int8"] > sizes["compact"]
    assert sizes["fp16"] > sizes["compact:b"] > sizes["compact"]


@pytest.mark.parametrize("recipe", ["ulysses", "compact:bits=2,warmup=2"])
def test_ulysses_coded_as_well(ranks: Meshes, recipe: str) -> None:
    model, inputs = qwen(), qwen_inputs(63)
    wanted = sample(model, inputs, 4)
    made = on_ranks(ranks[3], model, recipe, lambda own, _: sample(own, inputs, 4), mode="ulysses")
    assert all(torch.equal(x, made[0]) for x in made)
    assert 0 < (made[0] - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(ranks: Meshes, dtype: torch.dtype) -> None:
    """Uncoded within the model's own rounding; coded, the same bits on all ranks."""
    model, inputs = flux().to(dtype), flux_inputs(63)
    inputs |= {k: v.to(dtype) for k, v in inputs.items() if isinstance(v, Tensor) and "ids" not in k}
    wanted = sample(model, inputs, 3)
    for recipe in ("raw", "compact"):
        made = on_ranks(ranks[2], model, recipe, lambda own, _: sample(own, inputs, 3))
        assert torch.equal(*made)
        assert made[0].dtype == dtype
        assert (made[0] - wanted).norm() < 0.02 * wanted.norm()


def test_each_picture_begins_anew(ranks: Meshes) -> None:
    """Also after one of another size."""

    def use(own: nn.Module, found: Parallel) -> tuple[list[Tensor], list[int]]:
        made, numbers = [], []
        for tokens in (64, 63, 64, 64):
            made.append(sample(own, flux_inputs(tokens), 3))
            numbers.append(found.generation)
        return made, numbers

    for made, numbers in on_ranks(ranks[2], flux(), "compact", use):
        assert torch.equal(made[0], made[2])
        assert torch.equal(made[0], made[3])
        assert numbers == [1, 2, 3, 4]


def test_what_an_aborted_picture_left_is_not_taken(ranks: Meshes) -> None:
    model = flux()

    def use(own: nn.Module, found: Parallel) -> Tensor:
        gather: Any = found._session
        sample(own, flux_inputs(seed=5), 2)
        if gather._rank == 1:  # it sends the first message of a step that the other rank never makes
            traffic = gather._exchange
            exchange, traffic._exchange = traffic._exchange, Posting(traffic._exchange)
            with pytest.raises(KeyboardInterrupt):
                own(**flux_inputs(time=0.1, seed=5))
            traffic._exchange = exchange
        return sample(own, flux_inputs(), 3)

    x, y = on_ranks(ranks[2], model, "raw", use)
    assert torch.equal(x, y)
    assert torch.allclose(x, sample(model, flux_inputs(), 3), atol=1e-5)


class Posting:
    """An exchange that is interrupted while it waits."""

    def __init__(self, exchange: Any) -> None:
        self.ranks, self.post, self.hand_over = exchange.ranks, exchange.post, exchange.hand_over

    def collect(self, *_: object) -> dict[int, bytes]:
        raise KeyboardInterrupt


def test_guidance_streams_have_references_of_their_own(ranks: Meshes) -> None:
    """By the name that a pipeline gives, or by place: neither is coded against the other."""

    def use(own: nn.Module, found: Parallel, named: bool) -> list[Tensor]:
        made = []
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

    model = flux()
    apart = on_ranks(ranks[2], model, "compact", lambda own, _: one_stream(own, seed=2))[0]
    for named in (True, False):
        for made in on_ranks(ranks[2], model, "compact", lambda *a, named=named: use(*a, named)):
            assert all(torch.equal(x, y) for x, y in zip(made[1::2], apart, strict=True))


def one_stream(model: nn.Module, seed: int) -> list[Tensor]:
    return one_device(model, [flux_inputs(time=time, seed=seed) for time in (1.0, 0.9, 0.8)])


@pytest.mark.parametrize("recipe", ["one", "batch"])
def test_modes_that_send_nothing(ranks: Meshes, recipe: str) -> None:
    """Each rank has the picture of one device; in mode batch, one of its own."""
    model, seeds = flux(), iter((0, 1))

    def use(own: nn.Module, found: Parallel) -> tuple[Tensor, int]:
        assert found.mode == recipe
        seed = next(seeds) if recipe == "batch" else 0
        made = one_device(own, [flux_inputs(seed=seed)])[0]
        assert found.tally.nbytes == found.tally.exchanges == found.generation == 0
        return made, seed

    for made, seed in on_ranks(ranks[2], model, recipe, use):
        assert torch.equal(made, one_device(model, [flux_inputs(seed=seed)])[0])


def test_other_back_ends_serve(ranks: Meshes) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    model, calls = flux(), [flux_inputs()]
    with attention_backend("_native_math"):
        wanted = one_device(model, calls)[0]
        for made in on_ranks(ranks[2], model, "raw", lambda own, _: one_device(own, calls)[0]):
            assert torch.allclose(made, wanted, atol=1e-5)


def test_one_processor_may_serve_all_layers(ranks: Meshes) -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    model, calls = flux(), [flux_inputs()]
    model.set_attn_processor(FluxAttnProcessor())
    wanted = one_device(model, calls)[0]
    for made in on_ranks(ranks[2], model, "raw", lambda own, _: one_device(own, calls)[0]):
        assert torch.allclose(made, wanted, atol=1e-6)


def test_a_compiled_block_goes_on_as_before(ranks: Meshes) -> None:
    """The exchange in it is not compiled. One of the ranks is enough: compiling takes a while.

    So is mode pipe: what it has beside the layers of attention, the other modes have not.
    """
    model, calls = flux(), [flux_inputs()]
    wanted = one_device(model, calls)

    def use(own: nn.Module, found: Parallel) -> list[Tensor]:
        session: Any = found._session
        if session._rank == 1:
            own.single_transformer_blocks[1].compile(backend="eager")
        return one_device(own, calls)

    for made in on_ranks(ranks[2], model, "raw", use, mode="pipe"):
        assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(made, wanted, strict=True))
    model.compile(backend="eager")  # in place, and whole
    with pytest.raises(InputError, match="a compiled model cannot be taken apart"):
        check_whole(model)
