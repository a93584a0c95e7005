"""Clips: how garments move, what a clip is, how wan-fashion is sampled and trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from thinwire.types import InputError
from thinwire.uses.pictures.run.classifier import recognised
from thinwire.uses.pictures.run.options import PicturesConfig
from thinwire.uses.pictures.run.video import wan_fashion
from thinwire.uses.pictures.run.video.clips import PATCH, START, TICKS, Clip, sample_clip
from thinwire.uses.pictures.run.video.moving import BOUNCE, FASTEST, SLIDE, SWAY, moving, paths

pytest.importorskip("diffusers")

SMALL = Clip(4, 32, 32, (8,))
TINY = {"num_layers": 1, "num_attention_heads": 1, "ffn_dim": 32}


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_motions_are_what_they_are_called_and_keep_to_the_canvas() -> None:
    motions = torch.tensor([SLIDE, BOUNCE, SWAY] * 8)
    places, angles = paths(motions, 24, (48, 64), drawn(0))
    assert places.shape == (24, 24, 2) and angles.shape == (24, 24)
    assert places.amin() >= 14 and (places.amax((0, 1)) <= torch.tensor([34.0, 50.0])).all()
    assert (places[motions == SLIDE].diff(dim=1).abs() <= FASTEST + 1e-4).all()
    assert (angles[motions != SWAY] == 0).all() and (angles[motions == SWAY].std(1) > 0.05).all()
    falls = places[motions == BOUNCE][:, :, 0].diff(dim=1)
    assert (falls.diff(dim=1).median(1).values > 0).all(), "gravity points down"
    slides = places[motions == SLIDE].diff(n=2, dim=1).abs()
    assert (slides.median(1).values < 1e-4).all(), "between two edges the speed stays"


def test_frames_are_by_seed_and_a_garment_that_cannot_move_is_drawn_as_it_is() -> None:
    garments = torch.randint(256, (2, 3, 28, 28), dtype=torch.uint8, generator=drawn(1))
    motions = torch.tensor([[SLIDE, BOUNCE, SWAY]] * 2)
    made, again, other = (moving(garments, motions, 6, (32, 40), drawn(seed)) for seed in (5, 5, 6))
    assert made.shape == (2, 6, 32, 40) and torch.equal(made, again) and not torch.equal(made, other)
    assert made.amin() >= 0 and made.amax() <= 1 and (made.diff(dim=1).abs().amax((2, 3)) > 0.05).all()
    still = moving(garments[:, :1], motions[:, :1], 2, (28, 28), drawn(0))
    torch.testing.assert_close(still[:, 1], garments[:, 0].float() / 255, atol=1e-4, rtol=0)


def test_a_clip_is_so_many_tokens_and_its_start_is_by_seed() -> None:
    clip = Clip.parse(6, "32x48", "3,7")
    assert (clip.classes, clip.motions, clip.tokens) == ((3, 7), (SLIDE, BOUNCE), 3 * 8 * 12)
    assert torch.equal(clip.start(3), clip.start(3)) and not torch.equal(clip.start(3), clip.start(4))
    assert clip.start(0).shape == (1, 1, 6, 32, 48) and clip.image(clip.start(0)).shape == (6, 32, 48)
    named, unsaid = clip.words(), clip.words(keep_text=False)
    assert named.shape == (1, 2, 16) and named.sum(2).tolist() == [[2.0, 2.0]]
    assert unsaid.argmax(2).tolist() == [[10]] and unsaid.sum() == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"frames": 15}, "--frames 15 is no clip; give an even number from 2 to 64"),
        ({"frames": 66}, "--frames 66 is no clip"),
        ({"frames": 0}, "--frames 0 is no clip"),
        ({"canvas": "64x62"}, "--canvas 64x62 is not made here; give multiples of 4 from 32 to 128"),
        ({"canvas": "28x64"}, "--canvas 28x64 is not made here"),
        ({"canvas": "64"}, "--canvas 64 is no size; give height and width, as in 64x64"),
        ({"classes": "1,2,3,4"}, "--classes names 4 garments for a clip; name 1 to 3"),
        ({"classes": "10"}, "there is no class [10]"),
        ({"sheet": "4x8"}, "--sheet is for flux-fashion"),
        ({"recipes": "auto"}, "auto chooses among ways of flux-fashion; for wan-fashion name ways"),
        ({"recipes": "dice"}, "dice is a way of flux-fashion-moe; give --model flux-fashion-moe"),
        ({"model": "flux-fashion", "frames": 16}, "--frames is for wan-fashion, and flux-fashion has none"),
    ],
)
def test_what_cannot_be_is_one_sentence(asked: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as error:
        PicturesConfig(**{"model": "wan-fashion", "recipes": "one"} | asked)  # type: ignore[arg-type]
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_steps_are_those_of_diffusers_scheduler(guidance: float) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    model = wan_fashion.build(0, **TINY)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=torch.linspace(START, 0, 6)[:-1].tolist())
    x, texts = SMALL.start(2), [SMALL.words(), SMALL.words(keep_text=False)]
    for tick in scheduler.timesteps:
        with torch.no_grad():
            made, away = (model(x, tick[None], text, return_dict=False)[0] for text in texts)
        velocity = away + guidance * (made - away)
        x = scheduler.step(velocity, tick, x, return_dict=False)[0]
    ticks = list[int]()
    sampled = sample_clip(model, SMALL, 5, seed=2, guidance=guidance, on_step=ticks.append)
    torch.testing.assert_close(sampled, x, atol=1e-4, rtol=1e-4)
    assert ticks == [1, 2, 3, 4, 5] and float(scheduler.timesteps[0]) == TICKS * START


def test_a_seed_builds_one_model_and_frames_are_not_independent() -> None:
    """The same weights from the same seed; and a frame of noise changes what is made of others."""
    one, same, other = (wan_fashion.build(seed, **TINY) for seed in (0, 0, 1))
    weights = [torch.cat([p.flatten() for p in m.parameters()]) for m in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert one.config["patch_size"] == PATCH

    def made(x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = one(x, torch.tensor([500.0]), SMALL.words(), return_dict=False)[0]
        return out

    x = SMALL.start(0)
    changed = x.clone()
    changed[:, :, 0] += 1
    assert (made(changed) - made(x))[:, :, 2:].abs().max() > 1e-4


def test_the_packaged_model_makes_the_garments_that_are_named() -> None:
    """And its folder is one of diffusers."""
    from diffusers import WanTransformer3DModel

    model = wan_fashion.load()
    right = wrong = 0
    for kind in (1, 5, 7, 8, 9):
        frames = Clip(8, 32, 32, (kind,)).image(sample_clip(model, Clip(8, 32, 32, (kind,)), 8, seed=kind))
        found = recognised(frames)
        right, wrong = right + int((found == kind).sum()), wrong + int((found == (kind + 1) % 10).sum())
    assert right >= 20 and wrong <= 10, f"of 40 frames {right} show the garment that was named"
    assert wan_fashion.WEIGHTS.stat().st_size <= 12e6
    config, _ = WanTransformer3DModel.load_config(wan_fashion.FOLDER, return_unused_kwargs=True)
    assert {name: config[name] for name in wan_fashion.CONFIG} == wan_fashion.CONFIG | {
        "patch_size": [*PATCH]
    }


def test_training_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.pictures import wan_fashion as trainer

    images = torch.randint(256, (40, 28, 28), dtype=torch.uint8, generator=drawn(0))
    classes = torch.arange(40) % 10
    monkeypatch.setattr(trainer, "SIZES", (((2, 32, 32), 1, 0.5, 0.5), ((4, 32, 32), 2, 0.5, 0.5)))
    monkeypatch.setattr(trainer, "build", lambda seed: wan_fashion.build(seed, **TINY))

    def training() -> trainer.WanTraining:
        return trainer.WanTraining(images, classes, 6, tokens=256)

    whole, first, second = training(), training(), training()
    losses = [whole.advance() for _ in range(4)]
    for _ in range(2):
        first.advance()
    first.save(tmp_path)
    second.load(tmp_path)
    assert [second.advance() for _ in range(2)] == losses[2:]
    first, last = (trainer.spread_times(step, 1) for step in (0, trainer.WHOLE))
    assert 0 < first < 1 and 0 < last < trainer.NOISIEST
    times = torch.cat([trainer.spread_times(step, 2) for step in range(500)])
    assert times.amin() > 0 and times.amax() < 1 and 0.7 < times.median() < 0.8
