"""What stands for ComfyUI in the tests: its interface as read, with small models of our own."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

MODULES = {
    "__init__": "",
    "cli_args": "from types import SimpleNamespace\nargs = SimpleNamespace(cpu=False)",
    "sd": "from comfy_stand_in import load_diffusion_model",
    "model_management": "from comfy_stand_in import load_models_gpu",
    "patcher_extension": "from comfy_stand_in import WrappersMP",
}


@contextmanager
def installed(folder: Path) -> Iterator[Path]:
    """Have a folder in which modules of ComfyUI's names are, which can be imported in the block."""
    (folder / "comfy").mkdir(parents=True)
    for name, text in MODULES.items():
        (folder / "comfy" / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        yield folder
    finally:
        sys.path[:] = [path for path in sys.path if path != str(folder)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "comfy"]:
            del sys.modules[name]


class WrappersMP:
    SAMPLER_SAMPLE, DIFFUSION_MODEL = "sampler_sample", "diffusion_model"


class InterruptProcessingException(Exception):
    pass


ASKED = list[bool]()  # interrupts that a user has asked for


def throw_exception_if_processing_interrupted() -> None:
    if ASKED:
        ASKED.clear()
        raise InterruptProcessingException


def load_models_gpu(models: list[Any]) -> None:
    pass


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
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
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
        both = torch.cat([self.txt_qkv(txt * vec), self.img_qkv(img * vec)], 1)
        found = joint(both, self.heads, pe, transformer_options)
        return img + self.img_mlp(found[:, txt.shape[1] :]), txt + self.txt_mlp(found[:, : txt.shape[1]])


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
        return x + self.out(joint(self.qkv(x * vec), self.heads, pe, transformer_options))


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


KINDS: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in (WanModel, VaceWanModel, Flux)}


class ModelPatcher:
    """Its wrappers are what a sampler is run in."""

    def __init__(self, diffusion_model: nn.Module) -> None:
        self.model = SimpleNamespace(diffusion_model=diffusion_model)
        self.wrappers: dict[str, dict[str, list[Any]]] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}

    def clone(self) -> ModelPatcher:
        made = ModelPatcher(self.model.diffusion_model)
        made.wrappers = {
            kind: {key: [*own] for key, own in keys.items()} for kind, keys in self.wrappers.items()
        }
        return made

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)


def load_diffusion_model(path: str, model_options: dict[str, Any]) -> ModelPatcher:
    """Return a model of the kind that a file's name begins with."""
    made = KINDS[Path(path).name.partition("-")[0]]()
    made.load_state_dict(load_file(path))
    return ModelPatcher(made.to(model_options["dtype"]).eval().requires_grad_(False))


Each = Callable[[int], object]


@torch.inference_mode()
def sampled(
    patcher: ModelPatcher, noise: Tensor, texts: tuple[Tensor, ...], steps: int, each: Each
) -> Tensor:
    """Run a sampler with guidance in the wrappers of a model, as ``CFGGuider`` does."""
    guider = SimpleNamespace(inner_model=patcher.model, model_patcher=patcher)

    def sample(guider: Any, sigmas: Tensor, extra_args: Any, callback: Any, noise: Tensor, *_: Any) -> Tensor:
        x = noise
        for i, (sigma, after) in enumerate(pairwise(sigmas)):
            made = []
            for n, text in enumerate(texts):
                options = {**extra_args["transformer_options"], "cond_or_uncond": [n], "uuids": [object()]}
                options |= {"sample_sigmas": sigmas, "sigmas": sigma[None], "wrappers": patcher.wrappers}
                time = 1000 * sigma.expand(x.shape[0])
                model = guider.inner_model.diffusion_model
                made.append(model(x, time, context=text, control=None, transformer_options=options))
            callback(i)
            throw_exception_if_processing_interrupted()
            x = x + (after - sigma) * (2 * made[0] - made[1])
        return x

    call: Any = sample
    for own in patcher.wrappers.get(WrappersMP.SAMPLER_SAMPLE, {}).values():
        for wrapper in own:
            call = partial(wrapper, call)
    extra = {"transformer_options": patcher.model_options["transformer_options"]}
    return call(guider, torch.linspace(1, 0, steps + 1), extra, each, noise, None, None, True)
