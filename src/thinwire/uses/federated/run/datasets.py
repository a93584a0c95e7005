"""What clients learn, by name: ``fashion-mnist``, ``digits``, ``fsdd``, or a file of arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thinwire.rounds.local_training import as_they_are
from thinwire.runs.data import digits, fashion
from thinwire.runs.data.arrays import read_arrays
from thinwire.runs.data.speech import FSDD, find_speech, held_out, read_speech
from thinwire.runs.options import nearest
from thinwire.types import InputError, require

DIGITS = "digits"
NAMES = (fashion.FASHION, DIGITS, FSDD)
FIFTH = 5  # every fifth scan is held out: neighbours are often by one hand, so hands are in both parts


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples to train on and samples held out, with their classes.

    Inputs are [N, ...], mostly [N, channels, height, width]: float32, or bytes, of which ``prepare`` makes
    what a model takes, some at a time. Labels are [N] int64, below ``classes``.
    """

    name: str
    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    classes: int
    speakers: Tensor | None = None  # [N] int64: who spoke each sample to train on
    voices: tuple[str, ...] = ()  # the speakers' names, by those numbers
    notes: tuple[str, ...] = ()  # what a report has to say about it
    prepare: Callable[[Tensor], Tensor] = as_they_are

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.inputs.shape[1:])

    def __len__(self) -> int:
        return len(self.labels)


def load_dataset(name: str) -> Dataset:
    """Return the data that ``--data`` names: ``fashion-mnist``, ``digits``, ``fsdd[:PLACE]``, ``FILE.npz``.

    Never another than that. Errors: ``InputError``, one sentence, for what is unknown, missing or damaged;
    ``MissingExtra`` where ``digits`` are asked for without scikit-learn.
    """
    kind, colon, place = name.partition(":")
    if kind == FSDD:
        return _fsdd(name, Path(place) if colon else find_speech())
    if name == fashion.FASHION:
        return _fashion()
    if name == DIGITS:
        return _digits()
    if name.endswith(".npz"):
        return _arrays(name)
    hint = nearest(name, NAMES) or f"; give {', '.join(NAMES)}, or a file FOLDER.npz of arrays"
    raise InputError(f"--data {name!r} is unknown{hint}")


def _fashion() -> Dataset:
    train, test = fashion.load_fashion()
    parts = (fashion.pictures(train), fashion.targets(train), fashion.pictures(test), fashion.targets(test))
    return Dataset(fashion.FASHION, *parts, fashion.CLASSES, prepare=fashion.normed)


def _digits() -> Dataset:
    x, y = digits.load_digits()
    test = torch.arange(len(y)) % FIFTH == FIFTH - 1
    return Dataset(DIGITS, x[~test], y[~test], x[test], y[test], digits.CLASSES)


def _fsdd(name: str, place: Path) -> Dataset:
    recordings = read_speech(place)
    test = torch.tensor(held_out(recordings))
    x = torch.stack([r.spectrogram for r in recordings])
    y = torch.tensor([r.digit for r in recordings])
    voices = tuple(sorted({r.speaker for r in recordings}))
    who = torch.tensor([voices.index(r.speaker) for r in recordings])
    both = bool(test.any()) and not bool(test.all())
    require(both, InputError, f"{place} has no recording to train on or none to test; give the whole set")
    rule = f"{name}: {int(test.sum())} of {len(test)} recordings are held out; their speakers are trained on"
    return Dataset(name, x[~test], y[~test], x[test], y[test], 10, who[~test], voices, (rule,))


def _arrays(name: str) -> Dataset:
    train, labels, test, test_labels = read_arrays(Path(name))
    classes = int(labels.max()) + 1
    require(classes > 1, InputError, f"y_train of {name} has one class alone; give samples of two or more")
    return Dataset(name, train, labels, test, test_labels, classes)
