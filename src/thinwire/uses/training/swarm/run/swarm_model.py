"""The model of a swarm at either end: built whole, its loss, what it is worth, and the kit for members."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.rounds.local_training import placed
from thinwire.rounds.parameters import Parameters
from thinwire.runs.data.task import UNLEARNT, inputs, next_token_loss, targets
from thinwire.runs.machine.cache import cache_folder
from thinwire.runs.machine.compute import Compute
from thinwire.runs.models.folder import write_bare_model
from thinwire.runs.models.lora import add_adapters
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.models.split import build_stage, tie
from thinwire.runs.models.stage import ModelStage
from thinwire.uses.training.swarm.kit import pack_kit

AT_ONCE = 8  # blocks that are evaluated together


def build_whole(source: ModelSource, lora: int, seed: int, compute: Compute) -> ModelStage:
    """Return the model in one piece on its device; with ``lora`` adapters of that rank are all it trains."""
    layers = range(source.config.num_hidden_layers)
    stage = build_stage(source, [layers], 0, seed)
    if source.config.tie_word_embeddings:
        tie(stage)
    if lora:
        add_adapters(stage, lora, seed)
    return stage.to(compute.device)


def loss_in(compute: Compute) -> Callable[[nn.Module, Any], Tensor]:
    """Return the loss of a batch of blocks [B, seq + 1], in the dtype of compute: a mean in nats a token."""

    def loss(model: nn.Module, blocks: Tensor) -> Tensor:
        with compute.autocast():
            return next_token_loss(model(inputs(blocks)), targets(blocks))

    return loss


@dataclass(eq=False)
class Evaluator:
    """What a row of weights is worth: losses of blocks, by a model that is put back as it was."""

    model: nn.Module
    parameters: Parameters
    compute: Compute

    def losses(self, row: Tensor, blocks: Tensor) -> Tensor:
        """Return the loss of each block [n], nats a token, of the weights ``row`` [1, N], on the CPU."""
        with evaluating(self.model, self.parameters, row):
            return torch.cat([self._each(some) for some in blocks.split(AT_ONCE)]).cpu()

    def mean(self, row: Tensor, blocks: Tensor) -> float:
        """Return the mean of these losses."""
        return float(self.losses(row, blocks).mean())

    def _each(self, blocks: Tensor) -> Tensor:
        blocks = placed(blocks, self.compute.device)
        wanted = targets(blocks)
        with self.compute.autocast():
            logits = self.model(inputs(blocks)).float()
        found = nn.functional.cross_entropy(
            logits.transpose(1, 2), wanted, ignore_index=UNLEARNT, reduction="none"
        )
        return found.sum(1) / (wanted != UNLEARNT).sum(1).clamp(min=1)


@contextmanager
def evaluating(model: nn.Module, parameters: Parameters, row: Tensor) -> Iterator[None]:
    """Let a model have the weights ``row`` [1, N] and take no gradients in the block; then it trains on."""
    training = model.training
    parameters.write(row)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def make_kit(source: ModelSource, whole: bool) -> bytes:
    """Return what members build the model from; ``whole``: with its weights, which adapters leave frozen."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_bare_model(folder, source, whole)
        return pack_kit(folder)


def kept_kit(digest: str) -> Path:
    """Return where a kit is kept once it has come."""
    return cache_folder() / "kits" / digest


def trained_in(compute: Compute) -> Mapping[str, Any]:
    """Return how a member trains: its loss in the dtype of compute; weights and sums stay float32."""
    return {"loss": loss_in(compute), "loss_scale": compute.loss_scale}
