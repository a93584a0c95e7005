"""A model as inference engines keep it: fused, split over tensor-parallel ranks, padded, renamed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

WIDTH, HEADS, HIDDEN, VOCABULARY, PADDED, EXPERTS = 8, 4, 12, 10, 16, 2


def checkpoint(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return tensors as a trainer has them."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed.weight": (VOCABULARY, WIDTH),
        **{f"model.layers.0.attn.{x}_proj.weight": (WIDTH, WIDTH) for x in "qkvo"},
        **{f"model.layers.0.attn.{x}_proj.bias": (WIDTH,) for x in "qkv"},
        **{f"model.layers.0.mlp.{x}_proj.weight": (HIDDEN, WIDTH) for x in ("gate", "up")},
        "model.layers.0.mlp.down_proj.weight": (WIDTH, HIDDEN),
        **{f"model.layers.0.experts.{i}.weight": (HIDDEN, WIDTH) for i in range(EXPERTS)},
        "model.norm.weight": (WIDTH,),
        "model.scale": (1,),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


class FusedModel(nn.Module):
    """One of ``ranks`` parts of it; ``load_weights`` takes the checkpoint's names, as vLLM's models do."""

    def __init__(self, rank: int = 0, ranks: int = 2, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, 7.0, dtype=dtype), requires_grad=False)

        self.embed, self.head = new(PADDED // ranks, WIDTH), new(PADDED // ranks, WIDTH)
        self.qkv, self.qkv_bias = new(3 * WIDTH // ranks, WIDTH), new(3 * WIDTH // ranks)
        self.out, self.down = new(WIDTH, WIDTH // ranks), new(WIDTH, HIDDEN // ranks)
        self.gate_up = new(2 * HIDDEN // ranks, WIDTH)
        self.experts = new(EXPERTS, WIDTH, HIDDEN // ranks)  # transposed
        self.norm, self.scale = new(WIDTH), new(1)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy a checkpoint's tensors to where they are here."""
        return {name for name, x in weights if self._load(name, x.to(self.norm.device))}

    def _load(self, name: str, x: Tensor) -> bool:
        kind = name.split(".")[-2]
        if name == "model.scale":
            self.scale.data.fill_(x.item())
        elif kind in ("embed", "lm_head"):
            self._padded(self.embed if kind == "embed" else self.head, x)
        elif kind in ("q_proj", "k_proj", "v_proj"):
            self._shard(self.qkv if x.dim() == 2 else self.qkv_bias, x, "qkv".index(kind[0]), 3)
        elif kind in ("gate_proj", "up_proj"):
            self._shard(self.gate_up, x, ("gate_proj", "up_proj").index(kind), 2)
        elif kind in ("o_proj", "down_proj"):
            param = self.out if kind == "o_proj" else self.down
            param.data.copy_(x.narrow(1, self.rank * param.shape[1], param.shape[1]))
        elif kind == "norm":
            self.norm.data[:] = x
        else:
            self.experts.data[int(kind)].copy_(x.chunk(self.ranks)[self.rank].t())
        return True

    def _shard(self, param: nn.Parameter, x: Tensor, place: int, parts: int) -> None:
        own = len(param) // parts
        param.data.narrow(0, place * own, own).copy_(x.narrow(0, self.rank * own, own))

    def _padded(self, param: nn.Parameter, x: Tensor) -> None:
        first = self.rank * len(param)
        own = x[first : first + len(param)]
        param.data[: len(own)].copy_(own)
        param.data[len(own) :].fill_(0)
