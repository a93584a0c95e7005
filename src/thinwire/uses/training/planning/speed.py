"""What the parts of a model take on this machine: the numbers that ``thinwire plan`` plans with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from thinwire.runs.machine.heap import keep_freed
from thinwire.runs.machine.processor import pick_dtype, pick_threads
from thinwire.runs.models.cuts import embedding_seconds, measured_costs, median_seconds
from thinwire.runs.models.lora import add_adapters
from thinwire.uses.training.planning.machines_file import Measured
from thinwire.uses.training.run.config import TrainConfig


def measure(job: TrainConfig, config: Any) -> Measured:
    """Time a micro-batch of ``job`` through layer, head and embedding, and a layer's optimiser step.

    On the threads, in the precision and with the adapters that ``job`` would train with; medians.
    ``config``: the model's own. Adapters leave the embedding frozen, which makes it free.
    """
    keep_freed()
    rows, bf16 = job.batch // job.microbatches, pick_dtype(job.dtype)[0] == "bf16"
    with _threads(pick_threads(job)):
        costs = measured_costs(config, rows, job.seq, lora=job.lora, bf16=bf16)
        embed = 0.0 if job.lora else embedding_seconds(config, rows, job.seq, bf16=bf16)
        update = _update_seconds(config, job.lora)
    tokens = rows * job.seq
    return Measured(job.model, tokens, costs.layers[0], costs.head, update, embed, job.lora, job.threads)


@contextlib.contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _update_seconds(config: Any, lora: int) -> float:
    """Return the seconds of AdamW and of clipping to a norm over what is trained of one layer."""
    from thinwire.runs.models.split import probe

    stage = probe(config, range(1), last=False)
    if lora:
        add_adapters(stage, lora, seed=0)
    parameters = [p for p in stage.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) for p in parameters]
    optimiser = torch.optim.AdamW(parameters, fused=True)
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g

    def update() -> None:
        torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, 1.0)
        optimiser.step()

    return median_seconds(update)
