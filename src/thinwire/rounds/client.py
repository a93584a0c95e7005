"""A client: it takes a version, trains on its own data, and says how the model moved."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from thinwire.codecs import Raw
from thinwire.codecs.matrices.factors import placed
from thinwire.rounds.client_profile import ClientPace
from thinwire.rounds.local_training import (
    Data,
    LocalSGD,
    LocalTraining,
    Loss,
    check_finite,
    classification,
)
from thinwire.rounds.model_copy import ModelCopy
from thinwire.rounds.parameters import Parameters, Signature
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import Held, Update, VersionForm, VersionMessage
from thinwire.seeding import seeded
from thinwire.types import DesyncError, ThinwireError

TRIED = 3  # local steps that are timed before the first turn


class PauseError(ThinwireError):
    """A client has nothing to answer a version with; ``ready`` says whether it can take part again."""

    def __init__(self, message: str, ready: Callable[[], bool]) -> None:
        super().__init__(message)
        self.ready = ready


class Client:
    """Train ``model`` on ``data``, and send the difference, coded with what was not delivered before.

    Clients of one process may share the model, in which each writes the weights that it starts from, and the
    ``residuals``. A turn depends on weights, ``seed``, id and sequence number alone, dropout included: it
    comes out the same in any process. ``loss`` takes the model and a batch of ``data``. ``copy``: where the
    versions are followed (default: a copy of its own). ``parameters``: the model's, where many share it.
    ``loss_scale``: as of ``take_steps``. The model may be on any device; batches are brought there.

    >>> from thinwire.codecs import Raw
    >>> from thinwire.rounds.update_messages import VersionForm
    >>> from thinwire.rounds.local_training import Samples
    >>> data = Samples(torch.randn(20, 3), torch.zeros(20, dtype=torch.int64))
    >>> client = Client(0, nn.Linear(3, 2), data, ClientResiduals())
    >>> version = VersionMessage(0, 1, 0, 0, VersionForm.FULL, (), steps=2, rate=0.1, codec=Raw())
    >>> client.train(version, start=torch.zeros(1, 8)).samples
    20
    """

    def __init__(
        self,
        id: int,
        model: nn.Module,
        data: Data,
        residuals: ClientResiduals,
        *,
        loss: Loss = classification,
        local: LocalTraining | None = None,
        seed: int = 0,
        copy: ModelCopy | None = None,
        parameters: Parameters | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        self.id, self.data, self.residuals = id, data, residuals
        self._model, self._loss, self._local, self._seed = model, loss, local or LocalSGD(), seed
        self._loss_scale = loss_scale
        self._parameters = parameters or Parameters(model)
        self._copy = copy or ModelCopy(self._parameters.numel, device=self._parameters.device)
        self.sequence = 0  # of the last update; to be told to the server with each request

    @property
    def values(self) -> int:
        """Parameters of the model."""
        return self._parameters.numel

    @property
    def most_samples(self) -> int:
        """How many samples an update may be of; to be told to the server before the first version."""
        return self.data.samples

    def pace(self, seconds: float, steps: int) -> ClientPace:
        """Return how fast this client is, of which a turn of ``steps`` took ``seconds``."""
        return ClientPace(seconds / steps)

    @property
    def signature(self) -> Signature:
        """What the model is made of; to be told to the server before the first version."""
        return self._parameters.signature

    @property
    def held(self) -> Held | None:
        """What version the next one may lead on from; to be told to the server with each request."""
        return self._copy.held

    def train(self, version: VersionMessage, start: Tensor | None = None) -> Update:
        """Return the update that answers ``version``.

        ``start`` [1, N]: the values of that version, where the caller has them; they are not decoded then.
        An update that the server did not take before goes with this one.
        Errors: ``PayloadError`` or ``DesyncError`` for a version that cannot be followed, or was answered
        before: ask for another, with ``held`` and ``sequence``. ``TrainingError`` naming client and step.
        ``InputError`` where the server has another model, or training moves what clients do not share.
        After an error, what is undelivered stays so.
        """
        self._check_new(version)
        values = self._copy.take(version) if start is None else start
        self.residuals.prefetch(self.id)
        return self.answer(version, self.change(version, values))

    def follow(self, version: VersionMessage) -> None:
        """Hold ``version`` without training on it. Errors: ``PayloadError`` or ``DesyncError``."""
        self._copy.take(version)

    def end(self, number: int) -> None:
        """Hear that version ``number`` was the last one, before the server hears that this client is done."""

    def answer(self, version: VersionMessage, change: Tensor) -> Update:
        """Return the update for what the local steps of ``version`` changed, [1, N]."""
        self._check_new(version)
        self.residuals.settle(self.id, version.confirmed)
        codec = placed(version.codec, self._parameters.matrices)
        packet = self.residuals.encode(self.id, version.sequence, change, codec)
        self.sequence, samples = version.sequence, self.data.samples
        return Update(self.id, version.sequence, version.number, samples, version.steps, packet)

    def _check_new(self, version: VersionMessage) -> None:
        made, last, own = version.sequence, self.sequence, self.signature.digest
        if made <= last:  # settled by a newer version; it would be sent twice
            raise DesyncError(
                f"update {made} was made already, and {last} is the last; ask for another version"
            )
        if version.model not in (0, own):
            whose = f"the server's model, version {version.number},"
            Signature(own).check(Signature(version.model), whose)

    def change(self, version: VersionMessage, start: Tensor) -> Tensor:
        """Return start less end [1, N] of the local steps from ``start``; what is undelivered stays so.

        It is on the model's device.
        """
        who = f"client {self.id}, version {version.number}"
        seed = _seed(self._seed, self.id, version.sequence)
        batches = self.data.batches(version.steps, torch.Generator().manual_seed(seed))
        start = start.to(self._parameters.device)  # in one copy
        self._parameters.write(start)
        stood = self._parameters.stands()
        with seeded(seed):
            self._local.run(self._model, self._loss, batches, version.rate, who, self._loss_scale)
        self._parameters.check_kept(stood)
        change = start - self._parameters.row()
        check_finite(float(change.sum()), who, version.steps, version.rate)
        return change


def step_seconds(client: Client) -> float:
    """Return how long a local step takes here, measured."""
    start = torch.zeros(1, client.values)
    trial = VersionMessage(0, 0, 0, 0, VersionForm.FULL, (), TRIED, 1e-6, Raw())
    client.change(trial, start)  # the first one sets torch up
    began = time.perf_counter()
    client.change(trial, start)
    return max(1e-6, (time.perf_counter() - began) / TRIED)


def _seed(*numbers: int) -> int:
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}Q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
