"""Zstandard frames, by matches and of literals alone: any decoder reads them, the smaller ones are taken."""

from __future__ import annotations

import ctypes
import shutil
import sys
import threading

import numpy as np
import pytest
import zstandard
from each import each

from thinwire.codecs import zstd
from thinwire.codecs.zstd import literals
from thinwire.types import MissingExtra, PayloadError

compiled = pytest.mark.skipif(
    not literals.there() and shutil.which("cc") is None, reason="no C compiler when thinwire was installed"
)
SIZES = [100, 101, 255, 256, 257, 1000, 1023, 1024, 5000, 16383, 16384, 65536 + 255, 65536 + 256, 140_000]


def noise(n: int, kinds: int, evenness: float, seed: int) -> np.ndarray:
    """Return uint8 [n] of so many kinds of bytes; the lower ``evenness``, the more uneven their odds."""
    g = np.random.default_rng(seed)
    odds = g.dirichlet(np.full(kinds, evenness))
    return g.permutation(256)[:kinds][g.choice(kinds, size=n, p=odds)].astype(np.uint8)


def entropy(data: np.ndarray) -> float:
    """Return the bytes that ``data`` takes by the odds of its bytes."""
    share = np.unique(data, return_counts=True)[1] / data.size
    return float(-(share * np.log2(share)).sum()) * data.size / 8


def blocks(frame: bytes) -> list[tuple[str, int]]:
    """Return what the blocks of a frame are, and the bytes of each."""
    at, found = 5 + (1 << (frame[4] >> 6)), list[tuple[str, int]]()
    while True:
        head = int.from_bytes(frame[at : at + 3], "little")
        kind, size = ("raw", "run", "coded")[head >> 1 & 3], head >> 3
        found.append((kind, size))
        at += 3 + (1 if kind == "run" else size)
        if head & 1:
            assert at == len(frame)
            return found


@compiled
def test_the_library_is_of_this_source() -> None:
    assert literals.there(), "kernels.c changed: .venv/bin/python setup.py build_ext --inplace"


@compiled
@each("n", SIZES)
@each("kinds", [1, 2, 3, 17, 129, 256])
def test_literals_are_read_by_zstandard_itself(n: int, kinds: int) -> None:
    for seed, evenness in enumerate((0.05, 1.0, 10.0)):
        data = noise(n, kinds, evenness, seed)
        frame = literals.frame(data)
        if frame is None:  # a code, its table and headers are no shorter than the bytes
            assert entropy(data) + min(kinds, 128) + 32 > n
            continue
        assert len(frame) < n
        assert zstandard.frame_content_size(frame) == n
        assert zstandard.ZstdDecompressor().decompress(frame) == data.tobytes()


@compiled
@each(("kinds", "evenness"), [(16, 2.0), (40, 0.3), (81, 2.0), (200, 1.0)])
def test_literals_come_near_the_entropy(kinds: int, evenness: float) -> None:
    data = noise(100_000, kinds, evenness, kinds)
    frame = literals.frame(data)
    assert frame is not None
    assert entropy(data) < len(frame) < 1.03 * entropy(data) + 200
    assert blocks(frame) == [("coded", len(frame) - 9 - 3)]


@compiled
def test_codes_are_at_most_eleven_bits_long() -> None:
    data = np.repeat(np.arange(24, dtype=np.uint8), [max(1, 1 << k >> 4) for k in range(24)])[:100_000]
    for part in (data, data[::-1].copy()):
        frame = literals.frame(part)
        assert frame is not None
        assert zstandard.ZstdDecompressor().decompress(frame) == part.tobytes()


@compiled
@each(
    "counts",
    [
        [50] * 16,  # all weights alike: the coder of weights cannot tell their number
        [50] * 128,
        [1] * 64 + [64],  # many symbols that there are none of, and lengths
        [0] * 190 + [9, 5, 3, 2, 1, 1] + [0] * 40 + [30],
        [1000, 1],
        [1, 1000],
        [0] * 255 + [100],
    ],
)
def test_trees_of_every_kind(counts: list[int]) -> None:
    data = np.repeat(np.arange(len(counts), dtype=np.uint8), np.array(counts) * 12)
    np.random.default_rng(1).shuffle(data)
    frame = literals.frame(data)
    assert frame is not None
    assert len(frame) < 1.03 * max(entropy(data), data.size / 8) + 200  # no code is below a bit
    assert zstandard.ZstdDecompressor().decompress(frame) == data.tobytes()


@compiled
def test_nothing_is_written_beyond_the_room() -> None:
    data = [noise(700, 60, 0.3, 1), noise(5000, 200, 10.0, 2), np.zeros(300, np.uint8)]
    data.append(noise(1200, 256, 100.0, 4))
    for x in data:
        whole = literals.frame(x)
        for room in range(len(whole) + 16 if whole else len(x)):
            buffer = np.full(room + 64, 0xA5, np.uint8)
            given = x.ctypes.data, x.size, buffer.ctypes.data, room
            count = literals._FUNCTIONS["literals"](*(ctypes.c_size_t(value) for value in given))
            assert count <= room
            assert (buffer[room:] == 0xA5).all()
            if count >= 0:
                assert buffer[:count].tobytes() == (whole or buffer[:count].tobytes())


@compiled
def test_what_differs_in_kind_gets_blocks_of_its_own() -> None:
    data = noise(40_000, 30, 1.0, 5)
    data[20_000:] = 7
    frame = literals.frame(data)
    assert frame is not None
    assert [kind for kind, _ in blocks(frame)] == ["coded", "run"]
    data[20_000:] = np.random.default_rng(0).integers(0, 256, 20_000)
    frame = literals.frame(data)
    assert frame is not None
    assert [kind for kind, _ in blocks(frame)] == ["coded", "raw"]
    long = literals.frame(noise(400_000, 30, 1.0, 6))
    assert long is not None and len(blocks(long)) == 4  # a block holds 128 kB at most


@compiled
def test_a_frame_that_has_no_room_is_none() -> None:
    data = noise(5000, 30, 1.0, 7)
    frame = literals.frame(data)
    assert frame is not None
    for room in (0, 1, 63, 64, len(frame) // 2, len(frame) - 1, len(frame)):
        assert literals.frame(data, room) is None
    assert literals.frame(data, len(frame) + 16) == frame
    assert literals.frame(data[::2]) is None  # not in one piece
    assert literals.frame(data.astype(np.int16)) is None  # type: ignore[arg-type]
    assert literals.frame(data[: literals.LEAST - 1]) is None


@each("n", [0, 1, 10, 63, 64, 1000, 40_000, 300_000])
@each("level", [1, 3])
def test_the_smaller_of_both_ways_is_taken(n: int, level: int) -> None:
    far = np.resize(noise(24_000, 30, 1.0, 1), n)  # what repeats lies far apart
    for data in (noise(n, 9, 0.3, n), np.zeros(n, np.uint8), np.resize(noise(777, 200, 10.0, 1), n), far):
        frame = zstd.smallest(data, level)
        assert zstd.content_size(frame) == n
        assert zstd.decompress(frame) == data.tobytes()
        assert len(frame) <= len(zstd.compress(data, level))


@compiled
def test_matches_are_left_where_they_cost_more_than_they_save() -> None:
    for n in (20_000, 300_000):
        few = noise(n, 60, 0.02, 11)  # about two bits a byte
        assert len(zstd.smallest(few)) < 0.95 * len(zstd.compress(few))
        again = np.resize(noise(500, 200, 10.0, 3), n)  # nothing but matches
        assert zstd.smallest(again) == zstd.compress(again)


def test_without_the_compiled_pass_frames_are_by_matches() -> None:
    data = noise(20_000, 60, 0.02, 11)
    with literals.without():
        assert not literals.there() and literals.frame(data) is None
        assert zstd.smallest(data) == zstd.compress(data)


def test_threads_have_coders_of_their_own() -> None:
    data = [noise(50_000, 60, 0.1, seed) for seed in range(4)]
    wanted, found = [zstd.smallest(d) for d in data], dict[int, bool]()

    def work(k: int) -> None:
        found[k] = all(zstd.smallest(data[k]) == wanted[k] for _ in range(20))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), True)


@each("what", [b"", b"no frame at all", b"\x28\xb5\x2f\xfd\x20"])
def test_what_is_no_frame_is_a_payload_error(what: bytes) -> None:
    with pytest.raises(PayloadError):
        if zstd.content_size(what) >= 0:
            zstd.decompress(what)
            raise AssertionError("nothing was wrong")


def test_repeats_as_far_apart_as_level_1_finds_them_are_found() -> None:
    again = np.tile(np.random.default_rng(0).integers(0, 256, 140_000, dtype=np.uint8), 3)
    assert len(zstd.smallest(again)) < 141_000


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)  # what an import of a missing module meets
    for use in (lambda: zstd.smallest(np.zeros(9, np.uint8)), lambda: zstd.content_size(b""), zstd.package):
        with pytest.raises(MissingExtra, match=r"pip install 'thinwire\[entropy\]'"):
            use()
