"""The uniform quantiser: error bounds, exactness, unbiased dither, scales, bad input."""

from __future__ import annotations

import math
import threading
from itertools import product

import pytest
import torch
from codec_examples import tensor
from each import each

from thinwire.codecs import Hadamard, Uniform
from thinwire.codecs.kernels import scales
from thinwire.codecs.kernels.scales import Grid
from thinwire.types import InputError, Payload, PayloadError, TensorSpec

SHARED = ("tensor", "channel", "token", "group")


def step_of_each(codec: Uniform, x: torch.Tensor) -> torch.Tensor:
    """Return the scale that each value of ``x`` was coded with."""
    g = Grid.of(TensorSpec.of(x), codec.scale, codec.group)
    stored = codec.encode(x).parts[1]
    wide = g.broadcast(scales.load(stored, codec.scale_dtype)).expand(g.rows, g.width)
    return g.gather(wide).reshape(x.shape)


@each("shared, dtype", list(product(SHARED, scales.FORMATS)))
@each("bits", range(2, 9))
def test_nearest_errs_by_at_most_half_a_scale(bits: int, shared: str, dtype: str) -> None:
    codec = Uniform(bits=bits, scale=shared, group=16, scale_dtype=dtype)
    for shape in [(4, 10, 40), (3, 64), (50,)]:
        x = tensor(shape, seed=bits)
        step = step_of_each(codec, x)
        y = codec.decode(codec.encode(x))
        assert ((y - x).abs() <= step * (0.5 + 1e-4)).all()
        assert (y.abs() <= codec.top * step).all()


@each("bits", range(2, 9))
def test_stochastic_errs_by_less_than_a_scale(bits: int) -> None:
    codec = Uniform(bits=bits, rounding="stochastic")
    x = tensor((64, 96))
    assert ((codec.decode(codec.encode(x)) - x).abs() <= step_of_each(codec, x) * (1 + 1e-4)).all()


@each("dtype", scales.FORMATS)
@each("bits", range(1, 9))
def test_fused_and_separate_arithmetic_agree(bits: int, dtype: str) -> None:
    """The products are exact in float32, so a fused multiply-add moves a reference to the same bits."""
    g = torch.Generator().manual_seed(bits)
    x = torch.randn((64, 512), generator=g) * torch.logspace(-5, 3, 64)[:, None]
    reference = torch.randn((64, 512), generator=g)
    codec = Uniform(bits=bits, scale_dtype=dtype)
    step = step_of_each(codec, x).double()
    y = codec.decode(codec.encode(x))
    levels = y.double() / step
    assert torch.equal(levels, levels.round())
    assert torch.equal(levels * step, y.double()), "a product was rounded"
    fused = (reference.double() + levels * step).float()
    assert torch.equal(reference + y, fused)


@each("bits", [1, 2, 4, 8])
def test_stochastic_rounding_is_unbiased_over_calls(bits: int) -> None:
    codec = Uniform(bits=bits, scale="tensor", rounding="stochastic")
    g = torch.Generator().manual_seed(0)
    x = torch.rand(2000, generator=g) * 2 - 1
    x[0] = 1.0
    calls, total = 400, torch.zeros(2000)
    for _ in range(calls):
        # Another last value is another content, so another draw; the scale stays as it is.
        x[-1] = torch.rand((), generator=g)
        total += codec.decode(codec.encode(x)) - x
    step = 2.0 if bits == 1 else 1 / codec.top
    error = (total / calls)[1:-1] / step
    sigma = 0.5 / math.sqrt(calls)  # at most
    assert error.abs().max() < 5 * sigma
    assert error.mean().abs() < 5 * sigma / math.sqrt(error.numel())
    assert error.std() > 0.1 * sigma, "no noise at all"


def test_the_noise_depends_on_content_and_seed_only() -> None:
    x = tensor((50, 64))
    one, two = Uniform(rounding="stochastic"), Uniform(rounding="stochastic", seed=1)
    assert torch.equal(one.encode(x).parts[0], one.encode(x.clone()).parts[0])
    assert not torch.equal(one.encode(x).parts[0], two.encode(x).parts[0])
    moved = x.clone()
    moved[0, 0] += 1e-3
    changed = one.quantise(x)[0] != one.quantise(moved)[0]
    assert changed[64:].float().mean() > 0.1, "the noise of other values stayed the same"


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [1, 4])
def test_working_in_blocks_changes_nothing(
    shared: str, rounding: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = Uniform(bits=bits, scale=shared, rounding=rounding)
    x = tensor((500, 7, 80)).round(decimals=2)
    whole = codec.encode(x)
    y = codec.decode(whole)
    monkeypatch.setattr(scales, "BLOCK", 3000)
    if bits > 1 or rounding == "stochastic":  # means depend on the order of summation
        assert torch.equal(codec.encode(x).parts[0], whole.parts[0])
    assert torch.equal(codec.decode(whole), y)


def test_scales_are_shared_as_asked() -> None:
    x = torch.ones(2, 3, 64)
    x[0, 1, 40] = 70.0
    counts = {}
    for shared in SHARED:
        codec = Uniform(bits=4, scale=shared)
        counts[shared] = (step_of_each(codec, x) > 1).sum().item()
        assert codec.layout(TensorSpec.of(x))[1][1] == codec.encode(x).parts[1].numel()
    assert counts == {"tensor": 2 * 3 * 64, "channel": 6, "token": 64, "group": 32}


@each("bits", [1, 2, 5])
def test_the_short_group_at_a_row_s_end_is_coded_by_itself(bits: int) -> None:
    x = tensor((5, 70))
    x[:, 64:] *= 100
    codec = Uniform(bits=bits)
    tail = Uniform(bits=bits, group=6)
    want = torch.cat([codec.decode(codec.encode(x[:, :64])), tail.decode(tail.encode(x[:, 64:]))], 1)
    torch.testing.assert_close(codec.decode(codec.encode(x)), want, rtol=1e-2, atol=0)


def test_one_bit_is_sign_times_mean_magnitude() -> None:
    x = torch.tensor([[1.0, -3.0, 2.0, -2.0]])
    assert Uniform(bits=1).decode(Uniform(bits=1).encode(x)).tolist() == [[2.0, -2.0, 2.0, -2.0]]


def test_levels_are_symmetric_and_extremes_do_not_clip() -> None:
    x = tensor((64, 64))
    for bits in range(2, 9):
        codec = Uniform(bits=bits)
        y = codec.decode(codec.encode(x))
        assert torch.equal(codec.decode(codec.encode(-x)), -y)
        peak = x.reshape(64, 2, 32).abs().amax(-1)
        seen = y.reshape(64, 2, 32).abs().amax(-1)
        assert ((seen / peak - 1).abs() <= max(2**-7, 0.5 / codec.top)).all()


@each("magnitude", [1e-12, 1e-7, 1e-3, 1e4, 1e20])
@each("dtype", ["bfloat16", "e5m3"])
def test_tiny_gradients_and_huge_activations_keep_their_precision(magnitude: float, dtype: str) -> None:
    x = tensor((16, 64)) * magnitude
    codec = Uniform(bits=8, scale_dtype=dtype)
    error = (codec.decode(codec.encode(x)).double() - x).norm() / x.double().norm()
    assert error < 0.02


def test_saturation_is_at_top_times_the_largest_scale() -> None:
    codec = Uniform(bits=3, scale_dtype="float16")
    x = torch.tensor([1e6, -1e30, 3.0])
    assert codec.decode(codec.encode(x)).tolist() == [3 * 65504.0, -3 * 65504.0, 0.0]
    half = torch.full((4,), 65504.0, dtype=torch.float16)
    assert Uniform(bits=2).decode(Uniform(bits=2).encode(half)).tolist() == half.tolist()


@each("clip", [0.5, 0.9])
def test_clip_saturates_outliers_and_sharpens_the_rest(clip: float) -> None:
    x = torch.linspace(-1, 1, 32)
    y = Uniform(bits=3, clip=clip).decode(Uniform(bits=3, clip=clip).encode(x))
    assert clip <= y.max() <= clip * (1 + 2**-7) and y.min() == -y.max()


@each("bad", [math.nan, math.inf, -math.inf])
@each("shared", SHARED)
@each("bits", [1, 2, 8])
def test_non_finite_input_is_refused(bad: float, shared: str, bits: int) -> None:
    for rounding in ("nearest", "stochastic"):
        x = tensor((3, 50))
        x[1, 33] = bad
        with pytest.raises(InputError, match="NaN or infinite"):
            Uniform(bits=bits, scale=shared, rounding=rounding).encode(x)


@each("dtype", ["bfloat16", "float16"])
@each("bad", [math.nan, math.inf, -1.0, 0.0])
def test_scales_no_encoder_writes_are_refused(bad: float, dtype: str) -> None:
    codec = Uniform(scale_dtype=dtype)
    payload = codec.encode(tensor((4, 64)))
    stored = payload.parts[1].clone()
    stored[3] = bad
    with pytest.raises(PayloadError, match="scale"):
        codec.decode(Payload(payload.spec, (payload.parts[0], stored)))


@each("name", scales.FORMATS)
def test_stored_scales_round_up_by_at_most_one_step(name: str) -> None:
    f = scales.FORMATS[name]
    low = 2.0**-13
    s = torch.rand(5000, generator=torch.Generator().manual_seed(1)) * 4 + low
    stored = scales.load(scales.store(s, name), name)
    assert (stored >= s).all() and (stored <= s * (1 + 2.0**-f.mantissa)).all()
    kept = scales.load(scales.store(stored, name), name)
    assert torch.equal(kept, stored)


def test_e5m3_holds_a_scale_in_one_byte() -> None:
    spec = TensorSpec((8, 64))
    assert Uniform(bits=4, scale_dtype="e5m3").nbytes(spec) == 8 * 32 + 16 + 1
    assert Uniform(bits=4).nbytes(spec) == 8 * 32 + 32


@each(
    "wrong",
    [
        {"bits": 0},
        {"bits": 9},
        {"group": 0},
        {"clip": 0.0},
        {"clip": 1.5},
        {"scale": "row"},
        {"rounding": "up"},
        {"scale_dtype": "float64"},
    ],
)
def test_wrong_options_name_the_value(wrong: dict[str, object]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(InputError, match=f"{name}={value!r}"):
        Uniform(**wrong)  # type: ignore[arg-type]


def test_memory_first_used_in_inference_mode_serves_training_too() -> None:
    x = tensor((16, 64))
    codec = Hadamard(Uniform(bits=3, rounding="stochastic", seed=77))
    results = []

    def evaluate_then_train() -> None:
        with torch.inference_mode():
            results.append(codec.decode(codec.encode(x)).clone())
        results.append(codec.decode(codec.encode(x)))

    thread = threading.Thread(target=evaluate_then_train)  # a new thread has kept no memory yet
    thread.start()
    thread.join(60)
    assert len(results) == 2, "the second use failed"
    assert torch.equal(*results)
