"""Fashion-MNIST from Debian's package: only the files that are pinned, and a sentence where apt is not."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from each import each

from thinwire.lab.data import debian, images
from thinwire.lab.data.images import FASHION
from thinwire.lab.models import fetch
from thinwire.types import InputError

APT = """#!/bin/sh
[ "$1 $2" = "download dataset-fashion-mnist" ] || exit 9
[ -z "$FAILS" ] || { echo "W: a warning" >&2; echo "E: Unable to locate package $2" >&2; exit 100; }
echo deb > dataset-fashion-mnist_1_all.deb
"""
DPKG = """#!/bin/sh
[ "$1" = -x ] || exit 9
mkdir -p "$3/usr/share/datasets" && cp -r "$PACKED" "$3/usr/share/datasets/fashion-mnist"
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the cache be empty, and two programs stand for apt's, which unpack ``tmp_path``/packed."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PACKED", str(tmp_path / "packed"))
    for folder in ("bin", "packed"):
        (tmp_path / folder).mkdir()
    for name, text in (("apt-get", APT), ("dpkg-deb", DPKG)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    for name in debian.SHA256:
        (tmp_path / "packed" / name).write_bytes(name.encode())
    pinned = {name: hashlib.sha256(name.encode()).hexdigest() for name in debian.SHA256}
    monkeypatch.setattr(debian, "SHA256", pinned)
    return tmp_path


def test_the_four_files_come_into_the_cache_and_nothing_else(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (machine / "packed" / "README").write_text("not kept")
    assert fetch.main([FASHION]) == 0
    folder = machine / "cache" / FASHION
    assert str(folder) in capsys.readouterr().out
    assert sorted(f.name for f in folder.iterdir()) == sorted(debian.SHA256)
    monkeypatch.setenv("FAILS", "1")
    assert debian.fetch_fashion() == folder  # it is there, so nothing is run
    monkeypatch.delenv("THINWIRE_DATA", raising=False)
    monkeypatch.setattr(images, "PACKAGED", machine / "no such place")
    with pytest.raises(InputError, match=rf"{folder}.* cannot be read \(Not a gzipped file"):
        images.load_fashion()


@each(
    "change, words",
    [
        (lambda f: f.write_bytes(b"another"), r"train-labels.* has SHA-256 [0-9a-f]{12}\.\.\., not"),
        (lambda f: f.unlink(), "has no file train-labels"),
        (lambda f: f.symlink_to("t10k-labels-idx1-ubyte.gz"), "has no file train-labels"),
    ],
)
def test_other_files_are_refused_and_nothing_is_kept(change, words, machine: Path) -> None:  # type: ignore[no-untyped-def]
    change(machine / "packed" / "train-labels-idx1-ubyte.gz")
    with pytest.raises(InputError, match=words) as e:
        debian.fetch_fashion()
    assert "THINWIRE_DATA" in str(e.value) and not (machine / "cache" / FASHION).exists()


def test_what_apt_says_is_passed_on_and_its_absence_said(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "1")
    said = r"apt-get fails for .* \(E: Unable to locate package .*\); run apt-get update first, or put"
    with pytest.raises(InputError, match=said):
        debian.fetch_fashion()
    monkeypatch.setenv("PATH", str(machine / "packed"))
    with pytest.raises(
        InputError, match=r"has no apt-get to fetch dataset-fashion-mnist with; put .* THINWIRE"
    ):
        debian.fetch_fashion()


def test_an_unknown_thing_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["fashion"]) == 2
    assert "shakespeare, smollm2-135m, fashion-mnist" in capsys.readouterr().err
