"""The samples that a member trains on in one round, and how they cross. Little-endian::

samples u32, tokens of a sample u32, batch u32, planes of numbers u8, planes of tokens u8, bytes

The bytes are, as they are or as a Zstandard frame, the numbers of the samples, then their tokens, each in
planes: the lowest bytes of all, then the next ones, and so on.

A token t that is learnt is sent as 2 t, one that is not, and is there as its complement, as 2 t + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire.codecs import zstd
from thinwire.heads import U8, U32, Head, Rest
from thinwire.types import PayloadError, require

RATIO = 32  # bytes of tokens in memory that a byte may stand for: no share asks for more than it warrants
PLANES = 6  # bytes of a number at most
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Share:
    """A member's samples of one round: ``ids`` [n] int64, ``blocks`` [n, seq + 1] int64, n / batch steps.

    >>> Share(torch.tensor([7, 3]), torch.zeros(2, 5, dtype=torch.int64), batch=1).samples
    2
    """

    ids: Tensor
    blocks: Tensor
    batch: int

    @property
    def samples(self) -> int:
        """How many samples there are, which is how much the update counts."""
        return len(self.ids)


class ShareMessage(Head):
    """The head of a share."""

    samples: U32
    numbers: U32
    batch: U32
    id_planes: U8
    token_planes: U8
    data: Rest


def pack_share(share: Share) -> bytes:
    """Return a share as bytes, as ``read_share`` takes them.

    >>> share = Share(torch.tensor([7]), torch.tensor([[~5, 6, 70000]]), batch=1)
    >>> read_share(pack_share(share)).blocks
    tensor([[   -6,     6, 70000]])
    """
    tokens = share.blocks.numpy().reshape(-1)
    (k, ids), (m, folded) = _planes(share.ids.numpy()), _planes((tokens << 1) ^ (tokens >> 63))
    data = ids + folded
    frame = zstd.smallest(np.frombuffer(data, np.uint8))
    if len(frame) < len(data) and share.blocks.nbytes <= RATIO * len(frame):
        data = frame
    return ShareMessage(share.samples, share.blocks.shape[1], share.batch, k, m, data).pack()


def read_share(data: bytes | memoryview, vocabulary: int | None = None) -> Share:
    """Read what ``pack_share`` wrote; ``vocabulary``: how many tokens the model knows.

    Errors: ``PayloadError`` for anything else, before more is allocated than so many bytes warrant.
    """
    head = ShareMessage.unpack(data)
    n, length, batch = head.samples, head.numbers, head.batch
    shaped = n > 0 and length > 1 and batch > 0 and n % batch == 0
    wrong = f"a share of {n} samples of {length} tokens in batches of {batch}"
    require(shaped, PayloadError, wrong)
    k, m = head.id_planes, head.token_planes
    wide = 1 <= k <= PLANES and 1 <= m <= PLANES
    require(wide, PayloadError, f"a share whose numbers take {k} and {m} bytes, at most {PLANES}")
    warranted = 8 * n * length <= RATIO * len(head.data)
    require(
        warranted, PayloadError, f"{len(head.data)} bytes that claim to be {n} samples of {length} tokens"
    )
    raw = _opened(head.data, n * (k + m * length))
    ids, tokens = _numbers(raw[: n * k], k), _numbers(raw[n * k :], m)
    most = int(tokens.max()) >> 1
    known = vocabulary is None or most < vocabulary
    require(known, PayloadError, f"a share has the token {most}, and the model knows {vocabulary}")
    signs = -(tokens & 1)
    tokens >>= 1
    tokens ^= signs
    return Share(torch.from_numpy(ids), torch.from_numpy(tokens).view(n, length), batch)


def _planes(numbers: Numbers) -> tuple[int, bytes]:
    """Return how many bytes a number takes, and all their first ones, then the second ones, and so on."""
    many = max(1, -(-int(numbers.max()).bit_length() // 8))
    each = np.ascontiguousarray(numbers, "<i8").view(np.uint8).reshape(-1, 8)
    return many, each[:, :many].T.tobytes()


def _numbers(data: memoryview, planes: int) -> Numbers:
    each = np.zeros((len(data) // planes, 8), np.uint8)
    each[:, :planes] = np.frombuffer(data, np.uint8).reshape(planes, -1).T
    return each.view("<i8").reshape(-1).astype(np.int64, copy=False)


def _opened(data: memoryview | bytes, size: int) -> memoryview:
    """Return the ``size`` bytes that are there as they are, or as a frame."""
    if len(data) == size:
        return memoryview(data)
    found = zstd.content_size(data)
    require(found == size, PayloadError, f"samples of {found} bytes, expected {size}")
    return memoryview(zstd.decompress(data))
