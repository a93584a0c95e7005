"""Replicas on one card: a step of GPT-2 medium behind the DDP hook, beside DDP's own all-reduce over gloo."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import thinwire
from bench.gpu.ranks import RANKS, failing_alone, row, two_ranks, wait
from thinwire.uses.training.replicas.ddp_hook import EXACT

OFF: dict[str, Any] = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
MEDIUM = {"n_layer": 24, "n_embd": 1024, "n_head": 16, "n_positions": 1024}
TINY = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 512}
RECIPES = ("gloo", "topk", "deco", "dd-ef-sgd", "allreduce-bf16")  # gloo: DDP as it is
WARM, STEPS = 3, 5  # the first two behind the hook are exact: sums over the mesh, of as many bytes as gloo's


def measure(device: torch.device, smoke: bool) -> None:
    """Print a row a recipe: the median step, what coding takes of it, an exact pass, and to hook it up."""
    two_ranks(_rank, device, smoke)


def _rank(rank: int, store: Any, device: torch.device, smoke: bool) -> None:
    config = GPT2Config(**(TINY if smoke else MEDIUM), **OFF)
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT2LMHeadModel(config)
    texts = torch.Generator().manual_seed(rank)
    x = torch.randint(0, config.vocab_size, (2, config.n_positions), generator=texts).to(device)
    for recipe in RECIPES:
        with failing_alone(recipe=recipe):
            _run(rank, store, device, model, x, recipe)


def _run(
    rank: int, store: Any, device: torch.device, model: torch.nn.Module, x: torch.Tensor, recipe: str
) -> None:
    optimiser, ddp = torch.optim.AdamW(model.parameters(), 1e-6), DistributedDataParallel(model)
    with ExitStack() as stack:
        replicated, hooked = None, 0.0
        if recipe != "gloo":
            peers = thinwire.connect_mesh(rank, RANKS, dist.PrefixStore(recipe, store))
            for peer in peers.values():
                stack.callback(peer.close)
            start = time.perf_counter()
            replicated = thinwire.replicate(ddp, recipe, peers=peers)  # compares all weights
            hooked = time.perf_counter() - start
            stack.callback(replicated.close)
        taken = []
        for step in range(WARM + STEPS):
            if step == WARM and replicated is not None:
                replicated._synchroniser.tally.take()
            taken.append(_step(ddp, optimiser, replicated, x, device))
        dist.barrier()
    if rank == 0:
        told: dict[str, float] = {"step_s": round(statistics.median(taken[WARM:]), 4)}
        if replicated is not None:
            tally = replicated._synchroniser.tally
            told["coding_s"] = round((tally.encode_s + tally.decode_s) / STEPS, 4)
            told |= {"exact_s": round(taken[EXACT - 1], 4), "hook_s": round(hooked, 4)}
        row(recipe=recipe, parameters=sum(p.numel() for p in model.parameters()), **told)


def _step(ddp: Any, optimiser: Any, replicated: Any, x: torch.Tensor, device: torch.device) -> float:
    dist.barrier()
    wait(device)
    start = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16):
        loss = ddp(x, labels=x).loss
    loss.backward()
    if replicated is None or replicated.ready:
        optimiser.step()
    optimiser.zero_grad()
    wait(device)
    return time.perf_counter() - start
