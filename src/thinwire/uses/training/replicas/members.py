"""What exchanges the gradients of a site: its leader, and its other ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.types import InputError, require
from thinwire.uses.training.replicas.buckets import Buckets
from thinwire.uses.training.replicas.hook import Replicated, Terms, advised
from thinwire.uses.training.replicas.replicator import Apply, Replicator
from thinwire.uses.training.replicas.site import Site
from thinwire.uses.training.replicas.tally import Tally


class Leader(Replicated):
    """The leader of a site: tells the other ranks of it each mean."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        buckets: Buckets,
        replicator: Replicator,
        terms: Terms,
        scaler: torch.amp.GradScaler | None,
        site: Site,
    ) -> None:
        super().__init__(ddp, buckets, replicator, terms, scaler)
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
            self._replicator.drain(self._stepping(told))
        self._site.tell(None)
        self._settle_buffers()

    def _beyond(self, mean: Tensor) -> Tensor:
        return self._site.mean_of_sites(mean)

    def close(self) -> None:
        super().close()
        self._site.close()


class Member(Replicated):
    """Another rank of a site: it averages with the leader, and takes what that one tells."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        buckets: Buckets,
        terms: Terms,
        scaler: torch.amp.GradScaler | None,
        site: Site,
    ) -> None:
        super().__init__(ddp, buckets, Replicator(Tally()), terms, scaler)
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
