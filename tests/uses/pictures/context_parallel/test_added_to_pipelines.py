"""What people add to pipelines, and what they run them with: whole pipelines on two ranks."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from each import each
from meshes import Mesh, together
from picture_pipelines import ran
from torch import Tensor
from whole_pipelines import CASES, Whole, untimed

import thinwire

pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SMALL = 1e-2  # what models return is made, so that what mode pipe has of the last step is near
MODES = {"gather": 1e-6, "pipe": 5e-5}  # of the latents, of which models change some 0.003 to 0.01


def built(name: str) -> Whole:
    """A pipeline whose latents hardly change from step to step, nor do its models with the time."""
    make, add = CASES[name]
    made = make()
    for model in made.models:
        untimed(model)
        last = model.all_final_layer if hasattr(model, "all_final_layer") else model.proj_out
        for p in last.parameters():
            p.data *= SMALL
        add(model)
        model.eval()
    return made


def denoised(made: Whole) -> Tensor:
    """Three steps: all tokens in the first, patch by patch in the second, and once more."""
    return ran(made.pipe, **{"num_inference_steps": 3} | made.options)


@each("name", CASES)
def test_a_pipeline_makes_the_picture_of_one_device(ranks: dict[int, list[Mesh]], name: str) -> None:
    wanted = denoised(built(name))
    assert torch.isfinite(wanted).all()

    def rank(mode: str, made: Whole, peers: Mesh) -> tuple[Tensor, int]:
        with ExitStack() as stack:
            entered = [thinwire.parallel(model, peers, "raw", mode) for model in made.models]
            found = [stack.enter_context(each) for each in entered]
            return denoised(made), found[0].generation

    for mode, bound in MODES.items():
        each_rank = [partial(rank, mode, built(name), peers) for peers in ranks[2]]
        for made, generation in together(each_rank):
            assert (made - wanted).norm() <= bound * wanted.norm(), mode
            assert generation == (2 if name == "rising time" else 1), mode


@each("mode", MODES)
def test_a_model_that_is_offloaded_after_each_picture_stays_divided(
    ranks: dict[int, list[Mesh]], mode: str
) -> None:
    """Diffusers takes all of accelerate's hooks off then, with what was around them, and hangs them anew."""
    wanted = denoised(built("two calls a step"))

    def rank(made: Whole, peers: Mesh) -> tuple[list[Tensor], int, int]:
        made.pipe.enable_model_cpu_offload(device="cpu")
        with thinwire.parallel(made.models[0], peers, "raw", mode) as found:
            first, calls = denoised(made), found.tally.calls
            return [first, denoised(made)], calls, found.tally.calls

    each_rank = [partial(rank, built("two calls a step"), peers) for peers in ranks[2]]
    for pictures, calls, all_calls in together(each_rank):
        assert all_calls == 2 * calls
        for made in pictures:
            assert (made - wanted).norm() <= MODES[mode] * wanted.norm()
