"""CRC-32 by the compiled pass in both widths and without it: what zlib says, of any length and place."""

from __future__ import annotations

import random
import zlib
from contextlib import nullcontext

import pytest
from each import each

from thinwire import checksum

DATA = random.Random(0).randbytes((1 << 18) + 999)
LENGTHS = (0, 1, 15, 63, 64, 65, 127, 129, checksum.SHORT, checksum.SHORT + 17, checksum.SHORT + 255, 1 << 18)


@each("way", ["as this processor can", "sixteen bytes at a time", "by zlib"])
def test_it_is_that_of_zlib(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "sixteen bytes at a time":
        monkeypatch.setattr(checksum, "WIDE", False)
    with checksum.without() if way == "by zlib" else nullcontext():
        for n in LENGTHS:
            for start, before in ((0, 0), (1, 0xFFFFFFFF), (7, 12345)):
                view = memoryview(DATA)[start : start + n]
                for data in (view, bytes(view), bytearray(view)):
                    assert checksum.crc32(data, before) == zlib.crc32(view, before)


def test_a_sum_goes_on_from_another_wherever_the_data_is_cut() -> None:
    for cut in (1, 63, 20_000, len(DATA) - 1):
        assert checksum.crc32(DATA[cut:], checksum.crc32(DATA[:cut])) == zlib.crc32(DATA)
        sums = checksum.crc32(DATA[:cut]), checksum.crc32(DATA[cut:])
        assert checksum.joined(*sums, len(DATA) - cut) == zlib.crc32(DATA)
        assert checksum.joined(sums[0], 0, 0) == sums[0] and checksum.joined(0, sums[1], 10**12) == sums[1]
