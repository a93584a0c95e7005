"""HTTP connections of an endpoint: how many there may be, and which one goes where another one comes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from thinwire.links.sockets import make_room
from thinwire.types import InputError, require
from thinwire.uses.serving.run.endpoint.listening import MOST

OWN = 100  # descriptors of this process that are none of clients
FEWEST = 16  # connections without which an endpoint is none
IDLE = 20.0  # seconds that a connection may keep quiet, before its first call and between two


class BoundedConnection(H11Protocol):
    """A connection that is given up after ``IDLE`` s without a call, or where another one needs its place.

    uvicorn waits without end for a first call, and counts those that ask nothing towards its limit: so a
    thousand of them would keep everybody else out.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a client in, and let go of whoever has been quiet for longest where there are too many."""
        super().connection_made(transport)
        self._quiet_since = self.loop.time()
        self._first_call = self.loop.call_later(IDLE, self._give_up)
        known = (c for c in self.connections if isinstance(c, BoundedConnection) and c is not self)
        others = [c for c in known if c.is_quiet]
        if len(self.connections) >= (self.limit_concurrency or MOST) and others:
            min(others, key=lambda c: c._quiet_since)._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a client that has gone."""
        self._first_call.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next call."""
        self._quiet_since = self.loop.time()
        super().on_response_complete()

    @property
    def is_quiet(self) -> bool:
        """Whether no call of this client is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _give_up(self) -> None:
        if self.cycle is None:  # not even the head of a call has come
            self._drop()

    def _drop(self) -> None:
        self.connections.discard(self)  # at once: the next one counts
        self.transport.close()


def most_connections(most: int = MOST) -> tuple[int, str]:
    """Return how many clients there can be at a time, and a sentence where they are fewer than ``most``.

    Errors: ``InputError`` where the limit of open files leaves room for next to none.
    """
    make_room()
    with contextlib.suppress(ImportError):  # Windows has no such limit
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files == resource.RLIM_INFINITY or files - OWN >= most:
            return most, ""
        found, told = files - OWN, f"this process may open {files} files"
        remedy = f"raise the limit (ulimit -n) to {most + OWN}"
        require(found >= FEWEST, InputError, f"{told}, which is too few for an endpoint; {remedy}")
        return found, f"{told}, so the endpoint takes {found} connections at a time; {remedy} for {most}"
    return most, ""


def http_server(app: Any, most: int, farewell: int) -> uvicorn.Server:
    """Return a server for at most ``most`` clients at a time; ``farewell``: seconds for answers under way.

    Whoever comes where all places are taken by calls under way is answered with status 503.
    """
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            log_level="warning",
            limit_concurrency=most + 1,  # uvicorn counts the one that asks
            timeout_keep_alive=int(IDLE),
            timeout_graceful_shutdown=farewell,
            backlog=MOST,
        )
    )
