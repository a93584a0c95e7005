"""Matrices of any finite numbers are packed as well as ordinary ones; what no longer fits a plan is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.uses.models.budgets import Entries, like, to_budget, to_width
from thinwire.uses.models.codes import code_tensors, from_code_tensors
from thinwire.uses.models.entry import unpack_entry
from thinwire.uses.models.packed_model import PackedModel, read_model, write_model
from thinwire.uses.models.tensors import Tied
from thinwire.uses.models.weights_to_pack import Model

pytest.importorskip("zstandard")
NORMAL = torch.randn(64, 96, generator=torch.Generator().manual_seed(5))
OUTLIER = NORMAL.repeat(4, 1).index_put((torch.tensor(7), torch.tensor(9)), torch.tensor(1e9))
ZERO_ROWS = NORMAL * (torch.arange(64) % 3 > 0)[:, None]
MIXED = NORMAL * 10.0 ** torch.linspace(-16, 16, 64)[:, None]
SCALES = [10.0**k for k in (-38, -12, -9, -6, 6, 9, 37)]
WAYS = {
    "--bits": lambda model: to_width(model, 6.25),
    "--target": lambda model: to_budget(model, model.weights * 6 // 8 + 900, size),
}


def size(entries: Entries) -> int:
    return len(write_model(PackedModel(entries)))


def through(entries: Entries) -> dict[str, Tensor]:
    """Return what comes back from a packed file, which a checkpoint of codes gives too."""
    read = read_model(write_model(PackedModel(entries)))
    found = []
    for own in (read.entries, from_code_tensors(code_tensors(read)).entries):
        coded = {name: unpack_entry(entry, name) for name, entry in own.items()}
        found.append({name: c.decoded() for name, c in coded.items() if not isinstance(c, Tied)})
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())
    return found[0]


def off(back: Tensor, x: Tensor) -> float:
    most = x.double().abs().max()
    return float(((back.double() - x.double()) / most).norm() / (x.double() / most).norm())


@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_all_sizes_are_packed_alike(way: str) -> None:
    usual = {d: off(through(WAYS[way](Model({"x": NORMAL.to(d)})))["x"], NORMAL.to(d)) for d in WIDE}
    for dtype, most in usual.items():
        for scale in SCALES if dtype != torch.float64 else (1e-290, 1e-38, 1e-9, 1e9, 1e290):
            x = (NORMAL.double() * scale).to(dtype)
            back = through(WAYS[way](Model({"x": x})))["x"]
            floor = 2.0**-134 / scale if dtype == torch.bfloat16 else 0.0  # it has no smaller ones
            assert back.dtype == dtype and off(back, x) < 1.3 * most + floor, (dtype, scale, off(back, x))


WIDE = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("way", WAYS)
def test_numbers_that_no_scale_spans_at_once(way: str) -> None:
    """Subnormal numbers, zeros, single weights far out, and rows of very different sizes."""
    tensors = {"tiny": NORMAL * 1e-41, "zero": torch.zeros(64, 96), "rows": ZERO_ROWS}
    tensors["one"] = torch.ones(1, 1)
    back = through(WAYS[way](Model(tensors)))
    assert off(back["tiny"], tensors["tiny"]) < 0.05 and off(back["rows"], ZERO_ROWS) < 0.05
    assert not back["zero"].any() and not back["rows"][::3].any() and torch.equal(back["one"], tensors["one"])
    found = through(WAYS[way](Model({"x": OUTLIER})))["x"]
    others = torch.arange(len(OUTLIER)) != 7
    assert off(found, OUTLIER) < 0.01 and off(found[others], OUTLIER[others]) < 0.1


def test_rows_of_all_sizes_keep_their_accuracy_in_groups() -> None:
    found = through(to_width(Model({"x": MIXED}), 6.25))["x"]
    assert max(off(a, b) for a, b in zip(found, MIXED, strict=True)) < 0.1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grown", [3.0, 5_000.0, 1e-3, 1 / 30, 1e30, 1e-30])
def test_a_version_that_does_not_fit_its_codes_gets_new_ones_and_is_named(way: str, grown: float) -> None:
    first = {"x": NORMAL, "same": NORMAL.flip(0), "zero": torch.zeros(64, 96)}
    old = WAYS[way](Model(first))
    second = {"x": NORMAL * grown, "same": first["same"] * 1.01, "zero": 1e-4 * NORMAL}
    new, renewed = like(Model(second), old)
    before, after = through(old), through(new)
    assert set(renewed) == {"x", "zero"} and off(after["same"], second["same"]) < 0.05
    assert off(after["x"], second["x"]) < 1.5 * off(before["x"], NORMAL)
    assert off(after["zero"], second["zero"]) < 0.3
    assert size(new) < 1.3 * size(WAYS[way](Model(second)))
    part = NORMAL.clone()
    part[3:9] *= grown
    again, _ = like(Model({**first, "x": part}), old)
    rows = slice(3, 9) if grown > 1 or way == "--bits" else slice(9, 64)
    assert off(through(again)["x"][rows], part[rows]) < 0.1
