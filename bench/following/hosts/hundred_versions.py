"""A hundred versions with two restarts of each end, for ``sync_hosts``: are all bits the same, each time?"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.following.hosts.host_sources import Moving, same, stepped
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher

VERSIONS = 100
PUBLISHER_ENDS = (33, 66)  # after these versions
FOLLOWER_ENDS = (25, 75)
PATIENCE = 120.0  # seconds


class BothEnds:
    """A publisher and a follower on this machine; each can end, and go on from what it saved."""

    def __init__(self, source: Moving, place: Path) -> None:
        self._source, self._place = source, place
        self._publisher, self._port = self._published(0), 0
        self._port = self._publisher.port
        self._publisher.publish(step=0)
        self._follower = self._followed(base=source.tensors)

    def _published(self, port: int) -> Publisher:
        return Publisher(self._source.tensors, port=port, state=self._place / "published.tw")

    def _followed(self, **options: Any) -> Follower:
        return Follower("127.0.0.1", self._port, state=self._place / "followed.tw", **options)

    def version(self) -> bool:
        """Publish, wait until the version is there, and return whether all bits are the same."""
        version = self._publisher.publish(step=self._source.step)
        self._follower.wait(version.number, PATIENCE)
        return same(self._source.tensors, self._follower.tensors())

    def restart_publisher(self) -> None:
        """End it and begin it anew, at the same port."""
        self._publisher.close()
        self._publisher = self._published(self._port)

    def restart_follower(self) -> None:
        """End it and begin it anew."""
        self._follower.close()
        self._follower = self._followed()

    @property
    def received(self) -> int:
        """Bytes that this life of the follower has received."""
        return self._follower.status.nbytes

    def close(self) -> None:
        """End both."""
        self._follower.close()
        self._publisher.close()


def hundred(source: Moving, versions: int = VERSIONS) -> dict[str, Any]:
    """Return how many of so many versions had the same bits at both ends, and what crossed."""
    torch.set_num_threads(1)
    began, equal, received = time.perf_counter(), [], 0
    with tempfile.TemporaryDirectory() as place:
        ends = BothEnds(source, Path(place))
        try:
            for number in stepped(source, versions):
                equal.append(ends.version())
                if number in PUBLISHER_ENDS:
                    ends.restart_publisher()
                if number in FOLLOWER_ENDS:
                    received += ends.received
                    ends.restart_follower()
            received += ends.received
        finally:
            ends.close()
    restarts = {"publisher": [n for n in PUBLISHER_ENDS if n < versions],
                "follower": [n for n in FOLLOWER_ENDS if n < versions]}  # fmt: skip
    return {"versions": versions, "identical": sum(equal), "restarts": restarts, "received": received,
            "whole": source.layout.nbytes, "seconds": time.perf_counter() - began}  # fmt: skip
