"""The compiled passes against numpy's, which do the same: every word width, all sizes around a step's."""

import shutil

import numpy as np
import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.state import content, find_changes, log, native
from thinwire.state.layout import Piece
from thinwire.state.log import Change, LogEntry
from thinwire.state.patch_code import classes, diffs, indexing, planes, positions
from thinwire.state.patch_code.blocks import Block
from thinwire.state.patch_code.changes import pack_blocks, unpack_blocks
from thinwire.state.patch_code.patch_stream import LARGEST, PatchCursor, pack_numbers, unpack_numbers
from thinwire.state.patches import moves
from thinwire.types import InputError, PayloadError

WORDS = [np.dtype(f"i{n}") for n in (1, 2, 4, 8)]
sizes = st.one_of(st.integers(0, 200), st.sampled_from([63, 64, 65, 4095, 4096, 4097, 8200]))
shares = st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])
widths = st.sampled_from(WORDS)
seeds = st.integers(0, 2**32 - 1)

pytestmark = pytest.mark.skipif(
    not native.there() and shutil.which("cc") is None, reason="no C compiler when thinwire was installed"
)


def test_the_library_is_of_this_source():
    assert native.there(), "kernels.c changed: .venv/bin/python setup.py build_ext --inplace"


def with_numpy(work):
    """Return what ``work`` returns where there are no compiled passes."""
    with native.without():
        assert not native.there()
        return work()


def both(work):
    """Return what ``work`` returns, once compiled passes and numpy agree on it."""
    found, expected = work(), with_numpy(work)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    return found


def drawn(seed, n, word, share):
    """Return words [n], the same with a share of them changed, and where they were."""
    draw = np.random.default_rng(seed)
    old = draw.integers(np.iinfo(word).min, np.iinfo(word).max, n, dtype=word, endpoint=True)
    at = np.flatnonzero(draw.random(n) < share).astype(np.int32)
    new = old.copy()
    new[at] += draw.integers(1, 5, at.size, dtype=word)
    return old, new, at


@given(seeds, sizes, widths, shares)
def test_what_changed(seed, n, word, share):
    old, new, at = drawn(seed, n, word, share)

    def found():
        piece = find_changes._compared(new, old, 7, find_changes._Room(np.empty(n + 7, word)))
        return [] if piece is None else [a for a in piece[2:] if a is not None]

    listed = both(found)
    if 0 < at.size <= n // find_changes._WHOLE:
        for a, b in zip(listed, (at + 7, old[at], new[at]), strict=True):
            assert np.array_equal(a, b)


@given(seeds, sizes, widths, shares)
def test_differences_for_every_element_are_listed(seed, n, word, share):
    old, new, at = drawn(seed, n, word, share)
    where, by = both(lambda: classes.block_of(new - old).sparse())
    assert np.array_equal(where, at) and np.array_equal(by, new[at] - old[at])

    def listed():
        found = np.zeros(at.size, word)
        return as_bits(Block(n, None, new - old).listed(found), n), found

    bits, by = both(listed)
    assert np.array_equal(np.unpackbits(bits, count=n).view(bool), new != old)
    assert np.array_equal(by, new[at] - old[at])


@given(seeds, sizes, widths, shares)
def test_lists_stop_where_their_room_does(seed, n, word, share):
    old, new, at = drawn(seed, n, word, share)
    for missing in (0, 1):
        if at.size < missing:
            continue
        guard = np.full(at.size + 64, 77, word)
        room = guard[: at.size - missing]
        if missing:
            with pytest.raises(InputError, match="wrote to them meanwhile"):
                native.marked(new - old, room)
        else:
            native.marked(new - old, room)
        assert (guard[room.size :] == 77).all()


def test_a_list_that_cannot_be_written_to_is_refused():
    room = np.zeros(3, np.int16)
    room.flags.writeable = False
    with pytest.raises(InputError, match="no room to list"):
        native.marked(np.ones(3, np.int16), room)


@pytest.mark.parametrize("first", [0, 64])
def test_a_sample_unlike_the_rest_does_not_decide(monkeypatch, first):
    monkeypatch.setattr(find_changes, "_SAMPLE", 64)
    old = np.zeros(1000, np.int16)
    new = old.copy()
    new[first : first + 64] = 1  # all of the sample and little else, or little of it
    piece = find_changes._compared(new, old, 0, find_changes._Room(old))
    assert piece.at is not None and piece.moved == 64 and (piece.at == np.arange(first, first + 64)).all()
    new[first:] = 2
    assert find_changes._compared(new, old, 0, find_changes._Room(old)).at is None
    assert find_changes._compared(new, old, 0, find_changes._Room(old)).moved == np.count_nonzero(new)


@each("share", [0.05, 0.3, 0.9])
@each("jump", [False, True])
def test_blocks_with_a_difference_for_every_element_are_the_same_bytes(share, jump):
    old, new, _ = drawn(7, 20_000, np.dtype(np.int16), share)
    diffs = np.random.default_rng(1).integers(-9000, 9000, old.size).astype(np.int16) if jump else new - old

    def packed():
        before = lambda i, start, stop: old[start:stop]  # noqa: E731
        return [np.frombuffer(pack_blocks([Block(old.size, None, diffs)], diffs.dtype, before), np.uint8)]

    both(packed)


def test_words_that_are_back_to_what_they_were_are_no_change():
    at, old = np.arange(3, dtype=np.int32), np.array([1, 2, 3], np.int16)
    block = moves.Move(0, at, old, np.array([1, 5, 3], np.int16)).difference(9)
    assert block.positions.tolist() == [1] and block.diffs.tolist() == [3]


def as_bits(which, n):
    """Return a set as a bitmap, whichever way it comes."""
    return which.bits if isinstance(which, positions.Bitmap) else positions._bitmap(which, n)


@given(seeds, sizes, widths, st.sampled_from([1, 50]))
def test_differences_are_split(seed, n, word, ones):
    draw, span = np.random.default_rng(seed), np.iinfo(word)
    found = draw.choice(np.array([-2, 3, span.min, span.max] + ones * [-1, 1], dtype=word), n)

    def split():
        signs, larger, beyond = (diffs._compiled if native.there() else diffs._split)(found)
        return signs, as_bits(larger, n), beyond

    signs, larger, _ = both(split)
    assert np.array_equal(np.unpackbits(signs, count=n).view(bool), found < 0)
    assert np.array_equal(np.unpackbits(larger, count=n).view(bool), np.abs(found.astype(object)) > 1)
    if n:
        found[n // 2] = 0
        assert diffs._compiled(found) is None and with_numpy(lambda: diffs._split(found)) is None


@given(seeds, sizes, shares)
def test_positions_become_bits(seed, n, share):
    at = np.flatnonzero(np.random.default_rng(seed).random(n) < share).astype(np.int32)
    (bits,) = both(lambda: [positions._bitmap(at, n)])
    assert np.array_equal(np.flatnonzero(np.unpackbits(bits, count=n)), at)


@given(seeds, sizes, widths, st.booleans())
def test_words_become_planes(seed, n, word, signed):
    words = drawn(seed, n, word, 0.0)[0]
    words = words if signed else words.view(f"u{word.itemsize}")
    found = both(lambda: [np.asarray(planes._planes(words))])[0]
    numbers = planes.zigzag(words) if signed else words
    assert np.array_equal(found.T, numbers.view(np.uint8).reshape(n, word.itemsize))


@given(seeds, sizes, widths, st.lists(shares, min_size=1, max_size=5))
def test_changes_of_several_versions_become_one(seed, n, word, some):
    """Of several old words at one position the first list's counts, since that is the oldest version's."""
    draw, expected, entries = np.random.default_rng(seed), dict[int, int](), []
    for share in some:
        at = np.flatnonzero(draw.random(n) < share).astype(np.int32)
        entries.append(LogEntry(1, 0, {0: Change(at, draw.integers(-99, 99, at.size, dtype=word))}))
        for position, old in zip(at.tolist(), entries[-1].changes[0].old.tolist(), strict=True):
            expected.setdefault(position, old)
    at, old = both(lambda: log.merge(entries, [Piece(0, 0, n, word, 0)]).changes[0])
    assert dict(zip(at.tolist(), old.tolist(), strict=True)) == expected
    assert at.tolist() == sorted(expected)


@given(seeds, sizes, shares)
def test_where_a_mask_is_set(seed, n, share):
    mask = np.random.default_rng(seed).random(n) < share
    assert np.array_equal(both(lambda: [indexing.where(mask)])[0], np.flatnonzero(mask))


@given(seeds, sizes, widths, shares)
def test_words_at_positions(seed, n, word, share):
    old, new, at = drawn(seed, n, word, share)
    assert np.array_equal(both(lambda: [indexing.read(new, at)])[0], new[at])
    at = at[::-1].copy()  # in any order

    def written():
        into, mask = old.copy(), np.zeros(n, np.bool_)
        indexing.write(into, at, new[at])
        indexing.mark(mask, at)
        return into, mask

    assert np.array_equal(both(written)[0], new)


@given(seeds, sizes, widths, shares)
def test_the_hash_moves_alike(seed, n, word, share):
    old, new, at = drawn(seed, n, word, share)
    (found,) = both(lambda: [np.uint64(content.moved(at, old[at], new[at], 3))])
    whole = both(lambda: [np.uint64(content.whole(x, 3)) for x in (new, old)])
    assert found == np.uint64(content.add(int(whole[0]), -int(whole[1])))
    assert found == both(lambda: [np.uint64(content.whole(new, 3, old))])[0]


@settings(deadline=None)
@given(
    seeds,
    sizes.filter(bool),
    widths,
    shares,
    st.lists(st.integers(1, 255), min_size=1, max_size=4, unique=True),
)
def test_classes_are_taken_out_and_put_back(seed, n, word, share, cuts):
    old, new, at = drawn(seed, n, word, share)
    cuts, look = sorted(cuts), lambda _, start, stop: old[start:stop]
    blocks = [Block(n, at, new[at] - old[at])]

    def taken_out():
        found, (rest,) = classes.take_out(blocks, look, cuts)
        return [*found, *rest.sparse()]

    *found, others, by = both(taken_out)
    assert len(found) == len(cuts)
    rest = [Block(n, others, by)]
    back = both(lambda: classes.put_back(rest, found, look, cuts)[0].sparse())
    assert np.array_equal(back[0], at) and np.array_equal(back[1], new[at] - old[at])
    for wrong in (lambda x: x[:-1], lambda x: np.append(x, x.dtype.type(1))):
        if n and found[-1].size:
            short = [*found[:-1], wrong(found[-1])]
            for run in (lambda work: work(), with_numpy):
                with pytest.raises(PayloadError, match="other words"):
                    run(lambda short=short: classes.put_back(rest, short, look, cuts))


@pytest.mark.parametrize("word", WORDS, ids=str)
def test_patches_are_the_same_bytes(monkeypatch, word):
    monkeypatch.setattr(classes, "_FEWEST", 1)
    draw = np.random.default_rng(0)
    old = (draw.standard_normal(1 << 16) * 2 ** (8 * word.itemsize - 5)).astype(word)
    at = np.flatnonzero(np.abs(old) < 2 ** (8 * word.itemsize - 8)).astype(np.int32)[::2]
    blocks, look = [Block(old.size, at, np.ones(at.size, word))], lambda _, start, stop: old[start:stop]
    body = pack_blocks(blocks, word, look)
    assert body == with_numpy(lambda: pack_blocks(blocks, word, look))
    assert body != pack_blocks(blocks, word)  # there were classes
    (found,) = unpack_blocks(body, [old.size], word, before=look)
    assert np.array_equal(found.positions, at)


def test_wrong_arguments_reach_no_memory():
    words, at = np.zeros(8, np.int16), np.array([1, 3], np.int32)
    for wrong in ([-1, 3], [3, 8], [8, 1], [2**31 - 1, 0]):
        for work in (native.take, lambda w, p: native.put(w, p, np.zeros(2, np.int16))):
            with pytest.raises(InputError, match="of 8 elements"):
                work(words, np.array(wrong, np.int32))
    with pytest.raises(InputError, match="expected int32"):
        native.take(words, at.astype(np.int64))
    with pytest.raises(InputError, match="expected 2 of 2 bytes"):
        native.put(words, at, np.zeros(2, np.int32))
    with pytest.raises(InputError, match="expected 2 of 2 bytes"):
        native.put(words, at, np.zeros(3, np.int16))
    with pytest.raises(InputError, match="next to each other"):
        native.differing(words[::2], words[:4])
    with pytest.raises(InputError, match="17 classes"):
        native.sort(words, np.arange(17, dtype=np.uint16), at, words[:2])
    for wrong in ([-1, 3], [3, 8], [2**31 - 1, 0]):
        with pytest.raises(InputError, match="not of 8 elements"):
            native.sort(words, np.array([9], np.uint16), np.array(wrong, np.int32), words[:2])
    for wrong in ([-1, 3], [3, 8]):
        with pytest.raises(InputError, match="of 8 elements"):
            native.bits(np.array(wrong, np.int32), 8)
    with pytest.raises(InputError, match="expected int32"):
        native.bits(at.astype(np.int64), 8)
    with pytest.raises(InputError, match="expected 2 of 2 bytes"):
        native.marked(words, np.zeros(2, np.int32))
    for wrong in (2**32 - 8, 2**32 - 1):
        with pytest.raises(InputError, match=r"numbers over 2\*\*32 - 9"):
            native.pack_numbers(np.array([7, wrong], np.uint32))


@each("wrong", [-1, 1])
def test_what_somebody_writes_to_meanwhile_reaches_no_other_memory(wrong):
    old, new, at = drawn(0, 1000, np.dtype(np.int16), 0.2)
    assert (native.compared(new, old, 0, at.size + wrong) is None) == (wrong < 0)
    diffs, room = new - old, np.empty(at.size + wrong, np.int16)
    for work in (lambda: native.nonzero(diffs, room.size), lambda: native.marked(diffs, room)):
        with pytest.raises(InputError, match="wrote to them"):
            work()
    by = diffs[at]
    for many in (False, True):
        with pytest.raises(InputError, match="wrote to them"):
            native.beyond(by, native.larger(by) + wrong, many)


def test_arrays_that_are_not_for_c_are_left_to_numpy():
    raw = np.zeros(17, np.uint8)
    odd = raw[1:].view(np.int16)  # at an odd address
    assert not native.there(odd) and not native.there(np.zeros(8, np.int16)[::2])
    at = np.array([2], np.int32)
    indexing.write(odd, at, np.array([5], np.int16))
    assert indexing.read(odd, at).tolist() == [5]
    fixed = np.zeros(8, np.int16)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="cannot be written to"):
        indexing.write(fixed, at, np.array([5], np.int16))


@pytest.mark.parametrize("limit", ["MOST", "ROW"])
def test_a_library_of_other_limits_is_not_used(monkeypatch, limit):
    monkeypatch.setattr(native, limit, 8)
    assert native._load() == {}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0, 1, 9, 1000, 131_071, 131_073]),
    st.sampled_from([5, 9, 300, 70_000, 2**25, LARGEST]),
    seeds,
)
def test_numbers_are_the_same_bytes(n, largest, seed):
    numbers = (np.random.default_rng(seed).random(n) ** 3 * largest).astype(np.uint64).astype(np.uint32)
    numbers[-1:] = largest
    packed = pack_numbers(numbers)
    assert packed == with_numpy(lambda: pack_numbers(numbers))

    def read():
        reader = PatchCursor(packed, "numbers")
        found = unpack_numbers(reader, n)
        reader.close()
        return found

    assert np.array_equal(read(), numbers) and np.array_equal(with_numpy(read), numbers)
    if n and packed:
        with pytest.raises(PayloadError):
            unpack_numbers(PatchCursor(packed[:-1], "numbers"), n)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 2), seeds)
def test_gaps_are_the_same_positions(n, over, seed):
    gaps = np.random.default_rng(seed).integers(0, 9, n).astype(np.uint32)
    size = int(gaps.sum()) + n + 1 - over

    def summed():
        try:
            return positions._summed(gaps, size)
        except PayloadError as e:
            return str(e)

    found = both(lambda: [np.asarray(summed())])
    assert found[0].dtype == np.int32 or (over == 2 and n)
