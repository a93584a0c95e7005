"""A user's own samples: an ``.npz`` file of four arrays, read without unpickling anything."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from thinwire.types import WRONG_VALUES, InputError, require

PARTS = ("x_train", "y_train", "x_test", "y_test")
MAX_CLASSES = 10_000  # beyond it, labels are taken for something else
BROKEN = (OSError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error, *WRONG_VALUES)
REMEDY = "write it with numpy.savez(FILE, x_train=..., y_train=..., x_test=..., y_test=...)"


def read_arrays(file: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs and labels to train on, then those held out, of a file that ``numpy.savez`` wrote.

    inputs: [N, ...] float32, images as [N, channels, height, width]; without channels, they get one. Bytes
    are taken for shades from 0 to 255 and become 0 to 1; other numbers stay as they are. labels: [N] int64,
    from 0 up. ``InputError`` for what cannot be read, has no samples or not a number, or does not fit.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            missing = [part for part in PARTS if f"{part}.npy" not in archive.namelist()]
            require(not missing, InputError, f"{file} has no array {', '.join(missing)}; {REMEDY}")
            arrays = [_array(archive, part) for part in PARTS]
    except InputError:
        raise
    except BROKEN as e:
        why = str(getattr(e, "strerror", None) or e or type(e).__name__).split("\n")[0]
        raise InputError(f"{file} cannot be read as arrays ({why}); {REMEDY}") from e
    train, test = (_inputs(arrays[i], f"{PARTS[i]} of {file}") for i in (0, 2))
    seen, unseen = (_labels(arrays[i], len(arrays[i - 1]), f"{PARTS[i]} of {file}") for i in (1, 3))
    alike = train.shape[1:] == test.shape[1:]
    shapes = f"{list(train.shape[1:])} to train on and {list(test.shape[1:])} to test on"
    require(alike, InputError, f"samples of {file} have shapes {shapes}; give both the same")
    known = int(unseen.max()) <= int(seen.max())
    unknown = f"y_test of {file} has the class {int(unseen.max())}, which y_train does not reach; correct it"
    require(known, InputError, unknown)
    return train, seen, test, unseen


def _array(archive: zipfile.ZipFile, part: str) -> np.ndarray[Any, Any]:
    with archive.open(f"{part}.npy") as f:
        # What numpy.load does with such a file, but for the pickles that it could be told to read.
        return npy.read_array(f, allow_pickle=False)


def _inputs(array: np.ndarray[Any, Any], what: str) -> Tensor:
    number = array.dtype.kind in "uifb" and array.ndim >= 2 and array.size > 0
    kind = f"{what} is {array.dtype} of shape {list(array.shape)}"
    require(number, InputError, f"{kind}; give numbers [samples, values], or [samples, height, width]")
    scale = 255 if array.dtype == np.uint8 else 1
    with np.errstate(over="ignore"):  # what is beyond float32 is refused below
        x = torch.from_numpy(array.astype(np.float32)).div_(scale)
    require(bool(x.isfinite().all()), InputError, f"{what} has a value that is not finite; leave it out")
    return x.unsqueeze(1) if x.dim() == 3 else x


def _labels(array: np.ndarray[Any, Any], samples: int, what: str) -> Tensor:
    fits = array.dtype.kind in "ui" and array.shape == (samples,)
    kind = f"{what} is {array.dtype} of shape {list(array.shape)}"
    require(fits, InputError, f"{kind}; give a whole number for each of the {samples} samples")
    least, most = int(array.min()), int(array.max())
    range_ = f"{what} has labels from {least} to {most}; give classes from 0 to below {MAX_CLASSES}"
    require(least >= 0 and most < MAX_CLASSES, InputError, range_)
    return torch.from_numpy(array.astype(np.int64))
