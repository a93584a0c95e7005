"""Follow a state: keep a copy of what a publisher has, always the newest version that the link can carry."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import SILENCE, EventKind
from thinwire.links.names import tried
from thinwire.links.tcp.congestion import AUTO
from thinwire.state.layout import MAX_NBYTES, Layout
from thinwire.state.patch_code.patch_stream import check_coder
from thinwire.state.patches.patch import Version
from thinwire.state.replica import CHECK_EVERY, Replica
from thinwire.types import InputError, LinkError, PayloadError, require
from thinwire.uses.following.follower_base import PATIENCE, FollowerBase
from thinwire.uses.following.mirror import Base, Mirror
from thinwire.uses.following.push import protocol
from thinwire.uses.following.push.protocol import DOWN, MAGIC, NOTHING, PROTOCOL, Ask, Hello, LayoutIs
from thinwire.uses.following.push.reception import Reception
from thinwire.uses.following.push.state_relay import StateRelay

if TYPE_CHECKING:  # a copy of arrays needs no torch
    from torch import nn

ARRIVALS = 4096  # that are remembered


@dataclass(frozen=True)
class Arrival:
    """A version that came: its age then by the publisher's clock [s], bytes of the patch, seconds it took."""

    version: int
    age: float
    nbytes: int
    seconds: float
    at: float  # by this machine's monotonic clock


@dataclass(frozen=True)
class FollowingStatus:
    """Where a follower stands.

    ``version`` is the number of the version in use, ``held`` of the newest one here, ``age`` the seconds
    since that was published (None: none yet). ``nbytes``: all wire bytes received; ``ratio``: what the
    versions would have taken in full over that; ``trip``: the shortest round trip [s]; ``rate``: of the last
    patch [bytes/s]; ``ahead``: by how much the publisher's clock is ahead of this one [s], to within
    ``doubt``; ``abandoned``: patches given up for newer ones; ``restarts``: other publishers' lives seen.
    With a relay of its own, ``nbytes``, ``trip`` and ``rate`` are those of the relay's link.
    """

    version: int
    held: int
    age: float | None
    nbytes: int
    ratio: float
    trip: float | None
    rate: float | None
    connected: bool
    ahead: float
    doubt: float
    abandoned: int
    restarts: int
    error: str | None


class Follower(FollowerBase):
    """Keep a copy of the state that is published at ``host``:``port``, on threads of its own.

    The publisher may start later, stop, and come back.

    - ``into``: the model to update; ``apply_to`` does that. The state must fit it.
    - ``base``: tensors that are already here, by name (default: the weights of ``into``). If the publisher
      knows these contents, it sends only the changes since then.
    - ``state``: a file to go on from, in place of any base. ``save`` and ``close`` write it.
    - ``name``: the expected name of the state; another one is an error.
    - ``relay``: an address at which to serve other followers with the versions that arrive here;
      ``congestion`` is for their connections, as in ``Publisher``.
    - ``patience``: seconds without a sign of the publisher after which iteration fails.
    - ``max_nbytes``: the largest state that is accepted.
    - ``check_every``: patches between two hashes of all contents (0: never).

    Errors are raised by ``wait``, iteration and ``apply_to``: ``AuthError`` for another token; ``InputError``
    naming the first tensor that does not fit the model or has changed its shape, or the name of the state if
    it is not ``name``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes | None = None,
        into: nn.Module | None = None,
        relay: tuple[str, int] | None = None,
        *,
        base: Base | None = None,
        state: str | Path | None = None,
        patience: float = PATIENCE,
        silence: float = SILENCE,
        max_nbytes: int = MAX_NBYTES,
        check_every: int = CHECK_EVERY,
        congestion: str = AUTO,
        name: str | None = None,
    ) -> None:
        check_coder()
        path = None if state is None else Path(state)
        super().__init__(self._held_in(into, path, max_nbytes, base, check_every), path, patience)
        self._confirmed = False
        self._newest = self._mirror.held
        self._patches = 0  # that came
        self.arrivals: deque[Arrival] = deque(maxlen=ARRIVALS)
        own: Any = {"silence": silence, "max_nbytes": max_nbytes, "congestion": congestion, "name": name}
        own |= {"base": base, "into": into, "state": self._state}
        own |= {"failed": self._fail}  # of which all that this end sees is a line that breaks
        self.relay = None if relay is None else StateRelay(host, port, relay, token, **own)
        if self.relay is not None:  # so the link to the publisher carries one copy
            host, port = _reachable(self.relay.host), self.relay.port
        try:
            self._spoke = Spoke.connect(host, port, token=token, silence=silence)
        except BaseException:
            if self.relay is not None:
                self.relay.close()
            raise
        layout = self._mirror.replica.layout if self._mirror.replica is not None else None
        told = self._arrived, self._fail
        self._reception = Reception(self._spoke, self._mirror, layout, *told, max_nbytes, name)

    def _held_in(self, *given: Any) -> Mirror:
        """Return what holds the copy; ``given`` is what ``Mirror`` takes."""
        return Mirror(*given)

    @property
    def held(self) -> Version:
        return self._newest

    @property
    def confirmed(self) -> bool:
        """Whether the copy was the publisher's newest version at some time since this began to follow.

        Before that, the copy comes from the base or the file: it may be old.
        """
        return self._confirmed

    @property
    def current(self) -> bool:
        return self._reception.current and self._spoke.joined

    @property
    def replica(self) -> Replica:
        """The copy itself. Errors: ``InputError`` before anything came."""
        if self._mirror.replica is None:
            raise InputError(f"nothing has come from {self.peer} yet; wait() for it")
        return self._mirror.replica

    @property
    def peer(self) -> str:
        """The address that this follows, ``host:port``; with a relay of its own, the relay's source."""
        return self.relay.peer if self.relay is not None else self._spoke.peer

    @property
    def reached(self) -> bool:
        """Whether ``peer`` has ever answered."""
        return self.relay.reached if self.relay is not None else self._reception.reached

    def diagnosis(self) -> str:
        """Return the likely cause if no version arrives, and what to look at."""
        host, _, port = self.peer.rpartition(":")
        if not self.reached:
            return (
                f"nothing answered there{tried(host)} as a publisher does; see whether one runs there, and "
                f"whether a firewall lets TCP port {port} through"
            )
        if not self.status.connected:
            return "it answered before, and is gone; see whether it still runs, and whether the line is up"
        return "it is connected; see whether its publisher runs and has published, or wait longer"

    @property
    def silence(self) -> float:
        signed = [end.signed for end in (self._reception, self.relay) if end is not None]
        return monotonic() - min(signed)

    @property
    def clock(self) -> float:
        """The publisher's clock now, in seconds since the epoch."""
        clock = self._spoke.clock
        return time.time() if clock.trip is None else monotonic() + clock.ahead

    @property
    def status(self) -> FollowingStatus:
        replica, newest = self._mirror.replica, self._newest
        nbytes, trip, rate, doubt = self._link()
        whole = replica.layout.nbytes * self._patches if replica is not None else 0
        return FollowingStatus(
            version=replica.version if replica is not None else 0,
            held=newest.number,
            age=max(0.0, self.clock - newest.published) if newest.published else None,
            nbytes=nbytes,
            ratio=whole / nbytes if nbytes else 0.0,
            trip=trip,
            rate=rate,
            connected=self._spoke.joined and (self.relay is None or self.relay.connected),
            ahead=self.clock - time.time(),
            doubt=doubt,
            abandoned=self._reception.abandoned,
            restarts=self._reception.restarts,
            error=str(self._fatal) if self._fatal is not None else None,
        )

    def _link(self) -> tuple[int, float | None, float | None, float]:
        """Return bytes received, round trip [s] and rate [bytes/s] of the way here, and its clock's doubt."""
        clock, relay = self._spoke.clock, self.relay
        if relay is not None:  # to which the rest is a hop within this machine, but for its clock
            return relay.received, relay.trip, relay.rate, clock.doubt + relay.doubt
        last = self.arrivals[-1] if self.arrivals else None
        rate = last.nbytes / last.seconds if last is not None and last.seconds > 0 else None
        return self._spoke.traffic[1].nbytes, clock.trip, rate, clock.doubt

    def _missed(self, version: int, timeout: float) -> str:
        if self._closing:
            return f"this end stopped following {self.peer}"
        return f"waited {timeout:g} s for version {version} from {self.peer}: {self.diagnosis()}"

    def _lost(self) -> str:
        return f"no sign of {self.peer} for {self._patience:g} s: {self.diagnosis()}"

    def _end(self) -> None:
        self._reception.close()
        if self.relay is not None:
            self.relay.close()

    def _raise(self) -> None:
        if self.relay is not None:
            self.relay.check()
        super()._raise()

    def _arrived(self, version: Version, nbytes: int, seconds: float) -> None:
        now = monotonic()
        arrival = Arrival(version.number, self.clock - version.published, nbytes, seconds, now)
        with self._changed:
            if nbytes:
                self._patches += 1
                self.arrivals.append(arrival)
            self._newest, self._confirmed = version, True
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._fatal = self._fatal or error
            self._changed.notify_all()


def _reachable(host: str) -> str:
    """Return how to reach from this machine what listens at ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


@dataclass(frozen=True)
class Offer:
    """What a publisher has: the state's name and layout, and its newest version's number (0: none yet)."""

    name: str
    newest: int
    layout: Layout


def ask(
    host: str, port: int, token: bytes | None = None, timeout: float = 60.0, max_nbytes: int = MAX_NBYTES
) -> Offer:
    """Return what the publisher or relay at ``host``:``port`` has.

    Errors: ``LinkError`` naming it after ``timeout`` seconds, ``AuthError``, ``PayloadError``; ``InputError``
    for another protocol.
    """
    spoke, ends = Spoke.connect(host, port, token=token), monotonic() + timeout
    try:
        while (left := ends - monotonic()) > 0:
            event = spoke.recv(left)
            if event is not None and event.kind is EventKind.JOINED:
                spoke.send(Hello(MAGIC, PROTOCOL, 1, NOTHING, NOTHING, 0, 0, 0, 0, 0, 0, 0).pack())
            elif event is not None and event.kind is EventKind.DATA:
                found = _offer(protocol.unpack(event.data, DOWN), spoke.peer, max_nbytes)
                if found is not None:
                    return found
    finally:
        spoke.close(0.0)
    who = f"{spoke.peer}{spoke.tried}"
    raise LinkError(f"{who} did not answer within {timeout:g} s; see whether a publisher is there")


def _offer(message: protocol.Message, peer: str, max_nbytes: int) -> Offer | None:
    if isinstance(message, Ask) and message.protocol != PROTOCOL:
        raise InputError(
            f"{peer} speaks protocol {message.protocol}, this end {PROTOCOL}: install the same thinwire there"
        )
    if not isinstance(message, LayoutIs):
        return None
    layout = Layout.from_json(message.json, max_nbytes)
    require(layout.digest == message.layout.hex(), PayloadError, "a layout whose digest is another")
    return Offer(message.name.rstrip(b"\0").decode(errors="replace"), message.newest, layout)
