"""How samples are dealt: every one to at most one client, none empty, the same for the same seed."""

from __future__ import annotations

import pytest
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import toy

from thinwire.types import InputError
from thinwire.uses.federated.run.datasets import Dataset
from thinwire.uses.federated.run.partitioner import Partitioner, counts

TEXTS = ["iid", "skew:100", "dirichlet:0.3", "dirichlet:0.5+skew:100", "classes:2", "classes:3+skew:10"]


def table(text: str, data: Dataset, clients: int = 10, seed: int = 0) -> torch.Tensor:
    """Deal, check what holds for any split, and return clients by classes."""
    parts = Partitioner.parse(text).deal(data, clients, seed)
    dealt = torch.cat(parts)
    assert len(parts) == clients and len(dealt.unique()) == len(dealt)
    assert int(dealt.min()) >= 0 and int(dealt.max()) < len(data)
    assert all(len(part) and torch.equal(part, part.sort().values) for part in parts)
    found = counts(data, parts)
    assert found.shape == (clients, data.classes) and int(found.sum()) == len(dealt)
    if not (text.startswith("classes") and "skew" in text):
        assert len(dealt) == len(data)
    return found


@each("text", TEXTS)
def test_the_seed_alone_decides(text: str) -> None:
    data = toy()
    first, again, other = (Partitioner.parse(text).deal(data, 10, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert str(Partitioner.parse(text)) == text and Partitioner.parse(f" {text} ") == Partitioner.parse(text)
    assert Partitioner.parse(str(Partitioner("dirichlet", 0.1234567))) == Partitioner("dirichlet", 0.1234567)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-9, 1e6),
    st.integers(1, 40),
    st.integers(40, 300),
    st.integers(1, 12),
    st.integers(0, 9),
    st.booleans(),
)
def test_whatever_is_possible_is_dealt_at_once(
    alpha: float, clients: int, samples: int, classes: int, seed: int, skewed: bool
) -> None:
    data = toy(samples, classes, seed)
    if not skewed:
        table(str(Partitioner("dirichlet", alpha)), data, clients, seed)
        return
    split = Partitioner("dirichlet", alpha, skew=3.0)
    if samples * 2 / clients / 4 >= 1:
        sizes = table(str(split), data, clients, seed).sum(1)
        assert (sizes.diff() <= 0).all()
    else:
        with pytest.raises(InputError, match="smallest"):
            split.deal(data, clients, seed)


def test_dirichlet_is_the_more_uneven_the_smaller_alpha() -> None:
    data = toy(5000)
    spread = [
        float(table(f"dirichlet:{alpha}", data).float().std(0).mean())
        for alpha in ("0.05", "1", "100", "1e6")
    ]
    assert spread[0] > 2 * spread[1] > 4 * spread[2] and spread[3] < 2
    assert float(table("iid", data).sum(1).max() - table("iid", data).sum(1).min()) <= 1


def test_an_alpha_that_floats_can_hardly_hold_gives_a_class_to_one() -> None:
    found = table("dirichlet:1e-300", toy(500))
    assert ((found > 10).sum(0) == 1).all() and (found.sum(1) >= 1).all()


def test_amounts_are_an_arithmetic_series_whatever_the_labels() -> None:
    data = toy(20_200)
    for text in ("skew:100", "dirichlet:0.5+skew:100", "iid+skew:100"):
        sizes = table(text, data, 4).sum(1).tolist()
        assert sizes == [10_000, 6700, 3400, 100]
    assert table("skew:1", data, 5).sum(1).tolist() == [4040] * 5
    mixed = table("dirichlet:0.1+skew:10", data).float()
    largest = (mixed / mixed.sum(1, keepdim=True)).max(1).values
    assert largest.mean() > 0.5  # labels are uneven all the same


def test_classes_are_as_many_as_asked_for_and_each_held_about_as_often() -> None:
    data = toy(6000)
    for clients, each_one in ((10, 2), (7, 3), (100, 1), (5, 10)):
        found = table(f"classes:{each_one}", data, clients) > 0
        assert (found.sum(1) == each_one).all()
        assert int(found.sum(0).max() - found.sum(0).min()) <= 1
    skewed = table("classes:2+skew:10", data)
    assert ((skewed > 0).sum(1) == 2).all() and 8 < skewed.sum(1)[0] / skewed.sum(1)[-1] < 12
    assert skewed.sum() > 0.9 * len(data)


def test_one_client_a_speaker() -> None:
    base = toy(30)
    who = torch.arange(30) % 3
    data = Dataset(
        "toy", base.inputs, base.labels, base.test_inputs, base.test_labels, 10, who, ("a", "b", "c")
    )
    parts = Partitioner.parse("speaker").deal(data, 3)
    assert [who[part].unique().tolist() for part in parts] == [[0], [1], [2]]
    assert len(torch.cat(parts).unique()) == 30
    with pytest.raises(InputError, match="toy has 3 speakers; give --clients 3"):
        Partitioner.parse("speaker").deal(data, 4)
    with pytest.raises(InputError, match="names no speakers"):
        Partitioner.parse("speaker").deal(toy(), 3)


@each(
    "text, words",
    [
        ("dirichlet:0", "alpha 0; give a number above 0"),
        ("dirichlet:-1", "alpha -1"),
        ("dirichlet:nan", "'nan' for a number"),
        ("dirichlet:1e999", "'1e999' for a number"),
        ("dirichlet:1_0", "'1_0' for a number"),
        ("dirichlet:--1", "'--1' for a number"),
        ("dirichlet", "cannot read --split 'dirichlet'; write it like"),
        ("iid:3", "cannot read"),
        ("classes:2.5", "2.5 classes; give a whole number"),
        ("classes:0", "0 classes"),
        ("skew:0.5", "skew of 0.5; give a number from 1"),
        ("skew:1e7", "skew of 10000000.0"),
        ("dirichelt:1", "did you mean dirichlet"),
        ("", "is unknown; write it like iid"),
        ("skew:2+dirichlet:1", "no labels before the plus"),
        ("iid+classes:2", "no skew after the plus"),
        ("iid+skew:2+skew:3", "'2\\+skew:3' for a number"),
        ("speaker+skew:2", "leave the skew out"),
    ],
)
def test_what_is_no_split_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as e:
        Partitioner.parse(text)
    assert "\n" not in str(e.value)


@each(
    "text, clients, words",
    [
        ("iid", 0, "0 clients; give 1 or more"),
        ("iid", 601, "601 clients are more than the 600 samples of toy; give fewer"),
        ("classes:11", 10, "toy has 10 classes; give at most as many"),
        ("classes:2", 4, "4 clients leave out some of the 10 classes"),
        ("classes:10", 600, "lets 600 clients share a class, which has fewer samples"),
        ("skew:1000", 100, "skew:1000 leaves the smallest of 100 clients 0.012 of 600"),
        ("dirichlet:0.1+skew:1000", 100, "leaves the smallest"),
        ("classes:2+skew:100", 10, "would lack samples of its 2 classes"),
    ],
)
def test_what_cannot_be_dealt_is_refused_at_once(text: str, clients: int, words: str) -> None:
    with pytest.raises(InputError, match=words) as e:
        Partitioner.parse(text).deal(toy(), clients)
    assert "\n" not in str(e.value)
