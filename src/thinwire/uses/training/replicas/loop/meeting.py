"""Replicas that find each other without a launcher: each is started by itself, and knows one address."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from thinwire.collectives import MeshExchange
from thinwire.links.address import parse_address, shown
from thinwire.links.mesh import Peer, connect_mesh
from thinwire.links.names import await_answer, own_address
from thinwire.types import InputError, LinkError, require

if TYPE_CHECKING:
    import torch.distributed as dist

POLL = 0.5  # seconds


def meet(
    address: str,
    rank: int,
    replicas: int,
    token: bytes | None = None,
    *,
    relay: bool = False,
    host: str | None = None,
    patience: float = 600.0,
    **options: Any,
) -> dict[int, Peer]:
    """Return links to all other replicas, as soon as all have come to ``address``, ``HOST:PORT``.

    - ``rank``: 0 to ``replicas - 1``, another one at each. Replica 0 listens at the port of ``address``; the
      others must reach it. Of two replicas the lower one listens for the other, so the last one only dials;
    - ``token``: a secret that all share (``read_token``), of 32 bytes at least; without it, on one machine;
    - ``relay``: ``address`` is that of a running ``thinwire relay``, and every replica dials out to it;
    - ``host``: the own address at which others reach this replica; by itself that of the way to ``address``;
    - ``patience``: seconds to wait for the last one to come;
    - ``options``: others of ``connect_mesh``, such as ``port`` and ``advertise`` behind a router.

    Errors: ``InputError`` for an address or token that is none; ``LinkError`` naming the replica that did not
    come; ``AuthError`` for another token.

    >>> meet("127.0.0.1:7400", rank=0, replicas=1)
    {}
    """
    require(replicas > 0, InputError, f"replicas={replicas}; give how many there are, this one included")
    require(0 <= rank < replicas, InputError, f"rank {rank} is not one of 0 to {replicas - 1}")
    if replicas == 1:
        return {}
    end, options = time.monotonic() + patience, {"deadline": 60.0, "connect_timeout": patience} | options
    if relay:
        return connect_mesh(rank, replicas, None, token=token, relay=address, **options)
    name, port = parse_address(address)
    text = f"{address!r} has no port; give the HOST:PORT at which replica 0 listens"
    require(port is not None, InputError, text)
    own = host or _own_address(name, int(port or 0))
    store = _store(name, int(port or 0), rank, replicas, end)
    options["connect_timeout"] = max(1.0, end - time.monotonic())
    peers = connect_mesh(rank, replicas, store, own, token, **options)
    met = MeshExchange(rank, peers, None, "met")
    met.post(0, b"")
    met.collect(0, options["connect_timeout"])  # until then others may still ask the store
    met.close()
    return peers


def _own_address(name: str, port: int) -> str:
    own = own_address(name, port)
    if own is None:
        raise InputError(f"this machine knows no way to {name}; correct the address, or give host")
    return own


def _store(name: str, port: int, rank: int, replicas: int, end: float) -> dist.Store:
    """Return the store at an address; replica 0 has it, and the others wait for it."""
    import torch.distributed as dist

    if rank:
        try:
            await_answer(name, port, end, POLL)
        except OSError as e:
            text = f"nobody answers at {shown(name, port)} ({e.strerror or e})"
            raise LinkError(f"{text}; start replica 0, or correct the address") from e
    left = timedelta(seconds=max(1.0, end - time.monotonic()))
    try:
        at = name if rank else "127.0.0.1"  # a router may not lead back to what is behind it
        return dist.TCPStore(at, port, replicas, rank == 0, timeout=left, wait_for_workers=False)
    except (RuntimeError, ValueError) as e:  # torch's DistNetworkError is one
        why = " ".join(str(e).split())[:200]
        text = f"replica {rank} could not meet the others at {shown(name, port)} ({why})"
        raise LinkError(f"{text}; correct the address, or free the port") from e
