"""Spoken digits: found, read and held out by fixed rules; what is damaged is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from each import each
from samples import RATE, sound, spoken, write_archive

from thinwire.runs.data import speech
from thinwire.runs.data.speech import held_out, read_speech, spectrogram
from thinwire.types import InputError


def test_archive_and_folder_hold_the_same_recordings_in_order(tmp_path: Path) -> None:
    for name, data in spoken().items():
        (tmp_path / "set" / "recordings").mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / "recordings" / name).write_bytes(data)
    (tmp_path / "set" / "recordings" / "notes.txt").write_text("passed over")
    archived = read_speech(write_archive(tmp_path / "a.tar.xz", spoken()))
    for place in (tmp_path / "set", tmp_path / "set" / "recordings"):
        filed = read_speech(place)
        assert [(r.digit, r.speaker, r.number) for r in filed] == [
            (d, s, n) for d in range(3) for s in ("ann", "bob") for n in range(5)
        ]
        assert all(torch.equal(a.spectrogram, b.spectrogram) for a, b in zip(archived, filed, strict=True))


def test_a_spectrogram_shows_pitch_not_loudness_nor_length() -> None:
    time = torch.arange(RATE) / RATE
    low, high = ((2 * torch.pi * f * time).sin() for f in (600, 3060))
    bands = [spectrogram(x).mean(2).argmax().item() for x in (low, high)]
    assert bands == [4, 24]  # of 125 Hz each
    quiet = spectrogram(low / 4)
    assert quiet.shape == (1, 32, 32) and (quiet.mean(2).argmax() == 4).all()
    for x in (low, low[:100], torch.zeros(5)):
        assert spectrogram(x).shape == (1, 32, 32) and spectrogram(x).isfinite().all()


def test_the_sets_own_test_part_is_held_out_or_of_that_alone_the_last(tmp_path: Path) -> None:
    part = read_speech(write_archive(tmp_path / "a.tar.xz", spoken()))
    assert {r.number for r, test in zip(part, held_out(part), strict=True) if test} == {4}
    whole = read_speech(write_archive(tmp_path / "b.tar.xz", spoken(("ann",), numbers=7)))
    assert held_out(whole) == [r.number < 5 for r in whole]


@each(
    "data, words",
    [
        (b"", r"7_eve_0\.wav in .* cannot be read"),
        (b"RIFF" + b"\xff" * 99, r"7_eve_0\.wav in .* cannot be read"),
        (sound(7)[:30], r"7_eve_0\.wav in .* cannot be read"),
        (sound(7, seconds=0), "with sound in it"),
        (sound(7, rate=16_000), "not one channel of 16 bits at 8000 Hz"),
        (sound(7, channels=2), "not one channel"),
    ],
)
def test_a_damaged_recording_is_named(data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words) as e:
        read_speech(write_archive(tmp_path / "a.tar.xz", spoken() | {"7_eve_0.wav": data}))
    assert "\n" not in str(e.value) and "THINWIRE_DATA" in str(e.value)


def test_no_place_nothing_in_it_and_half_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"fsdd is not on this machine; put .*fsdd-test300\.tar\.xz"):
        speech.find_speech()
    with pytest.raises(InputError, match="holds no recording named like"):
        read_speech(tmp_path)
    with pytest.raises(InputError, match=r"nowhere cannot be read \(No such file"):
        read_speech(tmp_path / "nowhere")
    file = write_archive(tmp_path / "fsdd-test300.tar.xz", spoken())
    assert speech.find_speech() == file
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"tar\.xz cannot be read \("):
        read_speech(file)


def test_the_real_recordings() -> None:
    if "THINWIRE_DATA" not in os.environ:
        pytest.skip("THINWIRE_DATA is not set, and names the folder of fsdd-test300.tar.xz")
    try:
        found = read_speech(speech.find_speech())
    except InputError as e:
        pytest.skip(str(e))
    assert len({r.speaker for r in found}) == 6 and {r.digit for r in found} == set(range(10))
    assert torch.stack([r.spectrogram for r in found]).isfinite().all()
