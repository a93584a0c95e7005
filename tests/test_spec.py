"""Printable specs: numbers of codecs and memories read back, or are refused where they are made."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from codec_examples import EXAMPLES
from packets import MEMORIES

from thinwire import codecs, spec
from thinwire.channels import memory
from thinwire.types import InputError

SPECS: list[Any] = [*(examples[-1] for examples in EXAMPLES.values()), *MEMORIES]
FIELDS = [(s, f.name, f.type) for s in SPECS for f in fields(s) if f.type in ("int", "float", "bool")]


def test_numbers_of_numpy_become_pythons_own() -> None:
    for made, name, kind in FIELDS:
        value = getattr(made, name)
        foreign = {"int": np.int64, "float": np.float64, "bool": bool}[kind](value)
        again = replace(made, **{name: foreign})
        assert type(getattr(again, name)).__name__ == kind, (made, name)
        assert spec.parse(repr(again), {**codecs.REGISTRY, **memory.REGISTRY}) == made, (made, name)


def test_what_would_not_read_back_as_it_is_is_refused() -> None:
    for made, name, kind in FIELDS:
        wrong: dict[str, tuple[list[Any], str]] = {
            "int": ([float(getattr(made, name)), True, "4", None], "a whole number"),
            "float": ([float("inf"), float("nan"), 10**400, True, "1", None], "a finite number"),
            "bool": ([1, np.bool_(True), None], "True or False"),
        }
        values, what = wrong[kind]
        for value in values:
            with pytest.raises(InputError, match=f"{name}=.* is not {what}"):
                replace(made, **{name: value})


def test_whole_numbers_are_fine_where_any_number_is() -> None:
    assert repr(codecs.DeadZone(step=2)) == "DeadZone(step=2.0)"
