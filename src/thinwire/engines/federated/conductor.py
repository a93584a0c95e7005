"""Who trains when: by rounds, at once, or by the period; the same on a virtual clock and on real machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from thinwire.engines.federated.intake import Receipt, Refusal
from thinwire.engines.federated.server import Server
from thinwire.types import LinkError, require

ASKED_AGAIN = 1  # how often a round that nobody answered is repeated


@dataclass
class Made:
    """A version that was made, and of what."""

    number: int
    at: float  # seconds, of the clock in use
    updates: int
    staleness: float  # of these, the mean
    nbytes: int  # of these, together


@dataclass
class Conductor:
    """Let clients begin as the server's rule has it, until ``made``, which hears of each version, says so.

    ``present``: who can take part in a round that begins now. ``begin``: gives a client the newest version.
    ``participate``: how many take part at a time; 0 takes all. ``clock``: seconds since the start. Whoever
    keeps the time calls ``end_period`` each ``period`` seconds.
    """

    server: Server
    present: Callable[[], Sequence[int]]
    begin: Callable[[int], None]
    made: Callable[[Made], bool]
    clock: Callable[[], float]
    seed: int = 0
    participate: int = 0
    going: bool = True
    _idle: set[int] = field(default_factory=set)
    _under_way: int = 0
    _answered: list[int] = field(default_factory=list)  # clients that wait for the end of a period
    _arrived: list[tuple[int, int]] = field(default_factory=list)  # staleness and bytes, for the next version
    _again: int = 0

    def __post_init__(self) -> None:
        self._draw = np.random.default_rng([self.seed, 0xFED])

    @property
    def period(self) -> float:
        """Seconds from one version to the next; 0 where these do not go by time."""
        return float(getattr(self.server.rule, "seconds", 0.0))

    def start(self, clients: Iterable[int]) -> None:
        """Begin with these clients."""
        if self.server.rule.in_rounds:
            self._round()
            return
        self._idle.update(clients)
        many = self.participate or len(self._idle)
        for _ in range(many):
            self._another()

    def joined(self, client: int) -> None:
        """Let a client that came after the start take part: from the next round, or at once."""
        if not self.server.rule.in_rounds:
            self._idle.add(client)
            if not self.participate or self._under_way + len(self._answered) < self.participate:
                self._another()

    def left(self, client: int) -> None:
        """Let a client that is gone, and has nothing under way, not begin until it joins again."""
        self._idle.discard(client)
        self._answered = [c for c in self._answered if c != client]

    def came(self, client: int, found: Receipt | Refusal, nbytes: int) -> None:
        """Go on after a client's update of ``nbytes``: taken or refused."""
        if isinstance(found, Receipt):
            self._arrived.append((found.staleness, nbytes))
            number = found.version
        else:
            number = self.server.give_up(client)
        self._go_on(client, number, waits=self.period > 0)

    def lost(self, client: int, leaves: bool = False) -> None:
        """Go on without an update that was to come; ``leaves``: the client has gone, too."""
        number = self.server.leave(client) if leaves else self.server.give_up(client)
        self._go_on(client, number, waits=False, stays=not leaves)

    def end_period(self) -> None:
        """Make a version of what came, and let those begin who waited for it."""
        self._tell(self.server.close())
        if not self.going:
            return
        waited, self._answered = self._answered, []
        self._idle.update(waited)
        for _ in waited:
            self._another()

    def _go_on(self, client: int, number: int | None, waits: bool, stays: bool = True) -> None:
        self._tell(number)
        if not self.server.rule.in_rounds:
            self._under_way -= 1
        if not self.going:
            return
        if self.server.rule.in_rounds:
            if number is not None:
                self._again = 0
                self._round()
            elif not self.server.missing:
                self._nobody()
        elif waits:
            self._answered.append(client)
        else:
            self._idle |= {client} if stays else set()
            self._another()

    def _tell(self, number: int | None) -> None:
        if number is None:
            return
        late, self._arrived = self._arrived, []
        mean = sum(s for s, _ in late) / max(1, len(late))
        self.going = self.made(Made(number, self.clock(), len(late), mean, sum(n for _, n in late)))

    def _round(self) -> None:
        here = list(self.present())
        require(bool(here), LinkError, f"no client is there at {self.clock():.1f} s; start some")
        chosen = sorted(self._draw.permutation(here)[: self.participate or len(here)].tolist())
        self.server.begin(chosen)
        for client in chosen:
            self.begin(client)

    def _another(self) -> None:
        """Let an idle client begin."""
        if not self._idle:
            return
        idle = sorted(self._idle)
        client = idle[int(self._draw.integers(len(idle)))] if self.participate else idle[0]
        self._idle.discard(client)
        self._under_way += 1
        self.begin(client)

    def _nobody(self) -> None:
        """Repeat a round that nobody answered; then give up."""
        self.server.close()
        self._again += 1
        clients = self.server.clients
        who = ", ".join(map(str, clients[:8])) + (" and others" if len(clients) > 8 else "")
        text = f"no update came in {self._again} rounds at {self.clock():.1f} s, of clients {who}"
        require(self._again <= ASKED_AGAIN, LinkError, text)
        self._round()
