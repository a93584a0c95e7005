"""The bench of adapters, dropout and other prefixes: what it counts, and the tables drawn of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench import finetuning, pages, pages_finetuning
from tests.lab.models.test_models import make_config, make_source
from thinwire.lab.models.split import build_stage

pytest.importorskip("transformers")


def test_what_moved_is_of_all_tokens_and_of_the_median_one() -> None:
    x = torch.ones(1, 5, 4)
    x[0, 0] = 100.0
    reference = x.clone()
    reference[0, 0] = 0.0
    found = finetuning.moved(x, reference)
    assert found == {"all": pytest.approx(40_000 / 40_016), "median": 0.0, "sinks": 1.0}


def test_every_residual_branch_is_dropped_once() -> None:
    lower = build_stage(make_source(make_config("llama"), None), [range(2), range(2, 4)], 0)
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        before = lower(ids)
        finetuning.drop_branches(lower)
        assert sum(isinstance(m, nn.Dropout) and m.p == finetuning.P for m in lower.modules()) == 4
        assert not torch.equal(lower(ids), before)
        assert torch.equal(lower.eval()(ids), before)


def test_seeds_are_told_apart() -> None:
    assert finetuning.spread([0.2, 0.1, 0.6]) == {"mean": pytest.approx(0.3), "least": 0.1, "largest": 0.6}
    assert pages_finetuning.ranged(finetuning.spread([0.2, 0.1, 0.6])) == "30.0 % (10.0 to 60.0)"


def test_a_row_says_what_was_trained() -> None:
    rows = [{"rank": k, "rate": 2e-5, "values": 2.4e6, "loss": [4.5, 4.0, 3.5], "share": [0.02, 0.01]}
            for k in (0, 8)]  # fmt: skip
    text = pages_finetuning.adapters({"adapters": rows}, pages.table)
    assert "| all weights | 2.4 million | 2e-5 | 4.50, 4.00, 3.50 | 2.00 % | 1.00 % |" in text
    assert "| adapters, rank 8 | 2.4 million |" in text
