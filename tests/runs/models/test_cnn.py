"""The network for images: its weights come from the seed alone, it learns, and it is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from thinwire.runs.data.fashion import IMAGES, load_fashion
from thinwire.runs.data.task import BatchLoss
from thinwire.runs.models.cnn import CNN, CnnConfig, build_cnn
from thinwire.runs.models.folder import finish_model, save_stage
from thinwire.runs.models.model_source import resolve_model
from thinwire.types import InputError
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.stepper import make_optimiser

IMAGES_LEARNT, STEPS = 128, 48


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, second, other = (build_cnn(CnnConfig(), seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
    assert sum(p.numel() for p in first.parameters()) == 417_482


def test_it_is_saved_by_its_own_names(tmp_path: Path) -> None:
    model, source = build_cnn(CnnConfig()), resolve_model(CNN, None)
    save_stage(model, tmp_path, 0, 1)
    finish_model(tmp_path, source, 1)
    again = build_cnn(CnnConfig(), seed=1)
    again.load_state_dict(load_file(tmp_path / "model-00001-of-00001.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    assert source.digest == resolve_model(CNN, None).digest


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd:momentum=0.9"])
def test_it_learns_a_few_images(optimizer: str) -> None:
    """With what a run takes: its optimiser and rate, and the loss that counts right answers."""
    try:
        blocks = load_fashion()[0][:IMAGES_LEARNT]
    except InputError as e:
        pytest.skip(str(e))
    model, config = build_cnn(CnnConfig()), _config(optimizer)
    optimiser, loss = make_optimiser(config, model.parameters()), BatchLoss(accuracy=True)
    for step in range(STEPS):
        block = blocks[64 * step % IMAGES_LEARNT :][:64]
        _loss(model, loss, block).backward()
        optimiser.step()
        optimiser.zero_grad()
    with torch.no_grad():
        _loss(model, loss, blocks)
    assert loss.right / IMAGES_LEARNT > 0.8


def _config(optimizer: str) -> TrainConfig:
    return TrainConfig(model="gpt2-lab", optimizer=optimizer)  # which begins with random weights too


def _loss(model: nn.Module, loss: BatchLoss, block: torch.Tensor) -> torch.Tensor:
    wanted = IMAGES.targets(block)
    loss.begin(wanted, 1)
    return loss(model(IMAGES.inputs(block)), wanted)
