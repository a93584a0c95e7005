"""Mode guidance: each rank computes one of two forward passes, and both have the picture of one device."""

from __future__ import annotations

from threading import Barrier
from typing import Any

import pytest
import torch
from meshes import Mesh
from picture_models import flux, flux_inputs, on_ranks, wan
from picture_pipelines import flux_pipeline, wan_pipeline
from torch import Tensor, nn

from thinwire.types import InputError
from thinwire.uses.pictures.agreement import Parallel
from thinwire.uses.pictures.context_parallel.guidance import Later

pytest.importorskip("diffusers")

Meshes = dict[int, list[Mesh]]


def guided(transformer: nn.Module, height: int) -> Tensor:
    return flux_pipeline(transformer, height, guidance=3.0)


@pytest.mark.parametrize(("make", "pipeline"), [(flux, guided), (wan, wan_pipeline)])
def test_pipelines_make_the_same_picture_in_half_the_passes(ranks: Meshes, make: Any, pipeline: Any) -> None:
    """To the bit, both at the same time; in the first step of each size each rank computes both passes."""
    model, heights, both = make(), (96, 96, 80), Barrier(2)
    wanted = [pipeline(model, height) for height in heights]

    def use(own: nn.Module, found: Parallel) -> tuple[list[Tensor], int, int]:
        runs = []
        block = next(m for n, m in own.named_modules() if n.endswith("blocks.0"))
        block.register_forward_hook(lambda *_: runs.append(both.wait(20)))
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


@pytest.mark.parametrize("passes", [[1] * 4, [3] * 4, [2, 2, 1, 2], [2, 3, 1, 1]])
def test_other_numbers_of_passes_have_the_outputs_of_one_device(ranks: Meshes, passes: list[int]) -> None:
    """Also where guidance is left out of some steps, or an output is read before the other pass."""
    model = flux()

    def use(own: nn.Module) -> list[Tensor]:
        pairs = zip((1.0, 0.9, 0.8, 0.7), passes, strict=True)
        return [
            own(**flux_inputs(time=time, seed=seed))[0] * 2 for time, many in pairs for seed in range(many)
        ]

    with torch.no_grad():
        wanted = use(model)
    for made in on_ranks(ranks[2], model, "guidance", lambda own, _: use(own)):
        assert all(torch.equal(x, y) for x, y in zip(made, wanted, strict=True))


def test_other_numbers_of_ranks_are_refused(ranks: Meshes) -> None:
    with pytest.raises(InputError, match=r"mode guidance is for 2 ranks, .* not for 3; start 2"):
        on_ranks(ranks[3], flux(), "guidance", lambda own, _: None)


def test_what_comes_later_may_be_cut_at_once_and_is_awaited_where_it_is_read() -> None:
    values, asked = torch.randn(2, 6, 4), list[int]()

    def fetch() -> list[Tensor]:
        asked.append(1)
        return [values]

    for read, wanted in (
        (lambda x, part: x + 1, values + 1),
        (lambda x, part: torch.cat([values, x]), torch.cat([values, values])),
        (lambda x, part: x.clone().mul_(2), values * 2),
        (lambda x, part: part * 2, values[:, 1:] * 2),
        (lambda x, part: torch.tensor(x.tolist()), values),
        (lambda x, part: x.double().float(), values),
        (lambda x, part: x.transpose(0, 1).reshape(24, 2), values.transpose(0, 1).reshape(24, 2)),
        (lambda x, part: torch.zeros(2, 6, 4).add_(x), values),
    ):
        asked.clear()
        (later,) = Later.all_like([values], fetch)
        parts = [later[:, 1:], later.chunk(2)[1], later.transpose(0, 1).reshape(6, 2, 4), later.view(12, 4)]
        assert [tuple(x.shape) for x in parts] == [(2, 5, 4), (1, 6, 4), (6, 2, 4), (12, 4)]
        assert later.dtype == later.to(torch.float32).dtype == torch.float32
        assert not asked
        assert torch.equal(read(later, parts[0]), wanted)
        assert asked == [1]
        assert torch.equal(parts[2], values.transpose(0, 1))
        assert type(later + 1) is Tensor
