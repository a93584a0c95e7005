"""Files of packed models: whatever is written can be read, and sizes are exact."""

from __future__ import annotations

from random import Random

import pytest
import torch

from thinwire.assets.weights import container
from thinwire.assets.weights.container import PackedModel, read_model, write_model
from thinwire.assets.weights.entry import pack_entry, unpack_entry
from thinwire.assets.weights.tensors import Plain
from thinwire.lab.weights.packing import Size

pytest.importorskip("zstandard")


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
