"""What ``--data`` names: shapes, what is held out, and never another set than the one that was asked for."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from clothes import write_clothes
from each import each
from samples import spoken, write_archive

from thinwire.runs.data import fashion
from thinwire.types import InputError, MissingExtra
from thinwire.uses.federated.run.client_program import own_samples
from thinwire.uses.federated.run.datasets import Dataset, load_dataset


def check(data: Dataset) -> None:
    """Assert what holds for any data."""
    for x, y in ((data.inputs, data.labels), (data.test_inputs, data.test_labels)):
        assert (data.prepare(x[:3]).dtype, y.dtype) == (torch.float32, torch.int64) and len(x) == len(y) > 0
        assert tuple(x.shape[1:]) == data.shape and int(y.min()) >= 0 and int(y.max()) < data.classes


def test_digits_are_scikit_learns_of_which_a_fifth_is_held_out() -> None:
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed")
    data = load_dataset("digits")
    check(data)
    assert (data.shape, len(data), len(data.test_labels), data.classes) == ((1, 8, 8), 1438, 359, 10)
    both = torch.cat((data.labels, data.test_labels)).bincount()
    assert both.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as its own page says
    assert data.labels[:8].tolist() == [0, 1, 2, 3, 5, 6, 7, 8] and data.test_labels[:2].tolist() == [4, 9]
    shades = (data.inputs * 0.376 + 0.305) * 16
    assert torch.allclose(shades, shades.round(), atol=1e-4) and 15.9 < float(shades.max()) < 16.1
    assert "sklearn" not in sys.modules  # importing it would cost each process more than all else


def test_digits_without_the_package_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"scikit-learn: pip install 'thinwire\[federated\]'"):
        load_dataset("digits")


def test_spoken_digits_keep_their_speakers(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.tar.xz", spoken())
    data = load_dataset(f"fsdd:{tmp_path / 'a.tar.xz'}")
    check(data)
    assert (data.shape, len(data), len(data.test_labels), data.classes) == ((1, 32, 32), 24, 6, 10)
    assert data.voices == ("ann", "bob") and data.speakers is not None
    assert (
        data.speakers.tolist() == ([0] * 4 + [1] * 4) * 3
        and data.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    )
    assert "6 of 30 recordings are held out" in data.notes[0]


def test_a_file_of_arrays(tmp_path: Path) -> None:
    x, y = np.zeros((6, 5)), np.arange(6) % 3
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    data = load_dataset(str(tmp_path / "a.npz"))
    check(data)
    assert (data.shape, data.classes, data.speakers) == ((5,), 3, None)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y * 0, x_test=x[:2], y_test=y[:2] * 0)
    with pytest.raises(InputError, match="one class alone"):
        load_dataset(str(tmp_path / "a.npz"))


def test_clothes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_clothes(tmp_path, train=30, t10k=20)
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path))
    data = load_dataset("fashion-mnist")
    check(data)
    assert (data.shape, len(data), len(data.test_labels)) == ((1, 28, 28), 30, 20)
    train, _ = fashion.load_fashion()
    assert torch.equal(data.prepare(data.inputs), fashion.inputs(train))
    (batch, _), *_ = own_samples(data, torch.arange(4), 0).batches(1, torch.Generator())
    assert batch.dtype == torch.float32 and batch.shape == (4, 1, 28, 28)  # on real machines, too


@each(
    "name, words",
    [
        ("", "--data '' is unknown; give fashion-mnist, digits, fsdd, or a file FOLDER.npz"),
        ("digit", "--data 'digit' is unknown; did you mean digits"),
        ("digits:1", "is unknown; did you mean digits"),
        ("mnist", "--data 'mnist' is unknown"),
        ("fsdd", "fsdd is not on this machine; put"),
        ("fashion-mnist", "fashion-mnist is not on this machine; run"),
        ("no/such.npz", r"no/such\.npz cannot be read"),
        ("fsdd:no/such", "no/such cannot be read"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path))
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(fashion, "PACKAGED", tmp_path / "packaged")
    with pytest.raises(InputError, match=words) as e:
        load_dataset(name)
    assert "\n" not in str(e.value)


@each("name, shape, held", [("fashion-mnist", (1, 28, 28), 10_000), ("fsdd", (1, 32, 32), 60)])
def test_the_real_sets(name: str, shape: tuple[int, ...], held: int) -> None:
    if "THINWIRE_DATA" not in os.environ:
        pytest.skip("THINWIRE_DATA is not set")
    try:
        data = load_dataset(name)
    except InputError as e:
        pytest.skip(str(e))
    check(data)
    assert (data.shape, len(data.test_labels)) == (shape, held)
    some = data.prepare(data.inputs[::6])
    assert abs(float(some.mean())) < 0.02 and abs(float(some.std()) - 1) < 0.02
