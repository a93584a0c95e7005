"""Mode latent: parts of a video along axes in turn, joined to one that all ranks hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each import each
from meshes import Mesh
from picture_hosts import HOSTS, Host, drawn, made
from picture_models import on_ranks
from torch import Tensor

from thinwire.types import InputError
from thinwire.uses.pictures.agreement import Parallel
from thinwire.uses.pictures.context_parallel.latent import overlapping, weights
from thinwire.uses.pictures.diffusers_names.latent_grids import of_grid

pytest.importorskip("diffusers")

COG: Host = (
    made(
        "CogVideoXTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=1,
        sample_width=8,
        sample_height=8,
        sample_frames=13,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=5,
        use_rotary_positional_embeddings=True,
    ),
    lambda: {
        "hidden_states": drawn(1, 4, 4, 8, 8),
        "encoder_hidden_states": drawn(1, 5, 16, seed=2),
        "timestep": torch.tensor([500.0]),
        "image_rotary_emb": (drawn(64, 16, seed=3), drawn(64, 16, seed=4)),
    },
)
FAMILIES = {name: HOSTS[name] for name in ("Wan", "HunyuanVideo", "LTX-Video, from a picture")} | {
    "CogVideoX": COG
}


def drawn_for(name: str, draw: Any) -> dict[str, Any]:
    inputs: dict[str, Any] = draw()
    if name.startswith("LTX"):
        tokens = {"hidden_states": drawn(2, 48, 8), "timestep": 500 * torch.rand(2, 48)}
        return inputs | tokens | {"num_frames": 4, "height": 4, "width": 3}
    if name == "HunyuanVideo":
        return inputs | {"hidden_states": drawn(1, 4, 3, 8, 8)}
    return inputs


@torch.no_grad()
def steps(model: Any, inputs: dict[str, Any], times: int) -> list[Tensor]:
    return [
        model(**inputs | {"return_dict": False, "timestep": inputs["timestep"] - i})[0] for i in range(times)
    ]


@each("name", FAMILIES)
def test_a_rank_computes_less_and_all_hold_one_video(ranks: dict[int, list[Mesh]], name: str) -> None:
    make, draw = FAMILIES[name]
    torch.manual_seed(1)
    model, inputs = make(), drawn_for(name, draw)
    wanted = steps(model, inputs, 3)

    def use(own: Any, found: Parallel) -> tuple[list[Tensor], int]:
        return steps(own, inputs, 3), found.tally.nbytes

    (a, nbytes), (b, _) = on_ranks(ranks[2], model, "latent", use)
    for x, y, one in zip(a, b, wanted, strict=True):
        assert torch.equal(x, y) and x.shape == one.shape
        assert (x - one).norm() < one.norm()  # another video than one device's, but of the same content
    assert 0 < nbytes < 3 * (wanted[0].numel() * 2 + 4096)


def test_parts_that_reach_over_everything_are_one_devices(ranks: dict[int, list[Mesh]]) -> None:
    make, draw = FAMILIES["CogVideoX"]
    model, inputs = make(), draw()
    wanted = steps(model, inputs, 3)
    for found in on_ranks(ranks[2], model, "latent:overlap=100", lambda own, _: steps(own, inputs, 3)):
        for x, y in zip(found, wanted, strict=True):
            assert (x - y).norm() <= 1e-3 * y.norm()


@each("length, ranks, overlap", [(8, 2, 0.25), (21, 4, 0.5), (7, 3, 0.0), (9, 2, 1.0)])
def test_weights_are_one_in_sum_and_fall_towards_inner_edges(length: int, ranks: int, overlap: float) -> None:
    parts, whole = overlapping(length, ranks, overlap), torch.zeros(length)
    assert parts[0].start == 0 and parts[-1].stop == length
    for part, ramp in zip(parts, weights(parts, length), strict=True):
        whole[part] += ramp
        assert ramp.min() > 0
    assert torch.allclose(whole, torch.ones(length))


def test_a_table_of_tokens_is_cropped_as_the_video_is() -> None:
    x = torch.arange(2 * 3 * 4)
    assert of_grid(x, 0, (2, 3, 4), 1, slice(1, 2)).tolist() == [4, 5, 6, 7, 16, 17, 18, 19]


def test_what_has_no_frames_is_refused(ranks: dict[int, list[Mesh]]) -> None:
    with pytest.raises(InputError, match="mode latent does not know the axes of a FluxTransformer2DModel"):
        on_ranks(ranks[2], HOSTS["Flux"][0](), "latent", lambda own, _: None)
    make, draw = HOSTS["HunyuanVideo"]
    small = draw() | {"hidden_states": drawn(1, 4, 1, 4, 4)}
    with pytest.raises(InputError, match="is too small for 2 ranks in mode latent"):
        on_ranks(ranks[2], make(), "latent", lambda own, _: steps(own, small, 1))
    odd = draw() | {"hidden_states": drawn(1, 4, 3, 5, 8)}
    with pytest.raises(InputError, match="5 places along axis 3, no multiple of 2"):
        on_ranks(ranks[2], make(), "latent", lambda own, _: steps(own, odd, 1))
