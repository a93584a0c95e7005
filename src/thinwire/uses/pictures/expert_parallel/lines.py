"""Rows of tokens between this rank and one other, of which a message has some.

Without a memory the rows go as one matrix: both ends know which they are. With one, both hold a reference of
every row that ever travelled; a message then has those of now, by ``Rows`` in one entry, and before them the
rows that travel for the first time, by the keyframe codec.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.codecs import Codec, Rows
from thinwire.types import InputError, Mode, PayloadError, require
from thinwire.uses.pictures.context_parallel.coding import Coding, wide
from thinwire.uses.pictures.context_parallel.ends import Ends
from thinwire.uses.pictures.context_parallel.repairs import Kept
from thinwire.uses.pictures.context_parallel.traffic import Posted, Traffic

OTHER_TOKENS = "this rank has another number of tokens than in the step before; call reset() first"
PACKETS = 2  # of a message: rows that are new, and others; either may be empty


class Line(Ends):
    """Both ends of rows to, and from, one peer."""

    def __init__(self, coding: Coding, rank: int) -> None:
        super().__init__(coding, [rank])
        self._rank = rank
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # by key: rows as the peer has them, which it has

    def send(self, rows: Tensor, marked: Tensor, key: int, step: int) -> tuple[list[bytes], Kept | None]:
        """Return the packets for ``rows`` [n, width], those ``marked`` [all], and what they stand for."""
        if not len(rows):
            return [b""] * PACKETS, None
        coded = wide(self._coding.codec(step) or self._coding.scheme.codec, rows[None])
        if not self.remember:
            packet, _ = self._sender.encode(rows[None], [key], codec=coded)
            return [b"", wire.pack(packet)], None
        whole = rows.new_zeros((len(marked), rows.shape[1]), dtype=torch.float32)
        whole[marked] = rows.float()
        before, known = self._held.get(key, (torch.zeros_like(whole), torch.zeros_like(marked)))
        require(len(known) == len(marked), InputError, OTHER_TOKENS)
        packets = []
        first = wide(self._coding.scheme.keyframe, rows[None])
        for part, codec in ((marked & ~known, first), (marked & known, coded)):
            packets.append(b"")
            if bool(part.any()):
                news = torch.where(part[:, None], whole, before)
                packets[-1], before = self._encoded(news, key, codec)
        self._held[key] = before, known | marked
        return packets, Kept(self, before[None], [key])

    def _encoded(self, rows: Tensor, key: int, codec: Codec) -> tuple[bytes, Tensor]:
        first, mode = rowwise(self._coding.scheme.keyframe), None
        if key in self._forgotten:
            mode = Mode.KEYFRAME
            self._forgotten.discard(key)
        packet, x_hat = self._sender.encode(
            rows[None], [key], codec=rowwise(codec), keyframe=first, mode=mode
        )
        return wire.pack(packet), x_hat[0].clone()

    def take(
        self,
        traffic: Traffic,
        posted: Posted,
        packets: Sequence[bytes | memoryview],
        marked: Tensor,
        like: Tensor,
    ) -> Tensor:
        """Return the rows ``marked`` [all] of a message of the peer, [n, width], as ``like`` is."""
        n, width, key = int(marked.sum()), like.shape[1], posted.key._replace(source=self._rank).pack()
        due, whole = (len(marked) if self.remember else n), None
        for data in packets:
            if not len(data):
                continue
            repaired = traffic.tally.repairs
            whole = traffic.decode(posted, self, self._rank, data, [key], [(1, due, width)], like)[0]
            if traffic.tally.repairs > repaired:  # by the values after both packets
                break
        require((whole is not None) == (n > 0), PayloadError, f"rank {self._rank} sent no rows, or too many")
        if whole is None:
            return like.new_empty((0, width))
        return (whole[marked] if self.remember else whole).to(like.dtype)


def rowwise(codec: Codec) -> Codec:
    """Return the codec by which some rows of many are sent: itself, if it is of rows."""
    return codec if isinstance(codec, Rows) else Rows(codec)
