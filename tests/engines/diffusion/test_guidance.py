"""Mode guidance: each rank computes one of two forward passes, and both have the picture of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshes import Mesh
from picture_models import flux, flux_inputs, on_ranks, wan
from picture_pipelines import flux_pipeline, wan_pipeline
from torch import Tensor, nn

from thinwire.engines.diffusion.later import Later
from thinwire.engines.diffusion.parallel import Parallel
from thinwire.types import InputError

pytest.importorskip("diffusers")

Meshes = dict[int, list[Mesh]]


def guided(transformer: nn.Module, height: int) -> Tensor:
    return flux_pipeline(transformer, height, guidance=3.0)


@pytest.mark.parametrize(("make", "pipeline"), [(flux, guided), (wan, wan_pipeline)])
def test_pipelines_make_the_same_picture_in_half_the_passes(ranks: Meshes, make: Any, pipeline: Any) -> None:
    """To the bit; in the first step of each size both ranks compute both passes, to know how outputs look."""
    model, heights = make(), (96, 96, 80)
    wanted = [pipeline(model, height) for height in heights]

    def use(own: nn.Module, found: Parallel) -> tuple[list[Tensor], int, int]:
        runs = []
        block = next(m for n, m in own.named_modules() if n.endswith("blocks.0"))
        block.register_forward_hook(lambda *_: runs.append(1))
        return [pipeline(own, height) for height in heights], found.generation, len(runs)

    for pictures, generation, passes in on_ranks(ranks[2], model, "guidance", use):
        assert all(torch.equal(x, y) for x, y in zip(pictures, wanted, strict=True))
        assert generation == 3
        assert passes == 3 * 4 + 2


def test_coded_both_have_the_same_bits(ranks: Meshes) -> None:
    make = lambda own, _: guided(own, 96)  # noqa: E731
    x, y = on_ranks(ranks[2], flux(), "compact", make, mode="guidance")
    assert torch.equal(x, y)
    assert (x - guided(flux(), 96)).norm() < 0.01 * x.norm()


def steps(model: nn.Module, times: list[float], passes: int) -> list[Tensor]:
    return [model(**flux_inputs(time=time, seed=i))[0] for time in times for i in range(passes)]


@pytest.mark.parametrize(
    ("passes", "words"),
    [(1, "is for two forward passes a step, and this is one with one"), (3, "and this is one with more")],
)
def test_other_numbers_of_passes_are_refused(ranks: Meshes, passes: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        on_ranks(ranks[2], flux(), "guidance", lambda own, _: steps(own, [1.0, 0.9], passes))


def test_other_numbers_of_ranks_are_refused(ranks: Meshes) -> None:
    with pytest.raises(InputError, match=r"mode guidance is for 2 ranks, .* not for 3; use mode gather"):
        on_ranks(ranks[3], flux(), "guidance", lambda own, _: None)


def test_guidance_left_out_later_is_refused(ranks: Meshes) -> None:
    """By the rank that lacks the pass as soon as it reads the output, and by the other in the next step."""

    def use(own: nn.Module, found: Parallel) -> str:
        steps(own, [1.0, 0.9], 2)
        with pytest.raises(InputError) as error:
            for made in steps(own, [1.0], 1):
                made + 1
            steps(own, [0.9], 1)
        return str(error.value)

    first, second = on_ranks(ranks[2], flux(), "guidance", use)
    assert "this is one with one; use mode gather" in first
    assert "a model's output is read before the step's other forward pass" in second


def test_what_comes_later_may_be_cut_but_not_read() -> None:
    values = torch.randn(2, 6, 4)
    later = Later.like(values)
    parts = [later[:, 1:], later.chunk(2)[1], later.transpose(0, 1).reshape(6, 2, 4), later.view(12, 4)]
    assert [tuple(x.shape) for x in parts] == [(2, 5, 4), (1, 6, 4), (6, 2, 4), (12, 4)]
    assert later.dtype == torch.float32
    for read in (
        lambda: later + 1,
        lambda: torch.cat([values, later]),
        lambda: later.mul_(2),
        lambda: parts[0].sum().item(),
        lambda: later.tolist(),
        lambda: later.double(),
        lambda: bool(later[0, 0, 0]),
    ):
        with pytest.raises(InputError, match="is read before the step's other forward pass"):
            read()
    later.fill(values)
    assert torch.equal(later, values)
    assert torch.equal(parts[0] * 2, values[:, 1:] * 2)
    assert torch.equal(parts[2], values.transpose(0, 1))
    assert type(later + 1) is Tensor
