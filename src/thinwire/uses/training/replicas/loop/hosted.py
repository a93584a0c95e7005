"""Local steps in a framework that owns the loop: begun, drained and ended by its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thinwire.links.mesh import Peer
from thinwire.types import InputError
from thinwire.uses.training.replicas.loop.script import local_steps
from thinwire.uses.training.replicas.loop.shared_training import SharedTraining

Peers = Mapping[int, Peer]


class Hosted:
    """One training after another in a framework's loop.

    ``peers``: links to the other replicas, or a callable that makes them as a training begins, in the process
    that trains; what it made is closed when the training ends. A host of several processes at a site has all
    of them exchange where each has shards of its own, and else its first one for all.
    """

    def __init__(self, recipe: str, peers: Peers | Callable[[], Peers], options: Mapping[str, Any]) -> None:
        self._recipe, self._given, self._options = recipe, peers, dict(options)
        self._training: SharedTraining | None = None
        self._made: Peers | None = None
        self._drained = -1  # the host's step of the last drain

    @property
    def training(self) -> SharedTraining:
        """What exchanges. Errors: ``InputError`` where no training is under way."""
        if self._training is None:
            raise InputError("no training is under way; the framework begins it")
        return self._training

    @property
    def begun(self) -> bool:
        """Whether a training is under way."""
        return self._training is not None

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        state: Mapping[str, Tensor] | None = None,
        processes: int = 1,
    ) -> None:
        """Begin a training of ``processes`` at this site, from what ``save`` returned if that is given."""
        self.end()  # one that failed has the parameters still
        options = dict(self._options)
        if processes > 1 and not is_sharded(model):
            options.setdefault("site", dist.group.WORLD)
        site = options.get("site")
        exchanges = site is None or site.rank() == 0
        if isinstance(self._given, Mapping):
            peers: Peers | None = self._given
        else:
            peers = self._made = self._given() if exchanges else None
        try:
            self._training = local_steps(model, optimizers, self._recipe, peers=peers, **options)
            if state and exchanges:
                self._training.load_state_dict(state)
        except BaseException:
            self.end()
            raise

    def drain(self, step: int) -> None:
        """Have the same bits in the model of every replica, once behind each ``step`` of the host."""
        if step != self._drained:
            self.training.drain()
            self._drained = step

    def save(self, step: int) -> dict[str, Tensor]:
        """Return what this replica goes on from, behind a drain."""
        self.drain(step)
        return self.training.state_dict()

    def end(self, step: int | None = None) -> None:
        """End the training: drained behind a ``step``, unless it failed. Safe to call twice."""
        if self._training is not None:
            try:
                if step is not None:
                    self.drain(step)
            finally:
                self._training.close()
        self._training, self._drained = None, -1
        made, self._made = self._made, None
        for peer in (made or {}).values():
            peer.close(0.0 if step is None else 5.0)


def is_sharded(model: nn.Module) -> bool:
    """Say whether processes of a site have different parts of a model."""
    return any(isinstance(p, DTensor) for p in model.parameters())
