"""A replica saved to a file and gone on from."""

import contextlib
import os

import numpy as np
import pytest
import states
import torch
from replicas import advance, pair

from thinwire.state.replica import Replica
from thinwire.types import InputError


def test_a_saved_replica_goes_on_where_it_was(tmp_path):
    history, state, replica = pair()
    replica.apply(advance(history, state, 2))
    replica.save(tmp_path / "state.safetensors")  # what is held, though not in front yet
    back = Replica.load(tmp_path / "state.safetensors")
    assert (back.version, back.hash, back.meta) == (2, history.newest.hash, {"step": 2})
    assert back.layout == history.layout and states.same(back.tensors(), states.whole(history))
    back.apply(advance(history, state, 3))
    assert back.swap() and states.same(back.tensors(), states.whole(history))
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]
    from safetensors.torch import load_file

    assert load_file(tmp_path / "state.safetensors")["embed"].dtype == torch.bfloat16  # others read it too


def test_a_damaged_file_is_no_saved_state(tmp_path):
    _, _, replica = pair()
    path = tmp_path / "state"
    replica.save(path)
    good, g = path.read_bytes(), np.random.default_rng(1)
    for at in g.integers(0, len(good), 60):
        bad = bytearray(good)
        bad[at] ^= 1 << g.integers(0, 8)
        path.write_bytes(bad)
        with contextlib.suppress(InputError):
            assert Replica.load(path).held == replica.held  # padding, or a tensor's name told by no one
    for n in (0, 5, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:n])
        with pytest.raises(InputError, match="delete it"):
            Replica.load(path)
    path.write_bytes(good)
    with pytest.raises(InputError, match=r"over the limit.*delete it"):
        Replica.load(path, max_nbytes=100)
    with pytest.raises(InputError, match="no file"):
        Replica.load(tmp_path / "none")


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    history, state, replica = pair()
    path = tmp_path / "state"
    replica.save(path)
    good = path.read_bytes()
    replica.apply(advance(history, state, 2))

    def full(name):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        replica.save(path)
    assert path.read_bytes() == good and [p.name for p in tmp_path.iterdir()] == ["state"]
    with pytest.raises(InputError, match="cannot save a state to"):
        replica.save(tmp_path / "no" / "folder")
