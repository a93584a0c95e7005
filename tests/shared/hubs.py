"""Hubs and spokes that close, and a clock that leaps, for the tests of links."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from waiting import LONG

from thinwire.links.hub.hub import Hub
from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import Event, EventKind, Station


def await_event(station: Station, kind: EventKind, timeout: float = LONG) -> Event:
    """Return the next event of a kind; those of other kinds are passed over."""
    end = monotonic() + timeout
    while monotonic() < end:
        event = station.recv(end - monotonic())
        if event is not None and event.kind is kind:
            return event
    raise AssertionError(f"no {kind} within {timeout} s")


class Clock:
    """What hubs and spokes take for the time: it runs, and a test sets it forward."""

    by = 0.0  # seconds

    def __call__(self) -> float:
        return monotonic() + self.by


@contextmanager
def hub(**options: object) -> Iterator[Hub]:
    made = Hub.bind(**options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close(0.5)


@contextmanager
def spoke(port: int, token: bytes | None = None, **options: object) -> Iterator[Spoke]:
    made = Spoke.connect("127.0.0.1", port, token=token, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close(0.5)
