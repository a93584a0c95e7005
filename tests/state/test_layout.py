"""Layout, words and content hash: what both ends must agree on before a byte of a state travels."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import states
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.links.inbox import renewed
from thinwire.state import content
from thinwire.state import layout as layouts
from thinwire.state.devices.resident import filled
from thinwire.state.intake import named
from thinwire.state.layout import WORDS, Layout, Slot, TooLarge
from thinwire.state.patches.patch import Patch, check_meta
from thinwire.state.words import Words
from thinwire.types import InputError, PayloadError


def test_a_layout_reads_back():
    layout = states.layout()
    back = Layout.from_json(layout.to_json())
    assert back == layout and back.digest == layout.digest
    assert layout.aliases == (("head", "embed"),)
    assert layout.slots[0].dtype == torch.bfloat16 and layout.slots[1].word == np.int32
    assert layout.nbytes == 2 * (520 + 97 + 15 + 1) + 8 * 7 + 11 + 9


@each("kind", WORDS)
def test_every_dtype_is_kept_as_integers_of_its_size(kind):
    slot, dtype = Slot("x", (3,), kind), getattr(torch, kind)
    assert slot == Slot("x", (3,), dtype) and slot.dtype is dtype
    assert slot.word.kind == "i" and slot.word.itemsize * slot.count == dtype.itemsize * 3


def test_pieces_cover_each_slot_once_in_order(monkeypatch):
    monkeypatch.setattr(layouts, "PIECE", 100)
    layout = states.layout()
    covered = {i: [] for i in range(len(layout.slots))}
    for p in layout.blocks():
        assert 0 < p.numel <= 100 and p.word == layout.slots[p.slot].word
        covered[p.slot] += range(p.start, p.stop)
    assert covered == {i: list(range(s.numel)) for i, s in enumerate(layout.slots)}
    spans = sorted((p.word.str, p.at, p.at + p.numel) for p in layout.blocks())
    assert all(a[2] <= b[1] for a, b in pairwise(spans) if a[0] == b[0])


def test_slots_begin_at_whole_vectors():
    words = Words(states.layout())
    for i, slot in enumerate(words.layout.slots):
        if slot.numel:
            assert words.slot(i).ctypes.data % layouts.ALIGNED == 0


@each("other", [{"names": 1}, {"dtype": torch.float16}, {"bounds": None}, {"bounds": {"lossy": 0.02}}])
def test_the_digest_tells_layouts_apart(other):
    state = states.tensors()
    if other.pop("names", None):
        state["other"] = state.pop("one")
    kwargs = {"dtype": torch.bfloat16, "bounds": {"lossy": states.BOUND}} | other
    assert Layout.of(state, **kwargs).digest != states.layout().digest


ONE = torch.zeros(3)
HALF = torch.float16


def test_a_bound_is_of_the_tensor_whichever_of_its_names_it_is_given_by():
    for bounds in ({"a": 0.5}, {"b": 0.5}, {"a": 0.5, "b": 0.5}):
        layout = Layout.of({"a": ONE, "b": ONE}, bounds=bounds)
        assert [slot.bound for slot in layout.slots] == [0.5] and layout.aliases == (("b", "a"),)


def test_a_dtype_is_of_the_tensor_whichever_of_its_names_it_is_given_by():
    state = {"a": ONE, "b": ONE, "norm": torch.zeros(2), "steps": torch.zeros(2, dtype=torch.int8)}
    for name in ("a", "b"):
        layout = Layout.of(state, {name: HALF})
        assert [slot.dtype for slot in layout.slots] == [HALF, torch.float32, torch.int8]


@each(
    ("state", "kwargs", "match"),
    [
        ({"x": [1.0]}, {}, "x: .* list"),
        ({"x": torch.zeros(2, device="meta")}, {}, "x: .* meta"),
        ({"x": torch.zeros(2, 2).to_sparse()}, {}, "x: .*sparse"),
        ({"x": torch.zeros(2)}, {"dtype": torch.int8}, "cannot be cast to int8"),
        ({"x": torch.zeros(2)}, {"dtype": torch.complex64}, "cannot be cast to complex64"),
        ({"": torch.zeros(2)}, {}, "no name"),
        ({"x\n": torch.zeros(2)}, {}, "no name"),
        ({"__metadata__": torch.zeros(2)}, {}, "__metadata__ is no tensor's name"),
        ({"a": ONE, "b": ONE}, {"bounds": {"a": 1.0, "b": 2.0}}, "b and a are one tensor"),
        ({"x": torch.zeros(2)}, {"bounds": {"y": 1.0}}, "'y'"),
        ({1: torch.zeros(2)}, {}, "1 is no name"),
        ({"x": torch.zeros(2)}, {"bounds": {1: 1.0, "y": 1.0}}, "bounds name 1, .*there are x"),
        ({1: torch.zeros(2)}, {"bounds": {"y": 1.0}}, "bounds name 'y', .*there are 1"),
        ({"a": ONE, "b": ONE}, {"dtype": {"a": HALF, "b": ONE.dtype}}, "b and a are .* dtype gives it two"),
        ({"x": torch.zeros(2)}, {"dtype": {"y": HALF}}, "dtype names 'y', .*there are x"),
        ({"x": torch.zeros(2)}, {"dtype": {"x": torch.complex64}}, "cannot be cast to complex64"),
        ({"x": torch.zeros(2, dtype=torch.int8)}, {"dtype": {"x": HALF}}, "int8, which is not cast"),
        ({"x": torch.zeros(2)}, {"bounds": 0.0}, "bound=0.0"),
        ({"x": torch.zeros(2)}, {"bounds": math.nan}, "bound=nan"),
        ({"x": torch.zeros(2, dtype=torch.int8)}, {"bounds": {"x": 1.0}}, "needs floats"),
    ],
)
def test_what_cannot_be_followed_is_named(state, kwargs, match):
    with pytest.raises(InputError, match=match):
        Layout.of(state, **kwargs)


def test_names_are_compared_for_an_error_only(monkeypatch):
    def compared(*_):
        raise AssertionError("names were compared")

    monkeypatch.setattr(layouts.difflib, "get_close_matches", compared)
    assert Layout.of({"x": torch.zeros(2)}, bounds={"x": 1.0}).slots[0].bound == 1.0


def hostile(**changes):
    return json.dumps(json.loads(states.layout().to_json()) | changes).encode()


@each(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        hostile(format=2),
        hostile(slots=3),
        hostile(slots=[["x", [1], "float32"]]),
        hostile(slots=[["x", [-1], "float32", None]]),
        hostile(slots=[["x", [True], "float32", None]]),
        hostile(slots=[["x", [1.5], "float32", None]]),
        hostile(slots=[["x", [1] * 9, "float32", None]]),
        hostile(slots=[["x", "12", "float32", None]]),
        hostile(slots=[["x", [1 << 40], "float32", None]]),
        hostile(slots=[["x", [0, 1 << 70], "float32", None]]),
        hostile(slots=[["x", [1], "object", None]]),
        hostile(slots=[["x", [1], ["float32"], None]]),
        hostile(slots=[["x", [1], "float32", 1e300]]),
        hostile(slots=[["x", [1], "float32", math.nan]]),
        hostile(slots=[["x", [1], "float32", "1"]]),
        hostile(slots=[["x", [1], "int8", 1.0]]),
        hostile(slots=[[7, [1], "int8", None]]),
        hostile(slots=[["x" * 600, [1], "int8", None]]),
        hostile(slots=[["a", [1], "int8", None], ["a", [1], "int8", None]]),
        hostile(aliases=[["a", "b"]]),
        hostile(aliases=[["embed", "lossy"]]),
        hostile(aliases=[["a", ["embed"]]]),
        hostile(aliases=[["a", "embed", "c"]]),
    ],
)
def test_a_hostile_layout_is_a_payload_error(data):
    with pytest.raises(PayloadError):
        Layout.from_json(data)


def test_the_caller_bounds_the_state():
    data = states.layout().to_json()
    assert Layout.from_json(data, max_nbytes=4096)
    with pytest.raises(TooLarge, match=r"over the limit of 1000 \(max_nbytes\)") as told:
        Layout.from_json(data, max_nbytes=1000)
    again = renewed(told.value)
    assert isinstance(again, TooLarge) and isinstance(again, PayloadError)
    assert (again.nbytes, again.most) == (told.value.nbytes, 1000) and again.nbytes > 1000


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=300))
def test_noise_is_no_layout(data):
    with pytest.raises(PayloadError):
        Layout.from_json(data)


def test_a_tensor_that_does_not_fit_its_slot_is_named():
    state, layout = states.tensors(), states.layout()
    for change, match in [
        ({"one": torch.zeros(2)}, r"one: shape \(2,\), expected \(\)"),
        ({"count": torch.zeros(7)}, "count: torch.float32 cannot stand for torch.int64"),
        ({"more": torch.zeros(2)}, "more is not in the layout"),
        ({"head": torch.zeros(40, 13)}, "head was tied to embed"),
    ]:
        with pytest.raises(InputError, match=match):
            named(layout, state | change)
    with pytest.raises(InputError, match="one is in the layout of this state, but was not given"):
        named(layout, {n: x for n, x in state.items() if n != "one"})
    assert named(layout, state | {"head": state["head"].clone()})  # tied no more, equal still
    assert named(layout, {n: x for n, x in state.items() if n != "head"})  # as many checkpoints have it


word_types = st.sampled_from([np.int8, np.int16, np.int32, np.int64])


@settings(deadline=None, max_examples=60)
@given(word_types, st.integers(1, 9000), st.integers(0, 2**32), st.floats(0, 1))
def test_the_hash_moves_by_what_changed_alone(dtype, n, seed, share):
    g = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    old = g.integers(info.min, info.max, n, dtype=dtype, endpoint=True)
    new = np.where(g.random(n) < share, g.integers(info.min, info.max, n, dtype=dtype, endpoint=True), old)
    at = np.flatnonzero(old != new).astype(np.int32)
    moved = content.moved(at, old[at], new[at], 5)
    assert content.add(content.whole(old, 5), moved) == content.whole(new, 5)
    assert content.moved(None, old, new, 5) == moved


def test_the_hash_is_the_sum_it_says():
    words = np.array([3, -2, 7], np.int16)
    a, b, c = (content._splitmix(seed, 1)[0] for seed in (1, 2, 3 + (9 << 8)))
    rows = content._splitmix(1, 3).tolist()
    expected = sum(int(w) * r for w, r in zip(words, rows, strict=True)) * int(b) * int(c) % 2**64
    assert content.whole(words, 9) == expected and int(a) == rows[0]


@each("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_small_accidents_show(dtype):
    """A flipped bit, two flipped signs, exchanged words, words that moved by one, exchanged pieces."""
    g = np.random.default_rng(0)
    words = g.integers(-50, 50, 10_000).astype(dtype)
    h = content.whole(words, 0)
    for bit in range(8 * dtype().itemsize):
        flipped = words.copy()
        flipped.view(np.uint8)[777 * dtype().itemsize + bit // 8] ^= 1 << bit % 8
        assert content.whole(flipped, 0) != h
    signs = words.copy()
    signs[[5, 9999]] ^= np.iinfo(dtype).min
    swapped = words.copy()
    swapped[[5, 6000]] = words[[6000, 5]] + np.array([0, 1], dtype)
    others = [signs, swapped, np.roll(words, 1), np.roll(words, 4096)]
    assert h not in [content.whole(w, 0) for w in others] and h != content.whole(words, 1)


def test_zeros_are_not_nothing():
    assert Words(states.layout()).hash() == content.START != 0


def test_words_are_the_bits_that_followers_use():
    state, layout = states.tensors(), states.layout()
    words, _ = filled(layout, named(layout, state))
    i = layout.index["embed"]
    assert words.slot(i).tobytes() == state["embed"].bfloat16().view(torch.int16).numpy().tobytes()
    assert words.hash() == filled(layout, named(layout, states.tensors()))[0].hash()


META = {"step": 3, "loss": 0.5, "name": "a"}
PATCH = Patch(3, 7, 11, 13, 1.5, META, "00" * 16, b"body")


def test_a_patch_reads_back():
    assert Patch.unpack(PATCH.pack()) == PATCH
    assert PATCH.target.number == 7 and PATCH.target.meta == META and PATCH.nbytes == 4


@settings(deadline=None, max_examples=100)
@given(st.integers(0, len(PATCH.pack()) - 1), st.integers(1, 255))
def test_a_patch_with_any_byte_changed_is_a_payload_error(at, by):
    data = bytearray(PATCH.pack())
    data[at] ^= by
    with pytest.raises(PayloadError):
        Patch.unpack(data)


@each("n", range(len(PATCH.pack())))
def test_a_patch_cut_short_is_a_payload_error(n):
    with pytest.raises(PayloadError):
        Patch.unpack(PATCH.pack()[:n])


@each("change", [{"base": 7}, {"base": 8}, {"version": 1 << 60}, {"base": 0}, {"published": math.inf}])
def test_a_patch_that_cannot_be_is_a_payload_error(change):
    with pytest.raises(PayloadError):
        Patch.unpack(Patch(**(PATCH.__dict__ | change)).pack())


def test_a_patch_over_the_limit_is_a_payload_error():
    with pytest.raises(PayloadError, match="at most 10"):
        Patch.unpack(PATCH.pack(), max_nbytes=10)


@each("meta", [{"a": math.nan}, {"a": None}, {"a": [1]}, {1: 2}, {"a": "x" * (1 << 16)}, [1], {"a": {}}])
def test_meta_data_are_small_and_plain(meta):
    with pytest.raises(InputError):
        check_meta(meta)
