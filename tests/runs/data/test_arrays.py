"""Arrays of a user's own: read as they are, refused in a sentence, never unpickled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each import each

from thinwire.runs.data.arrays import read_arrays
from thinwire.types import InputError

Arrays = dict[str, Any]


def good() -> Arrays:
    rng = np.random.default_rng(0)
    x, y = rng.random((12, 3, 4)), np.arange(12) % 3
    return {"x_train": x, "y_train": y.astype(np.uint8), "x_test": x[:5], "y_test": y[:5]}


def test_arrays_become_tensors(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **good(), more=np.zeros(3))
        x, y, test, test_labels = read_arrays(tmp_path / "a.npz")
        assert (x.shape, x.dtype, test.shape) == ((12, 1, 3, 4), torch.float32, (5, 1, 3, 4))
        assert torch.equal(x[:, 0], torch.from_numpy(good()["x_train"]).float())
        assert y.tolist() == [0, 1, 2] * 4 and test_labels.tolist() == [0, 1, 2, 0, 1]


def test_bytes_are_shades_and_other_numbers_stay(tmp_path: Path) -> None:
    for dtype, expected in ((np.uint8, 1.0), (">i2", 255.0), (np.float64, 255.0)):
        x = np.full((4, 2), 255).astype(dtype)
        np.savez(
            tmp_path / "a.npz",
            **good() | {"x_train": x, "y_train": np.arange(4) % 3, "x_test": x[:5]} | _labels(4),
        )
        assert read_arrays(tmp_path / "a.npz")[0].tolist() == [[expected] * 2] * 4


def _labels(n: int) -> Arrays:
    return {"y_test": np.arange(n) % 3}


def put(name: str, value: Any) -> Callable[[Arrays], Arrays]:
    return lambda arrays: arrays | {name: value}


@each(
    "change, words",
    [
        (lambda a: {k: v for k, v in a.items() if k != "y_test"}, "has no array y_test; write it with"),
        (put("x_train", np.array([{}] * 12)), "cannot be read as arrays .*allow_pickle=False"),
        (put("x_train", np.array(["a"] * 12)), "x_train of .* is <U1"),
        (put("x_train", np.zeros((12, 0))), r"x_train of .* shape \[12, 0\]"),
        (put("x_train", np.full((12, 3, 4), np.nan)), "x_train of .* not finite"),
        (put("x_train", np.full((12, 3, 4), 1e300)), "x_train of .* not finite"),
        (put("x_test", np.zeros((5, 4, 3))), r"shapes \[1, 3, 4\] to train on and \[1, 4, 3\]"),
        (put("y_train", np.arange(11)), "y_train of .* each of the 12 samples"),
        (put("y_train", np.arange(12.0)), "y_train of .* is float64"),
        (put("y_train", np.arange(12) - 1), "y_train of .* labels from -1"),
        (put("y_train", np.arange(12) * 9999), "give classes from 0 to below 10000"),
        (put("y_test", np.array([0, 1, 2, 3, 0])), "y_test of .* has the class 3"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    change: Callable[[Arrays], Arrays], words: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", **change(good()))
    with pytest.raises(InputError, match=words) as e:
        read_arrays(tmp_path / "a.npz")
    assert "\n" not in str(e.value)


def test_files_that_are_no_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **good())
    whole = (tmp_path / "a.npz").read_bytes()
    at = whole.index(b"NUMPY") - 1
    for data in (b"", b"nothing of the kind", whole[:-30], whole[:at] + bytes(9) + whole[at + 9 :]):
        (tmp_path / "b.npz").write_bytes(data)
        with pytest.raises(InputError, match=r"b\.npz cannot be read as arrays \(.*numpy\.savez"):
            read_arrays(tmp_path / "b.npz")
    with pytest.raises(InputError, match=r"no\.npz cannot be read as arrays \(No such file"):
        read_arrays(tmp_path / "no.npz")
