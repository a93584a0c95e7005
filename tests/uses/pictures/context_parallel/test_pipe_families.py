"""Mode pipe on every family with an entry: as one device while nothing changes, on two ranks and three."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench.pictures.tiny_images import IMAGES
from bench.pictures.tiny_more import MORE
from bench.pictures.tiny_videos import VIDEOS
from each import each
from meshes import Mesh
from picture_hosts import HOSTS as PICTURE_HOSTS
from picture_hosts import drawn, video
from picture_models import on_ranks, sample
from torch import Tensor
from torch.utils._pytree import tree_leaves

from thinwire.types import InputError

pytest.importorskip("diffusers")


@torch.no_grad()
def called(model: Any, inputs: dict[str, Any], times: int) -> list[Tensor]:
    """Return what a model makes of the same inputs, at times that differ by rounding alone."""
    found = []
    for i in range(times):
        given = {name: dict(x) if isinstance(x, dict) else x for name, x in inputs.items()}
        name = "t" if "t" in given else "timestep"
        given[name] = given[name] * (1 - 1e-7 * i)
        found.append(torch.cat([x.flatten() for x in tree_leaves(model(**given | {"return_dict": False}))]))
    return found


HOSTS = IMAGES | MORE | VIDEOS | PICTURE_HOSTS
CUT = (
    "SD3",
    "SD3, a control network",
    "AuraFlow",
    "CogView3-Plus",
    "CogView4",
    "CogView4, masked",
    "PixArt",
    "DiT",
    "Lumina-Next",
    "Lumina 2",
    "CogVideoX",
    "CogVideoX, rotary",
    "HunyuanVideo 1.5",
    "Allegro",
    "Cosmos",
    "Cosmos, times of frames",
    "EasyAnimate",
    "Stable Audio",
    "Z-Image",
    "Bria FIBO 2",
    "Flux",
    "Flux, a control network",
    "Flux, an IP-Adapter",
    "Flux2",
    "Chroma",
    "LongCat-Image",
    "Ovis-Image",
    "Bria",
    "Qwen-Image",
    "Qwen-Image, a control network",
    "Wan",
    "Wan, times of tokens",
    "SkyReels-V2",
    "HunyuanVideo",
    "ChronoEdit",
    "LTX-Video",
    "LTX-Video, from a picture",
    "LTX-2",
    "Wan-VACE",
    "HunyuanVideo Framepack",
    "Mochi",
    "Kandinsky 5",
    "AnyFlow",
    "HunyuanImage",
    "Krea 2",
    "GLM-Image",
    "JoyImage-Edit",
    "JoyImage-Edit-Plus",
    "PRX",
    "Stable Audio 3",
)


@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")  # of Chroma, by diffusers
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # of Mochi, by diffusers
@each("name", CUT)
def test_uncoded_each_family_is_as_on_one_device(ranks: dict[int, list[Mesh]], name: str) -> None:
    make, draw = HOSTS[name]
    model, inputs = make(), draw()
    wanted = called(model, inputs, 2)
    for found in on_ranks(ranks[2], model, "raw", lambda own, _: called(own, inputs, 2), mode="pipe"):
        for x, y in zip(found, wanted, strict=True):
            assert (x - y).norm() <= 1e-5 * y.norm()


@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # of Mochi, by diffusers
@each("name", ["Wan", "HunyuanVideo", "LTX-Video", "Mochi", "Cosmos", "Kandinsky 5", "EasyAnimate"])
def test_patches_may_be_parts_of_all_frames(ranks: dict[int, list[Mesh]], name: str) -> None:
    make, draw = HOSTS[name]
    model, inputs = make(), draw() if name != "Wan" else video()
    wanted = called(model, inputs, 3)
    recipe = "pipe-fp16:patches=2,over=space"
    for found in on_ranks(ranks[2], model, recipe, lambda own, _: called(own, inputs, 3)):
        for x, y in zip(found, wanted, strict=True):
            assert (x - y).norm() <= 2e-3 * y.norm()  # float16 crosses


def test_frames_are_coded_one_against_the_other_where_a_patch_has_whole_ones(
    ranks: dict[int, list[Mesh]],
) -> None:
    """The same bits on both ranks; cut along time, a patch of one frame has nothing to be told from."""
    make, _ = HOSTS["Wan"]
    model, inputs = make(), video(hidden_states=drawn(1, 4, 4, 4, 6))
    found = {}
    for name in ("over=space,chain=0", "over=space", "patches=2,chain=0", "patches=2", "chain=0", ""):
        recipe = (
            f"compact-pipe:early=0,patches=4,{name}"
            if "patches" not in name
            else f"compact-pipe:early=0,{name}"
        )
        a, b = on_ranks(ranks[2], model, recipe, lambda own, _: sample(own, inputs, 4))
        assert torch.equal(a, b), recipe
        found[name] = a
    assert not torch.equal(found["over=space"], found["over=space,chain=0"])
    assert not torch.equal(found["patches=2"], found["patches=2,chain=0"])
    assert torch.equal(found[""], found["chain=0"])


def test_frames_beside_a_text_are_coded_one_against_the_other_too(ranks: dict[int, list[Mesh]]) -> None:
    make, draw = HOSTS["HunyuanVideo"]
    model, inputs, found = make(), draw(), []
    for chain in (0, 1):
        recipe = f"compact-pipe:early=0,patches=2,over=space,chain={chain}"
        a, b = on_ranks(ranks[2], model, recipe, lambda own, _: sample(own, inputs, 4))
        assert torch.equal(a, b)
        found.append(a)
    assert not torch.equal(*found)


def test_parts_of_frames_that_are_not_known_are_refused(ranks: dict[int, list[Mesh]]) -> None:
    make, draw = HOSTS["HunyuanVideo Framepack"]
    said = "mode pipe does not know the frames of a HunyuanVideoFramepack.*; leave over=space out"
    with pytest.raises(InputError, match=said):
        on_ranks(ranks[2], make(), "pipe-fp16:over=space", lambda own, _: called(own, draw(), 1))
