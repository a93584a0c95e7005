"""Files of packed models: whatever is written can be read, and sizes are exact."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from thinwire.types import PayloadError
from thinwire.uses.models import packed_model
from thinwire.uses.models.about_packed_model import describe
from thinwire.uses.models.entry import PackedTensor, pack_entry, unpack_entry
from thinwire.uses.models.packed_model import FRAME, PackedModel, digest, read_model, write_model
from thinwire.uses.models.run.model_packing import Size
from thinwire.uses.models.tensors import Grouped, Plain

pytest.importorskip("zstandard")


def test_what_packs_to_nearly_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_model, "FREE", 1 << 10)
    zeros = torch.zeros(256, 4096)
    data = write_model(PackedModel({"zeros": pack_entry(Plain(zeros))}, {"notes.txt": b" " * 70_000}))
    assert 4 * zeros.numel() + 70_000 <= (1 << 10) + packed_model.PER_BYTE * len(data) < 8 * zeros.numel()
    model = read_model(data)
    back = unpack_entry(model.entries["zeros"], "zeros")
    assert isinstance(back, Plain) and torch.equal(back.values, zeros)
    assert model.files["notes.txt"] == b" " * 70_000


def test_what_takes_more_to_decode_than_it_shows_is_refused() -> None:
    wide = Grouped(
        torch.zeros(1 << 10, 1).short(), torch.ones(1 << 10, 1).half(), 2, (1 << 10, 1), torch.float16
    )
    assert torch.equal(wide.decoded(), torch.zeros(1 << 10, 1).half())
    entry = pack_entry(wide)
    huge = PackedTensor({**entry.about, "shape": [1 << 26, 1]}, entry.data)
    note = {"tensors": {"a": dict(huge.about)}, "files": {}}
    data = FRAME.write({**note, "check": digest(note, [huge.data])}, {"tensor:a": huge.data})
    with pytest.raises(PayloadError, match="more than any packed model has"):
        read_model(data)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", "a\nb", "x" * 300, "../a", ""])
def test_files_of_names_that_no_folder_takes(name: str) -> None:
    with pytest.raises(PayloadError, match="no plain name"):
        PackedModel({}, {name: b""})


def test_words_about_a_tensor_that_its_kind_has_not_are_not_read(tmp_path: Path) -> None:
    plain = pack_entry(Plain(torch.ones(3)))
    twin = PackedTensor({"kind": "same", "name": "a", "shape": 5}, b"")
    path = tmp_path / "odd.tw"
    path.write_bytes(
        write_model(PackedModel({"a": PackedTensor({**plain.about, "name": "zzz"}, plain.data), "b": twin}))
    )
    assert describe(path, check=True)["weights"] == 6


def test_a_size_is_that_of_the_file_whatever_files_go_along() -> None:
    entries = {f"layer.{i}": pack_entry(Plain(torch.ones(i + 1))) for i in range(200)}
    files = {"vocab.txt": Random(1).randbytes(2_000_000), "config.json": b"{}"}
    assert Size(files)(entries) == len(write_model(PackedModel(entries, files)))
