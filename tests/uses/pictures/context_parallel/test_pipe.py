"""Mode pipe: blocks over the ranks, the picture in patches: near one device, the same bits on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from meshes import Mesh, together
from picture_hosts import HOSTS
from picture_models import flux, flux_inputs, on_ranks, one_device, sample
from torch import Tensor, nn

import thinwire
from thinwire.types import InputError, LinkError
from thinwire.uses.pictures.agreement import Parallel
from thinwire.uses.pictures.context_parallel import pipefusion

pytest.importorskip("diffusers")

Meshes = dict[int, list[Mesh]]
STEPS = 8


def db(x: Tensor, y: Tensor) -> float:
    return float(-10 * torch.log10((x - y).square().mean() / y.square().mean()))


@pytest.mark.parametrize(("tokens", "world"), [(64, 2), (63, 3), (63, 4)])
def test_uncoded_it_is_one_device_while_nothing_changes(ranks: Meshes, tokens: int, world: int) -> None:
    """At first all patches are awaited; later those of the last step are, here, those of this one."""
    model, calls = flux(singles=4), [flux_inputs(tokens, time) for time in (0.5, 0.4999999)]
    wanted = one_device(model, calls)
    for made in on_ranks(ranks[world], model, "raw", lambda own, _: one_device(own, calls), mode="pipe"):
        for x, y in zip(made, wanted, strict=True):
            assert (x - y).norm() <= 1e-5 * y.norm()


def test_the_order_of_patches_is_the_published_one_on_any_number_of_ranks(
    ranks: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patch sees those before it as of this step and those behind it as of the last: on 2 ranks as on 3.

    Source: PipeFusion, arXiv 2405.14430.
    """
    monkeypatch.setattr(pipefusion, "suited", lambda *of: 4)
    model, inputs = flux(singles=4), flux_inputs(64)
    run = lambda own, _: sample(own, inputs, STEPS)  # noqa: E731
    two, three = (on_ranks(ranks[n], model, "raw", run, mode="pipe")[0] for n in (2, 3))
    assert db(two, three) > 100 > db(two, sample(model, inputs, STEPS))


def test_all_ranks_hold_the_same_bits_and_more_bits_are_nearer(ranks: Meshes) -> None:
    model, inputs = flux(), flux_inputs(64)
    wanted, found, sent = sample(model, inputs, STEPS), {}, {}

    def use(own: nn.Module, parallel: Parallel) -> tuple[Tensor, int]:
        return sample(own, inputs, STEPS), parallel.tally.nbytes

    for name in (
        "pipe-fp16",
        "compact-pipe",
        "compact-pipe:bits=1",
        "pipe-fp16:warmup=8",
        "pipe-fp16:patches=7",
    ):
        made = on_ranks(ranks[2], model, name, use)
        assert torch.equal(made[0][0], made[1][0]), name
        found[name], sent[name] = db(made[0][0], wanted), made[0][1]
    assert found["pipe-fp16:warmup=8"] > 55 > found["compact-pipe:bits=1"] > 15
    assert found["pipe-fp16"] > found["compact-pipe"] > found["compact-pipe:bits=1"]
    assert found["pipe-fp16:patches=7"] > 50
    assert sent["compact-pipe:bits=1"] < sent["compact-pipe"] < sent["pipe-fp16"] / 1.5


@pytest.mark.parametrize("deaf", [False, True])
def test_one_processor_may_serve_all_layers_if_it_hears(ranks: Meshes, deaf: bool) -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    class Deaf(FluxAttnProcessor):  # type: ignore[misc]  # diffusers has no types
        def __call__(self, *args: Any, **given: Any) -> Any:
            kept, self._parallel_config = self._parallel_config, None
            try:
                return super().__call__(*args, **given)
            finally:
                self._parallel_config = kept

    model, calls = flux(), [flux_inputs(time=time) for time in (0.5, 0.4999999)]
    model.set_attn_processor(Deaf() if deaf else FluxAttnProcessor())
    wanted = one_device(model, calls)
    if deaf:
        with pytest.raises(
            InputError, match="block 0 has exchanged nothing in its attention, so the picture"
        ):
            on_ranks(ranks[2], model, "raw", lambda own, _: one_device(own, calls), mode="pipe")
        return
    for made in on_ranks(ranks[2], model, "raw", lambda own, _: one_device(own, calls), mode="pipe"):
        assert all((x - y).norm() <= 1e-5 * y.norm() for x, y in zip(made, wanted, strict=True))


def test_an_aborted_picture_leaves_nothing_to_the_next(ranks: Meshes) -> None:
    model, first, second = flux(), flux_inputs(64), flux_inputs(64, seed=2)
    wanted = sample(model, second, 3)

    def use(own: nn.Module, _: Parallel) -> Tensor:
        sample(own, first, 2)
        return sample(own, second, 3)

    for made in on_ranks(ranks[2], model, "pipe-fp16:warmup=8", use):
        assert db(made, wanted) > 50


@pytest.mark.parametrize("name", ["Helios", "MiniMax-H3"])
def test_models_without_an_entry_are_refused_by_name(ranks: Meshes, name: str) -> None:
    model = HOSTS[name][0]()
    words = f"mode pipe does not know where to cut a {type(model).__name__}; use mode gather"
    with pytest.raises(InputError, match=words):
        on_ranks(ranks[2], model, "pipe-fp16", lambda own, _: None)


def test_what_cannot_be_cut_is_refused(ranks: Meshes) -> None:
    with pytest.raises(InputError, match="mode pipe cuts 3 blocks over the ranks, and there are 4"):
        on_ranks(ranks[4], flux(), "pipe-fp16", lambda own, _: None)
    with pytest.raises(InputError, match="70 patches are more than the picture's 64 tokens"):
        on_ranks(ranks[2], flux(), "pipe-fp16:patches=70", lambda own, _: sample(own, flux_inputs(64), 1))
    with pytest.raises(InputError, match=r"patches=-1 is not a whole number in 0\.\.1024"):
        on_ranks(ranks[2], flux(), "pipe-fp16:patches=-1", lambda own, _: None)
    make, draw = HOSTS["SD3"]
    skipped = draw() | {"skip_layers": [1], "return_dict": False}
    with pytest.raises(InputError, match="a call passes over all blocks of the last rank; use fewer ranks"):
        on_ranks(ranks[2], make(), "pipe-fp16", lambda own, _: one_device(own, [skipped]))


def test_a_rank_that_leaves_is_named(ranks: Meshes) -> None:
    model = flux()

    def rank(peers: Mesh, gone: bool) -> str:
        own = copy.deepcopy(model)
        try:
            with torch.no_grad(), thinwire.parallel(own, peers, "pipe-fp16", deadline=20):
                sample(own, flux_inputs(64), 2)
                if gone:
                    return "left"
                sample(own, flux_inputs(64), 3)
        except LinkError as e:
            return str(e)
        return "done"

    said = together([lambda k=k, peers=peers: rank(peers, k == 1) for k, peers in enumerate(ranks[2])])
    assert said[1] == "left" and "rank 1 has left" in said[0]
