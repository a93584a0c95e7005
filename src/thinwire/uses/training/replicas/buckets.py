"""The gradients of one backward pass of DistributedDataParallel, by the names of their parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from thinwire.uses.training.replicas.site import Site
from thinwire.uses.training.replicas.table import Table, real


class Buckets(Table):
    """The gradients of one backward pass, bucket by bucket.

    With ``scaler``, a ``GradScaler``, they are exchanged unscaled: its factor may be another one later.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        scaler: torch.amp.GradScaler | None,
        site: Site | None = None,
    ) -> None:
        super().__init__(named)
        self._names = {id(p): name for name, p in named.items()}
        self.trained = tuple(named.values())
        self._scaler, self._site = scaler, site
        self._open: list[tuple[Tensor, Future[Tensor]]] = []  # each bucket, and what DDP waits for
        self._views: dict[str, Tensor] = {}  # of the gradients in them
        self._mean = torch.empty(0)  # what was exchanged last

    def take(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Add the next bucket of a pass; its first one begins anew, should the last pass have failed."""
        if bucket.index() == 0:
            self._open, self._views = [], {}
        buffer = bucket.buffer()
        # Of complex values a buffer has both parts, and ``bucket.gradients()`` the wrong ones.
        names = [self._names[id(p)] for p in bucket.parameters()]
        parts = buffer.split([self._shapes[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            self._views[name] = part.view(self._shapes[name])
        future: Future[Tensor] = Future(devices=None if buffer.device.type == "cpu" else [buffer.device])
        self._open.append((buffer, future))
        return future

    def complete(self, flat: Tensor | None) -> bool:
        """Hand all buckets back to DDP with these gradients, or zeros; return whether they are finite.

        Where all are zeros these are negative: they change no sum, and tell themselves from gradients that
        were cleared.
        """
        if flat is not None:
            for name, part in self._parts(self._scaled(flat)):
                self._views[name].copy_(part)
        if flat is None or not any(bool(buffer.any()) for buffer, _ in self._open):
            for buffer, _ in self._open:
                buffer.fill_(-0.0)
        finite = self._scaler is None or all(bool(buffer.isfinite().all()) for buffer, _ in self._open)
        for buffer, future in self._open:
            future.set_result(buffer)
        self._open, self._views = [], {}
        return finite

    def are_cleared(self) -> bool:
        """Return whether no parameter has a gradient but zeros such as ``zero_grad`` leaves."""
        return all(p.grad is None or _is_cleared(real(p.grad)) for p in self.trained)

    def are_there(self) -> bool:
        """Return whether any parameter has a gradient, be it zeros."""
        return any(p.grad is not None for p in self.trained)

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


def _is_cleared(gradient: Tensor) -> bool:
    return not bool(gradient.any()) and not bool(gradient.signbit().any())
