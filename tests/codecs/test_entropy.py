"""Entropy coding: what it saves, and frames that lie about their size."""

from __future__ import annotations

import sys

import pytest
import torch
import zstandard
from codec_examples import tensor
from each import each
from other_device import DEVICE, Elsewhere

from thinwire.codecs import DeadZone, Entropy, HardThreshold, Raw, Uniform, rans, tagged, zstd
from thinwire.codecs.deadzone import step_for
from thinwire.codecs.rans import rans_calls
from thinwire.staging import put_together
from thinwire.types import InputError, MissingExtra, Payload, PayloadError, TensorSpec


def bits_of_entropy(codes: torch.Tensor) -> float:
    p = torch.bincount(codes.long()).double() / codes.numel()
    p = p[p > 0]
    return float(-(p * p.log2()).sum())


@each("bits", [2, 3, 4, 8])
def test_gaussian_codes_come_near_their_entropy(bits: int) -> None:
    x = torch.randn((256, 1024), generator=torch.Generator().manual_seed(0))
    inner = Uniform(bits=bits)
    payload = Entropy(inner).encode(x)
    spent = 8 * payload.parts[0].numel() / x.numel()
    assert spent < 1.02 * bits_of_entropy(inner.quantise(x)[0]) + 0.01
    assert torch.equal(Entropy(inner).decode(payload), inner.decode(inner.encode(x)))


@each("bits", range(1, 9))
def test_noise_costs_one_byte_a_part_at_most(bits: int) -> None:
    g = torch.Generator().manual_seed(0)
    top = Uniform(bits=bits).top
    x = torch.randint(-top, top + 1, (3, 33), generator=g).float()
    inner = Uniform(bits=bits)
    assert Entropy(inner).encode(x).nbytes <= inner.nbytes(TensorSpec.of(x)) + 2
    assert Entropy(inner).nbytes(TensorSpec.of(x)) == inner.nbytes(TensorSpec.of(x)) + 2


def test_zeros_shrink_to_almost_nothing() -> None:
    codec = Entropy(Uniform(bits=4))
    x = torch.zeros(512, 1024)
    payload = codec.encode(x)
    assert payload.nbytes < 300
    assert torch.equal(codec.decode(payload), x)


def test_a_part_beyond_the_allowed_ratio_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tagged, "FREE", 1000)
    codec = Entropy(Uniform(bits=4))
    x = torch.zeros(512, 1024)
    payload = codec.encode(x)
    assert payload.parts[0].numel() == 512 * 512 + 1
    assert torch.equal(codec.decode(payload), x)


def frame_of(size: int) -> torch.Tensor:
    frame = zstandard.ZstdCompressor().compress(bytes(size))
    return torch.frombuffer(bytearray(b"\x80" + frame), dtype=torch.uint8)


@each("size", [0, 255, 257, 1 << 20, 1 << 28])
def test_a_frame_of_another_size_than_expected_is_refused(size: int) -> None:
    codec = Entropy(Uniform(bits=4, group=512))
    payload = codec.encode(torch.zeros(512))
    with pytest.raises(PayloadError):
        codec.decode(Payload(payload.spec, (frame_of(size), payload.parts[1])))


def test_a_bomb_is_refused_before_it_is_opened() -> None:
    """The spec asks for what the frame holds, but no encoder squeezes so much into so little."""
    size = 1 << 27
    codec = Entropy(Uniform(bits=8, scale="tensor"))
    scale = codec.encode(torch.zeros(4)).parts[1]
    with pytest.raises(PayloadError, match="claims"):
        codec.decode(Payload(TensorSpec((size,)), (frame_of(size), scale)))


def test_a_frame_that_does_not_state_its_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(256))
    part = torch.frombuffer(bytearray(b"\x80" + frame), dtype=torch.uint8)
    codec = Entropy(Uniform(bits=4, group=512))
    payload = codec.encode(torch.zeros(512))
    with pytest.raises(PayloadError, match="claims"):
        codec.decode(Payload(payload.spec, (part, payload.parts[1])))


def test_bytes_after_the_frame_are_refused() -> None:
    codec = Entropy(Uniform(bits=4, group=512))
    payload = codec.encode(torch.zeros(512))
    longer = torch.cat([payload.parts[0], payload.parts[0][-3:]])
    with pytest.raises(PayloadError):
        codec.decode(Payload(payload.spec, (longer, payload.parts[1])))


@each("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_raw_parts_of_any_dtype_come_back(dtype: torch.dtype) -> None:
    x = tensor((20, 30)).to(dtype)
    assert torch.equal(Entropy(Raw()).decode(Entropy(Raw()).encode(x)), x)


def test_a_variable_rate_inside() -> None:
    codec = Entropy(HardThreshold(threshold=2.5))
    x = tensor((100, 100))
    payload = codec.encode(x)
    assert payload.nbytes < HardThreshold(threshold=2.5).encode(x).nbytes
    assert torch.equal(codec.decode(payload), torch.where(x.abs() >= 2.5, x, 0.0))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    x = tensor((20, 30))
    old = Payload(TensorSpec.of(x), (frame_of(300), Entropy(Uniform()).encode(x).parts[1]))
    monkeypatch.setitem(sys.modules, "zstandard", None)  # what an import of a missing module meets
    for use in (lambda: Entropy(Uniform()).encode(torch.ones(4)), lambda: Entropy(Uniform()).decode(old)):
        with pytest.raises(MissingExtra, match=r"pip install 'thinwire\[entropy\]'"):
            use()


def by_zstandard(codec: Entropy, x: torch.Tensor) -> int:
    """Return the bytes of a dead-zone payload that were written before range coding was."""
    parts = codec.inner.encode(x).parts
    return sum(1 + min(p.nbytes, len(zstd.smallest(p.view(torch.uint8).numpy()))) for p in parts)


compiled = pytest.mark.skipif(not rans_calls.there(), reason="no C compiler when thinwire was installed")


@compiled
@each("bits", [0.6, 1.2, 2.4, 3.7])
def test_messages_take_no_more_than_by_zstandard(bits: float) -> None:
    """Codes of Laplacian values, whose size drifts from row to row; fewer at few bits."""
    codec, g = Entropy(DeadZone(step=step_for(bits))), torch.Generator().manual_seed(0)
    for rows in (1, 6, 40, 300):
        u = torch.rand((rows, 1024), generator=g) - 0.5
        x = -u.sign() * torch.log1p(-2 * u.abs()) * torch.linspace(1, 1.5, rows)[:, None]
        payload = codec.encode(x)
        assert torch.equal(codec.decode(payload), codec.inner.decode(codec.inner.encode(x)))
        assert payload.nbytes < (1.01 if bits > 1 else 0.985) * by_zstandard(codec, x)


@each("n, mean", [(100, 1.2), (400, 1.5), (400, 4.0), (3000, 1.02), (8000, 1.5)])
def test_small_and_repetitive_parts_take_the_shorter_frame(n: int, mean: float) -> None:
    values = torch.empty(n).geometric_(1 / mean, generator=torch.Generator().manual_seed(n)) - 1
    for part in (values, values[: n // 10].repeat(10), values.sort().values):
        data = part.to(torch.uint8)
        frames = tagged.compressed([tagged.Symbols.of(data)], 1)
        other = len(zstd.smallest(data.numpy())) + 1
        assert frames[0].numel() <= min(other * 1.02 + 2, n + 1)
        assert torch.equal(tagged.expand(*tagged.arrived(frames), n), data)


@compiled
def test_a_device_without_kernels_is_asked_once_for_all_parts() -> None:
    few, many = torch.arange(3000) ** 2 % 7, torch.arange(40_000) ** 2 % 7
    data = [p.to(torch.uint8) for p in (few, many)]
    coded = tagged.compressed([tagged.Symbols.of(p) for p in data], 1)
    with Elsewhere() as seen:
        there = [tagged.Symbols.of(p.to(DEVICE)) for p in data]
        seen.clear()
        found = tagged.compressed(there, 1)
        assert (seen.to_host, seen.to_device, len(seen.waits)) == (1, 1, 1), seen
        layout = [(torch.uint8, p.numel()) for p in coded]
        arrived = put_together([bytes(p.tolist()) for p in coded], layout, DEVICE)
        seen.clear()
        first = [tagged.expand(p, 40_000) for p in tagged.arrived(arrived[:1])]
        assert (seen.to_host, len(seen.waits)) == (0, 0), seen  # so short a part is known
        both = first + [tagged.expand(p, 40_000) for p in tagged.arrived(arrived[1:])]
        assert (seen.to_host, len(seen.waits)) == (1, 1), seen
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, coded, strict=True))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(both, data, strict=True))


def test_few_codes_have_a_short_table() -> None:
    codes = torch.empty(3000).geometric_(0.7, generator=torch.Generator().manual_seed(0)).clamp(max=4) - 1
    symbols = tagged.Symbols.of_codes(codes.to(torch.uint8), 2)
    asked = symbols.asked(), rans.Asked(symbols.data, rans.Form(), 3000, 0)
    few, many = rans.compress(asked)
    assert few is not None and many is not None and few.numel() < 0.95 * many.numel()


@compiled
def test_without_a_compiler_zstandard_writes_and_both_are_read() -> None:
    codec, x = Entropy(DeadZone(2.0)), torch.randn((8, 1024), generator=torch.Generator().manual_seed(0))
    payload = codec.encode(x)
    with rans_calls.without():
        own = codec.encode(x)
        assert torch.equal(codec.decode(payload), codec.decode(own))
    assert torch.equal(codec.decode(own), codec.decode(payload))
    assert int(own.parts[0][0]) == 0x80 and int(payload.parts[0][0]) == 0xC0
    assert own.nbytes < 1.1 * payload.nbytes


@each("level", [0, 20, -1])
def test_levels_out_of_range_are_refused(level: int) -> None:
    with pytest.raises(InputError, match=f"level={level}"):
        Entropy(Uniform(), level=level)
