"""One method on a virtual clock: clients fetch versions, compute and send, and nobody waits for real.

Events happen in the order of (time, client, sequence), and updates are added in that order, so that a run is
the same whatever the number of processes. A turn that drops out ends when its update would have come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from thinwire.links.trace import Rate
from thinwire.uses.federated.client import Client
from thinwire.uses.federated.conductor import Conductor, Made
from thinwire.uses.federated.message import Held, Version
from thinwire.uses.federated.run.fleet import Fleet
from thinwire.uses.federated.run.time import Agenda, Moment, SharedLine
from thinwire.uses.federated.run.trainer import Change, Trainer, Turn
from thinwire.uses.federated.server import Server

SERVER = -1  # the client of moments that are the server's own


class Kind(Enum):
    """What happens."""

    START = auto()  # a client begins to fetch the newest version
    TRAINED = auto()  # its local steps are done
    ARRIVED = auto()  # its update has come
    LOST = auto()  # it has not, and will not
    PERIOD = auto()  # a period ends
    LINE = auto()  # a transfer is through the server's line, or its rate changes


@dataclass
class Event:
    """What happens to a turn."""

    kind: Kind
    turn: Under | None = None
    client: int = SERVER
    data: bytes = b""
    line: SharedLine | None = None


@dataclass
class Under:
    """A turn that is under way."""

    client: int
    version: Version
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
    made: Callable[[Made], bool]
    seed: int = 0
    participate: int = 0
    free_down: bool = False
    budget: float = float("inf")
    now: float = 0.0

    def __post_init__(self) -> None:
        self._agenda: Agenda[Event] = Agenda()
        server = self.fleet.server
        self._down = SharedLine(server.uplink) if server else None
        self._up = SharedLine(server.downlink) if server else None
        self._held: dict[int, Held | None] = {}
        rounds = self.server.rule.in_rounds
        self._conductor = Conductor(
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
        self._agenda.add(Moment(at, client, 0), Event(Kind.START, client=client))

    def _next_period(self) -> None:
        if seconds := self.server.rule.seconds:
            self._agenda.add(Moment(self.now + seconds, SERVER, 0), Event(Kind.PERIOD))

    # -- a turn --------------------------------------------------------------------------------------------

    def _begin(self, client: int) -> None:
        version = self.server.issue(client, self._held.get(client))
        device = self.fleet.devices[client]
        turn = device.turn(self.seed, client, version.sequence)
        weights = self.server.given
        asked = Turn(client, version.sequence, version.number, version.steps, version.rate)
        change = self.trainer.start(asked, weights)
        self.tally.issued(version, client)
        under = Under(client, version, change, turn.drops, version.held)

        def train(through: float) -> None:
            fetched = through + (0.0 if self.free_down else self.fleet.delay(client, through))
            done = fetched + version.steps * turn.step_seconds
            self._agenda.add(Moment(done, client, version.sequence), Event(Kind.TRAINED, under, client))

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
            self._agenda.add(Moment(line.due, SERVER, 0), Event(Kind.LINE, line=line))

    def _handle(self, event: Event) -> None:
        if event.kind is Kind.START:
            self._begin(event.client)
        elif event.kind is Kind.PERIOD:
            self._conductor.end_period()
            self._next_period()
        elif event.kind is Kind.LINE and event.line is not None:
            if event.line.due <= self.now:  # else it changed since
                event.line.advance(self.now)
                self._look_at(event.line)
        elif event.kind is Kind.TRAINED and event.turn is not None:
            self._trained(event.turn)
        elif event.kind is Kind.ARRIVED:
            self._arrived(event)
        else:
            self._conductor.lost(event.client)

    def _trained(self, turn: Under) -> None:
        client, version = turn.client, turn.version
        self._held[client] = turn.held
        data = self.clients[client].answer(version, turn.change()).pack()
        link = self.fleet.devices[client].link
        kind = Kind.LOST if turn.drops else Kind.ARRIVED

        def arrive(through: float) -> None:
            moment = Moment(through + self.fleet.delay(client, through), client, version.sequence)
            self._agenda.add(moment, Event(kind, turn, client, data))

        self._send(self._up, len(data), link.uplink, arrive)

    def _arrived(self, event: Event) -> None:
        self._conductor.came(event.client, self.server.receive(event.client, event.data))
