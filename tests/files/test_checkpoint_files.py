"""Checkpoints in safetensors files and folders: read, written, refused when damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commanded import same, weights
from texts import POINTER

from thinwire.files.checkpoint import INDEX, read_checkpoint, read_header, write_checkpoint
from thinwire.files.file_kinds import read_notes
from thinwire.types import InputError, PayloadError

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("zstandard")
pytest.importorskip("safetensors")


def test_checkpoints_are_read_and_written_as_safetensors_does(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    state = weights()
    write_checkpoint(tmp_path / "ours", state, {"step": "7"})
    save_file(state, tmp_path / "theirs")
    assert same(load_file(tmp_path / "ours"), state)
    assert same(read_checkpoint(tmp_path / "theirs"), state)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours", "theirs"]  # nothing temporary is left


def test_a_folder_is_one_state(tmp_path: Path):
    write_checkpoint(tmp_path / "a.safetensors", {"a": torch.ones(3)}, {})
    write_checkpoint(tmp_path / "b.safetensors", {"b": torch.ones(2)}, {})
    assert read_checkpoint(tmp_path).keys() == {"a", "b"}
    index = {"weight_map": {"a": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_checkpoint(tmp_path).keys() == {"a"}
    (tmp_path / "model.safetensors.index.json").unlink()
    write_checkpoint(tmp_path / "c.safetensors", {"a": torch.ones(3)}, {})
    with pytest.raises(InputError, match="a is in two files"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("cut", [0, 7, 8, 40, -1])
def test_a_damaged_file_is_refused(tmp_path: Path, cut: int):
    file = tmp_path / "m.safetensors"
    write_checkpoint(file, weights(), {})
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(InputError, match="cannot read"):
        read_checkpoint(file)


@pytest.mark.parametrize("shape", [[0, 2**70], [0, 2**62, 8]])
def test_a_shape_that_no_tensor_has_is_refused(tmp_path: Path, shape: list[int]):
    file = tmp_path / "m.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InputError, match=r"cannot read .*w is not where the header says"):
        read_checkpoint(file)


def test_notes_of_any_name_leave_the_format_s_own(tmp_path: Path):
    file = tmp_path / "m.safetensors"
    write_checkpoint(file, weights(), {"format": "v3", "step": "1"})
    data = file.read_bytes()
    assert read_header(data, len(data))[1] == {"format": "pt", "step": "1"}


def test_a_git_lfs_pointer_is_called_that(tmp_path: Path):
    file = tmp_path / "m.safetensors"
    for name in (file, tmp_path / INDEX):
        name.write_text(POINTER)
    for read, path in ((read_checkpoint, file), (read_notes, file), (read_checkpoint, tmp_path)):
        with pytest.raises(InputError, match=r"a Git-LFS pointer, not the file itself; .*'git lfs pull'"):
            read(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save_is_called_that(tmp_path: Path, zipped: bool):
    torch.save({"w": torch.zeros(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    data = (tmp_path / "x.pt").read_bytes()
    with pytest.raises(PayloadError, match=r"torch\.save.*save_file"):
        read_header(data, len(data))
