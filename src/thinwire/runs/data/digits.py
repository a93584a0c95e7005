"""Scanned digits of 8 x 8 pixels: the 1,797 that come with scikit-learn."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.types import InputError, MissingExtra

FILE = "datasets/data/digits.csv.gz"  # of the package: 64 pixels and the digit a line
SCANS, SIDE, CLASSES = 1797, 8, 10
SHADES = 16  # a pixel is from 0 to this
MEAN, DEVIATION = 0.305, 0.376  # of the pixels, where the darkest is 1
REMEDY = "pip install 'thinwire[federated]'"


def load_digits() -> tuple[Tensor, Tensor]:
    """Return the scans [1797, 1, 8, 8], float32 with mean 0 and deviation 1, and the digits [1797], int64.

    The package's file is read alone: importing scikit-learn would take each process over a second.
    ``MissingExtra`` where it is not installed, ``InputError`` where its file is another one.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra(f"the scanned digits need scikit-learn: {REMEDY}")
    file = Path(spec.submodule_search_locations[0]) / FILE
    try:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    except (OSError, ValueError, EOFError) as e:
        raise InputError(f"scikit-learn's digits cannot be read from {file}; {REMEDY} anew") from e
    if table.shape != (SCANS, SIDE * SIDE + 1):
        raise InputError(f"{file} has scans of shape {list(table.shape)}, not the {SCANS}; {REMEDY} anew")
    pixels, digits = table[:, :-1], table[:, -1]
    return ((pixels / SHADES - MEAN) / DEVIATION).unflatten(1, (1, SIDE, SIDE)), digits.long()
