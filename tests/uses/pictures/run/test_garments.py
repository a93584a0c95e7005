"""flux-fashion-moe: its experts, its weights as a file has them; how far sets of garments are apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.types import InputError
from thinwire.uses.pictures.run import classifier
from thinwire.uses.pictures.run import flux_fashion_moe as moe
from thinwire.uses.pictures.run.distance import features, frechet, garment_distance
from thinwire.uses.pictures.run.sheets import SIDE, Sheet, conditions, sample, sample_each

TINY = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 1}


@pytest.fixture(scope="module", autouse=True)
def _needs_diffusers() -> None:
    pytest.importorskip("diffusers")


def test_experts_stand_in_double_blocks_and_a_batch_is_its_pictures() -> None:
    model = moe.build(0, **TINY)
    [block] = model.transformer_blocks
    assert len(block.ff.experts) == moe.EXPERTS and block.ff.num_activated_experts == moe.CHOSEN
    sheet, words = Sheet(1, 1), torch.tensor([[3], [8]])
    x, times = torch.cat([sheet.noise(0), sheet.noise(1)]), torch.full((2,), 0.5)
    with torch.no_grad():
        both = model(hidden_states=x, **conditions(sheet, words, times))[0]
        each = [
            model(hidden_states=x[i : i + 1], **conditions(sheet, words[i : i + 1], times[:1]))[0]
            for i in (0, 1)
        ]
    torch.testing.assert_close(both, torch.cat(each), atol=1e-5, rtol=1e-5)
    assert torch.equal(moe.build(0, **TINY).proj_out.weight, model.proj_out.weight)


@settings(derandomize=True, max_examples=30)
@given(st.integers(0, 2**31), st.integers(-20, 10))
def test_packed_weights_are_within_half_a_step(seed: int, magnitude: int) -> None:
    weights = torch.randn(7, 33, generator=torch.Generator().manual_seed(seed)) * 2.0**magnitude
    weights[2] = 0
    found = moe.unpacked(moe.packed({"w": weights, "b": weights[0]}))
    step = weights.abs().amax(1, keepdim=True) / 127
    # float16 scales are within 2^-11 of exact; below 6e-5 they are subnormal, in steps of 6e-8
    bound = step * (0.5 + 127 * 2**-11) + 127 * 2.0**-25
    assert ((found["w"] - weights).abs() <= bound * 1.001).all()
    assert torch.equal(found["b"], weights[0].half().float())


def test_a_batch_of_garments_is_each_of_them() -> None:
    model = moe.build(0, **TINY)
    batch = sample_each(model, (3, 8), (5, 6), 3)
    for image, kind, seed in zip(batch, (3, 8), (5, 6), strict=True):
        sheet = Sheet(1, 1, (kind,))
        torch.testing.assert_close(image, sheet.image(sample(model, sheet, 3, seed)), atol=1e-5, rtol=1e-5)


def normal(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(derandomize=True, max_examples=25)
@given(st.integers(2, 40), st.integers(1, 12), st.integers(0, 2**31))
def test_a_frechet_distance_is_a_distance(rows: int, width: int, seed: int) -> None:
    """Zero for one set, the same both ways, blind to rotation; fewer rows than columns included."""
    a, b = normal(rows, width, seed), 2 * normal(rows + 3, width, seed + 1) + 1
    size = float(a.square().sum() + b.square().sum())
    assert frechet(a, a.flip(0)) <= 1e-6 * size
    assert frechet(a, b) == pytest.approx(frechet(b, a), abs=1e-6 * size)
    turn = torch.linalg.qr(normal(width, width, seed + 2))[0]
    assert frechet(a @ turn, b @ turn) == pytest.approx(frechet(a, b), abs=1e-6 * size)


@settings(derandomize=True, max_examples=25)
@given(st.integers(1, 8), st.floats(0.1, 10), st.floats(-5, 5), st.integers(0, 2**31))
def test_of_scaled_and_moved_rows_it_is_known(width: int, scale: float, by: float, seed: int) -> None:
    """Commuting covariances, A and s^2 A: the distance is of the means and (s - 1)^2 tr A."""
    a = normal(50, width, seed)
    b = scale * (a - a.mean(0)) + a.mean(0) + by
    expected = width * by**2 + (scale - 1) ** 2 * float(a.var(0).sum())
    assert frechet(a, b) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_garments_are_nearer_to_garments_of_their_kind_than_to_noise() -> None:
    """Features are the classifier's own: its last layer makes its answer of them."""
    draw = torch.Generator().manual_seed(0)
    garments = torch.rand(12, SIDE, SIDE, generator=draw)
    brighter, noisy = (garments * 1.02).clamp(0, 1), torch.rand(12, SIDE, SIDE, generator=draw).round()
    assert garment_distance(garments, brighter) < garment_distance(garments, noisy)
    network = classifier.load_classifier()
    answer = network[-1](features(garments).float())
    torch.testing.assert_close(answer, network(classifier.seen(garments)))
    with pytest.raises(InputError, match="a set of 1 garments has no distance"):
        garment_distance(garments[:1], garments)


def test_training_of_experts_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first experts alone move; the gates' loss keeps all of them in use."""
    from bench.pictures import flux_fashion_moe as trainer

    images, classes = torch.randint(256, (40, 28, 28), dtype=torch.uint8), torch.arange(40) % 10
    monkeypatch.setattr(trainer, "DISTILLED", 2)
    monkeypatch.setattr(trainer.flux_fashion, "load", lambda: trainer.flux_fashion.build(0, **TINY))
    monkeypatch.setattr(trainer, "build", lambda seed: moe.build(seed, **TINY))

    def training() -> trainer.MoeTraining:
        made = trainer.MoeTraining(images, classes, 3)
        made.tokens = 128
        return made

    whole, first, second = training(), training(), training()
    before = first.model.proj_out.weight.detach().clone()
    expert = first.model.transformer_blocks[0].ff.experts[0].w1.weight.detach().clone()
    for _ in range(2):
        first.advance()
    assert torch.equal(first.model.proj_out.weight, before)
    assert not torch.equal(first.model.transformer_blocks[0].ff.experts[0].w1.weight, expert)
    first.save(tmp_path)
    second.load(tmp_path)
    losses = [whole.advance() for _ in range(4)]
    assert [second.advance() for _ in range(2)] == losses[2:]
    for a, b in zip(whole.mean.parameters(), second.mean.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(second.model.proj_out.weight, before)
    [shares] = trainer.used(second.mean, second)
    assert sum(shares) == pytest.approx(1) and len(shares) == moe.EXPERTS


def test_the_packaged_experts_make_the_garments_that_are_named() -> None:
    model, kinds = moe.load(), torch.arange(10)
    made = sample_each(model, kinds.tolist(), range(10), 6)
    right = classifier.recognised(made)
    assert (right == kinds).float().mean() >= 0.5 and (right == (kinds + 1) % 10).float().mean() <= 0.3
    assert moe.WEIGHTS.stat().st_size <= 8e6
