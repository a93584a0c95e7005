"""Stores: what goes in comes out, in memory and on disk; and what references make of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import Cast, Codec, Entropy, Raw, Uniform
from thinwire.store import DiskStore, Parts, References, Store, TensorStore
from thinwire.types import InputError

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


def parts(seed: int, n: int = 6) -> Parts:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 255, (n,), generator=g, dtype=torch.uint8),
        torch.randn(n, generator=g).to(torch.bfloat16),
        torch.randn(3, generator=g),
    )


def equal(a: Parts | None, b: Parts | None) -> bool:
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


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


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "put", "drop", "all"]), st.integers(0, 9), st.integers(0, 99)),
        max_size=40,
    )
)
def test_a_disk_store_does_what_a_dictionary_does(steps: list[tuple[str, int, int]]) -> None:
    disk, plain = DiskStore(), TensorStore()
    disk.GROWTH = 2
    for what, key, seed in steps:
        for s in (disk, plain):
            if what == "put":
                s.put(key, parts(seed))
            else:
                s.drop([key] if what == "drop" else None)
    try:
        assert sorted(disk.keys()) == sorted(plain.keys())
        assert all(equal(disk.get(k), plain.get(k)) for k in range(10))
    finally:
        disk.close()


def test_rows_of_another_size_fit_once_the_store_is_empty(tmp_path: Path) -> None:
    """The file then holds fewer rows than before, and has to grow."""
    disk = DiskStore(tmp_path)
    disk.GROWTH = 2
    for key in range(2):
        disk.put(key, parts(key, 4))
    with pytest.raises(InputError, match="one store per boundary"):
        disk.put(2, parts(2, 5000))
    disk.drop()
    for key in range(5):
        disk.put(key, parts(key, 5000))
    assert all(equal(disk.get(key), parts(key, 5000)) for key in range(5))
    disk.close()


def test_a_disk_store_leaves_no_file_and_shares_none(tmp_path: Path) -> None:
    a, b = DiskStore(tmp_path), DiskStore(tmp_path)
    a.put(1, parts(1))
    b.put(1, parts(2))
    assert equal(a.get(1), parts(1)) and equal(b.get(1), parts(2))
    a.close()
    b.close()
    assert not list(tmp_path.iterdir())


def test_what_a_disk_store_returns_is_a_copy(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path)
    disk.put(1, parts(1))
    got = disk.get(1)
    assert got is not None
    got[2].zero_()
    assert equal(disk.get(1), parts(1))
    disk.close()


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
    again.save([99], torch.zeros(1, 4, 16))  # must not survive
    again.load_state_dict(held.state_dict())
    assert sorted(disk.keys()) == [1, 2, 3]
    assert torch.equal(again.load([3, 1, 2]), held.load([3, 1, 2]))
    disk.close()


def test_int8_references_take_about_a_quarter_of_the_bytes() -> None:
    def nbytes(form: Codec) -> int:
        held = References(form)
        held.save([1], torch.randn(1, 64, 128))
        return sum(
            t.numel() * t.element_size() for k, t in held.state_dict().items() if not k.endswith("shape")
        )

    assert nbytes(Uniform(bits=8)) < 0.27 * nbytes(Raw())


def test_references_of_changing_size_go_to_memory_and_not_to_disk(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 32, generator=g) * torch.tensor([1.0, 0.0]).reshape(2, 1, 1)
    References(Entropy(Uniform())).save([1, 2], x)
    disk = DiskStore(tmp_path)
    with pytest.raises(InputError, match="one store per boundary"):
        References(Entropy(Uniform()), disk).save([1, 2], x)
    disk.close()
