"""Local steps in a framework that owns the loop: begun, drained and ended by its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.links.mesh import Peer
from thinwire.types import InputError
from thinwire.uses.training.replicas.loop.script import local_steps
from thinwire.uses.training.replicas.loop.shared_training import SharedTraining

Peers = Mapping[int, Peer]


class Hosted:
    """One training after another in a framework's loop.

    ``peers``: links to the other replicas, or a callable that makes them as a training begins, in the process
    that trains; what it made is closed when the training ends.
    """

    def __init__(self, recipe: str, peers: Peers | Callable[[], Peers], options: Mapping[str, Any]) -> None:
        self._recipe, self._given, self._options = recipe, peers, dict(options)
        self._training: SharedTraining | None = None
        self._made: Peers | None = None
        self._drained = -1  # the step of the last drain

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
        self, model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Tensor] | None = None
    ) -> None:
        """Begin a training, from what ``save`` returned if that is given."""
        self.end(failed=True)  # one that failed has the parameters still
        peers = self._given if isinstance(self._given, Mapping) else self._given()
        self._made = None if peers is self._given else peers
        try:
            self._training = local_steps(model, optimizers, self._recipe, peers=peers, **self._options)
            if state:
                self._training.load_state_dict(state)
        except BaseException:
            self.end(failed=True)
            raise

    def drain(self) -> None:
        """Have the same bits in the model of every replica, once a step."""
        if self.training.steps != self._drained:
            self.training.drain()
            self._drained = self.training.steps

    def save(self) -> dict[str, Tensor]:
        """Return what this replica goes on from, behind a drain."""
        self.drain()
        return self.training.state_dict()

    def end(self, failed: bool = False) -> None:
        """End the training: drained, unless it ``failed``. Safe to call twice."""
        if self._training is not None:
            try:
                if not failed:
                    self.drain()
            finally:
                self._training.close()
        self._training, self._drained = None, -1
        made, self._made = self._made, None
        for peer in (made or {}).values():
            peer.close(0.0 if failed else 5.0)
