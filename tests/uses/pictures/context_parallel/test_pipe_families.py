"""Mode pipe on every family with an entry: as one device while nothing changes, on two ranks and three."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each import each
from meshes import Mesh
from picture_hosts import HOSTS as PICTURE_HOSTS
from picture_hosts import Host, drawn, made, video
from picture_models import on_ranks
from torch import Tensor

pytest.importorskip("diffusers")


@torch.no_grad()
def called(model: Any, inputs: dict[str, Any], times: int) -> list[Tensor]:
    """Return what a model makes of the same inputs, at times that differ by rounding alone."""
    found = []
    for i in range(times):
        given = {name: dict(x) if isinstance(x, dict) else x for name, x in inputs.items()}
        name = "t" if "t" in given else "timestep"
        given[name] = given[name] * (1 - 1e-7 * i)
        out = model(**given | {"return_dict": False})[0]
        found.append(torch.cat([x.flatten() for x in out]) if isinstance(out, list) else out)
    return found


Z_IMAGE: dict[str, Host] = {
    "Z-Image": (
        made(
            "ZImageTransformer2DModel",
            all_patch_size=(2,),
            all_f_patch_size=(1,),
            in_channels=4,
            dim=32,
            n_layers=3,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[4, 6, 6],
            axes_lens=[64, 16, 16],
        ),
        lambda: {
            "x": [drawn(4, 1, 6, 10), drawn(4, 1, 8, 10, seed=2)],
            "t": torch.tensor([0.3, 0.3]),
            "cap_feats": [drawn(5, 16, seed=3), drawn(3, 16, seed=4)],
        },
    ),
}
HOSTS = Z_IMAGE | PICTURE_HOSTS
CUT = (
    "Z-Image",
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
)


@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")  # of Chroma, by diffusers
@each("name", CUT)
def test_uncoded_each_family_is_as_on_one_device(ranks: dict[int, list[Mesh]], name: str) -> None:
    make, draw = HOSTS[name]
    model, inputs = make(), draw()
    wanted = called(model, inputs, 3)
    for found in on_ranks(ranks[2], model, "raw", lambda own, _: called(own, inputs, 3), mode="pipe"):
        for x, y in zip(found, wanted, strict=True):
            assert (x - y).norm() <= 1e-5 * y.norm()


@each("name", ["Wan", "HunyuanVideo", "LTX-Video"])
def test_patches_may_be_parts_of_all_frames(ranks: dict[int, list[Mesh]], name: str) -> None:
    make, draw = HOSTS[name]
    model, inputs = make(), draw() if name != "Wan" else video()
    wanted = called(model, inputs, 3)
    recipe = "pipe-fp16:patches=2,over=space"
    for found in on_ranks(ranks[2], model, recipe, lambda own, _: called(own, inputs, 3)):
        for x, y in zip(found, wanted, strict=True):
            assert (x - y).norm() <= 2e-3 * y.norm()  # float16 crosses
