"""A relay: a machine that all ranks can reach passes bytes between two ranks that can only dial out.

It passes on what the ranks' own links encrypt end to end, and holds no key to it. A rank that listens keeps
one idle connection here for each pair; a rank that dials is connected to it, and from then on their bytes go
by untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from thinwire.links.address import MAX_RELAYED, shown
from thinwire.links.relay import handshake
from thinwire.links.relay.handshake import Answer, Request, Role, Verdict
from thinwire.links.relay.stream import Stream, reason, serve_streams, splice
from thinwire.links.sockets import make_room
from thinwire.links.strangers import Crowd
from thinwire.links.tcp import congestion
from thinwire.types import InputError, PayloadError

HANDSHAKE = 10.0  # seconds from a connection to its proof
PATIENCE = 10.0  # seconds that a dialler waits for its listener before it is told that there is none
HEARTBEAT = 3.0  # seconds between two pings to a waiting listener; routers forget idle connections, too
SILENCE = 5.0  # seconds for the answer
KNOCKING = 64  # connections without a proof yet; one more, and the oldest of whoever has most is dropped
KNOCKING_EACH = 16  # of them from one address; ranks behind one router come at once, and are soon done
LOST = b""  # instead of a listener's answer
Reply = Callable[[Answer], Awaitable[None]]


@dataclass
class RelayCounts:
    """What a relay has seen."""

    connections: int = 0
    strangers: int = 0  # said nothing in time, or nothing that makes sense
    refused: int = 0  # wrong token
    turned_away: int = 0  # over the limit
    pairs: int = 0  # connections passed on, reconnections included
    nbytes: int = 0  # passed on, both directions

    def __str__(self) -> str:
        return (
            f"{self.connections} connections, {self.pairs} passed on with {self.nbytes} bytes; "
            f"{self.refused} with a wrong token, {self.strangers} strangers, {self.turned_away} too many"
        )


@dataclass(eq=False)
class _Call:
    """A dialler that waits for its listener's answer, and says when the bytes of both have passed."""

    instance: bytes
    answer: asyncio.Future[bytes] = field(default_factory=asyncio.Future)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self, said: bytes) -> None:
        """Pass the listener's answer on, once."""
        if not self.answer.done():
            self.answer.set_result(said)


@dataclass(eq=False)
class _Listener:
    """A waiting connection; the coroutine that serves it is alone reads from it, up to GO."""

    stream: Stream
    instance: bytes
    call: asyncio.Future[_Call] = field(default_factory=asyncio.Future)


class RelayServer:
    """Connect ranks that hold ``secret``: their token, or the pass made of it (see ``relay_pass``).

    ``say`` is called with one line for each pair that has ended. Whatever a stranger sends, it costs one
    connection for at most ten seconds and a counter.
    """

    def __init__(
        self,
        secret: bytes,
        max_connections: int = MAX_RELAYED,
        say: Callable[[str], object] = len,
    ) -> None:
        self.counts = RelayCounts()
        self._key = handshake.access_key(secret)
        self._max, self._say, self._ended = max_connections, say, False
        self._tasks: set[asyncio.Task[None]] = set()  # one a connection; each is in one of the next two
        self._knocking = Crowd[asyncio.Task[None]](KNOCKING, KNOCKING_EACH)
        self._admitted: set[asyncio.Task[None]] = set()
        self._listeners: dict[bytes, _Listener] = {}
        self._arrival = asyncio.Condition()

    async def serve(
        self, host: str, port: int, stop: asyncio.Event, started: Callable[[int], object] = int
    ) -> None:
        """Listen at ``host`` until ``stop`` is set; ``started`` is called with the port (0 takes a free one).

        Errors: ``InputError`` for an address that cannot be listened at.
        """
        make_room()
        asyncio.get_running_loop().set_exception_handler(self._troubled)
        try:
            server = await serve_streams(host, port, self._arrived)
        except (OSError, OverflowError) as e:
            raise InputError(
                f"the relay cannot listen at {shown(host, port)}: {reason(e)}; choose another address"
            ) from e
        at = server.sockets[0].getsockname()[1]
        congestion.at_port(at, congestion.resolve(congestion.AUTO))
        started(at)
        try:
            await stop.wait()
        finally:
            self._ended = True
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _arrived(self, stream: Stream) -> None:
        self.counts.connections += 1
        task = asyncio.get_running_loop().create_task(self._attend(stream))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._left(done, stream))
        self._drop(self._knocking.came(task, stream.address))

    def _drop(self, knocking: asyncio.Task[None] | None) -> None:
        if knocking is not None:
            self.counts.strangers += 1
            knocking.cancel()

    def _troubled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Make room where no descriptor is left for who comes; asyncio accepts again after a while."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            self._drop(self._knocking.pop())
        elif not self._ended:  # after it, asyncio fails to accept again at what is closed
            loop.default_exception_handler(context)

    def _left(self, task: asyncio.Task[None], stream: Stream) -> None:
        stream.close()  # here, because a task that is cancelled at once never runs
        self._tasks.discard(task)
        self._admitted.discard(task)
        self._knocking.left(task)

    async def _attend(self, stream: Stream) -> None:
        with contextlib.suppress(OSError):  # the other end is gone: nobody is left to be told
            await self._admit(stream)

    async def _admit(self, stream: Stream) -> None:
        hello = handshake.MAGIC + secrets.token_bytes(handshake.NONCE)
        try:
            await stream.put(hello, HANDSHAKE)
            asking = await stream.take(handshake.ASKING, HANDSHAKE)
            request = handshake.asked(self._key, hello, asking)
        except (OSError, PayloadError):
            self.counts.strangers += 1
            return

        async def reply(said: Answer) -> None:
            await stream.put(handshake.answer(self._key, hello, asking, said), HANDSHAKE)

        if request is None:
            self.counts.refused += 1
            await reply(Answer(Verdict.REFUSED))
        elif len(self._admitted) >= self._max:
            self.counts.turned_away += 1
            await reply(Answer(Verdict.FULL))
        else:
            self._promote()
            serve = self._listen if request.role == Role.LISTEN else self._dial
            await serve(stream, request, reply)

    def _promote(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._knocking.left(task)
            self._admitted.add(task)

    async def _listen(self, stream: Stream, request: Request, reply: Reply) -> None:
        held = self._listeners.get(request.name)
        if held is not None and held.instance != request.instance:
            await reply(Answer(Verdict.TAKEN))
            return
        if held is not None:
            held.stream.close()  # the same process comes anew: it knows that its old connection is dead
        listener = self._listeners[request.name] = _Listener(stream, request.instance)
        try:
            await reply(Answer(Verdict.WAITING))
            async with self._arrival:
                self._arrival.notify_all()
            while not listener.call.done():
                await self._heartbeat(listener)
            await self._ring(listener, listener.call.result())
        finally:
            if self._listeners.get(request.name) is listener:
                del self._listeners[request.name]
            if listener.call.done():
                listener.call.result().settle(LOST)

    async def _heartbeat(self, listener: _Listener) -> None:
        """Wait a while for a call, then ask whether the listener is still there; ``OSError`` if it is not."""
        news: set[asyncio.Future[Any]] = {listener.call, listener.stream.ended}
        await asyncio.wait(news, timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)
        if not listener.call.done():
            await listener.stream.put(handshake.PING, SILENCE)
            if await listener.stream.take(1, SILENCE) != handshake.PONG:
                raise ConnectionAbortedError("a listener that does not keep to the protocol")

    async def _ring(self, listener: _Listener, call: _Call) -> None:
        """Tell a listener who is calling, and the caller its answer; the caller's coroutine does the rest."""
        await listener.stream.put(handshake.CALL + call.instance, SILENCE)
        said = await listener.stream.take(1, SILENCE)
        call.settle(said)
        if said == handshake.GO:
            await call.over.wait()

    async def _dial(self, stream: Stream, request: Request, reply: Reply) -> None:
        listener = await self._find(request.name, stream)
        if listener is None:
            await reply(Answer(Verdict.ABSENT))
            return
        if request.partner not in (handshake.ANYBODY, listener.instance):
            await reply(Answer(Verdict.TAKEN))  # of a run that broke off: this listener is of the next one
            return
        del self._listeners[request.name]
        call = _Call(request.instance)
        listener.call.set_result(call)
        try:
            said = await call.answer
            if said != handshake.GO:
                await reply(Answer(Verdict.ABSENT if said == LOST else Verdict.TAKEN))
                return
            await reply(Answer(Verdict.MATCHED, listener.instance))
            await self._pass_on(stream, listener.stream, request.name)
        finally:
            call.over.set()

    async def _find(self, name: bytes, dialler: Stream) -> _Listener | None:
        """Return the listener of ``name``, once there is one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE), self._arrival:
                await self._arrival.wait_for(lambda: name in self._listeners or dialler.ended.done())
        return None if dialler.ended.done() else self._listeners.get(name)

    async def _pass_on(self, dialler: Stream, listener: Stream, name: bytes) -> None:
        self.counts.pairs += 1
        counted, start = [0, 0], monotonic()

        def up(n: int) -> None:
            counted[0] += n

        def down(n: int) -> None:
            counted[1] += n

        try:
            await splice(dialler, listener, up, down)
        finally:
            self.counts.nbytes += sum(counted)
            self._say(
                f"pair {name.hex()[:8]}: {dialler.address} sent {counted[0]} bytes, "
                f"{listener.address} {counted[1]}, in {monotonic() - start:.0f} s"
            )
