"""Any budget is kept and used, whatever the tensors are; a next version keeps to the first one's plan."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from thinwire.types import InputError
from thinwire.uses.models.budgets import Entries, like, to_budget, to_width
from thinwire.uses.models.codes import code_tensors, from_code_tensors
from thinwire.uses.models.entry import unpack_entry
from thinwire.uses.models.moments import Moments
from thinwire.uses.models.packed_model import PackedModel, read_model, write_model
from thinwire.uses.models.tensors import Stepped, Tied
from thinwire.uses.models.weights_to_pack import Model

pytest.importorskip("zstandard")
DRAW = torch.Generator().manual_seed(3)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW)


def size(entries: Entries) -> int:
    return len(write_model(PackedModel(entries)))


def decoded(entries: Entries) -> dict[str, torch.Tensor]:
    read = read_model(write_model(PackedModel(entries))).entries
    coded = {name: unpack_entry(entry, name) for name, entry in read.items()}
    return {name: c.decoded() for name, c in coded.items() if not isinstance(c, Tied)}


def unused(rows: int, columns: int) -> torch.Tensor:
    """Return an embedding of which most rows were never learned."""
    x = normal(rows, columns)
    x[torch.rand(rows, generator=DRAW) < 0.8] = 0
    return x


MODELS = {
    "dense": {f"l{i}": normal(96, 160) for i in range(2)},
    "unused rows": {"embed": unused(1500, 32)} | {f"l{i}": normal(80, 64) for i in range(2)},
    "pruned": {f"l{i}": normal(200, 300) * (torch.rand(200, 300, generator=DRAW) < 0.1) for i in range(2)},
    "outliers": {f"l{i}": normal(96, 128) * torch.exp(2 * normal(96, 1)) for i in range(2)},
}


@pytest.mark.parametrize("kind", MODELS)
def test_budgets_are_kept_and_used_from_coarse_to_fine(kind: str) -> None:
    model = Model(MODELS[kind])
    least, most = (size(to_width(model, bits)) for bits in (2.6, 8.2))
    errors = []
    for budget in torch.linspace(0.9 * least, 0.6 * most, 3).long().tolist():
        entries = to_budget(model, budget, size)
        assert 0.9 * budget < size(entries) <= budget
        back = decoded(entries)
        errors.append(sum(float((back[n] - x).square().sum()) for n, x in MODELS[kind].items()))
    assert all(b < 1.02 * a for a, b in pairwise(errors))


def test_a_sample_that_misleads_is_no_reason_to_exceed_a_budget() -> None:
    x = torch.zeros(2000, 128)
    sampled = torch.linspace(0, 1999, (1 << 16) // 128).long()
    x[torch.ones(2000, dtype=torch.bool).scatter(0, sampled, 0)] = 1.0
    model = Model({"x": x * normal(2000, 128)})
    with pytest.raises(InputError, match="at least, and 20000 are asked for") as e:
        to_budget(model, 20_000, size)
    least = int(str(e.value).split()[3])
    assert size(to_budget(model, least, size)) <= least


def test_zeros_small_numbers_and_wide_tensors_are_packed() -> None:
    tensors = {"zero": torch.zeros(64, 64), "small": 1e-20 * normal(64, 64), "wide": normal(1, 3, 30_000)}
    model = Model(tensors | {"half": 65_000 * (1 + 0.002 * torch.rand(40, 40, generator=DRAW)).half()})
    back = decoded(to_budget(model, 60_000, size))
    assert not back["zero"].any() and bool(back["half"].isfinite().all())
    for name in ("small", "wide"):
        assert float((back[name] - tensors[name]).norm() / tensors[name].norm()) < 0.2


def test_small_weights_keep_their_accuracy_in_groups() -> None:
    x = normal(64, 128)
    errors = [float((decoded(to_width(Model({"x": s * x}), 8.3))["x"] / s - x).norm()) for s in (1.0, 1e-4)]
    assert errors[1] < 1.5 * errors[0]


def moments(rows: int, columns: int) -> Moments:
    a = normal(columns, columns)
    return Moments(torch.full((rows,), 1 / rows), a @ a.t())


def test_a_next_version_is_turned_over_as_the_first_was() -> None:
    x = normal(40, 72)
    known = Model({"x": x}, {"x": moments(72, 40)}, swapped={"x"})
    for first, second in ((known, Model({"x": x})), (Model({"x": x}), known)):
        old = to_budget(first, 1_600, size)
        new = unpack_entry(like(second, old).entries["x"], "x")
        before = unpack_entry(old["x"], "x")
        assert isinstance(new, Stepped) and isinstance(before, Stepped) and new.swapped == before.swapped
        assert float((new.decoded() - x).norm()) <= 1.2 * float((before.decoded() - x).norm())


def test_codes_keep_their_types_and_large_ones_are_not_cut() -> None:
    wide, narrow = normal(40, 40), normal(40, 40)
    wide[0, 0] = 1000.0
    old = to_budget(Model({"wide": wide, "narrow": narrow}), 2_400, size)
    first = code_tensors(PackedModel(old))
    assert first["wide"].dtype == torch.int16 and first["narrow"].dtype == torch.int8
    wide[0, 0], narrow[0, 0] = 1.0, 1000.0
    kept = from_code_tensors(first).entries
    new = like(Model({"wide": wide, "narrow": narrow}), kept).entries
    assert code_tensors(PackedModel(new))["wide"].dtype == torch.int16
    assert abs(float(decoded(new)["narrow"][0, 0]) - 1000) < 1


def test_twins_that_part_go_on_from_the_same_codes_and_whole_numbers_are_refused() -> None:
    x = normal(48, 48)
    old = to_budget(Model({"a": x, "b": x.clone()}), 1_800, size)
    assert old["b"].kind == "same"
    parted = like(Model({"a": x, "b": x + 0.01 * normal(48, 48)}), old).entries
    assert parted["b"].kind == "steps" and len(parted["b"].data) < 1.2 * len(parted["a"].data)
    with pytest.raises(InputError, match=r"a is torch\.int64 now and was torch\.float32"):
        like(Model({"a": x.long(), "b": x}), old)
