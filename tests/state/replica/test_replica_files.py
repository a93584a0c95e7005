"""A replica saved to a file and gone on from."""

import contextlib
import math
import os

import numpy as np
import pytest
import states
import torch
from replicas import advance, pair
from safetensors import safe_open

from thinwire.files.checkpoint import read_checkpoint, write_checkpoint
from thinwire.state.history import History
from thinwire.state.layout import BITS, Layout
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


def test_types_of_which_only_the_bits_matter_are_followed_and_saved(tmp_path):
    def bits(shift):
        raw = (torch.arange(256).reshape(16, 16) + shift).to(torch.uint8)
        return {kind: raw.view(getattr(torch, kind)) for kind in (*BITS, "float8_e4m3fn", "float8_e5m2")}

    write_checkpoint(tmp_path / "weights.safetensors", bits(0), {})
    state = read_checkpoint(tmp_path / "weights.safetensors")
    assert states.same(state, bits(0)) and len(BITS) == 4
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:  # the packed ones are told one by one
        assert file.get_slice("float4_e2m1fn_x2").get_shape() == [16, 32]
    scales = {name: x for name, x in state.items() if name in BITS}
    layout = Layout.of(scales | {"w": torch.ones(2)}, torch.bfloat16, 1.0)
    assert {(s.kind, s.bound) for s in layout.slots} == {(kind, None) for kind in BITS} | {("bfloat16", 1.0)}
    history = History(Layout.of(state))
    history.publish(state)
    replica = Replica(history.layout)
    replica.apply(history.patch())
    history.publish(bits(1))
    replica.apply(history.patch(1))
    replica.save(tmp_path / "state")
    back = Replica.load(tmp_path / "state")
    back.swap()
    assert states.same(back.tensors(), bits(1))
    with pytest.raises(InputError, match=r"float32 cannot stand for torch\.float8_e8m0fnu"):
        history.publish(state | {"float8_e8m0fnu": torch.ones(16, 16)})
    with pytest.raises(InputError, match=r"x cannot be cast to float8_e8m0fnu, which is"):
        Layout.of({"x": torch.ones(2)}, torch.float8_e8m0fnu)


def test_a_tie_is_one_of_bits():
    x = torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)
    layout = Layout.of({"a": x, "b": x})
    assert layout.aliases and History(layout).publish({"a": x, "b": x.clone()}).number == 1
    with pytest.raises(InputError, match="b was tied to a and now differs"):
        History(layout).publish({"a": x, "b": x.float().flip(0).to(x.dtype)})
