"""``thinwire generate`` with spread experts: records, pictures and report; what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from launchers import warm

from thinwire.runs.records.finished_runs import Run
from thinwire.types import InputError
from thinwire.uses.kinds import load_run
from thinwire.uses.pictures.run import flux_fashion_moe, recording
from thinwire.uses.pictures.run.cards import headline
from thinwire.uses.pictures.run.options import PicturesConfig
from thinwire.uses.pictures.run.sheets import Sheet, sample_batch, sample_each

pytest.importorskip("diffusers")

MODEL = ("--model", "flux-fashion-moe", "--init", "random", "--threads", "1")
WAYS = ("one", "ep-sync", "dice", "dice-residual", "batch")


def test_each_way_leaves_a_record_and_all_pictures(tmp_path: Path) -> None:
    """In order, whichever rank has made them; with values as they are they are those of one device."""
    out = tmp_path / "out"
    ranks = warm().ranks(
        tmp_path, "generate", *WAYS, *MODEL, "--pictures", "3", "--steps", "5", "--out", out, "--json"
    )
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    records = {r["recipe"]["name"]: r for r in json.loads(ranks[0].out)}
    assert list(records) == list(WAYS) and all(load_run(out / name).kind == "pictures" for name in WAYS)
    modes = ["one", "sync", "interweaved", "interweaved", "batch"]
    assert [r["mode"] for r in records.values()] == modes
    sync, dice, residual = (records[name] for name in WAYS[1:4])
    assert sync["bytes"]["total"] == pytest.approx(sync["bytes"]["fp16_total"], rel=0.05)
    few, some, all_ = (r["bytes"]["steady_step"] for r in (residual, dice, sync))
    assert few < some / 2 < all_ / 2.2
    assert sync["quality"]["psnr_db"] > 90 > dice["quality"]["psnr_db"] > 30
    assert sync["exchanges"] == 2 * 2 * 5  # there and back, layers, steps
    for name in WAYS:
        assert len(list((out / name).glob("picture*.png"))) == 3
    assert (out / "batch/picture-2.png").read_bytes() == (out / "one/picture-2.png").read_bytes()
    model = flux_fashion_moe.build(0)
    recording.save_png(sample_each(model, [2], [2], 5)[0], tmp_path / "alone.png")
    assert (tmp_path / "alone.png").read_bytes() == (out / "one/picture-3.png").read_bytes()
    assert (
        "3 pictures of a garment by flux-fashion-moe, 5 denoising steps" in (out / "report.html").read_text()
    )

    without_one = [Run(name, load_run(out / name)) for name in ("ep-sync", "dice")]
    assert re.fullmatch(r"\S+ makes 3 pictures [\d.]+× faster than \S+", headline(without_one))


def test_pictures_of_a_batch_are_those_made_apart_with_guidance_too() -> None:
    model, sheet = flux_fashion_moe.build(0), Sheet(1, 1)
    for guidance in (1.0, 3.0):
        both = sample_batch(model, sheet, [[4], [7]], [1, 2], 3, guidance)
        apart = [sample_batch(model, sheet, [[c]], [s], 3, guidance) for c, s in ((4, 1), (7, 2))]
        torch.testing.assert_close(both, torch.cat(apart), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"recipes": "compact"}, "compact is a way of flux-fashion; give --model flux-fashion"),
        ({"recipes": "dice", "model": "flux-fashion"}, "dice is a way of flux-fashion-moe; give --model"),
        ({"recipes": "dcie"}, "there is no recipe 'dcie'; did you mean dice"),
        ({"recipes": "auto"}, "auto chooses among ways of flux-fashion; for flux-fashion-moe name ways"),
        ({"recipes": "dice", "pictures": 3, "ranks": 4}, "--pictures 3 are too few for 4 ranks"),
        ({"recipes": "dice:stride=0"}, r"dice: stride=0 is not a whole number in 1\.\.1000"),
    ],
)
def test_what_cannot_be_is_one_sentence(asked: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        PicturesConfig(**{"model": "flux-fashion-moe"} | asked)  # type: ignore[arg-type]


def test_a_model_has_sheets_and_pictures_of_its_own_unless_told_otherwise() -> None:
    experts, other = PicturesConfig(recipes="one", model="flux-fashion-moe"), PicturesConfig()
    assert (experts.sheet, experts.pictures, other.sheet, other.pictures) == ("1x1", 32, "4x8", 1)
    assert PicturesConfig(recipes="one", model="flux-fashion-moe", pictures=4).pictures == 4
