"""The table of pipelines: some of its rows tried again, and none of a defect."""

from __future__ import annotations

import warnings

import pytest
from bench.pictures.breadth import KEPT, MODES, Cell, by_kind, meshes, outcome, pipelines, summary, verdict
from bench.pictures.breadth_tables import refusals, word
from each import each

pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers' own, which its models give when made


def test_every_class_of_the_table_has_pipelines_and_none_fails() -> None:
    rows = {row["kind"]: row for row in summary()["rows"]}
    assert rows.keys() <= pipelines().keys()
    assert len([row for row in rows.values() if row["models"]]) > 30
    assert all("failed" not in words for row in rows.values() for words in row["modes"].values())


@each(
    "kind, modes",
    [
        ("FluxTransformer2DModel", ("gather", "pipe", "latent")),
        ("MochiTransformer3DModel", ("gather", "ulysses")),
        ("SanaTransformer2DModel", ("displaced", "guidance")),
        ("Krea2Transformer2DModel", ("displaced", "batch")),
        ("WanTransformer3DModel", ("latent", "pipe")),
    ],
)
def test_rows_of_the_table_hold(kind: str, modes: tuple[str, ...]) -> None:
    tried = KEPT.get(Cell(kind))["tried"]
    name, (make, draw) = next(iter(by_kind()[kind].items()))
    with meshes(2) as ranks, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in modes:
            found = outcome(make(), draw(), mode, ranks)
            assert verdict(mode, found) == verdict(mode, tried[name][mode]), (mode, found)
            assert found.get("refused") == tried[name][mode].get("refused")


def test_words_and_sentences_are_of_all_models_of_a_class() -> None:
    assert [word(v) for v in ([], ["yes"], ["no", "yes"], ["failed", "yes"])] == [
        "–",
        "yes",
        "in part",
        "failed",
    ]
    rows = [{"kind": kind, "refused": [["pipe", f"mode pipe: {kind}"]]} for kind in ("A", "B")]
    assert "| `pipe` | mode pipe: … | `A`, `B` |" in refusals({"rows": rows})
    assert set(MODES) >= {"gather", "pipe"}
