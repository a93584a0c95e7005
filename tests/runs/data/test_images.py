"""Fashion-MNIST: where it is looked for, what is in a block, and what is said of files that are damaged."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from clothes import idx, write_clothes
from each import each

from thinwire.runs.data import fashion
from thinwire.runs.data.fashion import IMAGES, load_fashion
from thinwire.types import InputError

IMAGES_FILE, LABELS_FILE = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let there be no images: THINWIRE_DATA is not set, Debian's place and the cache are in ``tmp_path``."""
    monkeypatch.delenv("THINWIRE_DATA", raising=False)
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fashion, "PACKAGED", tmp_path / "packaged" / "fashion-mnist")
    return tmp_path


def test_blocks_are_pixels_and_a_class(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_clothes(nowhere, train=30, t10k=20)
    monkeypatch.setenv("THINWIRE_DATA", str(nowhere))
    train, heldout = load_fashion()
    assert (train.shape, heldout.shape, train.dtype) == ((30, 785), (20, 785), torch.uint8)
    assert IMAGES.targets(heldout).tolist() == [*range(10)] * 2
    x = IMAGES.inputs(train[11:13])
    assert x.shape == (2, 1, 28, 28) and x.dtype == torch.float32
    white = (250 / 255 - fashion.MEAN) / fashion.DEVIATION
    assert x[0, 0, 6:8].tolist() == [pytest.approx([white] * 28)] * 2 and x[0, 0, 5].max() < 0
    blank = IMAGES.blank(3)
    assert IMAGES.inputs(blank).shape == (3, 1, 28, 28) and IMAGES.targets(blank).tolist() == [0, 0, 0]


def test_own_images_go_before_those_of_the_package_and_these_before_the_fetched_ones(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        InputError,
        match=r"not on this machine; run .*fetch fashion-mnist.*dataset-fashion-mnist, or .*THINWIRE",
    ):
        load_fashion()
    write_clothes(nowhere / "cache", train=40, t10k=10)
    assert len(load_fashion()[0]) == 40
    write_clothes(nowhere / "packaged", train=10, t10k=10)
    assert len(load_fashion()[0]) == 10
    monkeypatch.setenv("THINWIRE_DATA", str(nowhere / "own"))
    assert len(load_fashion()[0]) == 10  # nothing is there yet
    write_clothes(nowhere / "own", train=20, t10k=10)
    assert len(load_fashion()[0]) == 20


BROKEN: list[tuple[str, Callable[[bytes], bytes]]] = [
    (r"t10k-images.* cannot be read \(", lambda packed: packed[:-20]),
    (r"t10k-images.* cannot be read \(", lambda packed: b"nothing of the kind"),
    (r"t10k-images.* is damaged, with 7839 values for 7840", lambda packed: _packed(packed, slice(0, -1))),
    ("t10k-images.* is damaged", lambda packed: _packed(packed, slice(1, None))),
    ("t10k-images.* is damaged", lambda packed: gzip.compress(b"")),
    (r"images of shape \[9, 28, 28\] for 10 labels", lambda _: _images(9, 28)),
    (r"images of shape \[10, 32, 32\] for 10 labels", lambda _: _images(10, 32)),
]


def _packed(packed: bytes, part: slice) -> bytes:
    return gzip.compress(gzip.decompress(packed)[part])


def _images(n: int, side: int) -> bytes:
    return gzip.compress(idx(torch.zeros(n, side, side, dtype=torch.uint8)))


def test_what_is_damaged_is_named(nowhere: Path) -> None:
    file = write_clothes(nowhere / "packaged", train=10, t10k=10) / IMAGES_FILE
    whole = file.read_bytes()
    for words, broken in BROKEN:
        file.write_bytes(broken(whole))
        with pytest.raises(InputError, match=words) as e:
            load_fashion()
        assert "dataset-fashion-mnist" in str(e.value) and "\n" not in str(e.value)
    file.unlink()
    with pytest.raises(InputError, match=r"t10k-images.* cannot be read \(No such file"):
        load_fashion()


@each("label", [10, 255])
def test_a_class_that_is_none_is_refused(label: int, nowhere: Path) -> None:
    folder = nowhere / "packaged" / "fashion-mnist"
    if not folder.exists():
        write_clothes(nowhere / "packaged", train=10, t10k=10)
    labels = torch.full((10,), label, dtype=torch.uint8)
    (folder / LABELS_FILE).write_bytes(gzip.compress(idx(labels)))
    with pytest.raises(InputError, match="is not fashion-mnist"):
        load_fashion()
