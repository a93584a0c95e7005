"""Every kind of transformer that can be split over ranks: exact, and returned as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each import each
from meshes import Mesh
from picture_hosts import HOSTS
from picture_models import on_ranks
from torch import Tensor
from torch.utils._pytree import tree_flatten

pytest.importorskip("diffusers")


@torch.no_grad()
def called(model: Any, inputs: dict[str, Any]) -> Any:
    return model(**{name: x.copy() if isinstance(x, dict) else x for name, x in inputs.items()})


@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")  # of Chroma, by diffusers
@each("mode, name", [(mode, name) for mode in ("gather", "ulysses") for name in HOSTS])
def test_uncoded_each_kind_is_as_on_one_device(ranks: dict[int, list[Mesh]], mode: str, name: str) -> None:
    make, draw = HOSTS[name]
    model, inputs = make(), {**draw(), "return_dict": True}
    wanted = called(model, inputs)
    for made in on_ranks(ranks[2], model, "raw", lambda own, _: called(own, inputs), mode=mode):
        assert type(made) is type(wanted)
        for x, y in zip(tensors(made), tensors(wanted), strict=True):
            assert (x - y).norm() <= 1e-6 * y.norm()


def tensors(output: Any) -> list[Tensor]:
    return [x for x in tree_flatten(output)[0] if isinstance(x, Tensor)]
