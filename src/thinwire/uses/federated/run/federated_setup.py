"""What a federated run starts from: data, whose they are, the model, and how good a model is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs import Raw
from thinwire.heads import F64, U64, Head
from thinwire.rounds.client import Client
from thinwire.rounds.local_training import Samples, classification
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import VersionForm, VersionMessage
from thinwire.runs.machine import devices
from thinwire.runs.machine.compute import ON_CPU, Compute
from thinwire.uses.federated.run.client_models import build_model
from thinwire.uses.federated.run.datasets import Dataset, load_dataset
from thinwire.uses.federated.run.options import FederatedConfig, JoinConfig
from thinwire.uses.federated.run.partitioner import Partitioner, counts

AT_ONCE = 100  # held-out samples that are named together; [measured] of 1000, caches hold too little
LOOKED_AT = 2000  # held-out samples of an evaluation, drawn once; the last one takes all
DRAW = 0x7E57  # of these, the same for every seed: a file may have its samples in any order


class LocalTurn(Head):
    """What one client is to compute."""

    client: U64
    sequence: U64
    version: U64
    steps: U64
    rate: F64


@dataclass(eq=False)
class Setup:
    """One seed's run: the same for the same options, in any process."""

    config: FederatedConfig
    seed: int
    data: Dataset
    parts: tuple[Tensor, ...]  # whose samples are whose
    model: nn.Module
    on: Compute = ON_CPU

    @classmethod
    def of(cls, config: FederatedConfig, seed: int, data: Dataset | None = None) -> Setup:
        """Return the setup; ``data`` where they are read already. Errors: ``InputError``."""
        data = data or load_dataset(config.data)
        parts = Partitioner.parse(config.split).deal(data, config.clients, seed)
        return cls.alone(config, seed, data, parts)

    @classmethod
    def alone(
        cls, config: FederatedConfig, seed: int, data: Dataset, parts: tuple[Tensor, ...] = ()
    ) -> Setup:
        """Return the setup of these parts, none for a server alone. Errors: ``InputError``."""
        on = compute_of(config)
        model = build_model(config.model, data.shape, data.classes, seed).to(on.device)
        return cls(config, seed, data, parts, model, on)

    def __post_init__(self) -> None:
        self.parameters = Parameters(self.model)
        self.weights = self.parameters.read()  # version 0, [1, N]

    @property
    def values(self) -> int:
        """Parameters of the model."""
        return self.weights.numel()

    @property
    def counts(self) -> list[list[int]]:
        """Samples by client and class."""
        return counts(self.data, self.parts).tolist() if self.parts else []

    def clients(self, residuals: ClientResiduals) -> Mapping[int, Client]:
        """Return the clients, which share the model and the residuals."""
        d, batch = self.data, self.config.batch
        return {
            i: Client(
                i,
                self.model,
                Samples(d.inputs, d.labels, batch, part, d.prepare),
                residuals,
                seed=self.seed,
                parameters=self.parameters,
                **training_in(self.on),
            )
            for i, part in enumerate(self.parts)
        }

    @cached_property
    def _computing(self) -> Mapping[int, Client]:
        return self.clients(ClientResiduals())

    def compute(self, turn: LocalTurn, weights: Tensor) -> Tensor:
        """Return what a turn changes, [1, N]."""
        version = VersionMessage(
            turn.version, turn.sequence, 0, 0, VersionForm.FULL, (), turn.steps, turn.rate, Raw()
        )
        return self._computing[turn.client].change(version, weights)

    @property
    def looks_at_some(self) -> bool:
        """Whether an evaluation on the way takes a part of the held-out samples."""
        return len(self.data.test_labels) > LOOKED_AT

    @cached_property
    def _drawn(self) -> Tensor:
        order = torch.randperm(len(self.data.test_labels), generator=torch.Generator().manual_seed(DRAW))
        return order[:LOOKED_AT].sort().values

    def accuracy(self, weights: Tensor, all_samples: bool = False) -> float:
        """Return which share of the held-out samples is named right: of some drawn at random, or of all."""
        inputs, labels = self.data.test_inputs, self.data.test_labels
        if not all_samples and self.looks_at_some:
            inputs, labels = inputs[self._drawn], labels[self._drawn]
        self.parameters.write(weights)
        self.model.eval()
        device = self.on.device
        with torch.no_grad(), self.on.autocast():
            given = (self.data.prepare(some).to(device) for some in inputs.split(AT_ONCE))
            named = [self.model(some).argmax(1) for some in given]
        return float((torch.cat(named) == labels.to(device)).float().mean())


def compute_of(config: FederatedConfig | JoinConfig) -> Compute:
    """Return where and in what a process computes, to the same bits as others on such a card."""
    torch.backends.cudnn.deterministic = True  # else its convolutions add in whatever order is done first
    return Compute.of(devices.own(config.device), config.dtype)


def training_in(compute: Compute) -> dict[str, Any]:
    """Return how a client trains: the loss in the dtype of compute; weights and sums stay float32."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with compute.autocast():
            return classification(model, batch)

    return {"loss": loss, "loss_scale": compute.loss_scale}
