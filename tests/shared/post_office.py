"""Exchanges and sums between threads of this process: what replicas send, without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.types import LinkError
from thinwire.uses.training.replicas.networks import Network

T = TypeVar("T")


class PostOffice:
    """Where ``ranks`` leave their messages for each other, by name of the exchange and number."""

    def __init__(self, ranks: int) -> None:
        self.ranks = tuple(range(ranks))
        self.sent: dict[tuple[str, int, int], bytes] = {}
        self._changed = threading.Condition()

    def put(self, name: str, number: int, rank: int, data: bytes) -> None:
        with self._changed:
            self.sent[name, number, rank] = data
            self._changed.notify_all()

    def take(self, name: str, number: int, rank: int, deadline: float) -> bytes:
        key = name, number, rank
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.sent, deadline):
                raise LinkError(f"waited {deadline:g} s for rank {rank}")
            return self.sent[key]

    def network(self, rank: int, deadline: float = 20.0) -> Network:
        """Return one rank's network."""
        return Network(lambda n: _Box(self, rank, n), lambda n: _Sum(self, rank, n), deadline=deadline)


class _Box:
    capacity = None

    def __init__(self, office: PostOffice, rank: int, name: str) -> None:
        self.office, self.rank, self.name, self.ranks = office, rank, name, office.ranks

    def post(self, step: int, payload: bytes) -> int:
        self.office.put(self.name, step, self.rank, bytes(payload))
        return len(payload)

    def collect(self, step: int, deadline: float) -> dict[int, bytes]:
        others = [r for r in self.ranks if r != self.rank]
        return {r: self.office.take(self.name, step, r, deadline) for r in others}


class _Sum(_Box):
    def __init__(self, office: PostOffice, rank: int, name: str) -> None:
        super().__init__(office, rank, name)
        self.posted: dict[int, Tensor] = {}

    def post(self, step: int, values: Tensor) -> None:  # type: ignore[override]
        self.posted[step] = values
        super().post(step, values.cpu().float().numpy().tobytes())

    def collect(self, step: int, deadline: float) -> Tensor:  # type: ignore[override]
        parts = super().collect(step, deadline)
        parts[self.rank] = self.office.sent[self.name, step, self.rank]
        rows = [torch.frombuffer(bytearray(parts[r]), dtype=torch.float32) for r in self.ranks]
        like = self.posted.pop(step)
        return torch.stack(rows).sum(0).to(like.dtype).view(like.shape).to(like.device)


def on_each(ranks: int, work: Callable[[int], T]) -> list[T]:
    """Return what ``work`` returns for each rank, all at once on threads; raise what the first raised."""
    with ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(work, rank) for rank in range(ranks)]]
