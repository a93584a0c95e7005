"""Casts that overflow are told, by tensor and number, or refused."""

from __future__ import annotations

import warnings

import pytest
import torch

from thinwire.state.history import History
from thinwire.state.layout import CASTS, Layout
from thinwire.types import InputError

WIDE = torch.tensor([1e6, 7e4, 1.0, -1e6, float("inf"), float("nan")])


def history(dtype: torch.dtype, strict: bool = False) -> History:
    made = History(Layout.of({"w": WIDE, "b": torch.ones(2)}, dtype))
    made.overflows.strict = strict
    return made


def told(made: History, tensors: dict[str, torch.Tensor]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made.publish(tensors)
    return [str(w.message) for w in seen]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_values_too_large_for_a_narrow_dtype_are_named(dtype: torch.dtype) -> None:
    made, w = history(dtype), {"w": WIDE.clone(), "b": torch.ones(2)}
    (first,) = told(made, w)
    assert first.startswith("3 values of w are too large for")
    w["w"][2] = 2e6
    assert not told(made, w)  # once a tensor
    w["b"][0] = 1e7
    (later,) = told(made, w)
    assert "1 value of b" in later


def test_what_fits_is_not_told() -> None:
    ends = torch.tensor([65519.0, -65504.0, float("inf")])  # the first rounds down
    assert not told(History(Layout.of({"w": ends}, torch.float16)), {"w": ends})
    assert not told(history(torch.bfloat16), {"w": WIDE, "b": torch.ones(2)})
    assert not told(History(Layout.of({"w": ends})), {"w": ends})


def test_strict_refuses_them_and_the_newest_version_stays() -> None:
    made, good = history(torch.float16, strict=True), {"w": torch.ones(6), "b": torch.ones(2)}
    made.publish(good)
    before = made.newest
    with pytest.raises(InputError, match="3 values of w are too large for float16"):
        made.publish({"w": WIDE, "b": torch.ones(2)})
    assert made.newest == before
    made.publish(good | {"b": torch.zeros(2)})
    assert made.newest.number == before.number + 1


def test_every_cast_to_a_narrower_dtype_is_looked_at() -> None:
    floats = [getattr(torch, kind) for kind in CASTS]
    for source in floats:
        for target in floats:
            for sign in (1.0, -1.0):
                least = torch.tensor([sign * torch.finfo(target).max * 1.5]).double().to(source)
                fits = not least.double().isfinite().all() or least.double().abs() < torch.finfo(target).max
                for x in (least, least.repeat(70)):  # short ones, and such as vectors are used for
                    notes = told(History(Layout.of({"w": x}, target)), {"w": x})
                    assert len(notes) == (0 if fits or source == target else 1), (source, target)
