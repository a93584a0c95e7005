"""Two stages of a GPT-2 as two processes that share one device, over the shaped link within the process."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config

from bench.gpu.ranks import RANKS, failing_alone, row, two_ranks, wait
from thinwire.links import LinkShape, connect_mesh
from thinwire.runs.data.task import next_token_loss
from thinwire.runs.machine.compute import Compute
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.models.split import build_stage
from thinwire.uses.training.pipeline.compressed_stage import CompressedStage, ScheduleEager1F1B
from thinwire.uses.training.pipeline.recipes import parse_recipe
from thinwire.uses.training.run.stepper import Autocast

OFF: dict[str, Any] = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}  # dropout undoes the deltas
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16, "n_positions": 1024},
    "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25, "n_positions": 1024},
    "tiny": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 96},
}


# The raw ways take seconds a step over slow links, each step alike: behind another way's steps one is enough.
PLANS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2-medium": {"none": ("fp32", "thinwire"), "100mbit": ("thinwire", "fp32")},
    "gpt2-xl": {
        **dict.fromkeys(("100mbit", "200mbit", "500mbit"), ("thinwire", "bf16", "fp32")),
        "none": ("thinwire", "bf16"),
    },
}
COMPUTE = {"gpt2-medium": torch.float32, "gpt2-xl": torch.bfloat16}
STEPS, RAW = 3, ("fp32", "bf16")  # timed steps, and the ways that are timed once
BATCH, SMALL = 8, 4


def measure(device: torch.device, smoke: bool, model: str) -> None:
    """Print a row a link and recipe: seconds of a first visit and of revisits, tokens a second."""
    two_ranks(_stage, device, smoke, model)


def _stage(rank: int, store: Any, device: torch.device, smoke: bool, model: str) -> None:
    config = GPT2Config(**CONFIGS["tiny" if smoke else model], **OFF)
    n = config.n_layer
    source = ModelSource(model, "gpt2", config, None, None)
    module = build_stage(source, [range(n // 2), range(n // 2, n)], rank).to(device)
    batch, compute = SMALL if smoke else BATCH, COMPUTE[model]
    for link, recipes in PLANS[model].items():
        peers = connect_mesh(
            rank, RANKS, dist.PrefixStore(f"links {link}", store), shape=LinkShape.parse(link)
        )
        try:
            for recipe in recipes:
                with failing_alone(model=model, link=link, recipe=recipe):
                    found = _run(rank, module, config, device, peers, recipe, batch, compute, link != "none")
                    if rank == 1:
                        row(model=model, link=link, recipe=recipe, **found)
                dist.barrier()
        finally:
            for peer in peers.values():
                peer.close()


def _run(
    rank: int,
    module: nn.Module,
    config: GPT2Config,
    device: torch.device,
    peers: Any,
    recipe: str,
    batch: int,
    compute: torch.dtype,
    slow: bool,
) -> dict[str, float]:
    """Train on one batch again and again: its first visit, then revisits."""
    length, width = config.n_positions, config.n_embd
    crossing = torch.float32 if recipe == "fp32" else compute
    hidden = torch.empty(1, length, width, dtype=crossing, device="meta")
    tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
    logits = torch.empty(1, length, config.vocab_size, dtype=compute, device="meta")
    stage = CompressedStage(
        Autocast(module, Compute(device, compute, crossing), last=rank == 1),
        rank,
        RANKS,
        device,
        input_args=hidden.clone().requires_grad_() if rank else tokens,
        output_args=logits if rank else hidden,
        input_grads=hidden if rank else None,
        output_grads=None if rank else hidden,
        peers=peers,
        recipe=parse_recipe(recipe),
        deadline=80.0,
        overlap=True,
    )
    schedule = ScheduleEager1F1B(stage, batch, loss_fn=next_token_loss)
    optimiser = torch.optim.AdamW(module.parameters(), 1e-5, fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, config.vocab_size, (batch, length + 1), generator=generator).to(device)
    warm, timed = (0, 1) if recipe in RAW and slow else (2, STEPS)
    taken = [_step(stage, schedule, optimiser, text, device) for _ in range(warm + timed)]
    stage.close()
    settled = taken[warm:]
    return {
        "first_visit_s": round(taken[0], 4),
        "revisit_s": round(sum(settled) / len(settled), 4),
        "tokens_s": round(batch * length * len(settled) / sum(settled), 1),
    }


def _step(
    stage: CompressedStage, schedule: Any, optimiser: Any, text: torch.Tensor, device: torch.device
) -> float:
    """Return the seconds of one step, from a common start to the end of the slower stage."""
    dist.barrier()
    start = time.perf_counter()
    if stage.is_first:
        stage.begin(range(len(text)), schedule._n_microbatches)
        schedule.step(text[:, :-1].contiguous())  # torch 2.11 looks at strides
    else:
        schedule.step(target=text[:, 1:], losses=[])
    optimiser.step()
    optimiser.zero_grad()
    stage.end()
    wait(device)
    dist.barrier()
    return time.perf_counter() - start
