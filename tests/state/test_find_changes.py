"""The comparison pass: exact for every dtype, and within the bound for lossy tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.state import find_changes, intake
from thinwire.state import layout as layouts
from thinwire.state.devices.resident import filled
from thinwire.state.find_changes import changed, word_dtype, words_of
from thinwire.state.layout import Layout, Slot
from thinwire.state.lossy import settle
from thinwire.state.patch_code.indexing import where
from thinwire.state.values import told
from thinwire.types import InputError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool]


def tensor(seed: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * 3
    if dtype.is_floating_point and numel > 4:
        x[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e38])
    return x.nan_to_num().to(dtype) if not dtype.is_floating_point else x.to(dtype)


@each("held", DTYPES)
@each("source", [torch.float32, torch.bfloat16, torch.float64])
@each("whole", [False, True])
@each("share", [0.0, 0.01, 0.2, 1.0])
def test_words_become_the_cast_tensor(
    held: torch.dtype, source: torch.dtype, whole: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_changes, "_PIECE", 256)
    x = tensor(1, 1500, source)
    words = words_of(x.to(held)).copy()
    before = words.copy()
    moved = torch.rand(1500, generator=torch.Generator().manual_seed(2)) < share
    new = torch.where(moved, tensor(3, 1500, source), x)
    found = changed(new, words, held, whole=whole)
    assert np.array_equal(words, words_of(new.to(held)))
    expected = np.flatnonzero(words != before)
    if found.positions is None:
        assert whole and 5 * expected.size > words.size
        assert np.array_equal(found.old, before)
        assert np.array_equal(found.new - found.old, words - before)
    else:
        assert not (whole and 5 * expected.size > words.size)
        assert found.positions.dtype == np.int32
        assert np.array_equal(found.positions, expected)
        assert np.array_equal(found.old, before[expected])
        assert np.array_equal(found.new - found.old, (words - before)[expected])
    assert changed(new, words, held).old.size == 0


def test_bits_decide() -> None:
    words = words_of(torch.zeros(3, dtype=torch.bfloat16)).copy()
    new = torch.tensor([-0.0, 0.0, float("nan")])
    assert changed(new, words, torch.bfloat16).old.size == 2
    assert changed(new, words, torch.bfloat16).old.size == 0


def test_strided_tensors_and_parameters() -> None:
    x = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    words = np.zeros(12, dtype=np.int16)
    changed(x, words, torch.bfloat16)
    assert np.array_equal(words, words_of(x.detach().bfloat16()))
    assert changed(torch.empty(0), words[:0], torch.bfloat16).old.size == 0


def test_what_does_not_fit_is_named() -> None:
    words = np.zeros(3, dtype=np.int16)
    with pytest.raises(InputError, match="wte has 4 elements, expected 3"):
        changed(torch.zeros(4), words, torch.bfloat16, "wte")
    with pytest.raises(InputError, match=r"wte: torch\.float32 held as int16"):
        changed(torch.zeros(3), words, torch.float32, "wte")
    with pytest.raises(InputError, match="complex64"):
        word_dtype(torch.complex64)


@settings(deadline=None, max_examples=60)
@given(
    st.floats(1e-6, 10.0),
    st.sampled_from([1e-3, 1.0, 300.0]),
    st.integers(0, 2**32),
    st.integers(1, 400),
)
def test_lossy_words_stay_within_the_bound(bound: float, scale: float, seed: int, numel: int) -> None:
    rng = np.random.default_rng(seed)
    if scale / bound > 2**18:
        bound = scale / 2**18
    words = np.zeros(numel, dtype=np.int32)
    x = rng.standard_normal(numel, dtype=np.float32) * np.float32(scale)
    for _ in range(4):
        x += rng.standard_normal(numel, dtype=np.float32) * np.float32(bound)
        before, held = words.copy(), told(words, bound, "float32").view(np.float32)
        found = settle(torch.from_numpy(x), words, bound)
        assert found.positions is not None
        used = told(words, bound, "float32").view(np.float32).astype(np.float64)
        error = np.abs(x.astype(np.float64) - used)
        assert (error <= bound).all()
        assert np.array_equal(found.positions, np.flatnonzero(words != before))
        near = np.abs(x.astype(np.float64) - held.astype(np.float64)) <= bound * (1 - 2.0**-19)
        assert np.array_equal(words[near], before[near])  # a value moves only when it must


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e9])
def test_a_lossy_tensor_that_cannot_be_held_moves_nothing(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_changes, "_PIECE", 64)
    x = tensor(5, 300).nan_to_num(0, 0, 0).clamp(-9, 9)
    words = np.zeros(300, dtype=np.int32)
    settle(x, words, 0.01)
    before = words.copy()
    new = x + 1.0
    new[299] = bad
    with pytest.raises(InputError, match="wte has"):
        settle(new, words, 0.01, "wte")
    assert np.array_equal(words, before)


def test_a_first_version_is_taken_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot of 2**31 elements has positions that no int32 holds, and one of any order is copied once."""
    x, taken = tensor(5, 1000).nan_to_num(0, 0, 0).clamp(-9, 9).view(10, 100), []

    def noted(new: Tensor, *args: object, **kwargs: object) -> object:
        taken.append(new.numel())
        return settle(new, *args, **kwargs)

    expected = np.zeros(1000, dtype=np.int32)
    settle(x, expected, 0.1, dtype=torch.bfloat16)
    monkeypatch.setattr(layouts, "PIECE", 64)
    monkeypatch.setattr(intake, "BATCH", 1000)
    monkeypatch.setattr(intake, "settle", noted)
    state = {"wte": x, "turned": x.t(), "other": x}
    layout = Layout(tuple(Slot(n, tuple(y.shape), torch.bfloat16, 0.1) for n, y in state.items()))
    words, _ = filled(layout, list(state.values()))
    assert np.array_equal(words.slot(0), expected) and np.array_equal(words.slot(2), expected)
    assert np.array_equal(words.slot(1).reshape(100, 10), expected.reshape(10, 100).T)
    assert sorted(taken) == sorted(([64] * 15 + [40]) * 3)
    assert [len(own) for own in intake.batches(layout, [x] * 3)] == [16, 16, 16]


@each("bound", [0.0, -1.0, float("nan"), float("inf"), 1e-300])
def test_bounds_out_of_range_are_refused(bound: float) -> None:
    with pytest.raises(InputError, match="wte: a bound of"):
        settle(torch.zeros(3), np.zeros(3, dtype=np.int32), bound, "wte")


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 5000), st.floats(0, 1), st.integers(0, 2**32))
def test_where_is_numpys(n: int, share: float, seed: int) -> None:
    mask = np.random.default_rng(seed).random(n) < share**3
    assert np.array_equal(where(mask), np.flatnonzero(mask))
    assert np.array_equal(where(mask[::2]), np.flatnonzero(mask[::2]))


@pytest.mark.parametrize(("fails", "share"), [("write", 0.1), ("_joined", 0.1), ("_joined", 0.9)])
def test_an_interrupt_leaves_all_as_it_was(monkeypatch, fails, share):
    monkeypatch.setattr(find_changes, "_PIECE", 64)
    words = np.zeros(256, dtype=np.int16)
    before, new = words.copy(), torch.zeros(256)
    new[torch.rand(256, generator=torch.Generator().manual_seed(0)) < share] = 1.0
    doing, calls = getattr(find_changes, fails), []

    def interrupted(*args):
        calls.append(args)
        found = doing(*args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(find_changes, fails, interrupted)
    with pytest.raises(KeyboardInterrupt):
        changed(new, words, torch.bfloat16)
    assert np.array_equal(words, before)
