"""The networks of replicas: links of a mesh, or a torch process group such as gloo's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from thinwire.channels.channel import Scheme
from thinwire.codecs import Codec, Raw
from thinwire.collectives import (
    Exchange,
    GroupExchange,
    GroupReduction,
    MeshExchange,
    MeshReduction,
    Reduction,
)
from thinwire.collectives.exchange import LENGTH
from thinwire.links.mesh import Peer
from thinwire.links.message import Data
from thinwire.types import WRONG_VALUES, InputError, PayloadError, TensorSpec, require
from thinwire.uses.training.replicas.coder import blocks
from thinwire.uses.training.replicas.controller import MESSAGES, Link
from thinwire.uses.training.replicas.flat_parameters import FlatParameters

FRAMING = 256  # bytes of a packet beside specs, entries and values, at most
ENTRY = 17  # of a segment's entry


@dataclass(frozen=True)
class Network:
    """How replicas reach each other: exchanges and sums by name, and what is known of this rank's link.

    ``link`` returns its rate, bytes/s, and one-way delay, seconds. ``deadline``: seconds without any data.
    ``restarts``: whether TCP begins with a small window there after each pause.
    """

    messages: Callable[[str], Exchange]
    sums: Callable[[str], Reduction]
    link: Link = lambda: (None, None)
    deadline: float = 60.0
    restarts: bool = False


def place_among(peers: Mapping[int, Peer]) -> int:
    """Return the rank that ``peers``, links to all others, leave out."""
    return next(rank for rank in range(len(peers) + 1) if rank not in peers)


def over_mesh(
    rank: int, peers: Mapping[int, Peer], ranks: Iterable[int] | None = None, deadline: float = 60.0
) -> Network:
    """Return the network of ``ranks`` among ``peers``, links of ``connect_mesh``; of all if None."""
    chosen = sorted({rank, *(peers if ranks is None else ranks)})
    others = [peers[r] for r in chosen if r != rank]
    return Network(
        lambda name: MeshExchange(rank, peers, chosen, name),
        lambda name: MeshReduction(rank, peers, chosen, name),
        lambda: _slowest(others),
        deadline,
        any(peer.restarts for peer in others),
    )


def _slowest(peers: Iterable[Peer]) -> tuple[float | None, float | None]:
    """Return the rate, bytes/s, and one-way delay, seconds, of the slowest way to a peer."""
    estimates = [peer.reliable.estimate() for peer in peers]
    rates = [e.rate for e in estimates if e.rate is not None]
    trips = [e.rtt for e in estimates if e.rtt is not None]
    return min(rates, default=None), max(trips) / 2 if trips else None


def over_group(
    group: dist.ProcessGroup, scheme: Scheme, flat: FlatParameters, deadline: float = 60.0
) -> Network:
    """Return the network of all ranks of ``group``, which nothing else uses.

    Every message takes the most bytes that the codec of ``scheme`` may need. Errors: ``InputError`` where the
    codec does not know, or may need more than values as they are.
    """
    backend = dist.get_backend(group)
    wrong = (
        f"a group of backend {backend} sends no bytes of main memory; make one by new_group(backend='gloo')"
    )
    require(backend == "gloo", InputError, wrong)
    wide, room = (_capacity(codec, scheme, flat.shape) for codec in (Raw(), scheme.codec))
    wrong = f"{scheme.codec!r} may need more bytes than values as they are, and a torch group sends the most"
    require(room <= wide or scheme.codec == Raw(), InputError, f"{wrong}; give peers of connect_mesh")
    return Network(lambda _: _RoomyExchange(group, room), lambda _: GroupReduction(group), deadline=deadline)


def _capacity(codec: Codec, scheme: Scheme, shape: tuple[int, int]) -> int:
    """Return the bytes of a message that ``codec`` makes of flat parameters [n, N], at most."""
    specs = len(repr(scheme.memory)) + 2 * len(repr(codec))
    total = MESSAGES.size
    for rows in blocks(shape):  # fewer and longer ones need less
        many = rows.stop - rows.start
        try:
            values = codec.nbytes(TensorSpec((many, shape[1])))
        except WRONG_VALUES as e:
            wrong = f"{codec!r} does not say how many bytes it needs at most, and a torch group has to know"
            raise InputError(f"{wrong}; give peers of connect_mesh") from e
        total += LENGTH.size + FRAMING + specs + ENTRY * many + values
    return total


class _RoomyExchange(GroupExchange):
    """A ``GroupExchange`` that has room for each message, whole."""

    def post(self, step: int, payload: Data) -> int:
        sent = super().post(step, payload)
        wrong = f"a message of {len(payload)} bytes has room for {sent}: its codec said it needs no more"
        require(sent == len(payload), PayloadError, wrong)
        return sent
