"""Weights to few bytes and back: codes, steps, budgets, and files that are damaged or hostile."""

from __future__ import annotations

import dataclasses
import json
import struct
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from other_device import DEVICE, Elsewhere

from thinwire.state.disk.tensor_header import METADATA
from thinwire.types import ByteCursor, InputError, PayloadError
from thinwire.uses.models import moments as rounding
from thinwire.uses.models import packed_model
from thinwire.uses.models.budgets import like, to_budget, to_width
from thinwire.uses.models.codes import NOTE, code_tensors, from_code_tensors
from thinwire.uses.models.entry import pack_entry, unpack_entry
from thinwire.uses.models.moments import Moments, inverse_factor, quantised
from thinwire.uses.models.packed_model import FRAME, PackedModel, digest, is_model, read_model, write_model
from thinwire.uses.models.streams import bits_of, pack_codes, unpack_codes
from thinwire.uses.models.tensors import Grouped, Plain, Tied
from thinwire.uses.models.weights_to_pack import Model

pytest.importorskip("zstandard")


def size(entries) -> int:
    return len(write_model(PackedModel(entries)))


def decoded(entries) -> dict[str, torch.Tensor]:
    coded = {name: unpack_entry(entry, name) for name, entry in entries.items()}
    return {name: c.decoded() for name, c in coded.items() if not isinstance(c, Tied)}


def moments(rows: int, columns: int, seed: int) -> Moments:
    """Return moments of inputs that depend on each other, as those of a layer do."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(400, columns, generator=draw) @ torch.randn(columns, columns, generator=draw)
    shares = torch.rand(rows, generator=draw)
    return Moments(shares / shares.sum(), x.t() @ x / 400)


def cost(error: torch.Tensor, known: Moments) -> float:
    return float(known.rows @ ((error @ known.columns) * error).sum(1)) / 2


@pytest.fixture(scope="module")
def odd() -> Model:
    """Return a model with tensors of all kinds: odd shapes, tied, swapped, whole numbers, far-out weights."""
    draw = torch.Generator().manual_seed(3)
    tensors = {
        "embed": torch.randn(90, 48, generator=draw),
        "down": torch.randn(48, 65, generator=draw) * 0.1,
        "conv": torch.randn(16, 5, 5, 3, generator=draw),
        "half": torch.randn(40, 64, generator=draw).to(torch.bfloat16),
        "norm": torch.rand(48, generator=draw),
        "ids": torch.arange(2000).view(40, 50),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 7),
    }
    tensors["down"][3, 4] = 40.0  # as single weights of language models are
    tensors["head"] = tensors["embed"].clone()
    known = {"embed": moments(90, 48, 1), "down": moments(65, 48, 2)}
    return Model(tensors, known, swapped={"down"}, lookups={"embed"})


CODES = hnp.arrays(
    np.int16,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=40),
    elements=st.one_of(st.integers(-3, 3), st.integers(-32767, 32767)),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(CODES)
def test_codes_come_back(codes) -> None:
    cursor = ByteCursor(pack_codes(codes), "codes")
    assert (unpack_codes(cursor, *codes.shape) == codes).all()
    cursor.close()


def test_codes_take_the_entropy_of_their_rows_and_columns() -> None:
    draw = np.random.default_rng(0)
    spread = 2.0 ** draw.integers(-1, 3, (400, 1)) * 2.0 ** draw.integers(-1, 3, 500)
    codes = np.rint(draw.normal(0, spread)).astype(np.int16)
    bits, mixed = bits_of(codes), bits_of(draw.permutation(codes.reshape(-1)).reshape(codes.shape))
    assert bits < 0.9 * mixed
    assert 0.98 * bits < 8 * len(pack_codes(codes)) < 1.04 * bits


def test_feedback_makes_errors_cost_less(monkeypatch: pytest.MonkeyPatch) -> None:
    known = moments(40, 60, 5)
    x, steps = torch.randn(40, 60), torch.full((60,), 0.5)
    upper = inverse_factor(known.columns)
    alone = cost(quantised(x, steps) * steps - x, known)
    fed = cost(quantised(x, steps, upper) * steps - x, known)
    assert fed < 0.6 * alone
    model = Model({"x": x}, {"x": known})
    whole = quantised(x, steps, upper), decoded(to_width(model, 4.5))["x"]
    monkeypatch.setattr(rounding, "PIECE", 7 * 60)  # a few rows at a time
    assert float((quantised(x, steps, upper) != whole[0]).float().mean()) < 0.01
    assert float((decoded(to_width(model, 4.5))["x"] - whole[1]).norm()) < 0.02 * float(x.norm())


def test_a_budget_is_kept_and_used(odd: Model) -> None:
    errors = []
    for most in (9_000, 14_000):
        entries = to_budget(odd, most, size)
        assert 0.97 * most < size(entries) <= most
        assert list(entries) == list(odd.tensors) and entries["head"].kind == "same"
        back = decoded(entries)
        for name in ("norm", "ids", "scalar", "empty"):
            assert torch.equal(back[name], odd.tensors[name])
        assert all(
            x.shape == odd.tensors[n].shape and x.dtype == odd.tensors[n].dtype for n, x in back.items()
        )
        assert abs(float(back["down"][3, 4]) - 40) < 1  # not clipped
        errors.append(cost(back["down"].t() - odd.tensors["down"].t(), odd.moments["down"]))
    assert errors[0] > errors[1]


def test_matrices_on_a_device_of_their_own_become_the_same_bytes(odd: Model) -> None:
    wanted = [to_width(odd, 4.0), to_budget(odd, 20_000, size)]
    with Elsewhere():
        there = dataclasses.replace(odd, device=DEVICE)
        found = [to_width(there, 4.0), to_budget(there, 20_000, size)]
    for ours, theirs in zip(wanted, found, strict=True):
        assert {n: e.data for n, e in ours.items()} == {n: e.data for n, e in theirs.items()}


def test_a_target_that_is_above_the_model_loses_nothing(odd: Model) -> None:
    back = decoded(to_budget(odd, 1_000_000, size))
    assert all(torch.equal(x, odd.tensors[name]) for name, x in back.items())


@pytest.mark.parametrize("share", [0.75, 0.97])
def test_a_target_just_below_lossless_is_used(odd: Model, share: float) -> None:
    """Where the finest steps leave room, some tensors are kept as they are."""
    most = int(share * size(odd.lossless()))
    entries = to_budget(odd, most, size)
    assert 0.6 * most < size(entries) <= most
    back, kept = decoded(entries), [name for name in odd.coded if entries[name].kind == "plain"]
    assert kept and all(torch.equal(back[name], odd.tensors[name]) for name in kept)


def test_a_layer_that_gets_zeros_alone_and_a_mask_of_huge_values() -> None:
    draw = torch.Generator().manual_seed(4)
    tensors = {name: torch.randn(40, 32, generator=draw) for name in ("dead", "other", "mask")}
    tensors["mask"] = torch.full((40, 40), torch.finfo(torch.float32).min).triu()
    known = {"dead": Moments(torch.ones(40) / 40, torch.zeros(32, 32)), "other": moments(40, 32, 1)}
    back = decoded(to_budget(Model(tensors, known), 8_000, size))
    assert torch.equal(back["mask"], tensors["mask"])
    assert all((back[name] - tensors[name]).norm() < 0.5 * tensors[name].norm() for name in ("dead", "other"))


def test_a_target_below_the_smallest_is_refused_with_one_that_will_do(odd: Model) -> None:
    with pytest.raises(InputError, match=r"takes \d+ bytes at least, and 100 are asked for; ask for") as e:
        to_budget(odd, 100, size)
    least = int(str(e.value).split()[3])
    assert size(to_budget(odd, least, size)) <= least


@pytest.mark.parametrize("bits", [2.6, 3.25, 8.4])
def test_fixed_widths_take_no_more_memory_than_asked(odd: Model, bits: float) -> None:
    entries = to_width(odd, bits)
    coded = [unpack_entry(entries[name], name) for name in odd.coded]
    assert all(isinstance(c, Grouped) and 2 <= c.width <= 8 for c in coded)
    assert sum(c.memory for c in coded) * 8 <= bits * odd.weights
    back = decoded(read_model(write_model(PackedModel(entries))).entries)
    assert all(x.shape == odd.tensors[name].shape for name, x in back.items())
    least = [unpack_entry(entry, name) for name, entry in to_width(odd, 2.01).items() if name in odd.coded]
    assert all(isinstance(c, Grouped) and c.width == 2 for c in least)  # more, with scales


def test_what_cannot_be_packed_is_named() -> None:
    bad = torch.ones(40, 40)
    bad[3, 3] = torch.nan
    with pytest.raises(InputError, match=r"layer\.weight has a NaN"):
        Model({"layer.weight": bad})
    with pytest.raises(InputError, match=r"w is torch\.complex64"):
        Model({"w": torch.zeros(3, dtype=torch.complex64)})


def test_a_version_like_another_moves_few_codes(odd: Model) -> None:
    old = to_budget(odd, 7_000, size)
    same = like(odd, old).entries
    assert all(torch.equal(a, decoded(old)[n]) for n, a in decoded(same).items())
    moved = {
        n: x + 0.04 * x.std() * torch.randn_like(x) if n in odd.coded else x for n, x in odd.tensors.items()
    }
    moved["head"] = moved["embed"].clone()
    new = like(Model(moved, odd.moments, odd.swapped, odd.lookups), old).entries
    first, second = (unpack_entry(e["embed"], "embed").codes for e in (old, new))
    assert 0 < float((first != second).float().mean()) < 0.2
    with pytest.raises(InputError, match="norm is in one of both"):
        like(odd, {n: e for n, e in old.items() if n != "norm"})


def test_a_checkpoint_of_codes_is_the_same_model(odd: Model) -> None:
    for entries in (to_budget(odd, 12_000, size), to_width(odd, 3.3)):
        packed = PackedModel(entries, {"config.json": b"{}"})
        tensors = code_tensors(packed)
        back = from_code_tensors(tensors)
        assert back.files == packed.files
        assert all(torch.equal(x, decoded(entries)[name]) for name, x in decoded(back.entries).items())
        for name in list(tensors):
            with pytest.raises(PayloadError, match="missing"):
                from_code_tensors({n: x for n, x in tensors.items() if n != name})


def test_files_that_grow_leave_a_checkpoint_of_codes_the_shapes_it_had(odd: Model) -> None:
    entries = odd.lossless()
    old, new = (PackedModel(entries, {"config.json": b"{}" * n, "a.txt": b"a" * n}) for n in (200, 206))
    shapes = [{n: x.shape for n, x in code_tensors(model).items()} for model in (old, new)]
    assert shapes[0] == shapes[1] and from_code_tensors(code_tensors(new)).files == new.files


def test_a_checkpoint_of_codes_names_files_of_its_folder_alone(odd: Model) -> None:
    tensors = code_tensors(PackedModel(odd.lossless(), {"config.json": b"{}"}))
    note = json.loads(tensors[NOTE].numpy().tobytes())
    for files in ({"../up": 2}, {"a": -1}, {"a": 1 << 40}, {"a": "2"}, ["a"], {"/etc/a": 1}):
        told = json.dumps(note | {"files": files}).encode()
        with pytest.raises(PayloadError):
            from_code_tensors(tensors | {NOTE: torch.tensor(list(told), dtype=torch.uint8)})


@pytest.fixture(scope="module")
def packed() -> bytes:
    draw = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randn(32, 33, generator=draw), "b": torch.rand(5, generator=draw)}
    entries = to_budget(Model(tensors), 1_600, size)
    entries |= {"c": pack_entry(Tied("a")), "d": pack_entry(Plain(torch.ones(3, dtype=torch.bool)))}
    return write_model(PackedModel(entries, {"config.json": b"{}" * 40}))


def refused_or_read(data: bytes) -> None:
    """Unpack all there is; only the one error may leave."""
    try:
        model = read_model(data)
        decoded(model.entries)
    except PayloadError:
        return
    claimed = sum(np.prod(e.shape, dtype=float) for e in model.entries.values())
    assert claimed <= packed_model.FREE + packed_model.PER_BYTE * len(data)


def test_a_cut_file_is_refused_wherever_it_is_cut(packed: bytes) -> None:
    for n in range(len(packed)):
        with pytest.raises(PayloadError):
            read_model(packed[:n])
    assert is_model(packed) and not is_model(b"ply\n" * 99)


def test_a_bit_that_fell_over_is_noticed(packed: bytes) -> None:
    (length,) = struct.unpack_from("<Q", packed)
    for at in range(8 + length, len(packed), 7):
        data = bytearray(packed)
        data[at] ^= 1 << at % 8
        with pytest.raises(PayloadError):
            read_model(bytes(data))


def test_hostile_files_are_refused_in_one_error(packed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_model, "digest", lambda note, _: note["check"])  # who lies has the right hash
    (length,) = struct.unpack_from("<Q", packed)
    draw, begin = Random(7), 8 + length
    for i in range(5_000):
        data = bytearray(packed)
        low, high = (8, begin) if i % 4 else (begin, len(data))  # most in the header, which costs least
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(low, high)] = draw.choice((0, 255, 48, 57, 45, 91, draw.randrange(256)))
        refused_or_read(bytes(data))


LIES = {
    "more than any packed model": ("a", "shape", [1 << 30, 1 << 30]),
    "has the shape": ("a", "shape", [-1, 5]),
    "update thinwire": ("a", "kind", "steps2"),
    "is of type": ("b", "dtype", "float128"),
    "which is not there": ("c", "name", "c"),
}


@pytest.mark.parametrize("told", LIES)
def test_a_header_that_lies_is_refused(packed: bytes, told: str) -> None:
    name, key, value = LIES[told]
    with pytest.raises(PayloadError, match=told):
        decoded(read_model(_changed(packed, lambda note: note["tensors"][name].update({key: value}))).entries)


def test_a_newer_version_says_update(packed: bytes) -> None:
    with pytest.raises(PayloadError, match="version 3, and this thinwire reads version 2; update"):
        read_model(_changed(packed, lambda note: note.update(version=3)))


def _changed(packed: bytes, change) -> bytes:
    (length,) = struct.unpack_from("<Q", packed)
    fields = json.loads(packed[8 : 8 + length])
    note = json.loads(fields[METADATA][FRAME.key])
    change(note)
    note["check"] = digest(note, [packed[8 + length :]])
    fields[METADATA][FRAME.key] = json.dumps(note)
    head = json.dumps(fields).encode()
    return struct.pack("<Q", len(head)) + head + packed[8 + length :]
