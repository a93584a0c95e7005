"""The gradients of one backward pass of DistributedDataParallel, by the names of their parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire.engines.replicas.site import Site
from thinwire.engines.replicas.table import Table


class Buckets(Table):
    """The gradients of one backward pass, bucket by bucket.

    With ``scaler``, a ``GradScaler``, they are exchanged unscaled: its factor may be another one later.
    """

    def __init__(
        self, ddp: DistributedDataParallel, scaler: torch.amp.GradScaler | None, site: Site | None = None
    ) -> None:
        left_out = set(ddp.parameters_to_ignore)
        named = {n: p for n, p in ddp.module.named_parameters() if p.requires_grad and n not in left_out}
        super().__init__(named)
        self._names = {id(p): name for name, p in named.items()}
        self._scaler, self._site = scaler, site
        self._open: list[tuple[Tensor, Future[Tensor]]] = []  # each bucket, and what DDP waits for
        self._views: dict[str, Tensor] = {}  # of the gradients in them
        self._mean = torch.empty(0)  # what was exchanged last

    def take(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Add the next bucket of a pass; its first one begins anew, should the last pass have failed."""
        if bucket.index() == 0:
            self._open, self._views = [], {}
        for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._views[self._names[id(p)]] = view
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=None if buffer.device.type == "cpu" else [buffer.device])
        self._open.append((buffer, future))
        return future

    def complete(self, flat: Tensor | None) -> None:
        """Hand all buckets back to DDP with these gradients, or zeros."""
        if flat is None:
            for buffer, _ in self._open:
                buffer.zero_()
        else:
            for name, part in self._parts(self._scaled(flat)):
                self._views[name].copy_(part)
        for buffer, future in self._open:
            future.set_result(buffer)
        self._open, self._views = [], {}

    def gradients(self) -> Tensor:
        flat = self.flat(self._views)
        own = flat if self._scaler is None else flat.div_(self._scale)
        return own if self._site is None else self._site.average(own)

    def put_gradients(self, flat: Tensor) -> None:
        self._mean = flat

    @property
    def mean(self) -> Tensor:
        """What was exchanged last [n, N]."""
        return self._mean

    def put_mean(self) -> None:
        """Write it into the parameters' gradients, outside of a backward pass."""
        super().put_gradients(self._scaled(self._mean))

    def _scaled(self, flat: Tensor) -> Tensor:
        return flat if self._scaler is None else flat * self._scale

    @property
    def _scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())
