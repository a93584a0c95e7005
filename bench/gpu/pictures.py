"""A picture by two ranks that share a card: ``FluxTransformer2DModel`` at full width with random weights."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import thinwire
from bench.gpu.ranks import RANKS, failing_alone, row, two_ranks, wait

FLUX: dict[str, Any] = {"in_channels": 64, "guidance_embeds": False}
TINY: dict[str, Any] = {
    "num_layers": 2, "num_single_layers": 4, "num_attention_heads": 4, "in_channels": 16,
    "joint_attention_dim": 32, "pooled_projection_dim": 32, "attention_head_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
BLOCKS = {"small": (6, 12), "full": (19, 38)}  # double and single
RECIPES = {
    "small": ("compact", "compact-pipe", "lowrank", "compact:bits=2", "displaced", "fp16"),
    "full": ("compact", "compact-pipe"),
}
STEPS, LAST = 8, 4  # the first steps send whole values


def measure(device: torch.device, smoke: bool, size: str) -> None:
    """Print a row for one rank alone and one a recipe: milliseconds a step, bytes a step and rank."""
    two_ranks(_rank, device, smoke, size)


def _rank(rank: int, store: Any, device: torch.device, smoke: bool, size: str) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    double, single = BLOCKS[size]
    shape = TINY if smoke else {**FLUX, "num_layers": double, "num_single_layers": single}
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # 12 G values in float32 would not fit twice
    with torch.device(device):
        model = FluxTransformer2DModel(**shape).eval()
    torch.set_default_dtype(previous)
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, model)
    pipe.set_progress_bar_config(disable=True)
    paint = _Painter(pipe, device, smoke)
    alone = None
    if rank == 0:
        paint()
        alone, seconds = paint()
        row(blocks=[double, single], recipe="one rank alone", step_ms=round(seconds / STEPS * 1e3, 1))
    dist.barrier()
    for recipe in RECIPES[size]:
        with failing_alone(blocks=[double, single], recipe=recipe):
            _together(rank, store, paint, alone, recipe, [double, single])


class _Painter:
    def __init__(self, pipe: Any, device: torch.device, smoke: bool) -> None:
        self.pipe, self.device = pipe, device
        self.side, length, width, pooled = (96, 7, 32, 32) if smoke else (1024, 512, 4096, 768)
        seeded = torch.Generator().manual_seed(1)
        self.prompt = {
            name: torch.randn(size, generator=seeded).to(device, torch.bfloat16)
            for name, size in (("prompt_embeds", (1, length, width)), ("pooled_prompt_embeds", (1, pooled)))
        }

    @torch.no_grad()
    def __call__(self) -> tuple[torch.Tensor, float]:
        """Return the latents, and the seconds that they took."""
        wait(self.device)
        start = time.perf_counter()
        ticks = [start]
        made = self.pipe(
            **self.prompt, height=self.side, width=self.side, num_inference_steps=STEPS, output_type="latent",
            callback_on_step_end=lambda _pipe, _step, _time, kept: ticks.append(time.perf_counter()) or kept,
            generator=torch.Generator().manual_seed(0),
        ).images  # fmt: skip
        wait(self.device)
        self.steps = [b - a for a, b in itertools.pairwise(ticks)]
        return made.float().cpu(), time.perf_counter() - start


def _together(
    rank: int, store: Any, paint: _Painter, alone: torch.Tensor | None, recipe: str, blocks: list[int]
) -> None:
    peers = thinwire.connect_mesh(rank, RANKS, dist.PrefixStore(f"picture {recipe}", store))
    try:
        with thinwire.parallel(paint.pipe.transformer, peers, recipe) as parallel:
            paint()
            dist.barrier()
            before = parallel.tally.nbytes
            made, seconds = paint()
            nbytes, late = parallel.tally.nbytes - before, statistics.median(paint.steps[-LAST:])
        if alone is not None:
            error = (made - alone).pow(2).mean()
            ratio = float(10 * torch.log10(alone.abs().max() ** 2 / error))
            row(
                blocks=blocks, recipe=recipe, steps=STEPS, step_ms=round(seconds / STEPS * 1e3, 1),
                last_ms=round(1e3 * late, 1), step_nbytes=round(nbytes / STEPS), latents_db=round(ratio, 1),
            )  # fmt: skip
        dist.barrier()
    finally:
        for peer in peers.values():
            peer.close()
