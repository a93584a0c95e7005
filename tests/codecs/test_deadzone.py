"""The dead-zone quantiser: its rule, what it gains with an entropy coder, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from each import each

from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import Delta
from thinwire.codecs import (
    ChannelMean,
    Codec,
    DeadZone,
    Entropy,
    Hadamard,
    HardThreshold,
    Sink,
    TopK,
    Uniform,
    parse_codec,
    roundtrip,
    tuned,
)
from thinwire.codecs.deadzone import UNITS, step_for
from thinwire.codecs.kernels import kernel_calls
from thinwire.types import InputError, Payload, PayloadError


def laplacian(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values of mean magnitude 1 with exponential tails, as deltas and gradients have."""
    u = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    return (-u.sign() * (1 - 2 * u.abs()).log()).float()


def cost(codec: Codec, x: torch.Tensor) -> tuple[float, float]:
    """Bits a value and |x_hat - x| / |x|."""
    payload = codec.encode(x)
    return 8 * payload.nbytes / x.numel(), float((codec.decode(payload) - x).norm() / x.norm())


@each("offset", [0.0, 0.25, 0.4, 0.5])
def test_levels_are_those_of_the_rule(offset: float) -> None:
    x = laplacian(64, 33)
    payload = DeadZone(0.7, offset).encode(x)
    step = payload.parts[2].float()
    assert step.item() == pytest.approx(0.7 * x.abs().mean().item(), rel=0.01)
    want = ((x.abs() / step + offset).floor() * x.sign()) * step
    got = DeadZone(0.7, offset).decode(payload)
    assert (got - want).abs().max() <= step  # a value on the very edge of a level may fall to either side
    assert (got != want).float().mean() < 0.001


def test_at_equal_bits_it_errs_less_than_group_scales() -> None:
    x = laplacian(4, 64, 192) * (0.2 + torch.rand(4, 64, 1, generator=torch.Generator().manual_seed(1)))
    for bits, clip in ((2, 0.6), (3, 0.8)):
        spent, error = cost(Entropy(Uniform(bits, scale_dtype="e5m3", clip=clip)), x)
        ours, error_ours = cost(Entropy(DeadZone(step_for(0.85 * spent))), x)
        assert ours < 0.95 * spent
        assert error_ours < 0.97 * error


@each("bits", [1.0, 1.4, 2.4, 3.0, 5.0])
def test_a_step_for_so_many_bits_takes_them(bits: float) -> None:
    spent, _ = cost(Entropy(DeadZone(step_for(bits))), laplacian(4, 128, 256))
    assert bits < spent < 1.06 * bits + 0.1


def test_one_huge_value_neither_saturates_nor_spoils_the_rest() -> None:
    x = laplacian(64, 64)
    x[3, 5] = 2000.0
    spent, _ = cost(Entropy(DeadZone(1.0)), x)
    y = DeadZone(1.0).decode(DeadZone(1.0).encode(x))
    assert abs(y[3, 5] - 2000.0) < 2
    assert spent < cost(Entropy(DeadZone(1.0)), laplacian(64, 64))[0] + 0.1


def repeated(codec: Codec, value: float, runs: int = 2000) -> torch.Tensor:
    """Return what ``codec`` makes of one value among others that differ from message to message."""
    found = []
    for seed in range(runs):
        x = torch.cat([laplacian(7, seed=seed), torch.tensor([value])])
        found.append(codec.decode(codec.encode(x))[-1])
    return torch.stack(found)


@each("value", [0.0, 0.3, -0.55, 1.2])
def test_dither_makes_it_unbiased_with_a_uniform_quantisers_error(value: float) -> None:
    step = 1.5
    found = repeated(DeadZone(step, 0.5, "one", dither=True), value)
    spread = step / 12**0.5
    assert float(found.mean()) == pytest.approx(value, abs=4 * spread / len(found) ** 0.5)
    assert float(found.std()) == pytest.approx(spread, rel=0.05)
    plain = repeated(DeadZone(step, 0.5, "one"), value, runs=50)
    assert float((plain - plain[0]).abs().max()) == 0  # so what is above shows the noise


def test_dither_costs_little_and_errs_as_the_dead_zone_does() -> None:
    x = laplacian(4, 128, 256)
    for bits in (1.4, 1.9, 2.4, 3.4):
        plain, error = cost(Entropy(DeadZone(step_for(bits))), x)
        dithered, error_dithered = cost(Entropy(DeadZone(step_for(bits), 0.5, dither=True)), x)
        assert dithered < plain + 0.35
        assert error_dithered < 1.02 * error


def test_equal_messages_have_equal_noise_and_others_another() -> None:
    codec, x = DeadZone(1.0, 0.5, dither=True), laplacian(32, 32)
    first, again, other = codec.encode(x), codec.encode(x.clone()), codec.encode(-x)
    assert all(torch.equal(a, b) for a, b in zip(first.parts, again.parts, strict=True))
    assert first.parts[3] != other.parts[3]
    assert not torch.equal(codec.decode(first), -codec.decode(other))


def test_a_key_of_noise_must_be_there() -> None:
    codec = DeadZone(1.0, 0.5, dither=True)
    payload = codec.encode(laplacian(4, 8))
    *parts, key = payload.parts
    for wrong, message in (((), "parts of"), ((key[:0],), "0 keys of noise"), ((key.int(),), "parts of")):
        with pytest.raises(PayloadError, match=message):
            codec.decode(Payload(payload.spec, (*parts, *wrong)))


@each("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    x = laplacian(4, 8)
    x[1, 2] = value
    with pytest.raises(InputError, match="NaN or infinite"):
        DeadZone().encode(x)


def test_large_levels_must_be_as_many_as_the_codes_say() -> None:
    payload = DeadZone(0.5).encode(laplacian(16, 16))
    codes, large, step = payload.parts
    for wrong in (large[:-2], large[:-1], torch.cat([large, large[:2]])):
        with pytest.raises(PayloadError, match="large levels"):
            DeadZone(0.5).decode(Payload(payload.spec, (codes, wrong, step)))


@each(
    ("make", "message"),
    [
        (lambda: DeadZone(step=0.0), "step=0.0 is not above"),
        (lambda: DeadZone(step=float("nan")), "step=nan is not a finite number"),
        (lambda: DeadZone(offset=0.6), "offset=0.6 is not in"),
        (lambda: DeadZone(unit="metre"), "unit=.metre. is not one of message, tensor, one"),
        (lambda: DeadZone(dither=True), r"offset=0\.4 with dither; take 0\.5"),
        (lambda: DeadZone(offset=0.5, dither=1), "dither=1 is not True or False"),  # type: ignore[arg-type]
        (lambda: step_for(0.0), r"0\.0 bits"),
    ],
)
def test_wrong_settings_are_one_sentence(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


@each("wrap", [lambda c: c, Entropy])
def test_the_unit_of_the_tensor_keeps_the_error_and_saves_bits(wrap: type) -> None:
    """Residuals a tenth and ten times as large as before: the same error for fewer and for more bits."""
    x = laplacian(2, 64, 96)
    errors, bits = {}, {}
    for unit in ("tensor", "message"):
        codec = wrap(DeadZone(0.2, unit=unit))
        for size in (0.1, 10.0):
            y = size * laplacian(2, 64, 96, seed=1)
            payload, y_hat = roundtrip(tuned(codec, x), y)
            assert torch.equal(codec.decode(payload), y_hat)
            errors[unit, size] = float((y_hat - y).norm())
            bits[unit, size] = payload.nbytes
    assert errors["message", 10.0] == pytest.approx(100 * errors["message", 0.1], rel=0.1)
    assert errors["tensor", 10.0] < 1.5 * errors["message", 0.1] * 10
    assert bits["tensor", 0.1] < 0.7 * bits["message", 0.1] < bits["tensor", 10.0]


@each("wrap", [Hadamard, ChannelMean, Sink, lambda c: TopK(1.0, c), lambda c: HardThreshold(0.0, c)])
def test_the_unit_of_the_tensor_holds_inside_other_codecs(wrap: Callable[[Codec], Codec]) -> None:
    """Residuals a hundredth as large as the tensor, in steps of its own size: nothing is left to send."""
    x = laplacian(2, 64, 96)
    y = 0.01 * laplacian(2, 64, 96, seed=1)
    codec, plain = (Entropy(wrap(DeadZone(1.0, unit=unit))) for unit in ("tensor", "message"))
    payload, y_hat = roundtrip(tuned(codec, x), y)
    assert torch.equal(codec.decode(payload), y_hat)
    assert payload.nbytes < 0.25 * plain.encode(y).nbytes
    assert tuned(plain, x) is plain


def test_deltas_in_the_unit_of_the_tensor_err_alike_at_each_visit() -> None:
    scheme = Scheme(Entropy(DeadZone(0.4, unit="tensor")), Delta(), Entropy(DeadZone(0.4)), Uniform(8))
    sender, receiver, errors, spent = Sender(scheme), Receiver(), [], []
    for scale in (1.0, 1.03, 1.5, -2.0):  # the same, nearly so, changed, turned round
        x = scale * laplacian(2, 64, 96)
        packet, x_hat = sender.encode(x, [4, 7])
        assert torch.equal(receiver.decode(packet), x_hat)
        errors.append(float((x_hat - x).norm() / x.norm()))
        spent.append(packet.nbytes)
    assert max(errors) < 1.15 * min(errors)
    assert spent[1] < 0.5 * spent[0] < spent[3]


def test_a_tensor_that_becomes_zero_is_told() -> None:
    scheme = Scheme(DeadZone(0.4, unit="tensor"), Delta(), DeadZone(0.4), Uniform(8))
    sender, x = Sender(scheme), laplacian(1, 16, 32)
    sender.encode(x, [0])
    _, x_hat = sender.encode(torch.zeros_like(x), [0])
    assert x_hat.abs().max() < 0.001 * x.abs().max()


@each("x", [torch.tensor([0.5, -2.0, 0.0]), torch.zeros(3), torch.tensor([3e38, 0.0])])
@each("step", [2.0, 1e39, 1e300])
@each("unit", UNITS)
def test_no_step_is_too_large(x: torch.Tensor, step: float, unit: str) -> None:
    with kernel_calls.without():
        expected = DeadZone(step, unit=unit).tuned(x).encode(x)
    codec = DeadZone(step, unit=unit).tuned(x)
    assert parse_codec(repr(codec)) == codec
    payload = codec.encode(x)
    assert all(torch.equal(a, b) for a, b in zip(payload.parts, expected.parts, strict=True))
    assert codec.decode(payload).isfinite().all()


@each("compiled_passes", [True, False])
@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
@each("offset", [0.4, 0.5])
@each("dither", [False, True])
def test_the_largest_values_stay_finite(
    compiled_passes: bool, dtype: torch.dtype, offset: float, dither: bool
) -> None:
    most = torch.finfo(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32).max
    x = (torch.tensor([1.0, -1.0, 0.999, 0.5, 0.0] * 20, dtype=torch.float64) * most).to(dtype)
    for step in (0.001, 0.3, 1.0, 1e9):
        codec = DeadZone(step, 0.5 if dither else offset, dither=dither)
        with nullcontext() if compiled_passes else kernel_calls.without():
            payload, x_hat = codec.roundtrip(x)
            decoded = codec.decode(payload)
        assert torch.equal(decoded, x_hat) and decoded.isfinite().all()
        step = float(payload.parts[2])
        assert bool(((decoded.double() - x.double()).abs() <= step * 1.01).all())
        with kernel_calls.without():
            expected = codec.encode(x)
        assert all(torch.equal(a, b) for a, b in zip(payload.parts, expected.parts, strict=True))


def test_the_largest_values_can_be_remembered() -> None:
    sender, receiver = Sender(Scheme(DeadZone(), Delta(), DeadZone())), Receiver()
    x = torch.full((1, 40), torch.finfo(torch.float32).max)
    for _ in range(3):
        packet, x_hat = sender.encode(x, [0])
        assert torch.equal(receiver.decode(packet), x_hat) and x_hat.isfinite().all()
        x = x / 2
