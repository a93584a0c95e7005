"""Sheets, how near pictures are, what is predicted, and how flux-fashion is sampled and trained."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from thinwire.types import InputError
from thinwire.uses.pictures.run import classifier, flux_fashion, predict, recording
from thinwire.uses.pictures.run.options import PicturesConfig
from thinwire.uses.pictures.run.recording import quality
from thinwire.uses.pictures.run.sheets import SIDE, Sheet, joined, parted, sample

TINY = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 1}


def test_a_sheet_is_cut_into_tokens_and_put_together_again() -> None:
    sheet = Sheet(2, 3)
    garments = torch.rand(6, SIDE, SIDE)
    image = joined(garments, sheet)
    torch.testing.assert_close(sheet.image(sheet.latents(image)), image)
    assert torch.equal(parted(image, sheet), garments)
    assert sheet.latents(image).shape == (1, sheet.tokens, 16) == (1, 384, 16)
    assert sheet.inputs(0.5)["encoder_hidden_states"].shape == (1, 6, 16)
    picture, text = sheet.positions()
    assert len(picture) == 384 and text[-1].tolist() == [1.0, 11.5, 19.5]


def test_noise_is_by_seed_alone() -> None:
    assert torch.equal(Sheet(1, 2).noise(3), Sheet(1, 2).noise(3))
    assert not torch.equal(Sheet(1, 2).noise(3), Sheet(1, 2).noise(4))


@pytest.mark.parametrize(
    ("size", "classes", "said"),
    [
        ("2x3", "0,1,2,3,4", "5 garments are named for a sheet of 2x3; name 6"),
        ("2by3", "", "--sheet 2by3 is no grid"),
        ("0x3", "", "a sheet of 0 rows is not made here"),
        ("9x1", "", "a sheet of 9 rows is not made here"),
        ("1x1", "11", "there is no class [11]"),
        ("1x2", "1,shoe", "--classes 1,shoe are no numbers"),
    ],
)
def test_sheets_that_cannot_be(size: str, classes: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        Sheet.parse(size, classes)
    assert said in str(error.value)


def test_quality_of_a_known_error() -> None:
    image = 0.9 * torch.rand(64, 96)
    found = quality(image + 0.01, image)
    assert found["psnr_db"] == pytest.approx(40, abs=1e-3) and found["max_abs"] == pytest.approx(0.01, 1e-3)
    assert found["ssim"] is not None and 0.9 < found["ssim"] < 1
    same = {"psnr_db": None, "ssim": 1.0, "ssim_window": 11.0, "relative_l2": 0.0, "max_abs": 0.0}
    assert quality(image, image) == same
    assert recording.png(image).startswith(b"\x89PNG")


def test_sampling_is_euler_s_and_guidance_of_one_text_changes_nothing() -> None:
    model, sheet = flux_fashion.build(0, **TINY), Sheet(1, 1)
    seen: list[int] = []
    x = sample(model, sheet, 3, seed=1, on_step=seen.append)
    assert seen == [1, 2, 3] and torch.equal(x, sample(model, sheet, 3, seed=1))
    by_hand = sheet.noise(1)
    for now, then in ((1.0, 2 / 3), (2 / 3, 1 / 3), (1 / 3, 0.0)):
        with torch.no_grad():
            by_hand = by_hand + (then - now) * model(hidden_states=by_hand, **sheet.inputs(now))[0]
    torch.testing.assert_close(x, by_hand)
    assert not torch.equal(sample(model, sheet, 3, 1, guidance=3.0), x)


def test_training_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.pictures import flux_fashion as trainer

    images, classes = torch.randint(256, (40, 28, 28), dtype=torch.uint8), torch.arange(40) % 10
    monkeypatch.setattr(trainer.Training, "sizes", (((1, 1), 0.5), ((1, 2), 0.5)))
    monkeypatch.setattr(trainer, "build", lambda seed: flux_fashion.build(seed, **TINY))

    def training() -> trainer.Training:
        return trainer.Training(images, classes, 6, tokens=128)

    whole, first, second = training(), training(), training()
    losses = [whole.advance() for _ in range(4)]
    for _ in range(2):
        first.advance()
    first.save(tmp_path)
    second.load(tmp_path)
    assert [second.advance() for _ in range(2)] == losses[2:]
    for a, b in zip(whole.mean.parameters(), second.mean.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_packaged_model_makes_the_garments_that_are_named() -> None:
    sheet = Sheet(2, 5)
    made = sheet.image(sample(flux_fashion.load(), sheet, 6, seed=0))
    assert classifier.accuracy(made, sheet) >= 0.5
    named_wrong = Sheet(2, 5, tuple((c + 1) % 10 for c in sheet.classes))
    assert classifier.accuracy(made, named_wrong) <= 0.3
    assert classifier.accuracy(sheet.image(sheet.noise(0)), sheet) <= 0.3


@pytest.mark.parametrize(
    "part", [(flux_fashion, flux_fashion.load), (classifier, classifier.load_classifier.__wrapped__)]
)
def test_weights_that_are_not_there(
    part: tuple[ModuleType, Callable[[], object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, load = part
    monkeypatch.setattr(module, "WEIGHTS", tmp_path / "gone.safetensors")
    with pytest.raises(InputError, match=r"gone\.safetensors is not in this package"):
        load()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recipes": "fp61"}, "no recipe 'fp61'; did you mean fp16"),
        ({"recipes": "fp16 fp16"}, "fp16 is named twice"),
        ({"recipes": "guidance"}, "--guidance 1 takes one"),
        ({"steps": 0}, "--steps is 0; it must be at least 1"),
        ({"ranks": 0}, "--ranks is 0; it must be at least 1"),
        ({"sheet": "2x3", "classes": "0,1,2,3,4"}, "5 garments are named"),
    ],
)
def test_options_that_cannot_be(options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as error:
        PicturesConfig(**options)  # type: ignore[arg-type]
    assert said in str(error.value)


def test_what_is_predicted_follows_the_link() -> None:
    """A code wins over a slow link, and one machine over a very slow one."""
    config, crossings = PicturesConfig(), {"gather": predict.StepTraffic(6e6, 1e5, 7)}

    def best(rate: float) -> str:
        machine = predict.ForwardAndLink(1.0, rate, 0.005)
        names = ("one", "fp16", "compact")
        return min(names, key=lambda name: predict.step_seconds(name, config, machine, crossings))

    assert best(1e12) != "one"
    assert best(1.25e7) == "compact" and best(1e4) == "one"
    assert predict.verdict({"one": 1.0, "fp16": 0.5}) is None
    assert math.isclose(
        predict.step_seconds("batch", config.replace(pictures=4), predict.ForwardAndLink(1, 1, 1), {}), 0.5
    )


def test_what_auto_expects_is_the_worst_that_the_study_showed() -> None:
    shown = json.loads((Path(__file__).parents[4] / "bench/results/diffusion.json").read_text("utf-8"))
    found = {
        r["way"]: r["psnr_worst"] for r in shown["rows"] if (r["group"], r["link"]) == ("two", "unlimited")
    }
    told = {name: db for name, db in predict.EXPECTED.items() if db is not None}
    assert told.keys() < found.keys() and all(db <= found[name] < db + 1 for name, db in told.items())
    assert predict.candidates(PicturesConfig(psnr=65)) == ["one", "fp16", "ulysses", "compact:bits=2", "int8"]
