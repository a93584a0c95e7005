"""CRC-32 by the compiled pass and without it: what zlib says, of any length, place and sum before."""

from __future__ import annotations

import random
import zlib
from contextlib import nullcontext

from each import each

from thinwire import checksum

DATA = random.Random(0).randbytes((1 << 18) + 999)
LENGTHS = (0, 1, 15, 63, 64, 65, 127, 129, checksum.SHORT, checksum.SHORT + 17, 1 << 18)


@each("compiled", [True, False])
def test_it_is_that_of_zlib(compiled: bool) -> None:
    with nullcontext() if compiled else checksum.without():
        for n in LENGTHS:
            for start, before in ((0, 0), (1, 0xFFFFFFFF), (7, 12345)):
                view = memoryview(DATA)[start : start + n]
                for data in (view, bytes(view), bytearray(view)):
                    assert checksum.crc32(data, before) == zlib.crc32(view, before)


def test_a_sum_goes_on_from_another_wherever_the_data_is_cut() -> None:
    for cut in (1, 63, 20_000, len(DATA) - 1):
        assert checksum.crc32(DATA[cut:], checksum.crc32(DATA[:cut])) == zlib.crc32(DATA)
