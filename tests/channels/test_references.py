"""Stores: what goes in comes out, in memory and on disk; and what references make of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stored import equal, parts

from thinwire.channels.disk import DiskStore
from thinwire.channels.references import References, Store, TensorStore, splits
from thinwire.codecs import Cast, Codec, Entropy, Raw, Uniform
from thinwire.types import TensorSpec

KINDS = ["as it is", "host", "disk"]


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    if request.param == "disk":
        made = DiskStore(tmp_path)
    else:
        made = TensorStore("cpu" if request.param == "host" else None)
    yield made
    made.close()


def test_what_was_put_comes_out(store: Store) -> None:
    for key in (5, 1, 1 << 62):
        store.put(key, parts(key % 97))
    assert store.keys() == [5, 1, 1 << 62]
    assert equal(store.get(1 << 62), parts((1 << 62) % 97))
    assert store.get(2) is None


def test_a_later_value_replaces_the_earlier_in_its_place(store: Store) -> None:
    for key in (3, 1, 2):
        store.put(key, parts(key))
    store.put(3, parts(30))
    assert store.keys() == [3, 1, 2]
    assert equal(store.get(3), parts(30)) and equal(store.get(1), parts(1))


def test_dropped_keys_are_gone_and_unknown_ones_are_no_error(store: Store) -> None:
    for key in range(4):
        store.put(key, parts(key))
    store.drop([1, 3, 77])
    assert store.keys() == [0, 2] and store.get(1) is None
    store.drop()
    assert store.keys() == []


def test_values_of_no_bytes_are_still_there(store: Store) -> None:
    """A memory that only knows that a sample was seen keeps rows of length zero."""
    store.put(1, (torch.empty(0),))
    assert equal(store.get(1), (torch.empty(0),)) and store.get(2) is None


def test_what_came_out_stays_as_it_is(store: Store) -> None:
    store.put(1, parts(1))
    got = store.get(1)
    store.put(1, parts(2))
    store.drop()
    store.put(3, parts(3))
    assert equal(got, parts(1))


def test_expecting_keys_changes_nothing(store: Store) -> None:
    for key in range(4):
        store.put(key, parts(key))
    store.prefetch([3, 77, 1, 3])
    assert store.keys() == [0, 1, 2, 3] and store.get(77) is None
    assert all(equal(store.get(key), parts(key)) for key in (3, 1, 0, 2))


# -- references: the same for every store and form ---------------------------------------------------------

FORMS: list[Codec] = [Raw(), Cast("float16"), Uniform(bits=8, group=16)]


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_references_come_back_as_their_form_holds_them(store: Store, form: Codec) -> None:
    held, x = References(form, store), torch.randn(3, 4, 16)
    held.save([7, 8, 9], x)
    each = torch.cat([form.decode(form.encode(row)) for row in x.split(1)])
    assert torch.equal(held.load([7, 8, 9]), each)
    assert torch.equal(held.load([9, 7]), each[[2, 0]])
    with pytest.raises(KeyError):
        held.load([7, 10])


def test_a_reference_does_not_follow_the_tensor_it_came_from(store: Store) -> None:
    held, x = References(Raw(), store), torch.randn(1, 4, 16)
    before = x.clone()
    held.save([1], x)
    x.zero_()
    assert torch.equal(held.load([1]), before)


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_saved_references_can_be_loaded_by_a_fresh_pair(form: Codec, tmp_path: Path) -> None:
    held, x = References(form), torch.randn(3, 4, 16)
    held.save([3, 1, 2], x)
    disk = DiskStore(tmp_path)
    again = References(form, disk)
    for state in held.states():
        again.take(state)
    assert sorted(disk.keys()) == [1, 2, 3]
    assert torch.equal(again.load([3, 1, 2]), held.load([3, 1, 2]))
    disk.close()


def test_int8_references_take_about_a_quarter_of_the_bytes() -> None:
    def nbytes(form: Codec) -> int:
        held = References(form)
        held.save([1], torch.randn(1, 64, 128))
        return sum(t.nbytes for state in held.states() for k, t in state.items() if not k.endswith("shape"))

    assert nbytes(Uniform(bits=8)) < 0.27 * nbytes(Raw())


def test_references_of_changing_size_fit_too(store: Store) -> None:
    pytest.importorskip("zstandard")
    form = Entropy(Uniform())
    held = References(form, store)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 32, generator=g) * torch.tensor([1.0, 0.0]).reshape(2, 1, 1)
    each = torch.cat([form.decode(form.encode(row)) for row in x.split(1)])
    for keys in ([1, 2], [2, 1]):  # then each row where the other was
        held.save(keys, x)
        assert torch.equal(held.load(keys), each)


EVERY_FORM = [
    *FORMS,
    Uniform(bits=8),
    Uniform(bits=4, group=16),
    Uniform(bits=8, scale="token"),
    Uniform(bits=8, scale="channel"),
    Uniform(bits=8, scale="tensor"),
    Uniform(bits=8, scale_dtype="e5m3"),
    Uniform(bits=8, rounding="stochastic"),
    Uniform(bits=8, group=24, scale_dtype="float16", clip=0.7),
    Entropy(Uniform(bits=8)),
]


@pytest.mark.parametrize("shape", [(5, 40), (7,), (3, 2, 33), ()], ids=repr)
@pytest.mark.parametrize("form", EVERY_FORM, ids=repr)
def test_a_sample_is_held_alike_whatever_its_batch(form: Codec, shape: tuple[int, ...]) -> None:
    """Else its references would depend on the shuffle; bytes, and what they stand for."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn((6, *shape), generator=g) * torch.logspace(-12, 12, 6).reshape(6, *[1] * len(shape))
    alone, batch = References(form), References(form)
    for i in range(6):
        alone.save([i], x[i : i + 1])
    batch.save([0, 1, 2, 3], x[:4])
    batch.save([5, 4], x[[5, 4]])
    for key in range(6):
        assert equal(batch.store.get(key), alone.store.get(key))
    each = torch.cat([alone.load([k]) for k in (4, 1, 5)])
    assert torch.equal(batch.load([4, 1, 5]), each)


def test_the_usual_forms_are_coded_in_one_go() -> None:
    spec = TensorSpec((1, 16, 64))
    assert all(splits(form, spec) for form in FORMS)
    assert not any(splits(form, spec) for form in (Uniform(), Uniform(bits=8, scale="tensor")))
