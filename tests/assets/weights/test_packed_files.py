"""Files of packed models: damage is told, and whatever is written can be read."""

from __future__ import annotations

import struct
from random import Random

import pytest
import torch

from thinwire.assets.weights import container
from thinwire.assets.weights.container import PackedModel, read_model, write_model
from thinwire.assets.weights.encoding import to_budget
from thinwire.assets.weights.entry import pack_entry, unpack_entry
from thinwire.assets.weights.model import Model
from thinwire.assets.weights.tensors import Plain
from thinwire.lab.weights.packing import Size
from thinwire.types import PayloadError

pytest.importorskip("zstandard")


def test_every_bit_that_flips_behind_the_header_is_told() -> None:
    tensors = {"a": torch.randn(48, 64, generator=torch.Generator().manual_seed(0)), "b": torch.ones(9)}
    entries = to_budget(Model(tensors), 3_000, Size({}))
    data = bytearray(write_model(PackedModel(entries, {"config.json": b"{}" * 40})))
    (length,) = struct.unpack_from("<Q", data)
    draw = Random(0)
    for _ in range(500):
        at, bit = draw.randrange(8 + length, len(data)), 1 << draw.randrange(8)
        data[at] ^= bit
        with pytest.raises(PayloadError, match="damaged"):
            read_model(data)
        data[at] ^= bit
    assert read_model(data).entries.keys() == tensors.keys()


def test_what_packs_to_nearly_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "FREE", 1 << 10)
    zeros = torch.zeros(256, 4096)
    data = write_model(PackedModel({"zeros": pack_entry(Plain(zeros))}, {"notes.txt": b" " * 70_000}))
    assert 4 * zeros.numel() + 70_000 <= (1 << 10) + container.PER_BYTE * len(data) < 8 * zeros.numel()
    model = read_model(data)
    back = unpack_entry(model.entries["zeros"], "zeros")
    assert isinstance(back, Plain) and torch.equal(back.values, zeros)
    assert model.files["notes.txt"] == b" " * 70_000


def test_a_size_is_that_of_the_file_whatever_files_go_along() -> None:
    entries = {f"layer.{i}": pack_entry(Plain(torch.ones(i + 1))) for i in range(200)}
    files = {"vocab.txt": Random(1).randbytes(2_000_000), "config.json": b"{}"}
    assert Size(files)(entries) == len(write_model(PackedModel(entries, files)))
