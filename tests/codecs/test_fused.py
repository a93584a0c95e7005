"""The kernels in Triton against what codecs do on a CPU without them: payloads and values to the bit.

Where there is no card, Triton's interpreter runs them, in a process of its own: once asked for, it is there
for good.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from codec_examples import tensor
from each import each
from interpreted import passes_in_the_interpreter
from torch import Tensor

from thinwire.codecs import (
    Cast,
    ChunkTopK,
    Codec,
    DeadZone,
    Hadamard,
    RankOne,
    TileAdaptive,
    Uniform,
    roundtrip,
)
from thinwire.codecs.codec import decode_against, roundtrip_against
from thinwire.codecs.kernels import rankone_calls, triton_calls
from thinwire.types import InputError, Payload, PayloadError

if find_spec("triton") is None:  # not imported here: it would stay in this process
    pytest.skip("no Triton", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CARD = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if CARD else "cpu")
kernels = pytest.mark.skipif(
    not CARD and not INTERPRETED, reason="no CUDA GPU; the interpreter is asked below"
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES: list[tuple[Codec, tuple[int, ...], torch.dtype]] = [
    (Uniform(4), (2, 4, 256), F32),  # a plane is whole groups
    (Uniform(2, group=8), (2, 7, 2, 16), BF16),
    (Uniform(8), (2, 64), F16),
    (Uniform(3), (5, 33), F32),  # it is not
    (Uniform(5, clip=0.6, group=5), (3, 40), BF16),
    (Uniform(7, "token", scale_dtype="float16"), (2, 3, 40), F16),
    (Uniform(3, scale_dtype="e5m3"), (2, 3, 40), F32),
    (Uniform(4, "channel"), (2, 20, 40), F32),
    (Uniform(6, "tensor"), (3, 77), BF16),
    (Hadamard(Uniform(4), block=4), (2, 64), F16),
    (Hadamard(Uniform(4), block=8), (2, 3, 20), F32),  # by a kernel behind torch's transform
    (RankOne(), (2, 5, 24), BF16),
    (RankOne(), (7,), F32),
    (RankOne(2), (2, 33, 8), F16),
    (RankOne(3), (2, 33, 8), F32),
    (RankOne(4), (2, 5, 24), BF16),
    (DeadZone(3e-4, 0.5, "one"), (2, 600), F32),
    (DeadZone(0.7, 0.5, "one", dither=True), (3, 51), BF16),
    (DeadZone(0.4, unit="tensor"), (4, 32), F16),
    (ChunkTopK(0.1, chunk=64, values=Uniform(8)), (3, 50), F32),
    (ChunkTopK(0.3, chunk=20, values=Cast()), (4, 33), BF16),
]


@pytest.fixture(autouse=True)
def at_work() -> Iterator[None]:
    with triton_calls.interpreted() if INTERPRETED else nullcontext():
        yield


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return values of distinct magnitudes: among equal ones ``ChunkTopK`` may choose others."""
    order = torch.randperm(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(2))
    return ((order - 60) * 0.4921875).reshape(shape).to(dtype)


def equal(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors have the same bits, signs of zeros included."""
    a, b = a.cpu().reshape(-1), b.cpu().reshape(-1)
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def outcome(codec: Codec, x: Tensor, reference: Tensor) -> list[Tensor]:
    payload, values = roundtrip(codec, x)
    against, restored = roundtrip_against(codec, x, reference)
    back = codec.decode(payload), decode_against(codec, against, reference)
    return [*payload.parts, *against.parts, values, restored, *back]


@kernels
def test_kernels_have_the_bits_of_a_cpu() -> None:
    assert triton_calls.there(torch.zeros(1, device=DEVICE)), "Triton cannot work here"
    for codec, shape, dtype in CASES:
        x, reference = tensor(shape, dtype), tensor(shape, seed=1)
        if isinstance(codec, ChunkTopK):
            x = values(shape, dtype)
        with triton_calls.without():
            expected = outcome(codec, x, reference)
        found = outcome(codec, x.to(DEVICE), reference.to(DEVICE))
        wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not equal(a, b)]
        assert not wrong, (codec, shape, dtype, wrong)


@kernels
@each("dtype", [F32, F16])
def test_tiles_decode_to_the_bits_of_a_cpu(dtype: torch.dtype) -> None:
    """What is coded may differ, where sums of floats decide which tiles get few bits."""
    codec = TileAdaptive(tile=8, high=5, low=2, share=0.5)
    x = tensor((2, 3, 20), dtype)
    with triton_calls.without():
        given = codec.encode(x)
        expected = codec.decode(given)
    far = Payload(given.spec, tuple(p.to(DEVICE) for p in given.parts))
    assert int(given.parts[5].sum()) > 0 and equal(codec.decode(far), expected)
    own, values = roundtrip(codec, x.to(DEVICE))
    with triton_calls.without():
        assert equal(codec.decode(Payload(own.spec, tuple(p.cpu() for p in own.parts))), values)
    error, usual = ((v.cpu() - x).float().square().sum() for v in (values, expected))
    assert error < 1.01 * usual


@kernels
def test_a_wrong_guess_of_the_largest_magnitude_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rankone_calls, "_FEW", 1)
    monkeypatch.setattr(rankone_calls, "SIZE", 16)  # so the first 256 values of a matrix are looked at
    x = tensor((1, 8, 48))
    x[0, -1, -1] = 500.0
    with triton_calls.without():
        expected = RankOne().encode(x)
    found = RankOne().encode(x.to(DEVICE))
    assert all(equal(a, b) for a, b in zip(found.parts, expected.parts, strict=True))


@kernels
@each("codec", [Uniform(4), Uniform(4, "channel"), RankOne(), DeadZone(), TileAdaptive()])
def test_kernels_refuse_what_torch_refuses(codec: Codec) -> None:
    x = tensor((4, 64)).to(DEVICE)
    parts = codec.encode(x).parts
    for wrong in (float("nan"), float("inf")):
        spoilt = x.clone()
        spoilt[-1, -1] = wrong
        with pytest.raises(InputError, match="NaN or infinite"):
            codec.encode(spoilt)
        k = next(k for k, part in enumerate(parts) if part.dtype == torch.bfloat16)
        scales = parts[k].clone()
        scales[-1] = wrong
        with pytest.raises(PayloadError, match="scale lies outside"):
            codec.decode(Payload(codec.encode(x).spec, (*parts[:k], scales, *parts[k + 1 :])))


@pytest.mark.skipif(CARD or INTERPRETED, reason="it is tried here")
def test_kernels_in_the_interpreter() -> None:
    passes_in_the_interpreter(__file__)
