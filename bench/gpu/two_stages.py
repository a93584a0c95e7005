"""Two stages of a GPT-2 as two processes that share one device, over the shaped link within the process."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import GPT2Config

from thinwire.links import LinkShape, connect_mesh
from thinwire.runs.data.task import next_token_loss
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.models.split import build_stage
from thinwire.uses.training.pipeline.compressed_stage import CompressedStage, ScheduleEager1F1B
from thinwire.uses.training.pipeline.recipes import parse_recipe

OFF: dict[str, Any] = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}  # dropout undoes the deltas
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2-medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16, "n_positions": 1024},
    "gpt2-xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25, "n_positions": 1024},
    "tiny": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 96},
}


@dataclass(frozen=True)
class Plan:
    """What one pair of processes measures."""

    model: str
    device: str
    links: tuple[str, ...]
    recipes: tuple[str, ...]
    steps: int
    batch: int = 8
    microbatches: int = 8


def measure(plan: Plan) -> list[dict[str, Any]]:
    """Return one row a link and recipe."""
    with tempfile.TemporaryDirectory() as out:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(_stage, (plan, store.port, out), nprocs=2)
        rows: list[dict[str, Any]] = json.loads(Path(out, "rows.json").read_text())
    return rows


def _stage(rank: int, plan: Plan, port: int, out: str) -> None:
    """Be one stage for every link and recipe of the plan, and end the process."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2)
    rows = []
    for i, link in enumerate(plan.links):
        peers = connect_mesh(rank, 2, dist.PrefixStore(f"links{i}", store), shape=LinkShape.parse(link))
        try:
            for recipe in plan.recipes:
                rows.append({"model": plan.model, "link": link, **_run(rank, plan, peers, recipe)})
                dist.barrier()
        finally:
            for peer in peers.values():
                peer.close()
    if rank == 1:
        Path(out, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's gloo threads can abort an ordinary interpreter exit


def _run(rank: int, plan: Plan, peers: Any, recipe: str) -> dict[str, Any]:
    """Train on one batch again and again: its first visit, then revisits."""
    config, device = GPT2Config(**CONFIGS[plan.model], **OFF), torch.device(plan.device)
    n, length, width = config.n_layer, config.n_positions, config.n_embd
    source = ModelSource(plan.model, "gpt2", config, None, None)
    module = build_stage(source, [range(n // 2), range(n // 2, n)], rank).to(device)
    rows = plan.batch // plan.microbatches
    hidden = torch.empty(rows, length, width, device="meta")
    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    logits = torch.empty(rows, length, config.vocab_size, device="meta")
    stage = CompressedStage(
        module,
        rank,
        2,
        device,
        input_args=hidden.clone().requires_grad_() if rank else tokens,
        output_args=logits if rank else hidden,
        input_grads=hidden if rank else None,
        output_grads=None if rank else hidden,
        peers=peers,
        recipe=parse_recipe(recipe),
        deadline=300.0,
        overlap=True,
    )
    schedule = ScheduleEager1F1B(stage, plan.microbatches, loss_fn=next_token_loss)
    optimiser = torch.optim.AdamW(module.parameters(), 1e-5, fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, config.vocab_size, (plan.batch, length + 1), generator=generator).to(device)
    taken = [_step(stage, schedule, optimiser, text, device) for _ in range(plan.steps + 2)]
    stage.close()
    settled = taken[2:]  # the second step still meets cold caches
    return {
        "recipe": recipe,
        "first_visit_seconds": round(taken[0], 4),
        "revisit_seconds": round(sum(settled) / len(settled), 4),
        "tokens_per_second": round(plan.batch * length * len(settled) / sum(settled), 1),
    }


def _step(
    stage: CompressedStage, schedule: Any, optimiser: Any, text: torch.Tensor, device: torch.device
) -> float:
    """Return the seconds of one step, from a common start to the end of the slower stage."""
    dist.barrier()
    start = time.perf_counter()
    if stage.is_first:
        stage.begin(range(len(text)), schedule._n_microbatches)
        schedule.step(text[:, :-1])
    else:
        schedule.step(target=text[:, 1:], losses=[])
    optimiser.step()
    optimiser.zero_grad()
    stage.end()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - start
