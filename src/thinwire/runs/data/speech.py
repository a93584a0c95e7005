"""Spoken digits by several speakers (the Free Spoken Digit Dataset), each as a small spectrogram."""

from __future__ import annotations

import io
import lzma
import os
import re
import tarfile
import wave
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.types import InputError, require

FSDD = "fsdd"
PLACES = ("fsdd-test300.tar.xz", FSDD, "free-spoken-digit-dataset")  # in the folder THINWIRE_DATA names
NAME = re.compile(r"([0-9])_([A-Za-z]+)_([0-9]{1,4})\.wav")
RATE = 8000  # samples a second
SIDE = 32  # bands of a spectrogram, and its steps of time
WINDOW = 256  # samples of a window: its bands are 31 Hz apart
FILE_LIMIT = 1 << 20  # bytes of a recording; the longest has 37 kB
FLOOR = 1e-6  # of a band's energy, where full scale is 1: quieter than what was recorded
OWN_HELD_OUT = 5  # recordings below it are the set's own test part
BROKEN = (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error, wave.Error)
REMEDY = (
    f"put {PLACES[0]}, or a clone of free-spoken-digit-dataset named {FSDD}, into the folder that "
    f"THINWIRE_DATA names, or give --data {FSDD}:FOLDER"
)


@dataclass(frozen=True)
class Recording:
    """One spoken digit: its spectrogram [1, 32, 32], who spoke it, and its number among theirs."""

    spectrogram: Tensor
    digit: int
    speaker: str
    number: int


def find_speech() -> Path:
    """Return where the recordings are in the folder that ``THINWIRE_DATA`` names.

    ``InputError`` where they are not.
    """
    root = os.environ.get("THINWIRE_DATA")
    for name in PLACES if root else ():
        if (Path(root or "") / name).exists():
            return Path(root or "") / name
    raise InputError(f"{FSDD} is not on this machine; {REMEDY}")


def read_speech(place: Path) -> list[Recording]:
    """Return the recordings of an archive, or of a folder or its ``recordings/``, ordered by their names.

    Errors: ``InputError`` where there are none, and for the first that cannot be read.
    """
    try:
        files = dict(_archived(place) if place.is_file() else _filed(place))
    except BROKEN as e:
        raise InputError(f"{FSDD}: {place} cannot be read ({_why(e)}); {REMEDY}") from e
    require(bool(files), InputError, f"{place} holds no recording named like 7_jackson_32.wav; {REMEDY}")
    return [_recording(name, files[name], place) for name in sorted(files)]


def held_out(recordings: list[Recording]) -> list[bool]:
    """Say which recordings are not to be trained on: numbers 0 to 4, by the set's own rule.

    Of a set that has no others, the test part alone, it is number 4 of each digit and speaker.
    """
    whole = any(r.number >= OWN_HELD_OUT for r in recordings)
    return [r.number < OWN_HELD_OUT if whole else r.number == OWN_HELD_OUT - 1 for r in recordings]


def spectrogram(sound: Tensor) -> Tensor:
    """Return the logarithm of a sound's energy, [1, 32, 32]: bands by time, mean 0 and deviation 1.

    sound: [N] at 8 kHz. Four neighbouring bands of a short-time Fourier transform make one. The sound's whole
    length becomes 32 steps: how fast a digit was spoken says little of which it is.

    >>> spectrogram(torch.ones(3000)).shape
    torch.Size([1, 32, 32])
    """
    sound = F.pad(sound, (0, max(0, WINDOW - len(sound))))
    window = torch.hann_window(WINDOW)
    bands = torch.stft(sound, WINDOW, WINDOW // 4, window=window, return_complex=True)[1:].abs().square()
    energy = F.adaptive_avg_pool2d(bands[None] / WINDOW, SIDE).add(FLOOR).log()
    return (energy - energy.mean()) / energy.std().clamp_min(FLOOR)


def _filed(folder: Path) -> Iterator[tuple[str, bytes]]:
    inner = folder / "recordings"
    for file in sorted((inner if inner.is_dir() else folder).iterdir()):
        if NAME.fullmatch(file.name) and file.stat().st_size <= FILE_LIMIT:
            yield file.name, file.read_bytes()


def _archived(file: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(file) as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            wanted = NAME.fullmatch(name) and member.isfile() and member.size <= FILE_LIMIT
            found = tar.extractfile(member) if wanted else None
            if found is not None:
                yield name, found.read()


def _recording(name: str, data: bytes, place: Path) -> Recording:
    try:
        with wave.open(io.BytesIO(data)) as w:
            form = (w.getnchannels(), w.getsampwidth(), w.getframerate())
            frames = w.readframes(w.getnframes())
    except BROKEN as e:
        raise InputError(f"{FSDD}: {name} in {place} cannot be read ({_why(e)}); {REMEDY}") from e
    fits = form == (1, 2, RATE) and len(frames) >= 2
    other = f"{FSDD}: {name} in {place} is not one channel of 16 bits at {RATE} Hz with sound in it; {REMEDY}"
    require(fits, InputError, other)
    samples = torch.frombuffer(bytearray(frames[: len(frames) // 2 * 2]), dtype=torch.int16)
    digit, speaker, number = NAME.fullmatch(name).groups()  # type: ignore[union-attr]  # only such names
    return Recording(spectrogram(samples.float() / 32768), int(digit), speaker, int(number))


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
