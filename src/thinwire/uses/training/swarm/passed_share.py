"""The share of a branch: the samples that came from above, divided among its members."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from thinwire.rounds.update_messages import MOST_GAPS, VersionMessage
from thinwire.types import PayloadError, require
from thinwire.uses.training.swarm.handed_out import HandedOut
from thinwire.uses.training.swarm.shares import Share, pack_share, read_share

HELD = 64  # blocks of the first share that nobody here trains on


class PassedShare:
    """Hand out what a branch was given for a round, ``batch`` samples a local step, below ``vocabulary``.

    What a member was given and did not answer is there for others; what is left at the end goes back up. The
    last quarter of the first share, of 64 blocks at most, is held out here to score updates on: those samples
    go back up too, and others train on them. Where members have data of their own, numbers alone are handed
    out.

    >>> share = PassedShare(batch=2, vocabulary=9)
    >>> rows = Share(torch.arange(8), torch.ones(8, 3, dtype=torch.int64), batch=2)
    >>> share.begin(8, rows)
    >>> read_share(share.give(5, steps=1)).ids.tolist(), share.most(6, steps=9)
    ([0, 1], 2)
    >>> share.settle(5, done=True)
    >>> share.gaps(without=())
    ((2, 6),)
    """

    def __init__(self, batch: int, vocabulary: int, held: int = HELD) -> None:
        self._batch, self._vocabulary, self._hold = batch, vocabulary, held
        self._share: Share | None = None
        self.given = 0  # samples of this round
        self.heldout: Tensor | None = None  # blocks [n, seq + 1], once a share has come
        self._held = set[int]()  # their numbers
        self._free: deque[int] = deque()  # places in the share that nobody has
        self._handed = HandedOut()  # places in the share

    def take(self, version: VersionMessage) -> None:
        """Begin with the share of a version. Errors: ``PayloadError``."""
        share = read_share(version.work, self._vocabulary) if len(version.work) else None
        many = version.steps * self._batch
        wrong = f"a share of {share and share.samples} samples where {many} are to be trained on"
        require(share is None or share.samples == many, PayloadError, wrong)
        self.begin(many, share)

    def begin(self, many: int, share: Share | None) -> None:
        """Begin with so many samples, those of ``share`` where they are known."""
        self._share, self.given = share, many
        self._handed = HandedOut()
        most = many
        if share is not None and self.heldout is None and self._hold:
            steps = many // self._batch
            held = min(self._hold, max(1, steps // 4) * self._batch)
            most = many - held if steps > 1 else many
            self.heldout, self._held = share.blocks[-held:].clone(), set(share.ids[-held:].tolist())
        free: Sequence[int] = range(most)
        if share is not None:  # what goes back up may come again
            others = [place for place in free if int(share.ids[place]) not in self._held]
            free = others if len(others) >= self._batch else free
        self._free = deque(free)

    @property
    def steps(self) -> int:
        """For how many local steps there are samples that nobody has."""
        return len(self._free) // self._batch

    def most(self, client: int, steps: int) -> int:
        """Return for how many of so many local steps of ``client`` there are samples."""
        return min(steps, (len(self._free) + len(self._handed.under_way.get(client, ()))) // self._batch)

    def give(self, client: int, steps: int) -> bytes:
        """Return the share of ``client`` for ``steps`` local steps; one that it did not answer is void."""
        self.settle(client, done=False)
        places = [self._free.popleft() for _ in range(steps * self._batch)]
        self._handed.give(client, places)
        if self._share is None:
            return b""
        rows = torch.tensor(places)
        return pack_share(Share(self._share.ids[rows], self._share.blocks[rows], self._batch))

    def settle(self, client: int, done: bool, left: Iterable[tuple[int, int]] = ()) -> None:
        """Count the share of ``client`` as done, or let others have it; harmless where it has none."""
        _, again = self._handed.settle(client, done, left)
        self._free.extendleft(reversed(again))

    def assigned(self, client: int) -> Tensor | None:
        """Return the blocks of a client's share, or of what it answered; None where there is neither."""
        places = self._handed.of(client)
        return None if places is None or self._share is None else self._share.blocks[torch.tensor(places)]

    def samples(self, client: int) -> int:
        """Return how many samples the share of ``client`` has, or what it answered."""
        return len(self._handed.of(client) or ())

    def gaps(self, without: Collection[int]) -> tuple[tuple[int, int], ...]:
        """Return what nobody trained on, what the clients ``without`` did included, as ``Update.left``."""
        answered = self._handed.answered.items()
        done = {place for client, places in answered if client not in without for place in places}
        runs = groupby(range(self.given), key=lambda place: place in done)
        found = [(run[0], len(run)) for trained, run in ((t, list(r)) for t, r in runs) if not trained]
        if len(found) > MOST_GAPS:  # more cannot be said: all from the last one on goes back
            start = found[MOST_GAPS - 1][0]
            found = [*found[: MOST_GAPS - 1], (start, self.given - start)]
        return tuple(found)

    def state(self) -> dict[str, Any]:
        """Return nothing: a branch that begins again is given a share anew."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept."""
