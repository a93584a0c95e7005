"""Work that a server hands out with its versions: samples by number, given anew where a client is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class WorkSource(Protocol):
    """What clients train on, where the server has the samples. Each client has one share at a time."""

    def most(self, client: int, steps: int) -> int:
        """Return for how many of so many local steps of ``client`` there are samples."""
        ...

    def give(self, client: int, steps: int) -> bytes:
        """Return the share for ``steps`` local steps of ``client``; one that it did not answer is void."""
        ...

    def settle(self, client: int, done: bool, left: Iterable[tuple[int, int]] = ()) -> None:
        """Count the share of ``client`` as done, or let others have it; harmless where it has none.

        ``left``: what others may have of a share that is done, as pairs of the first place and how many.
        """
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

    def most(self, client: int, steps: int) -> int:
        return steps

    def give(self, client: int, steps: int) -> bytes:
        return b""

    def settle(self, client: int, done: bool, left: Iterable[tuple[int, int]] = ()) -> None:
        """Nothing was given."""

    def samples(self, client: int) -> int:
        return 0

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept."""
