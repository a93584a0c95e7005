"""Replicas that nobody launches find each other, or are told who is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launchers import free_port
from meshes import Mesh, together
from relayed import TOKEN, Running

from thinwire.types import InputError, LinkError
from thinwire.uses.training.replicas.loop.meeting import meet


def met(replicas: int, call: Callable[[int], Mesh]) -> None:
    """Have replicas meet, the last one first; all have links to all others."""
    peers = together([lambda r=r: call(r) for r in reversed(range(replicas))])
    assert [sorted(found) for found in reversed(peers)] == [
        [other for other in range(replicas) if other != rank] for rank in range(replicas)
    ]
    together([peer.close for found in peers for peer in found.values()])


def test_replicas_meet_at_one_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    met(3, lambda rank: meet(address, rank, 3, TOKEN, patience=30.0))
    met(2, lambda rank: meet(address, rank, 2, patience=30.0))  # the same again, by a process that goes on
    assert meet(address, 0, 1) == {}


def test_replicas_meet_at_a_relay() -> None:
    with Running() as relay:
        met(2, lambda rank: meet(f"127.0.0.1:{relay.port}/run", rank, 2, TOKEN, relay=True, patience=30.0))


def test_who_is_missing_is_said() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: meet("127.0.0.1", 0, 2), InputError, "has no port"),
        (lambda: meet(nobody, 2, 2), InputError, "rank 2 is not one of 0 to 1"),
        (lambda: meet(nobody, 0, 0), InputError, "replicas=0"),
        (lambda: meet(nobody, 1, 2, patience=0.6), LinkError, "nobody answers.*start replica 0"),
        (lambda: meet(nobody, 0, 2, patience=1.5), LinkError, "rank 1"),
        (lambda: meet("0.0.0.0:7400", 0, 2, host="0.0.0.0"), InputError, "token"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()
