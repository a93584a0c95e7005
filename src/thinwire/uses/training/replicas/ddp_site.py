"""Sites of several ranks: a torch process group averages inside a site, and one leader speaks for it.

The leader is rank 0 of DDP's own group. It exchanges with the other sites' leaders over the mesh, and
broadcasts inside its site what comes of it: a state of one byte, then the mean where there is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import Exchange
from thinwire.collectives.exchange import words_of
from thinwire.types import InputError, ThinwireError, require
from thinwire.uses.training.replicas.ddp_hook import Buckets, HookTerms, Replicated, advised
from thinwire.uses.training.replicas.networks import Network
from thinwire.uses.training.replicas.synchroniser import Apply, ReplicaTally, Synchroniser

NOTHING, MEAN, ENDED = range(3)  # what the leader says: none is due, one follows, it ended with an error


class DdpSite:
    """The ranks of DDP's own group, and what the leader tells the others."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._group = ddp.process_group
        self.size, self.leads = self._group.size(), self._group.rank() == 0
        self._device = next(ddp.module.parameters()).device
        self._leader = dist.get_global_rank(self._group, 0)
        self._statistics: Exchange | None = None  # with the other leaders
        self._deadline, self._averaged = 0.0, 0
        self.weight = 1.0  # of this site's mean beside others': by its number of ranks

    def average(self, flat: Tensor) -> Tensor:
        """Return the mean of all ranks' ``flat``, times the site's weight."""
        shared = flat.to(self._device)
        dist.all_reduce(shared, group=self._group)
        return flat.copy_(shared).mul_(self.weight / self.size)

    def meet(self, network: Network, what: str, weights: str) -> None:
        """Weigh this site against the others. Errors: ``InputError`` where one of these differs."""
        exchange = network.messages("sites")
        exchange.post(0, json.dumps({"what": what, "weights": weights, "ranks": self.size}).encode())
        sizes = [self.size]
        for rank, data in exchange.collect(0, network.deadline).items():
            theirs = words_of(bytes(data), f"site {rank}")
            text = f"site {rank} exchanges other parameters, or by another recipe; give all sites the same"
            require(theirs.get("what") == what, InputError, text)
            text = f"site {rank} starts from other weights; start all sites from the same"
            require(theirs.get("weights") == weights, InputError, text)
            sizes.append(int(str(theirs.get("ranks"))))
        exchange.close()
        self._statistics, self._deadline = network.messages("statistics"), network.deadline
        self.weight = self.size * len(sizes) / sum(sizes)

    def mean_of_sites(self, flat: Tensor) -> Tensor:
        """Return the mean of all sites' ``flat``, of float64, each by its weight."""
        if self._statistics is not None:
            with self.telling():
                self._statistics.post(self._averaged, (flat.cpu() * self.weight).numpy().tobytes())
                parts = self._statistics.collect(self._averaged, self._deadline)
            self._averaged += 1
            parts[self._statistics.rank] = (flat.cpu() * self.weight).numpy().tobytes()
            every = [torch.frombuffer(bytearray(parts[r]), dtype=flat.dtype) for r in sorted(parts)]
            flat = torch.stack(every).sum(0) / len(every)
            self.tell(flat)
            return flat.to(self._device)
        mean = self.hear(flat)
        return flat if mean is None else mean

    def close(self) -> None:
        """Exchange no more statistics."""
        if self._statistics is not None:
            self._statistics.close()

    def tell(self, mean: Tensor | None) -> None:
        """Let the other ranks of the site have a mean, or know that none is due."""
        self._say(NOTHING if mean is None else MEAN)
        if mean is not None:
            dist.broadcast(mean.to(self._device), self._leader, group=self._group)

    def hear(self, like: Tensor) -> Tensor | None:
        """Return what the leader tells. Errors: ``ThinwireError`` where it ended with an error."""
        state = torch.empty(1, dtype=torch.uint8, device=self._device)
        dist.broadcast(state, self._leader, group=self._group)
        ended = "the leader of this site ended with an error; see what its rank says"
        told = int(state)
        require(told != ENDED, ThinwireError, ended)
        if told == NOTHING:
            return None
        mean = torch.empty_like(like, device=self._device)
        dist.broadcast(mean, self._leader, group=self._group)
        return mean.to(like.device)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Let the other ranks know of an error of the leader's."""
        try:
            yield
        except BaseException:
            self._say(ENDED)
            raise

    def _say(self, state: int) -> None:
        told = torch.tensor([state], dtype=torch.uint8, device=self._device)
        dist.broadcast(told, self._leader, group=self._group)


class SiteLeader(Replicated):
    """The leader of a site: tells the other ranks of it each mean."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        buckets: Buckets,
        synchroniser: Synchroniser,
        terms: HookTerms,
        scaler: torch.amp.GradScaler | None,
        site: DdpSite,
    ) -> None:
        super().__init__(ddp, buckets, synchroniser, terms, scaler)
        self._site = site

    def _exchange(self) -> None:
        with self._site.telling():
            super()._exchange()
        self._site.tell(self._due)

    def drain(self, step: Apply) -> None:
        def told() -> None:
            self._site.tell(self._buckets.mean)
            step()

        self._check_settled("drain")
        with self._drained(), self._site.telling(), advised():
            self._synchroniser.drain(self._stepping(told))
        self._site.tell(None)
        self._settle_buffers()

    def _beyond(self, mean: Tensor) -> Tensor:
        return self._site.mean_of_sites(mean)

    def close(self) -> None:
        super().close()
        self._site.close()


class SiteMember(Replicated):
    """Another rank of a site: it averages with the leader, and takes what that one tells."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        buckets: Buckets,
        terms: HookTerms,
        scaler: torch.amp.GradScaler | None,
        site: DdpSite,
    ) -> None:
        super().__init__(ddp, buckets, Synchroniser(ReplicaTally()), terms, scaler)
        self._site = site
        self._like = torch.empty(0)

    def _exchange(self) -> None:
        self._like = self._buckets.gradients()
        self._due = self._site.hear(self._like)

    def drain(self, step: Apply) -> None:
        self._check_settled("drain")
        apply = self._stepping(step)
        with self._drained():
            while (mean := self._site.hear(self._like)) is not None:
                self._buckets.put_gradients(mean)
                apply()
        self._settle_buffers()

    def _beyond(self, mean: Tensor) -> Tensor:
        return self._site.mean_of_sites(mean)

    def state_dict(self) -> dict[str, Tensor]:
        return {}  # the leader has the site's

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        require(not state, InputError, "the leader of a site loads its state; give the other ranks {}")
