"""What the parts of a model take on this machine: the numbers that ``thinwire plan`` plans with."""

from __future__ import annotations

import time
from typing import Any

import torch

from thinwire.lab.cuts import measured_costs
from thinwire.lab.lora import add_adapters
from thinwire.lab.machine import pick_dtype
from thinwire.lab.machines_file import Measured


def measure(model: str, config: Any, rows: int, seq: int, dtype: str = "auto", lora: int = 0) -> Measured:
    """Time a micro-batch of ``rows`` samples through a layer and the head, and a layer's optimiser step.

    In the precision that ``--dtype`` would train in, with adapters of rank ``lora``; the best of three.
    """
    costs = measured_costs(config, rows, seq, lora=lora, bf16=pick_dtype(dtype)[0] == "bf16")
    update = _update_seconds(config, lora)
    return Measured(model, rows * seq, costs.layers[0], costs.head, update, lora)


def _update_seconds(config: Any, lora: int, repeats: int = 3) -> float:
    """Return the seconds of AdamW and of the gradient norm over what is trained of one layer."""
    from thinwire.lab.split import probe

    stage = probe(config, range(1), last=False)
    if lora:
        add_adapters(stage, lora, seed=0)
    parameters = [p for p in stage.parameters() if p.requires_grad]
    grads = [torch.zeros_like(p) for p in parameters]
    optimiser, best = torch.optim.AdamW(parameters, fused=True), float("inf")
    for _ in range(repeats + 1):  # the first one makes the moments
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g
        start = time.perf_counter()
        torch.nn.utils.get_total_norm(grads)
        optimiser.step()
        best = min(best, time.perf_counter() - start)
    return best
