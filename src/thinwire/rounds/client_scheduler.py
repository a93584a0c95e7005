"""Who trains when: by rounds, at once, or by the period; the same on a virtual clock and on real machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from thinwire.rounds.aggregation_server import Accepted, Rejected, Server
from thinwire.rounds.update_messages import VersionMessage
from thinwire.types import LinkError, require

ASKED_AGAIN = 1  # how often a round that nobody answered is repeated
SILENCE = 100  # turns in a row that may end without an update where there are no rounds; twice all, if more
NAMED = 8  # clients that an error names
REST = 6  # doublings of how long a client that does not answer in time is left out
KEPT = 100  # refusals of a client that are kept; of more, the last one says so
MANY = 1 << 12  # clients of which any are: who calls itself another each time fills no memory


@dataclass
class MadeVersion:
    """A version that was made, and of what."""

    number: int
    at: float  # seconds, of the clock in use
    updates: int
    staleness: float  # of these, the mean
    kept: float  # values that each sent, the mean


@dataclass
class TurnCounts:
    """What clients did, each counted by client."""

    steps: Counter[int] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)  # values that it sent, of all that were taken
    samples: Counter[int] = field(default_factory=Counter)  # that it trained on, of all that were taken
    late: Counter[int] = field(default_factory=Counter)  # turns that it did not answer in time
    refused: list[tuple[float, Rejected]] = field(default_factory=list)  # with when it was
    _refusals: Counter[int] = field(default_factory=Counter)

    def issued(self, version: VersionMessage, client: int) -> None:
        """Count a turn that begins."""
        self.turns[client] += 1
        self.steps[client] += version.steps

    def refuse(self, at: float, refusal: Rejected) -> None:
        """Note why an update was not taken, or did not come; of one client not without end."""
        if refusal.client not in self._refusals and len(self._refusals) >= MANY:
            return
        self._refusals[refusal.client] += 1
        many = self._refusals[refusal.client]
        if many == KEPT:
            refusal = Rejected(refusal.client, f"{refusal.reason}; more of this client are not listed")
        if many <= KEPT:
            self.refused.append((at, refusal))


@dataclass
class ClientScheduler:
    """Let clients begin as the server's rule has it, until ``made``, which hears of each version, says so.

    ``present``: who can take part in a round that begins now. ``begin``: gives a client the newest version.
    ``participate``: how many take part at a time; 0 takes all. ``clock``: seconds since the start. Whoever
    keeps the time calls ``end_period`` each ``rule.seconds`` seconds, where that is above 0. ``remedy``: what
    to do where nobody answers. ``asked_again``: how often a round that nobody answered is repeated.
    """

    server: Server
    present: Callable[[], Sequence[int]]
    begin: Callable[[int], None]
    made: Callable[[MadeVersion], bool]
    clock: Callable[[], float]
    seed: int = 0
    participate: int = 0
    remedy: str = "look at what became of them"
    asked_again: int = ASKED_AGAIN
    going: bool = True
    tally: TurnCounts = field(default_factory=TurnCounts)

    def __post_init__(self) -> None:
        resumed = [self.server.version] if self.server.version else []  # or the same would be drawn again
        self._draw = np.random.default_rng([self.seed, 0xFED, *resumed])
        self._idle: set[int] = set()
        self._busy: set[int] = set()  # clients with a turn under way, where there are no rounds
        self._answered: set[int] = set()  # clients that wait for the end of a period
        self._arrived: list[Accepted] = []  # for the next version
        self._silent: Counter[int] = Counter()  # turns by client since an update came
        self._again = 0  # rounds in a row that nobody answered
        self._late: Counter[int] = Counter()  # turns in a row that a client did not answer in time
        self._rests: dict[int, int] = {}  # the version at which such a client may be asked again

    def start(self, clients: Iterable[int]) -> None:
        """Begin with these clients."""
        if self.server.rule.in_rounds:
            self._round()
            return
        self._idle.update(clients)
        self._fill()

    def joined(self, client: int) -> None:
        """Let a client that came after the start take part: from the next round, or at once."""
        if not self.server.rule.in_rounds and client not in self._busy | self._answered:
            self._idle.add(client)
            self._fill()

    def left(self, client: int) -> None:
        """Let a client that is gone, and has nothing under way, not begin until it joins again."""
        self._idle.discard(client)
        self._answered.discard(client)

    def came(self, client: int, found: Accepted | Rejected) -> None:
        """Go on after a client's update: taken or refused."""
        if isinstance(found, Accepted):
            self._arrived.append(found)
            self.tally.kept[client] += found.kept
            self.tally.samples[client] += found.samples
            self._silent.clear()
            self._late.pop(client, None)
            self._rests.pop(client, None)
            self._go_on(client, found.version, waits=self.server.rule.seconds > 0)
            return
        self.tally.refuse(self.clock(), found)
        self._silent[client] += 1
        self._go_on(client, self.server.give_up(client), waits=self.server.rule.seconds > 0)

    def lost(self, client: int, leaves: bool = False) -> None:
        """Go on without an update that was to come; ``leaves``: the client has gone, too."""
        self._silent[client] += 1
        number = self.server.leave(client) if leaves else self.server.give_up(client)
        self._go_on(client, number, waits=False, stays=not leaves)

    def late(self, client: int, leaves: bool = False) -> None:
        """Go on without a client that did not answer in time; leave it out for 1, 3, 7, ... versions."""
        self.tally.late[client] += 1
        self._late[client] = min(REST, self._late[client] + 1)
        self._rests[client] = self.server.version + (1 << self._late[client])
        self.lost(client, leaves)

    def end_period(self) -> None:
        """Make a version of what came, and let those begin who waited for it."""
        self._tell(self.server.close())
        if self.going:
            self._idle |= self._answered
            self._answered.clear()
            self._fill()

    def _go_on(self, client: int, number: int | None, waits: bool, stays: bool = True) -> None:
        self._tell(number)
        if number is not None and self.going and self._rests and not self.server.rule.in_rounds:
            self._fill()  # some may have rested long enough
        self._busy.discard(client)
        if not self.going:
            return
        if self.server.rule.in_rounds:
            self._next_round(number)
            return
        few = max(SILENCE, (1 + ASKED_AGAIN) * (self.participate or len(self.server.clients)))
        self._check_answers(self._silent.total() < few, f"{few} turns")
        if waits:
            self._answered.add(client)
        elif stays:
            self._idle.add(client)
            self._fill()

    def _tell(self, number: int | None) -> None:
        if number is None:
            return
        came, self._arrived = self._arrived, []
        many = max(1, len(came))
        late, kept = sum(r.staleness for r in came) / many, sum(r.kept for r in came) / many
        self.going = self.made(MadeVersion(number, self.clock(), len(came), late, kept))

    def _next_round(self, number: int | None) -> None:
        """Begin another round, where this one made a version; repeat one that nobody answered."""
        if number is not None:
            self._again = 0
            self._round()
        elif not self.server.missing:
            self.server.close()
            self._again += 1
            self._check_answers(self._again <= self.asked_again, f"{self._again} rounds")
            self._round()

    def _round(self) -> None:
        here = list(self.present())
        if not self.going:
            return
        self._check_answers(bool(here), f"{self._again} rounds, and nobody is there")
        here = [c for c in here if not self._is_resting(c)] or here
        most = min(self.participate or len(here), self.server.most_asked)
        chosen = sorted(self._draw.permutation(here)[:most].tolist())
        self.server.begin(chosen)
        for client in chosen:
            self.begin(client)

    def _fill(self) -> None:
        """Let idle clients begin, as many as take part."""
        while self._idle and (not self.participate or self._at_work < self.participate):
            idle = sorted(c for c in self._idle if not self._is_resting(c))
            idle = idle or ([] if self._at_work else sorted(self._idle))
            if not idle:
                return
            client = idle[int(self._draw.integers(len(idle)))] if self.participate else idle[0]
            self._idle.discard(client)
            self._busy.add(client)
            self.begin(client)

    def _is_resting(self, client: int) -> bool:
        """Return whether a client is left out now."""
        return self.server.version < self._rests.get(client, 0)

    @property
    def _at_work(self) -> int:
        return len(self._busy) + len(self._answered)

    def _check_answers(self, enough: bool, waited: str) -> None:
        who = sorted(self._silent or self.server.known)
        more = f" and {len(who) - NAMED} others" if len(who) > NAMED else ""
        names = ", ".join(map(str, who[:NAMED])) + more
        text = f"no update came in {waited} until {self.clock():.1f} s, of clients {names}"
        require(enough, LinkError, f"{text}; {self.remedy}")
