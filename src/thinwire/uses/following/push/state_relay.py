"""A relay: follow one publisher and serve many followers, so that its uplink carries each version once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from thinwire.links.hub.hub import Hub
from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import SILENCE
from thinwire.links.inbox import renewed
from thinwire.links.tcp.congestion import AUTO
from thinwire.state.history import History
from thinwire.state.layout import MAX_NBYTES, Layout
from thinwire.state.patch_code.patch_stream import check_coder
from thinwire.state.patches.moves import SectionReading
from thinwire.state.patches.patch import Patch, Version
from thinwire.types import Closing, LinkError, PayloadError
from thinwire.uses.following.mirror import Base, begin, check_same
from thinwire.uses.following.push.feed import HIGHEST, SILENT, TURN, Feed, FollowerStatus
from thinwire.uses.following.push.protocol import Quiet
from thinwire.uses.following.push.reception import Reception

if TYPE_CHECKING:  # a copy of arrays needs no torch
    from torch import nn


class StateRelay(Closing):
    """Follow the publisher, or another relay, at ``host``:``port``, and serve at ``listen``.

    Memory: one copy of the state and the log of its changes. Versions keep their numbers, times are by the
    publisher's clock. ``token`` is the same up and down. ``max_nbytes``: no larger state is taken.
    ``congestion``: TCP's congestion control down, as for ``Publisher``. ``name``: of the state, where
    anything else would be a mistake; without it, what the publisher calls it first: followers here are told.
    It begins with what the file ``state`` holds, if it is there, else with ``base``, else with the weights of
    ``into``: contents that nobody is offered unless the publisher says that they are its newest version.

    Errors: as ``Publisher`` for the address; ``InputError`` for a file that is no saved state. What ends the
    relay later is raised by ``check`` and ``wait``. ``failed`` is called with that on one of its threads,
    perhaps before this has returned.
    """

    def __init__(
        self,
        host: str,
        port: int,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        token: bytes | None = None,
        *,
        budget: int | None = None,
        silence: float = SILENCE,
        max_nbytes: int = MAX_NBYTES,
        congestion: str = AUTO,
        name: str | None = None,
        base: Base | None = None,
        into: nn.Module | None = None,
        state: str | Path | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        check_coder()
        self._budget, self._above, self._failed = budget, 0, failed
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._history: History | None = None
        self._rate: float | None = None
        if state is not None and Path(state).is_file():
            self._history, into, base = History.load(state, budget, max_nbytes), None, None
        self._own = into, base
        self._feed: Feed | None = None
        self._spoke: Spoke | None = None  # the hub's thread, which runs at once, asks for the time by it
        self._hub = Hub.bind(*listen, token=token, silence=silence, clock=self.now, control=congestion)
        self.host, self.port = self._hub.host, self._hub.port
        try:
            self._spoke = Spoke.connect(host, port, token=token, silence=silence)
        except BaseException:
            self._hub.close(0.0)
            raise
        self._over = threading.Event()
        self._begun = threading.Lock()  # held where there is a feed, or none: it needs the reception
        with self._begun:
            told = self._arrived, self._fail
            self._reception = Reception(self._spoke, self, None, *told, max_nbytes, name)
        self._waiting = threading.Thread(target=self._tell_quiet, name="relay without a feed", daemon=True)
        self._waiting.start()

    def now(self) -> float:
        """Return the time in seconds since the epoch by the publisher's clock."""
        spoke = self._spoke
        return time.time() if spoke is None or spoke.clock.trip is None else monotonic() + spoke.clock.ahead

    # what patches are applied to

    @property
    def held(self) -> Version:
        """The newest complete version; number 0 before the first."""
        return self._history.newest if self._history is not None else Version()

    @property
    def above(self) -> int:
        """The newest version number known here or further down."""
        return max(self._above, self.held.number)

    def agree(self, layout: Layout, name: str) -> None:
        """Take the publisher's layout; ``InputError`` where it is another than before."""
        if self._history is not None:
            check_same(self._history.layout, layout)
        if self._feed is not None:
            return
        history = self._history or self._beginning(layout)
        with self._begun:
            self._reception.name = name  # from now on: who follows here is told it once
            self._history = history
            # what it begins with may be older than what the publisher has: it is a base, and no news
            self._feed = Feed(
                history, self._hub, name, self._pass_up, quiet=lambda: monotonic() - self.signed, later=True
            )

    def _beginning(self, layout: Layout) -> History:
        """Return the history of what is here of a state before anything comes."""
        history = History(layout, self._budget)
        begin(layout, *self._own, history.start)
        self._own = None, None
        return history

    def reading(self, base_hash: int) -> SectionReading | None:
        """Return what reads a patch from ``base_hash`` (0: a keyframe) as it comes; None if not here."""
        return self._history.reading(base_hash) if self._history is not None else None

    def apply(self, patch: Patch, reading: SectionReading | None = None) -> Version:
        """Move on by a patch, and pass it on; ``reading`` may have read some of it."""
        if self._history is None or self._feed is None:
            raise PayloadError("a patch before the layout")
        self._feed.check()
        version = self._history.adopt(patch, reading)
        self._feed.wake()
        return version

    def prepare(self) -> None:
        """A relay's words need nothing before a patch."""

    def confirm(self, version: Version) -> Version:
        """Call what is held as the publisher does, and pass that on."""
        if self._history is None or self._feed is None:
            raise PayloadError("a version before the layout")
        known = self._history.confirm(version)
        self._feed.wake()
        return known

    # what users call

    @property
    def signed(self) -> float:
        """When the publisher last gave a sign of life, by the monotonic clock."""
        return self._reception.signed

    @property
    def connected(self) -> bool:
        """Whether there is a connection up now."""
        return self._reception.spoke.joined

    @property
    def reached(self) -> bool:
        """Whether a connection has ever been up."""
        return self._reception.reached

    @property
    def peer(self) -> str:
        """Whom it follows: ``host:port``."""
        return self._reception.spoke.peer

    @property
    def followers(self) -> list[FollowerStatus]:
        """Who follows this relay now, and how far each is."""
        return self._feed.followers if self._feed is not None else []

    @property
    def sent(self) -> int:
        """Wire bytes sent to all followers so far."""
        return self._hub.traffic()[0].nbytes

    @property
    def received(self) -> int:
        """Wire bytes received from the publisher so far."""
        return self._reception.spoke.traffic[1].nbytes

    @property
    def trip(self) -> float | None:
        """The shortest round trip to the publisher in seconds."""
        return self._reception.spoke.clock.trip

    @property
    def doubt(self) -> float:
        """Bound on how far off ``now`` is, in seconds; infinite while nothing is known."""
        return self._reception.spoke.clock.doubt

    @property
    def rate(self) -> float | None:
        """Of the last patch from the publisher, in bytes a second."""
        return self._rate

    def check(self) -> None:
        """Raise what ended the relay, if anything did."""
        if self._error is not None:
            raise renewed(self._error)
        if self._feed is not None:
            self._feed.check()

    def wait(self, version: int = 1, timeout: float = 60.0) -> Version:
        """Return the newest version here once its number is at least ``version``.

        Errors: ``LinkError`` naming the publisher after ``timeout`` seconds; what ended the relay.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.held.number >= version or self._error is not None, timeout)
        self.check()
        if self.held.number < version:
            where = self._reception.spoke.peer
            raise LinkError(f"waited {timeout:g} s for version {version} from {where}")
        return self.held

    def close(self) -> None:
        """Stop receiving and serving. Harmless twice."""
        self._over.set()
        self._reception.close()
        self._waiting.join(TURN)
        if self._feed is not None:
            self._feed.close()
        self._hub.close()

    def _pass_up(self, version: int) -> None:
        """Ask the publisher to number its versions above what a follower of this relay has seen."""
        above = min(version + 1, HIGHEST - 1)  # one that is refused up there would cut all others off
        if above > self._above:
            self._above = above
            self._reception.hello()

    def _tell_quiet(self) -> None:
        """Tell who follows already how long there has been no sign of a publisher, until there is a feed."""
        while not self._over.wait(TURN):
            with self._begun:
                if self._feed is not None:
                    return
                seconds = monotonic() - self.signed
                for peer in self._hub.peers if seconds > SILENT else ():
                    self._hub.send(peer, Quiet(seconds).pack())

    def _arrived(self, version: Version, nbytes: int, seconds: float) -> None:
        with self._changed:
            if nbytes and seconds > 0:
                self._rate = nbytes / seconds
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        if self._failed is not None:
            self._failed(error)
        self._hub.close(0.0)  # followers notice, instead of waiting for what cannot come
