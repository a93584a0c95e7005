"""The same exchange over a torch process group, such as gloo's: an all-gather of fixed size a step."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.links.base import Data
from thinwire.types import InputError, LinkError, PayloadError, require

_LENGTH = struct.Struct("<Q")


@dataclass
class _Posted:
    work: dist.Work
    own: Tensor  # the all-gather reads it until it is done
    buffers: list[Tensor]


class GroupExchange:
    """An ``Exchange`` over ``group``, for messages of at most ``capacity`` bytes; longer ones fit in part.

    All participants post the same steps in the same order, with the same capacity. Every message takes the
    capacity on the wire. ``group`` is used for nothing else meanwhile, and its ranks number the participants.
    """

    def __init__(self, group: dist.ProcessGroup, capacity: int) -> None:
        require(capacity > 0, InputError, f"a message has room for {capacity} bytes; give it 1 at least")
        self._group, self.capacity = group, capacity
        self.rank, self.ranks = group.rank(), tuple(range(group.size()))
        self._posted: dict[int, _Posted] = {}
        self._closed = False

    def post(self, step: int, payload: Data) -> int:
        require(not self._closed, LinkError, "this exchange is closed")
        body = memoryview(payload).cast("B")[: self.capacity]
        own = torch.zeros(_LENGTH.size + self.capacity, dtype=torch.uint8)
        own.numpy()[: _LENGTH.size + len(body)] = np.frombuffer(_LENGTH.pack(len(body)) + body, np.uint8)
        buffers = [torch.empty_like(own) for _ in self.ranks]
        try:
            work = self._group.allgather([buffers], [own])
        except RuntimeError as e:
            raise self._lost(f"could not send the message of step {step} to", e) from e
        self._posted[step] = _Posted(work, own, buffers)
        return len(body)

    def collect(self, step: int, deadline: float) -> dict[int, bytes]:
        require(step in self._posted, InputError, f"step {step} was not posted, or was collected before")
        self._wait(step, deadline)
        posted = self._posted.pop(step)
        return {r: self._message(posted.buffers[r], r) for r in self.ranks if r != self.rank}

    def drain(self, deadline: float) -> None:
        for step in self._posted:
            self._wait(step, deadline)

    def close(self, timeout: float = 5.0) -> None:
        self._closed = True
        with suppress(LinkError):
            self.drain(timeout)

    def _wait(self, step: int, deadline: float) -> None:
        work = self._posted[step].work
        try:
            work.wait(timedelta(seconds=deadline))
        except RuntimeError as e:
            what = "lost" if work.is_completed() else f"waited {deadline:g} s for"
            raise self._lost(f"{what} the message of step {step} from", e) from e

    def _lost(self, what: str, error: RuntimeError) -> LinkError:
        others = ", ".join(str(r) for r in self.ranks if r != self.rank)
        return LinkError(f"{what} rank {others} of the group: {str(error).partition('. ')[0]}")

    def _message(self, buffer: Tensor, rank: int) -> bytes:
        (length,) = _LENGTH.unpack(buffer[: _LENGTH.size].numpy().tobytes())
        text = f"rank {rank} sent {length} bytes where {self.capacity} fit; give all ranks one capacity"
        require(length <= self.capacity, PayloadError, text)
        return buffer[_LENGTH.size : _LENGTH.size + length].numpy().tobytes()
