"""Which garments a picture shows, as a small network trained on Fashion-MNIST sees them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor

from thinwire.runs.data.fashion import DEVIATION, MEAN
from thinwire.runs.data.fashion import SIDE as WITHOUT_EDGE
from thinwire.runs.models.cnn import CnnConfig, build_cnn
from thinwire.types import InputError, require
from thinwire.uses.pictures.run.sheets import SIDE, Sheet, parted

if TYPE_CHECKING:
    from torch import nn

WEIGHTS = Path(__file__).parent / "classifier.safetensors"
EDGE = (SIDE - WITHOUT_EDGE) // 2  # black pixels around a garment


@cache
def load_classifier() -> nn.Module:
    """Return the trained network. Errors: ``InputError`` where its weights are not in the package."""
    require(WEIGHTS.exists(), InputError, f"{WEIGHTS.name} is not in this package; install thinwire anew")
    network = build_cnn(CnnConfig())
    network.load_state_dict({name: p.float() for name, p in load_file(WEIGHTS).items()})
    return network.eval()


def seen(garments: Tensor) -> Tensor:
    """Return what the network takes, [N, 1, 28, 28], for garments [N, 32, 32] in 0..1."""
    return (garments[:, None, EDGE:-EDGE, EDGE:-EDGE] - MEAN) / DEVIATION


def recognised(garments: Tensor) -> Tensor:
    """Return the classes [N] that the network takes garments [N, 32, 32] in 0..1 for."""
    with torch.no_grad():
        return load_classifier()(seen(garments)).argmax(1)


def accuracy(image: Tensor, sheet: Sheet) -> float:
    """Return the share of a picture's garments that are taken for the classes named for them."""
    return float((recognised(parted(image, sheet)) == torch.tensor(sheet.classes)).float().mean())
