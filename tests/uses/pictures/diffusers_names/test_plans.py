"""Every kind of transformer that can be split over ranks: exact, and returned as on one device."""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from bench.pictures.tiny import drawn
from bench.pictures.tiny_images import picture
from each import each
from meshes import Mesh, together
from picture_hosts import HOSTS
from picture_models import on_ranks, wan, wan_inputs
from torch import Tensor
from torch.utils._pytree import tree_flatten

import thinwire
from thinwire.types import InputError
from thinwire.uses.pictures.diffusers_names.plan_entries import TOKENS, Whole
from thinwire.uses.pictures.diffusers_names.plans import plan_of

pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:In CPU autocast")  # diffusers' own


@torch.no_grad()
def called(model: Any, inputs: dict[str, Any]) -> Any:
    return model(**{name: x.copy() if isinstance(x, dict | list) else x for name, x in inputs.items()})


BESIDE = ("Mochi", "PRX", "SD3, an IP-Adapter")  # they attend to tokens that are not split as well


@each("name", HOSTS)
def test_uncoded_each_kind_is_as_on_one_device(ranks: dict[int, list[Mesh]], name: str) -> None:
    """In mode gather, and then in mode ulysses."""
    make, draw = HOSTS[name]
    model, inputs = make(), {**draw(), "return_dict": True}
    modes, wanted = ("gather",) if name in BESIDE else ("gather", "ulysses"), called(model, inputs)

    def rank(peers: Mesh) -> list[Any]:
        own, found = copy.deepcopy(model), []
        for mode in modes:
            with torch.no_grad(), thinwire.parallel(own, peers, "raw", mode):
                found.append(called(own, inputs))
        return found

    for made in chain(*together([partial(rank, peers) for peers in ranks[2]])):
        assert type(made) is type(wanted)
        for x, y in zip(tensors(made), tensors(wanted), strict=True):
            assert (x - y).norm() <= 1e-6 * y.norm()


@each(
    "name, setting, given, words",
    [
        ("Flux2", {}, {"kv_cache_mode": "extract"}, "kv_cache_mode does not go with several ranks"),
        ("SkyReels-V2", {}, {"enable_diffusion_forcing": True}, "each frame has a time of its own"),
        ("HunyuanVideo", {"image_condition_type": "token_replace"}, {}, "replaces the first frame's tokens"),
        ("Helios", {"is_amplify_history": True}, {}, "scales keys of the history"),
        (
            "Lumina-Next",
            {},
            {"cross_attention_kwargs": {"base_sequence_length": 16}},
            "pass proportional_attn=False",
        ),
    ],
)
def test_what_a_share_of_the_tokens_cannot_tell_is_refused(
    ranks: dict[int, list[Mesh]], name: str, setting: dict[str, Any], given: dict[str, Any], words: str
) -> None:
    make, draw = HOSTS[name]
    model: Any = make()
    model.register_to_config(**setting)
    with pytest.raises(InputError, match=words):
        on_ranks(ranks[2], model, "raw", lambda own, _: called(own, draw() | given))


def test_keys_that_every_rank_has_beside_the_shares_need_mode_gather(ranks: dict[int, list[Mesh]]) -> None:
    for name in BESIDE:
        make, draw = HOSTS[name]
        with pytest.raises(InputError, match="attends to tokens that are not split as well; use mode gather"):
            on_ranks(ranks[2], make(), "raw", lambda own, _, draw=draw: called(own, draw()), mode="ulysses")


@each("height, text", [(6, 5), (6, 8), (6, 15), (8, 8), (8, 16)])
def test_a_plan_that_forgets_a_cross_attention_is_refused_or_right(
    ranks: dict[int, list[Mesh]], height: int, text: int
) -> None:
    """15 or 20 tokens of a picture; a text may by chance be as long as a share, or as the whole."""
    make, _ = HOSTS["PixArt"]
    model: Any = make()
    inputs = picture(text=text) | {"hidden_states": drawn(2, 4, height, 10)}
    plan = {path: entry for path, entry in plan_of(model).items() if not isinstance(entry, Whole)}
    wanted = called(model, inputs)
    try:
        found = on_ranks(ranks[2], model, "raw", lambda own, _: called(own, inputs), plan=plan)
    except InputError as e:
        assert f"attn2 has {text} tokens here, no shares of what was split" in str(e)
    else:
        assert all((made[0] - wanted[0]).norm() <= 1e-6 * wanted[0].norm() for made in found)


def test_a_plan_names_what_the_modules_take(ranks: dict[int, list[Mesh]]) -> None:
    """An input that is not there would stay whole, and give a wrong picture."""
    plan = dict(wan()._cp_plan) | {"blocks.0": {"hidden_state": TOKENS}}  # type: ignore[arg-type]
    words = "a plan splits hidden_state of WanTransformerBlock, which does not take it"
    with pytest.raises(InputError, match=words):
        on_ranks(ranks[2], wan(), "raw", lambda own, _: None, plan=plan)


def test_a_model_may_have_a_plan_of_the_callers(ranks: dict[int, list[Mesh]]) -> None:
    from diffusers import WanTransformer3DModel

    class Own(WanTransformer3DModel):  # type: ignore[misc]
        _cp_plan = None

    model: Any = wan()
    plan, inputs = dict(model._cp_plan), wan_inputs(63)
    model.__class__ = Own
    wanted = called(model, inputs)
    for made in on_ranks(ranks[2], model, "raw", lambda own, _: called(own, inputs), plan=plan):
        assert (made[0] - wanted[0]).norm() <= 1e-6 * wanted[0].norm()
    wrong = {"bloks.0": plan["blocks.0"]}
    for given, words in (
        (None, r"Own has no plan .*; give parallel one by plan=, or use mode guidance .* or batch"),
        (wrong, r"the plan of Own names 'bloks\.0', which it has not"),
        ({"proj_out": 1}, r"the plan of Own says 1 of 'proj_out'"),
    ):
        with pytest.raises(InputError, match=words):
            on_ranks(ranks[2], model, "raw", lambda own, _: None, plan=given)


def tensors(output: Any) -> list[Tensor]:
    return [x for x in tree_flatten(output)[0] if isinstance(x, Tensor)]
