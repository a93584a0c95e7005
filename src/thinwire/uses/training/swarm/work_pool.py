"""The keeper's samples: handed out to members by number, and again where a member was lost with them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from thinwire.types import WRONG_VALUES, InputError, require
from thinwire.uses.training.swarm.handed_out import HandedOut
from thinwire.uses.training.swarm.shares import Share, pack_share
from thinwire.uses.training.swarm.shuffled_passes import ShuffledPasses


@dataclass
class WorkCounts:
    """Samples handed out in all, those trained on, and those that were handed out for a second time."""

    given: int = 0
    done: int = 0
    again: int = 0


class WorkPool:
    """Hand out the rows of ``blocks`` [n, seq + 1] int64, ``batch`` a local step, in shuffled passes.

    Each pass takes every sample once. What a client was given and did not answer is handed out next. A share
    that is longer than what is left of a pass goes on in the next one.
    Errors: ``InputError`` for samples that make no batch.

    >>> from thinwire.uses.training.swarm.shares import read_share
    >>> pool = WorkPool(torch.arange(12).view(4, 3), batch=2, seed=0)
    >>> first = read_share(pool.give(7, steps=1))
    >>> pool.settle(7, done=False)
    >>> read_share(pool.give(8, steps=1)).ids.equal(first.ids), pool.counts.again
    (True, 2)
    """

    def __init__(self, blocks: Tensor, batch: int, seed: int = 0) -> None:
        tokens = blocks.dtype == torch.int64 and blocks.ndim == 2 and blocks.shape[1] > 1
        wrong = f"samples are {blocks.dtype} of shape {list(blocks.shape)}; give [n, seq + 1] of int64"
        require(tokens, InputError, wrong)
        wrong = f"{len(blocks)} samples make no batch of {batch}; give more text, or a smaller batch"
        require(1 <= batch <= len(blocks), InputError, wrong)
        self._blocks, self.batch = blocks.contiguous(), batch
        self._passes = ShuffledPasses(len(blocks), seed)
        self._again: deque[int] = deque()  # to be handed out before anything else
        self._handed = HandedOut()
        self.counts = WorkCounts()

    @property
    def passes(self) -> float:
        """How many passes over the samples were handed out."""
        return self._passes.taken / len(self._blocks)

    def most(self, client: int, steps: int) -> int:
        """Return ``steps``: passes do not end."""
        return steps

    def give(self, client: int, steps: int) -> bytes:
        """Return the share of ``client`` for ``steps`` local steps; one that it did not answer is void."""
        self.settle(client, done=False)
        many = steps * self.batch
        again = [self._again.popleft() for _ in range(min(many, len(self._again)))]
        ids = again + self._passes.take(many - len(again))
        self._handed.give(client, ids)
        self.counts.given += many
        self.counts.again += len(again)
        rows = torch.tensor(ids)
        return pack_share(Share(rows, self._blocks[rows], self.batch))

    def settle(self, client: int, done: bool, left: Iterable[tuple[int, int]] = ()) -> None:
        """Count the share of ``client`` as done, or let others have it next; harmless where it has none.

        ``left``: as of ``WorkSource.settle``.
        """
        trained, again = self._handed.settle(client, done, left)
        self.counts.done += len(trained)
        self._again.extendleft(reversed(again))

    def assigned(self, client: int) -> Tensor | None:
        """Return the blocks of a client's share, or of what it answered last; None where there is neither."""
        ids = self._handed.of(client)
        return None if ids is None else self._blocks[torch.tensor(ids)]

    def samples(self, client: int) -> int:
        """Return how many samples ``assigned`` has: what the update of ``client`` counts for."""
        return len(self._handed.of(client) or ())

    # -- to go on later ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what is handed out and what is to be, as plain values."""
        return {
            "of": self._described,
            "taken": self._passes.taken,
            "again": list(self._again),
            "shares": {str(c): ids for c, ids in self._handed.under_way.items()},
            "settled": {str(c): ids for c, ids in self._handed.answered.items()},
            "counts": dataclasses.asdict(self.counts),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned; shares under way stay so until they are settled.

        Errors: ``InputError`` where it is of other samples or another seed, or cannot be read.
        """
        of, own = state.get("of"), self._described
        wrong = f"the work of the state is of {of}, and here are {own}; give the same data and seed"
        require(of == own, InputError, wrong)
        try:
            taken, again, counts = int(state["taken"]), self._read(state["again"]), state["counts"]
            shares, settled = (
                {int(c): self._read(ids) for c, ids in state[part].items()} for part in ("shares", "settled")
            )
            self.counts = WorkCounts(**{name: int(n) for name, n in counts.items()})
        except WRONG_VALUES as e:
            raise InputError(f"the work of the state cannot be read: {type(e).__name__} at {e}") from e
        self._passes.taken, self._again = taken, deque(again)
        self._handed.under_way, self._handed.answered = shares, settled

    def _read(self, ids: Iterable[Any]) -> list[int]:
        found = [int(i) for i in ids]
        within = all(0 <= i < len(self._blocks) for i in found)
        require(within, InputError, f"samples beyond the {len(self._blocks)} that there are")
        return found

    @cached_property
    def _described(self) -> str:
        digest = hashlib.blake2b(self._blocks.numpy().data, digest_size=8).hexdigest()
        n, length = self._blocks.shape
        return f"{n} samples of {length} tokens, digest {digest}, seed {self._passes.seed}"


class OwnWork:
    """Members train on samples of their own, at most ``batch`` a local step: only how many is known."""

    def __init__(self, batch: int) -> None:
        self._batch, self._given = batch, dict[int, int]()

    def most(self, client: int, steps: int) -> int:
        """Return ``steps``: members have samples enough."""
        return steps

    def give(self, client: int, steps: int) -> bytes:
        """Return nothing; note how many samples ``steps`` local steps take."""
        self._given[client] = steps * self._batch
        return b""

    def settle(self, client: int, done: bool, left: Iterable[tuple[int, int]] = ()) -> None:
        """Nothing was given that others could have."""

    def samples(self, client: int) -> int:
        """Return how many samples the steps of ``client`` take at most: no update counts for more."""
        return self._given.get(client, 0)

    def state(self) -> dict[str, Any]:
        """Return nothing: members are given steps anew."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept."""
