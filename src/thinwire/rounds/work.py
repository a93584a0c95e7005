"""Work that a server hands out with its versions: samples by number, given anew where a client is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class WorkSource(Protocol):
    """What clients train on, where the server has the samples. Each client has one share at a time."""

    def give(self, client: int, steps: int) -> bytes:
        """Return the share for ``steps`` local steps of ``client``; one that it did not answer is void."""
        ...

    def settle(self, client: int, done: bool) -> None:
        """Count the share of ``client`` as done, or let others have it; harmless where it has none."""
        ...

    def samples(self, client: int) -> int:
        """Return how many samples the share of ``client`` has; 0 where nobody knows."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what is kept, as plain values."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what ``state`` returned. Errors: ``InputError`` where it is of other samples."""
        ...


class OwnData:
    """Clients train on data of their own: nothing is handed out.

    >>> OwnData().give(3, steps=5)
    b''
    """

    def give(self, client: int, steps: int) -> bytes:
        return b""

    def settle(self, client: int, done: bool) -> None:
        """Nothing was given."""

    def samples(self, client: int) -> int:
        return 0

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept."""
