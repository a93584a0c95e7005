"""Small models of our own, built to the interface of ComfyUI's classes as read."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def optimized_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, **given: Any) -> Tensor:
    override = (given.get("transformer_options") or {}).get("optimized_attention_override")
    if override is not None:
        return override(attention_basic, q, k, v, heads, **given, _inside_attn_wrapper=True)
    return attention_basic(q, k, v, heads, **given)


def attention_basic(
    q: Tensor, k: Tensor, v: Tensor, heads: int, skip_reshape: bool = False, **_: Any
) -> Tensor:
    """Not by torch's own: what hears that must hear nothing here."""
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    found = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
    return found.transpose(1, 2).flatten(2)


def positions(ids: Tensor, width: int) -> Tensor:
    """Return rotations [B, tokens, width / 2, 2, 2] of positions [B, tokens]."""
    angles = ids[..., None] / 100 ** (torch.arange(width // 2) / width)
    return torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).unflatten(-1, (2, 2))


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    return (freqs * x.unflatten(-1, (-1, 1, 2))).sum(-1).flatten(-2)


class WanSelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, freqs: Tensor, transformer_options: Any = None) -> Tensor:
        q, k = (
            rotated(part(x).unflatten(-1, (self.heads, -1)), freqs).flatten(2) for part in (self.q, self.k)
        )
        return self.o(
            optimized_attention(q, k, self.v(x), self.heads, transformer_options=transformer_options)
        )


class WanCrossAttention(WanSelfAttention):
    def forward(self, x: Tensor, context: Tensor, transformer_options: Any = None) -> Tensor:
        q, k, v = self.q(x), self.k(context), self.v(context)
        return self.o(optimized_attention(q, k, v, self.heads, transformer_options=transformer_options))


class WanAttentionBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = WanSelfAttention(dim, heads), WanCrossAttention(dim, heads)
        self.ffn, self.norm = (
            nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)),
            nn.LayerNorm(dim),
        )

    def forward(
        self,
        x: Tensor,
        e: Tensor,
        freqs: Tensor,
        context: Tensor,
        transformer_options: Any = None,
    ) -> Tensor:
        x = x + self.self_attn(self.norm(x) * e, freqs, transformer_options=transformer_options)
        x = x + self.cross_attn(self.norm(x), context, transformer_options=transformer_options)
        return x + self.ffn(self.norm(x))


class Head(nn.Module):
    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.head = nn.Linear(dim, out)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        return self.head(x * e)


class WanModel(nn.Module):
    def __init__(self, dim: int = 24, heads: int = 2, layers: int = 3) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.patch_embedding = nn.Conv3d(4, dim, (1, 2, 2), (1, 2, 2))
        self.text_embedding, self.time_embedding = nn.Linear(16, dim), nn.Linear(1, dim)
        self.blocks = nn.ModuleList([WanAttentionBlock(dim, heads) for _ in range(layers)])
        self.head = Head(dim, 16)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        clip_fea: Any = None,
        transformer_options: Any = None,
        **_: Any,
    ) -> Tensor:
        x = self.patch_embedding(x)
        grid = transformer_options["grid_sizes"] = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        e, text = self.time_embedding(timestep[:, None] / 1000)[:, None], self.text_embedding(context)
        freqs = positions(torch.arange(float(x.shape[1]))[None], self.dim // self.heads)[:, :, None]
        for i, block in enumerate(self.blocks):
            transformer_options["block_index"] = i
            x = block(x, e=e, freqs=freqs, context=text, transformer_options=transformer_options)
        x = self.head(x, e).unflatten(-1, (1, 2, 2, 4)).unflatten(1, grid)
        return x.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(2, 3).flatten(3, 4).flatten(4, 5)


class VaceWanModel(WanModel):
    pass


class DoubleStreamBlock(nn.Module):
    def __init__(self, dim: int, heads: int, flipped: bool = False) -> None:
        super().__init__()
        self.heads, self.flipped = heads, flipped
        self.img_qkv, self.txt_qkv = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)
        self.img_mlp, self.txt_mlp = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        vec: Tensor,
        pe: Tensor,
        attn_mask: Any = None,
        transformer_options: Any = None,
    ) -> tuple[Tensor, Tensor]:
        both = [self.img_qkv(img * vec), self.txt_qkv(txt * vec)]
        both = both if self.flipped else both[::-1]
        found = joint(torch.cat(both, 1), self.heads, pe, transformer_options)
        parts = found.split([x.shape[1] for x in both], 1)
        ours, words = parts if self.flipped else parts[::-1]
        txt += self.txt_mlp(words)  # in place, as ComfyUI's
        return img + self.img_mlp(ours), txt


class SingleStreamBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(
        self,
        x: Tensor,
        vec: Tensor,
        pe: Tensor,
        attn_mask: Any = None,
        transformer_options: Any = None,
    ) -> Tensor:
        x += self.out(joint(self.qkv(x * vec), self.heads, pe, transformer_options))
        return x


def joint(qkv: Tensor, heads: int, pe: Tensor, options: Any) -> Tensor:
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = rotated(q, pe), rotated(k, pe)
    return optimized_attention(q, k, v, heads, skip_reshape=True, transformer_options=options)


class Flux(nn.Module):
    def __init__(self, dim: int = 24, heads: int = 2) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.img_in, self.txt_in, self.time_in = nn.Linear(16, dim), nn.Linear(16, dim), nn.Linear(1, dim)
        self.double_blocks = nn.ModuleList([DoubleStreamBlock(dim, heads) for _ in range(2)])
        self.single_blocks = nn.ModuleList([SingleStreamBlock(dim, heads) for _ in range(2)])
        self.final_layer = Head(dim, 16)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        **_: Any,
    ) -> Tensor:
        h, w = x.shape[2] // 2, x.shape[3] // 2
        img = x.unflatten(3, (w, 2)).unflatten(2, (h, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        img, txt, vec = (
            self.img_in(img),
            self.txt_in(context),
            self.time_in(timestep[:, None] / 1000)[:, None],
        )
        ids = torch.cat([torch.zeros(1, txt.shape[1]), torch.arange(float(img.shape[1]))[None]], 1)
        pe = positions(ids, self.dim // self.heads)[:, None]
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe, transformer_options=transformer_options)
        img = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            img = block(img, vec=vec, pe=pe, transformer_options=transformer_options)
        img = self.final_layer(img[:, txt.shape[1] :, ...], vec)
        return (
            img.unflatten(1, (h, w))
            .unflatten(3, (4, 2, 2))
            .permute(0, 3, 1, 4, 2, 5)
            .flatten(4)
            .flatten(2, 3)
        )


class PatchEmbed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(4, dim, (1, 2, 2), (1, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class HunyuanVideo(nn.Module):
    def __init__(self, dim: int = 24, heads: int = 2) -> None:
        super().__init__()
        self.dim, self.heads, self.patch_size = dim, heads, [1, 2, 2]
        self.img_in, self.txt_in, self.time_in = PatchEmbed(dim), nn.Linear(16, dim), nn.Linear(1, dim)
        self.double_blocks = nn.ModuleList([DoubleStreamBlock(dim, heads, True) for _ in range(2)])
        self.single_blocks = nn.ModuleList([SingleStreamBlock(dim, heads) for _ in range(2)])
        self.final_layer = Head(dim, 16)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        attention_mask: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        **_: Any,
    ) -> Tensor:
        grid = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
        vec = self.time_in(timestep[:, None] / 1000)[:, None]
        img, txt = self.img_in(x), self.txt_in(context)
        ids = torch.cat([torch.arange(float(math.prod(grid))), torch.zeros(context.shape[1])])[None]
        pe, length = positions(ids, self.dim // self.heads)[:, None], img.shape[1]
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe, transformer_options=transformer_options)
        img = torch.cat((img, txt), 1)
        for block in self.single_blocks:
            img = block(img, vec=vec, pe=pe, transformer_options=transformer_options)
        return unpatched(self.final_layer(img[:, :length], vec), grid)


def unpatched(x: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Return a video [B, 4, frames, rows, columns] of tokens of 2 x 2 pixels."""
    x = x.unflatten(-1, (2, 2, 4)).unflatten(1, grid)
    return x.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


class QwenAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.to_qkv, self.add_qkv = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        image_rotary_emb: Tensor,
        transformer_options: Any = None,
    ) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.add_qkv(encoder_hidden_states), self.to_qkv(hidden_states)], 1)
        found = joint(both, self.heads, image_rotary_emb, transformer_options)
        words = encoder_hidden_states.shape[1]
        return found[:, words:], found[:, :words]


class QwenImageTransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn, self.img_mlp, self.txt_mlp = (
            QwenAttention(dim, heads),
            nn.Linear(dim, dim),
            nn.Linear(dim, dim),
        )

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Any,
        temb: Tensor,
        image_rotary_emb: Tensor,
        timestep_zero_index: Any = None,
        transformer_options: Any = None,
    ) -> tuple[Tensor, Tensor]:
        ours, words = self.attn(
            hidden_states=hidden_states * temb,
            encoder_hidden_states=encoder_hidden_states * temb,
            image_rotary_emb=image_rotary_emb,
            transformer_options=transformer_options,
        )
        return encoder_hidden_states + self.txt_mlp(words), hidden_states + self.img_mlp(ours)


class QwenImageTransformer2DModel(nn.Module):
    """Of the name of a class of diffusers, which is cut in another way."""

    def __init__(self, dim: int = 24, heads: int = 2) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.embed, self.txt_in, self.time_in = PatchEmbed(dim), nn.Linear(16, dim), nn.Linear(1, dim)
        self.transformer_blocks = nn.ModuleList([QwenImageTransformerBlock(dim, heads) for _ in range(3)])
        self.proj_out = nn.Linear(dim, 16)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        control: Any = None,
        transformer_options: Any = None,
        **_: Any,
    ) -> Tensor:
        grid = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
        img, txt = self.embed(x), self.txt_in(context)
        temb = self.time_in(timestep[:, None] / 1000)[:, None]
        ids = torch.cat([100 + torch.arange(float(txt.shape[1])), torch.arange(float(img.shape[1]))])[None]
        pe = positions(ids, self.dim // self.heads)[:, None]
        for block in self.transformer_blocks:
            txt, img = block(
                hidden_states=img,
                encoder_hidden_states=txt,
                encoder_hidden_states_mask=None,
                temb=temb,
                image_rotary_emb=pe,
                transformer_options=transformer_options,
            )
        return unpatched(self.proj_out(img), grid)


class LtxAttention(WanSelfAttention):
    def forward(  # type: ignore[override]
        self, x: Tensor, context: Any = None, pe: Any = None, transformer_options: Any = None
    ) -> Tensor:
        context = x if context is None else context
        q, k = self.q(x), self.k(context)
        if pe is not None:
            q, k = q * pe[0] + q.flip(-1) * pe[1], k * pe[0] + k.flip(-1) * pe[1]
        found = optimized_attention(
            q, k, self.v(context), self.heads, transformer_options=transformer_options
        )
        return self.o(found)


class LtxBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn1, self.attn2 = LtxAttention(dim, heads), LtxAttention(dim, heads)
        self.ff = nn.Linear(dim, dim)

    def forward(
        self,
        x: Tensor,
        context: Any = None,
        attention_mask: Any = None,
        timestep: Any = None,
        pe: Any = None,
        transformer_options: Any = None,
    ) -> Tensor:
        x += self.attn1(x * timestep, pe=pe, transformer_options=transformer_options)
        x += self.attn2(x, context=context, transformer_options=transformer_options)
        x += self.ff(x)
        return x


class LTXVModel(nn.Module):
    def __init__(self, dim: int = 24, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.txt_in, self.time_in = PatchEmbed(dim), nn.Linear(16, dim), nn.Linear(1, dim)
        self.transformer_blocks = nn.ModuleList([LtxBlock(dim, heads) for _ in range(3)])
        self.proj_out = nn.Linear(dim, 16)

    def forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, transformer_options: Any = None, **_: Any
    ) -> Tensor:
        grid = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
        x, text = self.embed(x), self.txt_in(context)
        angles = torch.arange(float(x.shape[1]))[None, :, None] * torch.linspace(0, 1, x.shape[2])
        time, pe = self.time_in(timestep[:, None] / 1000)[:, None], (angles.cos(), angles.sin())
        for block in self.transformer_blocks:
            x = block(x, context=text, timestep=time, pe=pe, transformer_options=transformer_options)
        return unpatched(self.proj_out(x), grid)


KINDS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (WanModel, VaceWanModel, Flux, HunyuanVideo, QwenImageTransformer2DModel, LTXVModel)
}
