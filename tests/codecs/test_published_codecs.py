"""The published systems' own codecs: what their sources say of them, and that decoding is exact."""

import pytest
import torch
from each import each

from thinwire.codecs import FixedPoint, TileAdaptive, Uniform
from thinwire.codecs.kernels.bits import unpack
from thinwire.types import InputError, Payload, PayloadError


def activations(shape=(2, 16, 256), outlier=30.0, seed=0):
    """Normal values, and one large channel in every other tile of 64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., 5::128] *= outlier
    return x


def masks(payload, tiles):
    """The two bit masks of a ``TileAdaptive`` payload: low, turned."""
    return tuple(unpack(payload.parts[i], 1, tiles).bool() for i in (4, 5))


def error(codec, x):
    return ((codec.decode(codec.encode(x)) - x).norm() / x.norm()).item()


def test_tiles_take_about_4_4_bits_a_value_metadata_included():
    for x in (activations(outlier=1.0), activations()):
        bits = TileAdaptive().encode(x).nbytes * 8 / x.numel()
        assert 4.3 < bits < 4.45
    assert TileAdaptive().nbytes(Payload(TileAdaptive().encode(x).spec, ()).spec) * 8 / x.numel() < 4.45


def test_the_flat_tiles_of_each_sample_get_the_high_bits():
    x = torch.zeros(2, 2, 256)  # 8 tiles of 64 a sample
    x[:] = torch.randn(64, generator=torch.Generator().manual_seed(0)).repeat(4)
    x[0, 0, :64] = torch.eye(64)[3] * 2 + 0.01  # one spiky tile in sample 0, two in sample 1
    x[1, 1, 64:192] = torch.eye(64)[9].repeat(2) * 2 + 0.01
    payload = TileAdaptive(share=0.75, threshold=1e9).encode(x)
    low, turned = masks(payload, 16)
    assert low.view(2, 8).sum(1).tolist() == [2, 2]
    assert low[0] and low[8 + 5] and low[8 + 6]
    assert not turned.any()


def test_a_lone_outlier_is_turned_and_no_longer_drowns_its_tile():
    x = activations()
    payload = TileAdaptive().encode(x)
    _, turned = masks(payload, x.numel() // 64)
    peaks = x.view(-1, 64).abs().topk(2).values
    assert torch.equal(turned, peaks[:, 0] > 2 * peaks[:, 1])
    assert 0.2 < turned.float().mean() < 0.6
    assert error(TileAdaptive(), x) < 0.5 * error(TileAdaptive(threshold=1e9), x)
    assert error(TileAdaptive(), x) < 0.5 * error(Uniform(bits=4, group=64), x)


def test_no_value_of_a_tile_errs_by_more_than_half_its_scale():
    x = activations(outlier=1.0) + 5
    codec = TileAdaptive(threshold=1e9)
    payload = codec.encode(x)
    err = (codec.decode(payload) - x).view(-1, 64).abs().amax(1)
    assert (err <= payload.parts[2].float() * 0.5001).all()
    assert err.max() > 0.2 * payload.parts[2].float().min()


def test_a_turned_tile_errs_by_no_more_than_its_transform_allows():
    x = activations(outlier=1000.0)
    codec = TileAdaptive(threshold=1.0)
    payload = codec.encode(x)
    err = (codec.decode(payload) - x).view(-1, 64).norm(dim=1)
    assert (err <= payload.parts[2].float() * 64 * 0.5001).all()


@each("outlier", [1.0, 30.0, 1e6])
def test_tiles_decode_to_integers_times_the_scale_rounded_once(outlier):
    """So no order of summation, fused operation or matmul precision can change a bit."""
    codec, x = TileAdaptive(threshold=1.0), activations(outlier=outlier)
    payload = codec.encode(x)
    out = codec.decode(payload).view(-1, 64)
    low, turned = masks(payload, len(out))
    codes = torch.empty(len(out), 64, dtype=torch.int64)
    codes[~low] = unpack(payload.parts[0], 4, int((~low).sum()) * 64).view(-1, 64).long()
    codes[low] = unpack(payload.parts[1], 3, int(low.sum()) * 64).view(-1, 64).long()
    whole = codes + payload.parts[3].long()[:, None]
    h = torch.tensor([[(-1) ** (i & j).bit_count() for j in range(64)] for i in range(64)])
    pivots = unpack(payload.parts[6], 6, int(turned.sum())).tolist()
    for row, pivot in zip(turned.nonzero()[:, 0].tolist(), pivots, strict=True):
        back = h @ whole[row]
        back[[0, pivot]] = back[[pivot, 0]]
        whole[row] = back
    assert whole.abs().max() < 2**24
    exact = whole.double() * payload.parts[2].double()[:, None]
    assert torch.equal(out, exact.float())


def test_the_models_autocast_does_not_reach_into_a_codec():
    x = activations()
    plain, out = TileAdaptive().encode(x), TileAdaptive().decode(TileAdaptive().encode(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = TileAdaptive().encode(x)
        assert torch.equal(TileAdaptive().decode(mixed), out)
    assert all(torch.equal(a, b) for a, b in zip(plain.parts, mixed.parts, strict=True))


def test_zeros_stay_zero_in_a_tile_with_an_offset_range():
    x = activations(outlier=1.0).clamp_min(0)
    assert (TileAdaptive(threshold=1e9).decode(TileAdaptive(threshold=1e9).encode(x))[x == 0] == 0).all()


@each("shape", [(2, 3, 100), (5, 7), (3, 1), (9,)])
def test_rows_that_are_no_whole_number_of_tiles(shape):
    x = activations((4, 256))[:1].repeat(64, 1).flatten()[: torch.Size(shape).numel()].reshape(shape)
    assert error(TileAdaptive(tile=16, high=8, low=8), x) < 0.02


@each("codec", [TileAdaptive(), FixedPoint()])
@each("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_is_refused(codec, bad):
    x = activations()
    x[1, 2, 3] = bad
    with pytest.raises(InputError, match="NaN or infinite"):
        codec.encode(x)


def test_a_mask_of_another_number_of_low_tiles_is_refused():
    payload = TileAdaptive().encode(activations())
    parts = list(payload.parts)
    parts[4] = torch.zeros_like(parts[4])
    with pytest.raises(PayloadError, match="few bits"):
        TileAdaptive().decode(Payload(payload.spec, tuple(parts)))


@each("bits", [2, 3, 4, 8])
@each("scale_dtype", ["float16", "bfloat16"])
def test_fixed_point_is_the_formula_of_the_released_code(bits, scale_dtype):
    x = torch.randn(3, 50, 64, generator=torch.Generator().manual_seed(1))
    peaks = 2.0 ** torch.arange(64).remainder(9).float()  # exact in every format, so the formula is too
    x = x.clamp(-4, 4) / 4 * peaks
    x[1, 7] = peaks * (-1) ** torch.arange(64)
    f = 2 ** (bits - 1)
    want = (x / peaks * f).round().clamp(-f, f - 1) * peaks / f
    codec = FixedPoint(bits, scale_dtype)
    assert torch.equal(codec.decode(codec.encode(x)), want)
    assert (want[1, 7, 0], want[1, 7, 1]) == ((f - 1) / f, -2.0)  # the positive peak clips


def test_fixed_point_keeps_gradients_of_any_size():
    g = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(2)) * 1e-9
    assert error(FixedPoint(8, "bfloat16"), g) < 0.02
    assert FixedPoint(8).encode(g).nbytes == g.numel() + 2 * 32


@each(
    "make",
    [
        lambda: TileAdaptive(tile=48),
        lambda: TileAdaptive(tile=512),
        lambda: TileAdaptive(low=5),
        lambda: TileAdaptive(share=1.5),
        lambda: TileAdaptive(threshold=0.5),
        lambda: FixedPoint(9),
        lambda: FixedPoint(scale_dtype="e5m3"),
    ],
)
def test_wrong_fields_are_refused(make):
    with pytest.raises(InputError, match=r"^\w+='?\w"):
        make()
