"""One method on a virtual clock: clients fetch versions, compute and send, and nobody waits for real.

Events happen in the order of (time, client, sequence), and updates are added in that order, so that a run is
the same whatever the number of processes. A turn that drops out ends when its update would have come.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

from thinwire.links.trace import ConstantRate, Rate
from thinwire.rounds.aggregation_server import Server
from thinwire.rounds.client import Client
from thinwire.rounds.client_scheduler import ClientScheduler, MadeVersion
from thinwire.rounds.update_messages import Held, VersionMessage
from thinwire.uses.federated.run.federated_setup import LocalTurn
from thinwire.uses.federated.run.fleet import Fleet
from thinwire.uses.federated.run.trainer import Change, Trainer

SERVER = -1  # the client of moments that are the server's own
T = TypeVar("T")
STEP = 0.1  # seconds
FASTEST = 1e15  # bytes/s: a line without a limit


class VirtualEventKind(Enum):
    """What happens."""

    START = auto()  # a client begins to fetch the newest version
    TRAINED = auto()  # its local steps are done
    ARRIVED = auto()  # its update has come
    LOST = auto()  # it has not, and will not
    PERIOD = auto()  # a period ends
    LINE = auto()  # a transfer is through the server's line, or its rate changes


@dataclass
class VirtualEvent:
    """What happens to a turn."""

    kind: VirtualEventKind
    turn: Under | None = None
    client: int = SERVER
    data: bytes = b""
    line: SharedLine | None = None


@dataclass
class Under:
    """A turn that is under way."""

    client: int
    version: VersionMessage
    change: Change
    drops: bool
    held: Held | None


@dataclass
class Simulation:
    """Run ``server`` and ``clients`` on ``fleet``; ``made`` hears of each version, and says whether to go on.

    ``participate``: how many clients take part at a time. ``free_down``: downloads take no time.
    """

    server: Server
    clients: Mapping[int, Client]
    fleet: Fleet
    trainer: Trainer
    made: Callable[[MadeVersion], bool]
    seed: int = 0
    participate: int = 0
    free_down: bool = False
    budget: float = float("inf")
    now: float = 0.0

    def __post_init__(self) -> None:
        self._agenda: Agenda[VirtualEvent] = Agenda()
        server = self.fleet.server
        self._down = SharedLine(server.uplink) if server else None
        self._up = SharedLine(server.downlink) if server else None
        self._held: dict[int, Held | None] = {}
        rounds = self.server.rule.in_rounds
        self._conductor = ClientScheduler(
            self.server,
            self._present,
            self._begin if rounds else self._wake,
            self.made,
            lambda: self.now,
            self.seed,
            self.participate,
            "look at their drop_out",
        )
        self.tally = self._conductor.tally

    def run(self) -> None:
        """Go on until ``made`` says so, the budget is spent, or nothing is left to happen."""
        self._conductor.start(self.clients)
        self._next_period()
        while self._conductor.going and self._agenda:
            moment, event = self._agenda.next()
            if moment.at > self.budget:
                self.now = self.budget
                return
            self.now = moment.at
            self._handle(event)

    def _present(self) -> list[int]:
        """Return who is there; where nobody is, wait for the first."""
        since = {c: self.fleet.devices[c].available.since(self.now) for c in sorted(self.clients)}
        self.now = max(self.now, min(since.values()))
        return [c for c, at in since.items() if at <= self.now]

    def _wake(self, client: int) -> None:
        """Let a client begin as soon as it is there."""
        at = self.fleet.devices[client].available.since(self.now)
        self._agenda.add(Moment(at, client, 0), VirtualEvent(VirtualEventKind.START, client=client))

    def _next_period(self) -> None:
        if seconds := self.server.rule.seconds:
            self._agenda.add(Moment(self.now + seconds, SERVER, 0), VirtualEvent(VirtualEventKind.PERIOD))

    # -- a turn --------------------------------------------------------------------------------------------

    def _begin(self, client: int) -> None:
        version = self.server.issue(client, self._held.get(client))
        device = self.fleet.devices[client]
        turn = device.turn(self.seed, client, version.sequence)
        weights = self.server.given
        asked = LocalTurn(client, version.sequence, version.number, version.steps, version.rate)
        change = self.trainer.start(asked, weights)
        self.tally.issued(version, client)
        under = Under(client, version, change, turn.drops, version.held)

        def train(through: float) -> None:
            fetched = through + (0.0 if self.free_down else self.fleet.delay(client, through))
            done = fetched + version.steps * turn.step_seconds
            self._agenda.add(
                Moment(done, client, version.sequence), VirtualEvent(VirtualEventKind.TRAINED, under, client)
            )

        if self.free_down:
            train(self.now)
        else:
            self._send(self._down, version.nbytes, device.link.downlink, train)

    def _send(self, line: SharedLine | None, nbytes: int, own: Rate, then: Callable[[float], None]) -> None:
        """Send bytes over a device's own line, and the server's where it has one."""
        if line is None:
            then(own.finish(self.now, nbytes))
            return
        line.add(self.now, nbytes, own, then)
        self._look_at(line)

    def _look_at(self, line: SharedLine) -> None:
        if line.due < float("inf"):
            self._agenda.add(Moment(line.due, SERVER, 0), VirtualEvent(VirtualEventKind.LINE, line=line))

    def _handle(self, event: VirtualEvent) -> None:
        if event.kind is VirtualEventKind.START:
            self._begin(event.client)
        elif event.kind is VirtualEventKind.PERIOD:
            self._conductor.end_period()
            self._next_period()
        elif event.kind is VirtualEventKind.LINE and event.line is not None:
            if event.line.due <= self.now:  # else it changed since
                event.line.advance(self.now)
                self._look_at(event.line)
        elif event.kind is VirtualEventKind.TRAINED and event.turn is not None:
            self._trained(event.turn)
        elif event.kind is VirtualEventKind.ARRIVED:
            self._arrived(event)
        else:
            self._conductor.lost(event.client)

    def _trained(self, turn: Under) -> None:
        client, version = turn.client, turn.version
        self._held[client] = turn.held
        data = self.clients[client].answer(version, turn.change()).pack()
        link = self.fleet.devices[client].link
        kind = VirtualEventKind.LOST if turn.drops else VirtualEventKind.ARRIVED

        def arrive(through: float) -> None:
            moment = Moment(through + self.fleet.delay(client, through), client, version.sequence)
            self._agenda.add(moment, VirtualEvent(kind, turn, client, data))

        self._send(self._up, len(data), link.uplink, arrive)

    def _arrived(self, event: VirtualEvent) -> None:
        self._conductor.came(event.client, self.server.receive(event.client, event.data))


class Moment(NamedTuple):
    """When something happens, and in which order if at one time: by client, then by its sequence number."""

    at: float  # virtual seconds
    client: int
    sequence: int


class Agenda(Generic[T]):
    """What is to happen, by moment; of equal moments, what was added first.

    >>> agenda = Agenda[str]()
    >>> agenda.add(Moment(2.0, 0, 0), "late")
    >>> agenda.add(Moment(1.0, 1, 0), "soon")
    >>> agenda.next()
    (Moment(at=1.0, client=1, sequence=0), 'soon')
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Moment, int, T]] = []
        self._added = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, moment: Moment, what: T) -> None:
        """Let something happen at a moment."""
        heapq.heappush(self._heap, (moment, self._added, what))
        self._added += 1

    def next(self) -> tuple[Moment, T]:
        """Take out what happens next."""
        moment, _, what = heapq.heappop(self._heap)
        return moment, what


@dataclass
class LineTransfer:
    """A message that is on its way through a line; ``then`` is told when it is through."""

    left: float  # bytes
    own: Rate  # of the client's own line
    then: Callable[[float], None]
    rate: float = 0.0  # bytes/s, until the line looks again
    end: float = math.inf  # when it is through at that rate


class SharedLine:
    """One direction of the server's link, of which all transfers get an equal share, as TCP's connections do.

    One whose own line is slower than that leaves the rest to the others (max-min fairness). Rates that vary
    are looked at anew every ``STEP`` seconds.

    >>> line, ends = SharedLine(ConstantRate(1000.0)), []
    >>> for own in (400.0, 5000.0):
    ...     line.add(0.0, 600, ConstantRate(own), ends.append)
    >>> line.due
    1.0
    >>> line.advance(1.0)
    >>> line.due, ends
    (1.5, [1.0])
    """

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._transfers: list[LineTransfer] = []
        self._now = 0.0
        self.due = math.inf  # when to call ``advance`` next

    def add(self, now: float, nbytes: float, own: Rate, then: Callable[[float], None]) -> None:
        """Begin a transfer; ``due`` changes."""
        self._move(now)
        self._transfers.append(LineTransfer(nbytes, own, then))
        self._share()

    def advance(self, now: float) -> None:
        """End the transfers that are through, in the order in which they began; ``due`` changes."""
        self._move(now)
        through = [t for t in self._transfers if t.end <= now]
        self._transfers = [t for t in self._transfers if t.end > now]
        self._share()
        for transfer in through:
            transfer.then(now)

    def _move(self, now: float) -> None:
        for t in self._transfers:
            t.left = max(0.0, t.left - t.rate * (now - self._now))
        self._now = now

    def _share(self) -> None:
        """Give each transfer its rate, and find out when that changes next."""
        left, many = self._capacity(self._rate), len(self._transfers)
        for t in sorted(self._transfers, key=lambda t: self._capacity(t.own)):
            t.rate = min(self._capacity(t.own), left / many)
            t.end = self._now + t.left / t.rate if t.rate > 0 else math.inf
            left, many = left - t.rate, many - 1
        ends = [t.end for t in self._transfers]
        rates = [self._rate, *(t.own for t in self._transfers)]
        varies = bool(self._transfers) and not all(isinstance(rate, ConstantRate) for rate in rates)
        self.due = min([*ends, self._now + STEP] if varies else ends, default=math.inf)

    def _capacity(self, rate: Rate) -> float:
        if isinstance(rate, ConstantRate):
            return min(rate.mean, FASTEST)
        return min(rate.between(self._now, self._now + STEP) / STEP, FASTEST)
