"""The compiled passes of codecs against torch's, which do the same: payloads and values to the bit."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_examples import CODECS, tensor
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import compiled
from thinwire.codecs import Codec, DeadZone, RankOne, Uniform, roundtrip, tiles
from thinwire.codecs.codec import decode_against, roundtrip_against
from thinwire.codecs.kernels import bits, kernel_calls, noise, scales
from thinwire.state import native as state_native
from thinwire.types import InputError, Payload, PayloadError, TensorSpec

pytestmark = pytest.mark.skipif(
    not kernel_calls.there() and shutil.which("cc") is None,
    reason="no C compiler when thinwire was installed",
)
SIZES = st.one_of(st.integers(1, 300), st.sampled_from([2047, 2048, 2049, 4096, 8191, 8195, 20_000]))


def drawn(seed: int, n: int, spread: float) -> Tensor:
    """Return normal values, a tenth of them ``spread`` times as large, some of them zeros of either sign."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g)
    x *= torch.where(torch.rand(n, generator=g) < 0.1, spread, 1.0)
    x[torch.rand(n, generator=g) < 0.05] = -0.0
    x[torch.rand(n, generator=g) < 0.05] = 0.0
    return x


def equal(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors have the same bits, signs of zeros included."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_torchs(codec: Codec, x: Tensor) -> None:
    """Check that the compiled passes of a codec encode, return and decode the bits that torch's do."""
    payload, values = roundtrip(codec, x)
    with kernel_calls.without():
        expected, expected_values = roundtrip(codec, x)
        decoded = codec.decode(payload)
    assert all(equal(a, b) for a, b in zip(payload.parts, expected.parts, strict=True))
    assert equal(values, expected_values) and equal(codec.decode(payload), values) and equal(decoded, values)
    held = values.float().mul(0.75)
    payload, values = roundtrip_against(codec, x, held)
    with kernel_calls.without():
        expected, expected_values = roundtrip_against(codec, x, held)
        decoded = decode_against(codec, payload, held)
    assert all(equal(a, b) for a, b in zip(payload.parts, expected.parts, strict=True))
    assert equal(values, expected_values) and equal(decoded, values)
    assert equal(decode_against(codec, payload, held), values)


def test_the_library_is_of_this_source() -> None:
    assert kernel_calls.there(), "kernels.c changed: .venv/bin/python setup.py build_ext --inplace"


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    SIZES,
    st.sampled_from([1.0, 30.0, 1e5, 1e30]),
    st.sampled_from([0.05, 0.65, 2.0, 9.0]),
    st.sampled_from([(0.0, False), (0.4, False), (0.5, False), (0.5, True)]),
    st.sampled_from(["message", "tensor", "one"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_payloads_and_values_are_torchs(
    seed: int, n: int, spread: float, step: float, how: tuple[float, bool], unit: str, dtype: torch.dtype
) -> None:
    x = drawn(seed, n, spread).to(dtype)
    x = x.nan_to_num(posinf=6e4, neginf=-6e4)
    # torch's level of a small negative value is 0, which has no sign; so has ours
    assert_torchs(DeadZone(step, how[0], unit, dither=how[1]), x)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 7), (5, 33), (2, 64), (2, 3, 96), (40, 1), (3, 250)]),
    st.sampled_from([2.0**-149, 1e-38, 1.0, 1e30, 2.0**120]),
    st.integers(2, 8),
    st.sampled_from([("group", 1.0), ("group", 0.6), ("token", 1.0), ("channel", 1.0), ("tensor", 0.6)]),
    st.sampled_from(["nearest", "stochastic"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_codes_and_scales_are_torchs(
    seed: int,
    shape: tuple[int, ...],
    size: float,
    bits: int,
    how: tuple[str, float],
    rounding: str,
    dtype: torch.dtype,
) -> None:
    x = (drawn(seed, torch.Size(shape).numel(), 30.0) * size).to(dtype).reshape(shape)
    x = x.nan_to_num(posinf=6e4, neginf=-6e4)
    assert_torchs(Uniform(bits, how[0], rounding=rounding, seed=seed, clip=how[1]), x)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 7), (5, 33), (2, 3, 96), (40, 1), (2, 2050, 3), (1, 3, 4099), (3, 5, 2, 20)]),
    st.sampled_from([2.0**-149, 1e-38, 2.0**-100, 1.0, 1e30, 2.0**120]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_scales_of_rows_and_columns_and_their_levels_are_torchs(
    seed: int, shape: tuple[int, ...], size: float, bits: int, dtype: torch.dtype
) -> None:
    x = (drawn(seed, torch.Size(shape).numel(), 1000.0) * size).to(dtype).reshape(shape)
    x = x.nan_to_num(posinf=6e4, neginf=-6e4)
    x[-1] *= seed % 3 / 4096  # zeros of either sign, or a sample or row that is far smaller
    assert_torchs(RankOne(bits), x)


@each("wrong", [0.0, -1.0, 2.0**-101, 2.0**121, float("inf"), float("nan")])
def test_scales_that_nobody_writes_are_refused_as_without(wrong: float) -> None:
    codec = Uniform(bits=8)
    codes, stored = codec.encode(drawn(0, 200, 3.0)).parts
    payload = Payload(TensorSpec((200,)), (codes, stored.clone()))
    payload.parts[1][-1] = wrong
    with pytest.raises(PayloadError, match="scale lies outside"):
        codec.decode(payload)
    with kernel_calls.without(), pytest.raises(PayloadError, match="scale lies outside"):
        codec.decode(payload)


def test_any_codes_of_a_stranger_stand_for_what_torch_makes_of_them() -> None:
    codes, stored = torch.arange(256, dtype=torch.uint8), torch.full((8,), 0.5, dtype=torch.bfloat16)
    payload, codec = Payload(TensorSpec((256,)), (codes, stored)), Uniform(bits=8)
    values = codec.decode(payload)
    with kernel_calls.without():
        assert equal(values, codec.decode(payload))
    assert values.min() == -64.0 and values.max() == 63.5


@each("wrong", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_none_are_refused_as_without(wrong: float) -> None:
    x = drawn(0, 200, 3.0)
    x[150] = wrong
    for codec in (Uniform(bits=4), Uniform(bits=8, scale="token")):
        with pytest.raises(InputError, match="NaN or infinite"):
            codec.encode(x)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.sampled_from([1, 5, noise.TABLE - 1, noise.TABLE, noise.TABLE + 1, 3 * noise.TABLE + 17]),
    st.sampled_from([2.0**-130, 0.3125, 1.0, 2.0**120]),
    st.sampled_from([1, -1]),
)
def test_noise_is_torchs_lap_by_lap(key: int, n: int, step: float, sign: int) -> None:
    x, width = drawn(key % 2**32, n, 30.0), torch.tensor([step])
    found = noise.dithered(x, key, width, sign)
    with kernel_calls.without():
        expected = noise.dithered(x, key, width, sign)
    assert equal(found, expected)
    back = noise.dithered(torch.zeros(n), key, width, sign)
    assert float(back.abs().max()) <= step / 2 and (n < noise.TABLE or len(back.unique()) == noise.TABLE)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([(0.0, False), (0.4, False), (0.5, False), (0.5, True)]),
    st.sampled_from([1.0, 32767.0, 65534.0, 2.0**-80, 2.0**100]),
    st.booleans(),
)
def test_levels_reach_the_top_and_not_beyond(
    seed: int, dtype: torch.dtype, how: tuple[float, bool], largest: float, alone: bool
) -> None:
    """With a step that is far too small for the values, it grows until the largest has the level 32767."""
    x = drawn(seed, 1 if alone else 500, 1.0).to(dtype)
    x[0] = largest if seed % 2 else -largest
    x = x.clamp_(-largest, largest)
    codec = DeadZone(1e-30, how[0], "one" if seed % 3 else "message", how[1])
    payload, values = codec.roundtrip(x)
    with kernel_calls.without():
        expected, expected_values = codec.roundtrip(x)
    assert all(equal(a, b) for a, b in zip(payload.parts, expected.parts, strict=True))
    assert equal(values, expected_values) and equal(codec.decode(payload), values)
    assert abs(float(values[0])) > 0.99 * largest


def test_any_levels_of_a_stranger_become_what_torch_makes_of_them() -> None:
    codec, n = DeadZone(), 2**16
    numbers = torch.arange(n, dtype=torch.int32)
    halves = torch.cat([numbers & 0xFF, numbers >> 8]).to(torch.uint8)
    all_large = torch.full((n // 4,), 0xFF, dtype=torch.uint8)
    payload = Payload(TensorSpec((n,)), (all_large, halves, torch.tensor([0.5], dtype=torch.bfloat16)))
    values = codec.decode(payload)
    with kernel_calls.without():
        assert equal(values, codec.decode(payload))
    assert values.min() == -0.5 * 2**15 and values.max() == 0.5 * (2**15 - 1)


@each("change", [-2, -1, 1, 2])
def test_another_number_of_large_levels_is_refused_as_without(change: int) -> None:
    codec = DeadZone(step=0.5)
    payload = codec.encode(drawn(0, 5000, 3.0))
    packed, large, stored = payload.parts
    large = large[:change] if change < 0 else torch.cat([large, large[:change]])
    wrong = Payload(payload.spec, (packed, large, stored))
    with pytest.raises(PayloadError, match="large levels, expected two each") as found:
        codec.decode(wrong)
    with kernel_calls.without(), pytest.raises(PayloadError) as expected:
        codec.decode(wrong)
    assert str(found.value) == str(expected.value)


def test_what_c_cannot_reach_is_left_to_torch() -> None:
    x = torch.randn(4, 6)
    assert kernel_calls.there(x) and not kernel_calls.there(x, x.t())
    assert not kernel_calls.there(torch.empty(3, device="meta"))
    assert not kernel_calls.there(torch.nn.Parameter(x))  # a subclass may be anything
    assert not kernel_calls.there(torch._neg_view(x))  # whose memory has the opposite signs
    assert not kernel_calls.there(torch.frombuffer(bytearray(9), dtype=torch.float32, offset=1, count=2))
    assert not kernel_calls.there(torch._efficientzerotensor((3,)))  # which has no memory
    y = torch.randn(6, 40).t()
    codec = DeadZone()
    assert equal(codec.decode(codec.encode(y)), codec.decode(codec.encode(y.contiguous())))
    turned = torch._neg_view(x.clone())
    assert equal(codec.decode(codec.encode(turned)), codec.decode(codec.encode(-x)))
    with pytest.raises(InputError, match="float32 in one piece"):
        kernel_calls.levels(x.double().flatten(), 1.0, 0.4, 1.0)


def forget_constants() -> None:
    for kept in (noise._table, bits._byte, tiles._hadamard):
        kept.cache_clear()
    scales._kept.__dict__.clear()


def outcome(codec: Codec, x: Tensor) -> list[Tensor]:
    payload, values = roundtrip(codec, x)
    return [*payload.parts, values, codec.decode(payload), codec.decode(codec.encode(x))]


def alike(codec: Codec, x: Tensor, expected: list[Tensor]) -> bool:
    return all(equal(a, b) for a, b in zip(outcome(codec, x), expected, strict=True))


@each("compiled_passes", [True, False])
@each("codec", CODECS)
def test_the_default_device_changes_nothing(codec: Codec, compiled_passes: bool) -> None:
    x = tensor((4, 6, 80))
    with nullcontext() if compiled_passes else kernel_calls.without():
        expected = outcome(codec, x)
        forget_constants()
        with torch.device("meta"):
            assert alike(codec, x, expected)
        assert alike(codec, x, expected), "what was made on that device is kept"


@each("compiled_passes", [True, False])
@each("codec", CODECS)
def test_the_default_dtype_changes_nothing(codec: Codec, compiled_passes: bool) -> None:
    x = tensor((4, 6, 80))
    with nullcontext() if compiled_passes else kernel_calls.without():
        expected = outcome(codec, x)
        forget_constants()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            assert alike(codec, x, expected)
        finally:
            torch.set_default_dtype(before)
        assert alike(codec, x, expected), "what was made in that dtype is kept"


def test_a_library_of_another_source_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Path(kernel_calls.__file__).parent
    assert compiled.functions(folder, ["levels"]) and state_native._load()
    assert not compiled.functions(folder, ["nothing"]) and not compiled.functions(tmp_path, ["levels"])
    monkeypatch.setattr(compiled.zlib, "crc32", lambda data: 0)
    assert not compiled.functions(folder, ["levels"]) and state_native._load() == {}


CUT = """
import sys
from pathlib import Path
from thinwire import compiled
folder, whole = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
for n in (0, 1, 63, 64, *range(1000, len(whole), 3000), len(whole) - 1):
    (folder / "_kernels.bin").write_bytes(whole[:n])
    assert not compiled.functions(folder, ["levels"]), n
(folder / "_kernels.bin").write_bytes(whole)
assert compiled.functions(folder, ["levels"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what is loaded elsewhere is no ELF file")
def test_a_library_of_which_a_part_is_missing_is_not_loaded(tmp_path: Path) -> None:
    """In a process of its own: Linux would end it."""
    words = [sys.executable, "-c", CUT, tmp_path, Path(kernel_calls.__file__).with_name("_kernels.bin")]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


def test_a_build_puts_a_library_in_place_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setuptools = pytest.importorskip("setuptools")
    made: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", made.update)
    monkeypatch.chdir(Path(__file__).parents[2])
    runpy.run_path("setup.py")
    build = made["cmdclass"]["build_ext"](setuptools.Distribution())
    old, new, place = b"old" * 30_000, b"new" * 50_000, tmp_path / "_kernels.bin"
    place.write_bytes(old)
    (tmp_path / "built").write_bytes(new)
    replace, seen = os.replace, list[bytes]()

    def replaced(source: str, target: str) -> None:
        seen.extend((place.read_bytes(), Path(source).read_bytes()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    with place.open("rb") as held:
        build.copy_file(str(tmp_path / "built"), str(place))
        assert held.read() == old and place.read_bytes() == new and seen == [old, new]
    assert sorted(x.name for x in tmp_path.iterdir()) == ["_kernels.bin", "built"]


def test_sources_that_cannot_be_read_leave_all_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    folder = Path(kernel_calls.__file__).parent
    assert compiled.functions(folder, ["levels"])
    monkeypatch.setattr(Path, "read_bytes", refused)
    assert compiled.functions(folder, ["levels"]) == {}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("asked", ["-ffast-math", "-Ofast", "-funsafe-math-optimizations"])
def test_fast_maths_in_cflags_changes_nothing(
    asked: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: dict[str, Any] = {}
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", made.update)
    monkeypatch.chdir(Path(__file__).parents[2])
    runpy.run_path("setup.py")
    flags = made["ext_modules"][0]
    source, middle, library = (str(tmp_path / name) for name in ("a.c", "a.o", "a.so"))
    Path(source).write_text("float rest(float a, float b) { return (a + b) - a; }")
    subprocess.run(["cc", asked, "-fPIC", "-c", source, "-o", middle, *flags.extra_compile_args], check=True)
    subprocess.run(["cc", "-shared", asked, middle, "-o", library, *flags.extra_link_args], check=True)
    rest = """import ctypes, sys
rest = ctypes.CDLL(sys.argv[1]).rest
rest.argtypes, rest.restype = [ctypes.c_float] * 2, ctypes.c_float
print(rest(1e8, 1), float(sys.argv[2]) / 4 > 0)"""  # numbers that no compiler can work out before
    said = subprocess.check_output([sys.executable, "-c", rest, library, "1e-310"], text=True)
    assert said.split() == ["0.0", "True"]
