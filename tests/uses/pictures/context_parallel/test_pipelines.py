"""Pipelines of diffusers over a parallel transformer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshes import Mesh
from picture_models import flux, on_ranks, wan
from picture_pipelines import flux_pipeline, wan_pipeline
from torch import Tensor, nn

from thinwire.uses.pictures.agreement import Parallel

pytest.importorskip("diffusers")


@pytest.mark.parametrize(("make", "pipeline"), [(flux, flux_pipeline), (wan, wan_pipeline)])
def test_a_pipeline_makes_the_same_picture(ranks: dict[int, list[Mesh]], make: Any, pipeline: Any) -> None:
    """Twice, and in another size afterwards: each is a generation of its own. Uncoded: in the file beside."""
    model, heights = make(), (96, 96, 80)
    wanted = [pipeline(model, height) for height in heights]

    def use(own: nn.Module, found: Parallel) -> tuple[list[Tensor], int]:
        return [pipeline(own, height) for height in heights], found.generation

    made = on_ranks(ranks[2], model, "compact:bits=2", use)
    for pictures, generation in made:
        assert generation == 3
        for x, y, z in zip(pictures, made[0][0], wanted, strict=True):
            assert torch.equal(x, y)
            assert (x - z).norm() <= 1e-2 * z.norm()
        assert torch.equal(pictures[0], pictures[1])
