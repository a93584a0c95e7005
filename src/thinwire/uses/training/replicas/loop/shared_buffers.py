"""A model's buffers, which no optimiser steps: alike at all replicas after a drain."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.staging import to_host
from thinwire.types import PayloadError, require
from thinwire.uses.training.replicas.ddp_hook import is_statistic
from thinwire.uses.training.replicas.networks import Network


class SharedBuffers:
    """Average running statistics over all replicas, and take all other buffers from the first of them.

    Equal statistics stay what they are: their mean is made in float64, in the order of the ranks.
    """

    def __init__(self, model: nn.Module, network: Network) -> None:
        self.model, self._exchange, self._deadline = model, network.messages("buffers"), network.deadline
        self._leads = self._exchange.rank == min(self._exchange.ranks)
        self._number = 0

    def share(self) -> None:
        """Exchange the buffers once. All replicas call this at the same place."""
        averaged, others = self._found()
        if not averaged and not others:
            return
        own = _bytes_of(averaged) + (_bytes_of(others) if self._leads else b"")
        self._exchange.post(self._number, own)
        received = self._exchange.collect(self._number, self._deadline) | {self._exchange.rank: own}
        self._number += 1
        split = sum(x.nbytes for x in averaged)
        for rank, data in received.items():
            whole = split + (sum(x.nbytes for x in others) if rank == min(received) else 0)
            text = f"rank {rank} sent {len(data)} bytes of buffers and {whole} were expected"
            require(len(data) == whole, PayloadError, f"{text}; give all replicas one model")
        self._put(averaged, others, {rank: bytes(received[rank]) for rank in sorted(received)}, split)

    def close(self) -> None:
        """Exchange nothing more."""
        self._exchange.close()

    def _put(self, averaged: list[Tensor], others: list[Tensor], parts: dict[int, bytes], split: int) -> None:
        with torch.no_grad():
            values = [_tensors_of(data[:split], averaged) for data in parts.values()]
            for i, x in enumerate(averaged):
                mean = torch.stack([there[i].double() for there in values]).sum(0) / len(values)
                x.copy_(mean.to(x.dtype))
            for x, value in zip(others, _tensors_of(parts[min(parts)][split:], others), strict=True):
                x.copy_(value)

    def _found(self) -> tuple[list[Tensor], list[Tensor]]:
        averaged: list[Tensor] = []
        others: list[Tensor] = []
        for (name, _), x in zip(self.model.named_buffers(), buffers_of(self.model), strict=True):
            (averaged if is_statistic(name, x) else others).append(x)
        return averaged, others


def buffers_of(model: nn.Module) -> list[Tensor]:
    """Return this process's part of each buffer, in the same memory."""
    return [(x.to_local() if isinstance(x, DTensor) else x).detach() for x in model.buffers()]


def _bytes_of(tensors: list[Tensor]) -> bytes:
    return b"".join(to_host(tensors).views())


def _tensors_of(data: bytes, like: list[Tensor]) -> list[Tensor]:
    out, at = [], 0
    for x in like:
        part = torch.frombuffer(bytearray(data[at : at + x.nbytes]), dtype=torch.uint8)
        out.append(part.view(x.dtype).view(x.shape) if x.nbytes else torch.empty_like(x, device="cpu"))
        at += x.nbytes
    return out
