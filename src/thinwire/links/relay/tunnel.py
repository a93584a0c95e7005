"""A way through a relay: connections on loopback, spliced to ones that this process dialled.

ZeroMQ, its encryption and all above stay as they are between two ranks that reach each other. The lower rank
of a pair keeps one idle connection to the relay, registered under the pair's name; the higher one dials. When
a connection breaks, ZeroMQ makes a new one, and that goes through the relay again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import replace
from time import monotonic
from typing import Any, Self, TypeVar

from thinwire.links.address import Route
from thinwire.links.pair.zmq_link import ZmqLink
from thinwire.links.relay import handshake
from thinwire.links.relay.handshake import Request, Role, Verdict, access_key, is_pass, pair_name
from thinwire.links.relay.stream import Stream, open_stream, reason, serve_streams, splice
from thinwire.links.security import REMEDY, check_bytes, require_long
from thinwire.links.tcp import congestion
from thinwire.links.tcp.counts import KernelCounts
from thinwire.links.tcp.info import TcpInfo
from thinwire.types import AuthError, InputError, LinkError, require

LOOPBACK = "127.0.0.1"
CONNECT = 10.0  # seconds to reach the relay, and for each of its answers
MATCH = 20.0  # seconds for its verdict: it may wait for the other rank meanwhile
QUIET = 10.0  # seconds without a word from the relay after which a waiting connection counts as dead
UNREACHED = 20.0  # seconds: a relay runs before the ranks do
PAUSE, LONGEST = 0.5, 5.0  # seconds between two attempts: at first and, once it has worked, at most
GRACE = 5.0  # seconds
CARRIED = 8  # connections at a time
T = TypeVar("T")


class Tunnel:
    """One end of a pair's way through a relay: a thread that dials, splices, and dials again after a cut.

    A listening end leads to ``port`` on loopback; a dialling one listens there, at a free port. ``wait`` must
    have returned before the tunnel is used. ``name`` and ``instance``: see ``handshake.Request``. ``end``:
    when ``timeout`` seconds are over, if they began before this tunnel was made.
    """

    def __init__(
        self,
        route: Route,
        key: bytes,
        request: Request,
        peer: str,
        port: int = 0,
        timeout: float = 60.0,
        control: str | None = None,
        end: float | None = None,
    ) -> None:
        self.port, self._control = port, control
        self.route, self._key, self._request, self._peer = route, key, request, peer
        self._timeout, self._end = timeout, monotonic() + timeout if end is None else end
        self._ready: Future[None] = Future()
        self.lost: Future[LinkError] = Future()  # done once this end, after it was ready, will not come back
        self._first: Stream | None = None  # a dialling end's connection before there is anything to carry
        self._carried: dict[asyncio.Task[None], int] = {}  # and the local port of its connection to the relay
        self._linger = 0.0
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"tunnel to {peer}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until this end is registered at the relay or, if it dials, connected to the other rank.

        Errors: ``AuthError`` if relay and rank do not hold the same token, ``LinkError`` that names the relay
        if it cannot be reached, or the rank if it did not come in time.
        """
        try:
            self._ready.result(max(0.0, self._end - monotonic()) + MATCH + CONNECT)
        except TimeoutError as e:
            self.close(0.0)
            raise LinkError(f"the way to {self._peer} did not open within {self._timeout:g} s") from e
        except BaseException:
            self.close(0.0)
            raise

    @property
    def ports(self) -> set[int]:
        """Local ports of the connections to the relay that carry this link's bytes now."""
        return {port for port in list(self._carried.values()) if port}

    def close(self, timeout: float = 5.0) -> None:
        """Pass on what the link has sent for at most ``timeout`` seconds, then close everything."""
        self._linger = timeout
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout + 10.0)

    # the thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        work = asyncio.ensure_future(self._offer() if self._request.role == Role.LISTEN else self._answer())
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            error = work.exception() or LinkError(f"the tunnel to {self._peer} ended")
            if self._ready.done():
                if self._carried:  # what runs may go on, but nothing follows it
                    await asyncio.wait({stop, *self._carried}, return_when=asyncio.FIRST_COMPLETED)
                self._lose(error)
            else:
                self._ready.set_exception(error)
        work.cancel()
        if self._carried:
            await asyncio.wait(set(self._carried), timeout=self._linger)
        if self._first is not None:
            self._first.close()

    async def _offer(self) -> None:
        """Keep one connection waiting at the relay; when the other rank is put through, carry it."""
        while True:
            far = await self._admitted()
            self._settle()
            try:
                called = await self._called(far)
            except OSError:
                called = False
            if called:
                self._carry(self._inward(far), far.port)
            else:
                far.close()
                await asyncio.sleep(PAUSE)

    async def _called(self, far: Stream) -> bool:
        """Answer pings until the relay puts the other rank through; return whether it is the right one."""
        try:
            while (word := await far.take(1, QUIET)) == handshake.PING:
                await far.put(handshake.PONG, CONNECT)
            if word != handshake.CALL:
                return False
            instance = await far.take(handshake.INSTANCE, CONNECT)
            good = self._know(instance)
            await far.put(handshake.GO if good else handshake.BUSY, CONNECT)
            return good
        except asyncio.CancelledError:
            far.close()
            raise

    def _know(self, instance: bytes) -> bool:
        """Return whether the other end is the one instance that this one talks to: the first that came."""
        if self._request.partner == handshake.ANYBODY:
            self._request = replace(self._request, partner=instance)
        return self._request.partner == instance

    async def _inward(self, far: Stream) -> None:
        try:
            near = await open_stream(LOOPBACK, self.port, CONNECT)
        except OSError:  # the link is closing
            far.close()
            return
        await splice(near, far)

    async def _answer(self) -> None:
        """Listen on loopback, once the other rank has come to the relay, and carry what connects."""
        self._first = await self._admitted()
        server = await serve_streams(LOOPBACK, 0, self._came)
        self.port = server.sockets[0].getsockname()[1]
        self._settle()
        try:
            await self._stop.wait()
        finally:
            server.close()

    def _came(self, near: Stream) -> None:
        if len(self._carried) < CARRIED:
            self._carry(self._outward(near))
        else:  # strangers of this machine: ZeroMQ has one connection, and those before it that end
            near.close()

    async def _outward(self, near: Stream) -> None:
        far, self._first = self._first, None
        try:
            if far is None or far.ended.done():
                far = await _unless(near.ended, self._admitted())
            if far is None:
                return
            task = asyncio.current_task()
            if task is not None:
                self._carried[task] = far.port
            await splice(near, far)
        except LinkError as e:
            self._lose(e)
        finally:
            near.close()

    def _carry(self, work: Coroutine[Any, Any, None], port: int = 0) -> None:
        task = self._loop.create_task(work)
        self._carried[task] = port
        task.add_done_callback(lambda t: self._carried.pop(t, None))

    def _settle(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def _lose(self, error: BaseException) -> None:
        if not self.lost.done():
            self.lost.set_result(error if isinstance(error, LinkError) else LinkError(str(error)))

    # the relay

    async def _admitted(self) -> Stream:
        """Return a connection that is registered or put through; before the first, give up in time.

        After it, ask again until the link is closed, ever less often. A wrong token ends it at any time.
        """
        reached, pause = monotonic(), PAUSE
        while True:
            try:
                verdict, stream = await self._knock()
                reached = monotonic()
                if verdict in (Verdict.WAITING, Verdict.MATCHED):
                    return stream
                stream.close()
                error, over = LinkError(self._why(verdict)), reached >= self._end
            except LinkError as e:
                now = monotonic()
                error, over = e, now >= self._end or now - reached > UNREACHED
            if isinstance(error, AuthError) or (over and not self._ready.done()):
                raise error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST) if self._ready.done() else PAUSE

    async def _knock(self) -> tuple[Verdict, Stream]:
        """Ask the relay once; ``LinkError`` where it does not answer, ``AuthError`` for a wrong token."""
        try:
            host, port = self.route.host, self.route.port
            stream = await open_stream(host, port, self._patience(CONNECT), self._control)
        except (OSError, UnicodeError) as e:
            raise LinkError(f"the {self.route} cannot be reached: {reason(e)}; is it running?") from e
        try:
            hello = await stream.take(handshake.HELLO, self._patience(CONNECT))
            if not hello.startswith(handshake.MAGIC):
                raise ConnectionAbortedError
            asking = handshake.ask(self._key, hello, secrets.token_bytes(handshake.NONCE), self._request)
            await stream.put(asking, CONNECT)
            try:
                data = await stream.take(handshake.ANSWER, self._patience(MATCH))
            except TimeoutError:
                if self._request.role == Role.DIAL:
                    return Verdict.ABSENT, stream
                raise
            said = handshake.answered(self._key, hello, asking, data)
        except OSError as e:
            stream.close()
            raise LinkError(f"the {self.route} broke off or is no thinwire relay; check the address") from e
        except BaseException:
            stream.close()
            raise
        if said is None or said.verdict is Verdict.REFUSED:
            stream.close()
            raise AuthError(
                f"the {self.route} and this rank do not hold the same token: give the relay the ranks' "
                "token, or the pass that thinwire relay --show-pass makes of it"
            )
        if said.verdict is Verdict.MATCHED:
            self._know(said.partner)
        return said.verdict, stream

    def _patience(self, limit: float) -> float:
        """Return ``limit`` seconds or, before the tunnel is ready, what is left of its time."""
        return limit if self._ready.done() else min(limit, max(PAUSE, self._end - monotonic()))

    def _why(self, verdict: Verdict) -> str:
        return {
            Verdict.ABSENT: f"{self._peer} did not come within {self._timeout:g} s",
            Verdict.FULL: f"the {self.route} has no room for more connections; raise its --max-connections",
        }.get(
            verdict,
            f"another process has this rank's place in a run through the {self.route}; end that one, or "
            "name the runs apart: --relay HOST:PORT/NAME",
        )


async def _unless(event: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T | None:
    """Return what ``work`` returns, or None if ``event`` comes first."""
    working = asyncio.ensure_future(work)
    try:
        news: set[asyncio.Future[Any]] = {working, event}
        await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()


class RelayedLink(ZmqLink):
    """A ``ZmqLink`` and the tunnel under it, closed together."""

    def over(self, tunnel: Tunnel) -> Self:
        """Return this link, which from now on is the tunnel's."""
        self._tunnel = tunnel
        tunnel.lost.add_done_callback(lambda lost: self.fail(lost.result()))
        return self

    def kernel_counts(self) -> KernelCounts:
        """Return the counters of the connections to the relay; ZeroMQ's own only lead to the tunnel."""
        return _TunnelCounts(self._tunnel)

    def close(self, timeout: float = 5.0) -> None:
        end = monotonic() + timeout
        super().close(timeout)
        self._tunnel.close(max(0.5, end - monotonic()))


class _TunnelCounts(KernelCounts):
    """Follow a tunnel's connections, which have another port each time."""

    def __init__(self, tunnel: Tunnel) -> None:
        super().__init__(tunnel.route.port, local=False)
        self._tunnel = tunnel

    def _ours(self, info: TcpInfo) -> bool:
        return super()._ours(info) and info.local[1] in self._tunnel.ports


def check_relay(token: bytes | None) -> bytes:
    """Return the token that a link through a relay needs; ``InputError`` without one."""
    if token is None:
        raise InputError(
            f"links through a relay leave this machine and need a shared token: {REMEDY} on each rank"
        )
    check_bytes(token)
    require(
        not is_pass(token),
        InputError,
        "this is the pass of a relay, not the token it was made of; give each rank the token",
    )
    require_long(token)
    return token


def relayed_link(
    route: Route,
    token: bytes,
    rank: int,
    other: int,
    *,
    instance: bytes,
    connect_timeout: float = 60.0,
    end: float | None = None,
    max_message: int,
    control: str = congestion.AUTO,
) -> RelayedLink:
    """Return ``rank``'s link to ``other`` through a relay; the lower of the two listens.

    ``instance``: 16 random bytes, drawn once by each process; a rank talks to one instance of each other rank
    only, so that neither a second run nor a restarted rank can slip into this one. ``end``: when
    ``connect_timeout`` seconds are over, if they began before. ``control``: TCP's congestion control of the
    way to the relay (``congestion``). Errors: those of ``Tunnel.wait``.
    """
    chosen = congestion.resolve(control)
    low, high = sorted((rank, other))
    name = pair_name(token, route.run, low, high)
    request = Request(Role.LISTEN if rank == low else Role.DIAL, name, instance)
    peer, key = f"rank {other}", access_key(token)
    options: Any = {"token": token, "peer": peer, "via": str(route)}
    options |= {"connect_timeout": connect_timeout, "max_message": max_message}
    options["control"] = congestion.SYSTEM  # to the tunnel
    who = f"{peer} ({route})"
    if rank == high:
        tunnel = Tunnel(route, key, request, who, timeout=connect_timeout, control=chosen, end=end)
        tunnel.wait()
        return RelayedLink.connect(name.hex().encode(), LOOPBACK, tunnel.port, **options).over(tunnel)
    link = RelayedLink.bind(name.hex().encode(), LOOPBACK, **options)
    tunnel = Tunnel(route, key, request, who, link.port, connect_timeout, chosen, end)
    link.over(tunnel)
    try:
        tunnel.wait()
    except BaseException:
        link.close(0.0)
        raise
    return link
