"""Changes <-> bytes: exact, small, and safe against any bytes."""

from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.state.layout import Array
from thinwire.state.patch_code import changes, classes
from thinwire.state.patch_code.changes import Block, Look, pack_blocks, unpack_blocks
from thinwire.state.patch_code.patch_stream import LARGEST, PatchCursor, pack_numbers, unpack_numbers, uvarint
from thinwire.state.patch_code.planes import decode_whole, encode_whole
from thinwire.types import InputError, MissingExtra, PayloadError

WORDS = [np.dtype(f"i{size}") for size in (1, 2, 4, 8)]
SHORT = np.dtype(np.int16)


def random_block(rng: np.random.Generator, numel: int, share: float, word: np.dtype, scale: float) -> Block:
    at = np.flatnonzero(rng.random(numel) < share).astype(np.int32)
    limit = np.iinfo(word)
    diffs = np.rint(rng.standard_normal(at.size) * scale).clip(limit.min // 2, limit.max // 2)
    diffs = np.where(diffs == 0, limit.min if scale > 2 else 1, diffs)
    return Block(numel, at, diffs.astype(word))


def random_words(rng: np.random.Generator, numel: int, word: np.dtype) -> Array:
    return rng.integers(0, 256, numel * word.itemsize, dtype=np.uint8).view(word)


def optimised(rate: float, steps: int, numel: int = 1 << 18) -> tuple[Array, Array]:
    """Return bf16 weights as words before and after ``steps`` steps as Adam's at a learning rate."""
    rng = np.random.default_rng(int(rate * 1e8) + steps)
    weights = torch.from_numpy(rng.standard_normal(numel, dtype=np.float32) * 0.05).bfloat16().float()
    moment, versions = torch.zeros(numel), []
    for step in range(8 + steps):
        if step in (8, 7 + steps):
            versions.append(weights.bfloat16().view(torch.int16).numpy().copy())
        moment = 0.9 * moment + 0.1 * torch.from_numpy(rng.standard_normal(numel, dtype=np.float32))
        weights = weights - rate * moment / 0.23
    versions.append(weights.bfloat16().view(torch.int16).numpy().copy())
    return versions[0], versions[-1]


def difference(before: Array, after: Array) -> Block:
    at = np.flatnonzero(before != after).astype(np.int32)
    return Block(before.size, at, after[at] - before[at])


def add_to(words: Array, block: Block) -> None:
    """Take ``words`` [numel] from the one version to the other, in place."""
    positions, diffs = block.sparse()
    words[positions] += diffs


def held(*words: Array) -> Look:
    """Return the words of blocks as both ends look at them."""
    return lambda i, start, stop: words[i][start:stop]


def entropy(values: Array) -> float:
    """Return the order-0 entropy of all values together in bytes."""
    counts = np.unique(values, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum()) / 8


blocks_strategy = st.lists(
    st.tuples(st.integers(0, 9000), st.sampled_from([0.0, 0.004, 0.1, 0.3, 0.7, 1.0])), max_size=5
)


@settings(deadline=None, max_examples=60)
@given(
    blocks_strategy,
    st.sampled_from(WORDS),
    st.sampled_from([0.5, 3.0, 1e4, 1e12]),
    st.integers(0, 2**32),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_what_was_packed_comes_out(
    sizes: list[tuple[int, float]],
    word: np.dtype,
    scale: float,
    seed: int,
    options: tuple[bool, bool, bool],
) -> None:
    known, whole, dense = options
    rng = np.random.default_rng(seed)
    blocks = [random_block(rng, numel, share, word, scale) for numel, share in sizes]
    before = [random_words(rng, numel, word) for numel, _ in sizes]
    given_ = [Block(b.numel, None, b.dense()) if dense else b for b in blocks]
    look = held(*before) if known else None
    body = pack_blocks(given_, word, look)
    found = unpack_blocks(body, [b.numel for b in blocks], word, whole, look)
    for got, expected in zip(found, blocks, strict=True):
        positions, diffs = got.sparse()
        assert positions.dtype == np.int32 and diffs.dtype == word and diffs.flags.writeable
        assert expected.positions is not None
        assert np.array_equal(positions, expected.positions)
        assert np.array_equal(diffs, expected.diffs)


@each("rate, steps", [(1e-7, 8), (1e-6, 1), (1e-6, 16), (1e-5, 1)])
def test_words_come_out_as_an_optimiser_left_them(rate: float, steps: int) -> None:
    before, after = optimised(rate, steps)
    half = before.size // 2
    blocks = [difference(before[:half], after[:half]), difference(before[half:], after[half:])]
    old = [before[:half], before[half:]]
    body = pack_blocks(blocks, SHORT, held(*old))
    assert body[2]  # by classes
    words = before.copy()
    found = unpack_blocks(body, [half, half], SHORT, True, held(*old))
    add_to(words[:half], found[0])
    add_to(words[half:], found[1])
    assert np.array_equal(words, after)


@each("share", [0.002, 0.02, 0.1, 0.3])
def test_bytes_are_near_the_entropy_of_gaps_and_differences(share: float) -> None:
    rng = np.random.default_rng(7)
    block = random_block(rng, 1 << 22, share, SHORT, 0.6)
    gaps = -block.numel * (share * np.log2(share) + (1 - share) * np.log2(1 - share)) / 8
    assert len(pack_blocks([block], SHORT)) < 1.05 * (gaps + entropy(block.diffs))


def test_wide_differences_are_near_their_entropy() -> None:
    rng = np.random.default_rng(3)
    numel = 1 << 18
    diffs = np.rint(rng.standard_normal(numel) * 12).astype(np.int16)
    body = pack_blocks([Block(numel, None, diffs)], SHORT)
    assert len(body) < 1.05 * entropy(diffs)


@each("rate, steps", [(1e-6, 1), (1e-6, 16), (1e-5, 1), (1e-5, 4), (5e-5, 1), (5e-5, 4)])
def test_bytes_are_at_least_ten_per_cent_fewer_than_others(rate: float, steps: int) -> None:
    before, after = optimised(rate, steps)
    block = difference(before, after)
    assert block.positions is not None
    index = np.diff(block.positions, prepend=0).astype(np.int32).tobytes()
    coders = [zstandard.ZstdCompressor(level=level) for level in (1, 3)]
    xored = min(len(c.compress((before ^ after).tobytes())) for c in coders)
    values = min(len(c.compress(index + after[block.positions].tobytes())) for c in coders)
    apart = min(len(c.compress(index)) + len(c.compress(after[block.positions].tobytes())) for c in coders)
    plain, classed = len(pack_blocks([block], SHORT)), len(pack_blocks([block], SHORT, held(before)))
    assert plain < 0.9 * min(xored, values, apart)
    assert classed < 0.9 * plain if 8 * block.moved < block.numel else classed == plain


def test_sixteen_classes_take_fewer_bytes_than_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve exponents with few elements each, which move by half as much as those in the one below."""
    rng, many = np.random.default_rng(5), 1 << 20
    exponents = np.where(rng.random(many) < 0.2, rng.integers(100, 112, many), 125)
    before = (exponents << 7 | rng.integers(0, 128, many)).astype(np.int16)
    scale = 64 * 0.5 ** (exponents - 100.0)
    diffs = np.rint(rng.standard_normal(many) * scale).astype(np.int16)
    blocks = [Block(many, np.flatnonzero(diffs).astype(np.int32), diffs[diffs != 0])]
    body = pack_blocks(blocks, SHORT, held(before))
    (again,) = unpack_blocks(body, [many], SHORT, before=held(before))
    assert np.array_equal(again.dense(), diffs)
    assert 4 < len(classes.choose(blocks, held(before))) <= classes.MAX_CUTS
    monkeypatch.setattr(classes, "MAX_CUTS", 4)
    assert len(body) < 0.98 * len(pack_blocks(blocks, SHORT, held(before)))


@each("every, numel", [(9000, 1 << 22), (7, 1 << 14), (100, 1 << 14)])
def test_words_are_not_looked_at_where_that_is_no_gain(every: int, numel: int) -> None:
    """Too few changes for the time it takes, too many for it, and too few to learn from."""
    at = np.arange(0, numel, every, dtype=np.int32)
    block = Block(numel, at, np.ones(at.size, dtype=np.int16))

    def look(*_: int) -> Array:
        raise AssertionError

    assert pack_blocks([block], SHORT, look) == pack_blocks([block], SHORT)


def test_an_unchanged_block_costs_a_bit() -> None:
    none = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int16)
    body = pack_blocks([Block(1 << 22, *none)] * 800, SHORT)
    assert len(body) < 110


def test_layout_does_not_change_unnoticed() -> None:
    at, diffs = np.array([1, 9, 30], dtype=np.int32), np.array([1, -1, 300], dtype=np.int16)
    assert pack_blocks([Block(40, at, diffs)], SHORT).hex() == GOLDEN
    assert unpack_blocks(bytes.fromhex(GOLDEN), [40], SHORT)[0].diffs.tolist() == [1, -1, 300]


GOLDEN = "80000000060601070e0000024003000220022a0201"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, LARGEST), max_size=300), st.integers(1, 40))
def test_numbers_of_any_scale(values: list[int], repeats: int) -> None:
    numbers = np.array(values * repeats, dtype=np.uint32)
    reader = PatchCursor(pack_numbers(numbers), "a patch")
    assert np.array_equal(unpack_numbers(reader, numbers.size), numbers)
    reader.close()


def test_numbers_at_every_edge_of_a_symbol() -> None:
    edges = [
        max(0, (8 + m << width) - 8 + off) for width in range(29) for m in range(9) for off in (-1, 0, 1)
    ]
    numbers = np.tile(np.array([e for e in edges if e <= LARGEST], dtype=np.uint32), 600)  # over a page
    assert np.array_equal(
        unpack_numbers(PatchCursor(pack_numbers(numbers), "a patch"), numbers.size), numbers
    )


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(WORDS), st.integers(0, 3000), st.integers(0, 2**32))
def test_whole_words_come_out(word: np.dtype, numel: int, seed: int) -> None:
    words = random_words(np.random.default_rng(seed), numel, word) >> (seed % 13)
    assert np.array_equal(decode_whole(encode_whole(words), numel, word), words)


def test_whole_weights_take_two_thirds() -> None:
    words = optimised(1e-6, 1)[0]
    assert len(encode_whole(words)) < 0.68 * words.nbytes


def test_small_integers_take_their_entropy_whole() -> None:
    words = np.random.default_rng(0).integers(-3, 4, 1 << 16).astype(np.int32)
    assert len(encode_whole(words)) < 1.05 * entropy(words)


def sample_bodies() -> list[tuple[bytes, list[int], np.dtype, Array | None]]:
    rng = np.random.default_rng(1)
    found: list[tuple[bytes, list[int], np.dtype, Array | None]] = []
    for word, share, scale in (
        (SHORT, 0.01, 0.5),
        (SHORT, 0.9, 5.0),
        (WORDS[2], 0.2, 1e6),
        (WORDS[3], 0.2, 9.0),
    ):
        blocks = [random_block(rng, n, share, word, scale) for n in (300, 5000)]
        found.append((pack_blocks(blocks, word), [300, 5000], word, None))
    before, after = optimised(1e-6, 16, 1 << 15)
    body = pack_blocks([difference(before, after)], SHORT, held(before))
    assert body[2]  # by classes
    return [*found, (body, [1 << 15], SHORT, before)]


@each("body, numels, word, before", sample_bodies())
def test_damaged_bytes_are_refused_or_stay_in_bounds(
    body: bytes, numels: list[int], word: np.dtype, before: Array | None
) -> None:
    look = None if before is None else held(before)
    rng = np.random.default_rng(5)
    cut = [body[:n] for n in {*range(min(60, len(body))), *range(0, len(body), 97)}]
    flipped = []
    for at in [*range(min(40, len(body))), *rng.integers(0, len(body), 150).tolist()]:
        changed = bytearray(body)
        changed[at] ^= 1 << int(rng.integers(8))
        flipped.append(bytes(changed))
    for damaged in cut:
        with pytest.raises(PayloadError):
            unpack_blocks(damaged, numels, word, before=look)
    with pytest.raises(PayloadError):
        unpack_blocks(body + b"\0", numels, word, before=look)
    for damaged in flipped:
        try:
            blocks = unpack_blocks(damaged, numels, word, before=look)
        except PayloadError:
            continue
        for block in blocks:
            add_to(np.zeros(block.numel, dtype=word), block)  # whatever it says, it stays inside


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200), st.sampled_from(WORDS), st.lists(st.integers(0, 5000), max_size=3))
def test_any_bytes_are_refused_or_stay_in_bounds(data: bytes, word: np.dtype, numels: list[int]) -> None:
    look = held(*[np.zeros(n, dtype=word) for n in numels])
    try:
        for block in unpack_blocks(data, numels, word, before=look):
            add_to(np.zeros(block.numel, dtype=word), block)
    except PayloadError:
        pass


HUGE = 50_000_000


def frame(nbytes: int) -> bytes:
    """Return a stream of a few bytes that would decompress to ``nbytes``."""
    packed = zstandard.ZstdCompressor().compress(bytes(nbytes))
    return uvarint(2 * len(packed) + 1) + packed


def jump(words: bytes) -> bytes:
    """Return what stands for a block that jumps."""
    return uvarint(len(words)) + words


@each(
    "body, reason",
    [
        (b"\x80\0\0\0" + uvarint(2 * HUGE) + frame(HUGE), "changes 50000000 of 100"),
        (b"\x80\0\0\0" + uvarint(2 * 90) + frame(HUGE), "claims 50000000 bytes, expected 90"),
        (b"\x80\0\0\x80" + bytes(8) + frame(HUGE), "claims 50000000 bytes, expected 100"),  # all differences
        (b"\x80\x80" + uvarint(2) + b"\0" + frame(HUGE), "too early"),
        (b"\x80\x80" + uvarint(HUGE) + b"\0" + frame(HUGE), "too early"),
        (b"\x80\x80" + jump(b"\0" + frame(HUGE)), "claims 50000000 bytes, expected 100"),
        (b"\x80\x00\x01\x70" + uvarint(HUGE) + bytes(40), "classes of 50000000 elements"),
        (b"\x80\x00\x02\x70\x70" + uvarint(1) + bytes(40), "out of order"),
    ],
)
def test_a_few_bytes_cannot_claim_much_memory(body: bytes, reason: str) -> None:
    words = np.zeros(100, dtype=np.int16)
    unpack_blocks(pack_blocks([], SHORT), [], SHORT)  # the coders have their memory
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError, match=reason):
            unpack_blocks(body, [100], SHORT, before=held(words))
        assert tracemalloc.get_traced_memory()[1] < HUGE // 10  # other threads may need some too
    finally:
        tracemalloc.stop()


def test_a_patch_for_other_words_is_refused() -> None:
    before, after = optimised(1e-6, 16)
    body = pack_blocks([difference(before, after)], SHORT, held(before))
    for other in (np.zeros_like(before), np.full_like(before, 0x7000)):  # all in a class, and none
        with pytest.raises(PayloadError, match="other words"):
            unpack_blocks(body, [before.size], SHORT, before=held(other))
    with pytest.raises(PayloadError, match="none are held"):
        unpack_blocks(body, [before.size], SHORT)


@pytest.mark.parametrize("length", [1 << 9, 1 << 12])
def test_what_is_taken_out_by_class_is_put_back(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(classes, "RUN", length)
    before, after = optimised(1e-5, 4, 5000)
    block, cuts = difference(before, after), [110, 118, 120]
    taken, rest = classes.take_out([block], held(before), cuts)
    sizes = (before.view(np.uint16) << 1) >> 8
    for least, cut, diffs in zip([0, *cuts], cuts, taken, strict=False):
        assert np.array_equal(diffs, block.dense()[(least <= sizes) & (sizes < cut)])
    assert rest[0].positions is not None and (sizes[rest[0].positions] >= cuts[-1]).all()
    assert 0 < rest[0].moved < block.moved
    (again,) = classes.put_back(rest, taken, held(before), cuts)
    assert np.array_equal(again.dense(), block.dense())


def test_wrong_blocks_are_input_errors() -> None:
    at, diffs = np.array([3, 2], dtype=np.int32), np.array([1, 1], dtype=np.int16)
    with pytest.raises(InputError, match="sort them"):
        pack_blocks([Block(9, at, diffs)], SHORT)
    with pytest.raises(InputError, match="sort them"):
        pack_blocks([Block(3, at[:1], diffs[:1])], SHORT)
    with pytest.raises(InputError, match="do not fit"):
        pack_blocks([Block(9, at[:1], diffs)], SHORT)
    with pytest.raises(InputError, match="of zero"):
        pack_blocks([Block(9, at[:1], diffs[:1] * 0)], SHORT)
    many = np.arange(0, 4000, 10, dtype=np.int32)
    with pytest.raises(InputError, match="8 words of int16 before a change of 1024"):
        pack_blocks(
            [Block(4000, many, np.ones(400, dtype=np.int16))], SHORT, held(np.zeros(8, dtype=np.int16))
        )


def test_without_zstandard_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtra, match=r"thinwire\[entropy\]"):
        pack_blocks([Block(9, np.array([1], dtype=np.int32), np.array([1], dtype=np.int16))], SHORT)


def test_classes_longer_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "CUT", 1000)
    before, after = optimised(1e-5, 1)
    body = pack_blocks([difference(before, after)], SHORT, held(before))
    assert body[2]
    words = before.copy()
    (found,) = unpack_blocks(body, [before.size], SHORT, True, held(before))
    add_to(words, found)
    assert np.array_equal(words, after)
