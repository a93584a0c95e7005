"""Small labelled samples, spoken or not, for clients to learn."""

from __future__ import annotations

import io
import math
import tarfile
import wave
from pathlib import Path

import torch

from thinwire.uses.federated.run.datasets import Dataset

RATE = 8000


def toy(samples: int = 600, classes: int = 10, seed: int = 0) -> Dataset:
    """Return samples of one number each, of classes drawn at random."""
    labels = torch.randint(0, classes, (samples,), generator=torch.Generator().manual_seed(seed))
    x = labels[:, None].float()
    return Dataset("toy", x, labels, x[:1], labels[:1], classes)


def sound(digit: int, seconds: float = 0.2, rate: int = RATE, channels: int = 1) -> bytes:
    """Return a recording of a tone that is the higher, the larger the digit."""
    steps = torch.arange(int(seconds * rate) * channels) * (2 * math.pi * (300 + 300 * digit) / rate)
    file = io.BytesIO()
    with wave.open(file, "wb") as w:
        w.setnchannels(channels)
        w.setsampwidth(2)
        w.setframerate(rate)
        w.writeframes((steps.sin() * 9000).to(torch.int16).numpy().tobytes())
    return file.getvalue()


def spoken(speakers: tuple[str, ...] = ("ann", "bob"), numbers: int = 5) -> dict[str, bytes]:
    """Return recordings by their names: three digits by each speaker."""
    return {
        f"{d}_{s}_{n}.wav": sound(d, 0.1 + 0.05 * n)
        for d in range(3)
        for s in speakers
        for n in range(numbers)
    }


def write_archive(file: Path, recordings: dict[str, bytes]) -> Path:
    """Pack recordings as the set's test part is packed."""
    with tarfile.open(file, "w:xz") as tar:
        for name, data in recordings.items():
            member = tarfile.TarInfo(f"recordings/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file
