"""One method on a virtual clock: clients fetch versions, compute and send, and nobody waits for real.

Events happen in the order of (time, client, sequence), and updates are added in that order, so that a run is
the same whatever the number of processes. A turn that drops out ends when its update would have come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from thinwire.engines.federated.client import Client
from thinwire.engines.federated.intake import Receipt, Refusal
from thinwire.engines.federated.message import Held, Version
from thinwire.engines.federated.server import Server
from thinwire.lab.federated.fleet import Fleet
from thinwire.lab.federated.time import Agenda, Moment, SharedLine
from thinwire.lab.federated.trainer import Change, Trainer, Turn
from thinwire.types import LinkError, require

ASKED_AGAIN = 1  # how often a round that nobody answered is repeated
SILENCE = 100  # turns in a row that may end without an update where there are no rounds; twice all, if more
NAMED = 8  # clients that an error names
SERVER = -1  # the client of moments that are the server's own


class Kind(Enum):
    """What happens."""

    START = auto()  # a client begins to fetch the newest version
    TRAINED = auto()  # its local steps are done
    ARRIVED = auto()  # its update has come
    LOST = auto()  # it has not, and will not
    PERIOD = auto()  # a period ends


@dataclass
class Event:
    """What happens to a turn."""

    kind: Kind
    turn: Under | None = None
    client: int = SERVER
    data: bytes = b""


@dataclass
class Under:
    """A turn that is under way."""

    client: int
    version: Version
    change: Change
    drops: bool
    held: Held | None


@dataclass
class Made:
    """A version that was made, and of what."""

    number: int
    at: float
    updates: int
    staleness: float
    kept: float  # values that each sent, the mean


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
    refused: list[tuple[float, Refusal]] = field(default_factory=list)
    steps: Counter[int] = field(default_factory=Counter)  # by client, of all its turns
    turns: Counter[int] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)  # values that it sent, of all that were taken
    now: float = 0.0

    def __post_init__(self) -> None:
        self._agenda: Agenda[Event] = Agenda()
        server = self.fleet.server
        self._down = SharedLine(server.uplink if server else None)
        self._up = SharedLine(server.downlink if server else None)
        self._held: dict[int, Held | None] = {}
        self._idle = set(self.clients)
        self._arrived: list[Receipt] = []  # of the updates of the next version
        self._answered: list[int] = []  # clients that wait for the end of a period
        self._draw = np.random.default_rng([self.seed, 0xFED])
        self._going = True
        self._again = 0  # rounds in a row that nobody answered
        self._seconds = self.server.rule.seconds
        self._silent: Counter[int] = Counter()  # turns by client since an update came

    def run(self) -> None:
        """Go on until ``made`` says so, the budget is spent, or nothing is left to happen."""
        if self.server.rule.in_rounds:
            self._round()
        else:
            for _ in range(self._many):
                self._another()
            self._next_period()
        while self._going and self._agenda:
            moment, event = self._agenda.next()
            if moment.at > self.budget:
                self.now = self.budget
                return
            self.now = moment.at
            self._handle(event)

    @property
    def _many(self) -> int:
        return self.participate or len(self.clients)

    # -- who takes part ------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Ask clients that are there, as many as take part; where nobody is, wait for the first."""
        since = {c: self.fleet.devices[c].available.since(self.now) for c in sorted(self.clients)}
        here = [c for c, at in since.items() if at <= self.now]
        if not here:
            self.now = min(since.values())
            here = [c for c, at in since.items() if at <= self.now]
        chosen = sorted(self._draw.permutation(here)[: self._many].tolist())
        self.server.begin(chosen)
        for client in chosen:
            self._begin(client)

    def _another(self) -> None:
        """Let an idle client begin as soon as it is there."""
        if not self._idle:
            return
        idle = sorted(self._idle)
        client = idle[int(self._draw.integers(len(idle)))] if self.participate else idle[0]
        self._idle.discard(client)
        self._wake(client)

    def _wake(self, client: int) -> None:
        at = self.fleet.devices[client].available.since(self.now)
        self._agenda.add(Moment(at, client, 0), Event(Kind.START, client=client))

    def _next_period(self) -> None:
        if self._seconds:
            self._agenda.add(Moment(self.now + self._seconds, SERVER, 0), Event(Kind.PERIOD))

    # -- a turn --------------------------------------------------------------------------------------------

    def _begin(self, client: int) -> None:
        version = self.server.issue(client, self._held.get(client))
        device = self.fleet.devices[client]
        turn = device.turn(self.seed, client, version.sequence)
        weights = self.server.given
        asked = Turn(client, version.sequence, version.number, version.steps, version.rate)
        change = self.trainer.start(asked, weights)
        self.steps[client] += version.steps
        self.turns[client] += 1
        fetched = self.now
        if not self.free_down:
            through = self._down.take(self.now, version.nbytes, device.link.downlink)
            fetched = through + self.fleet.delay(client, through)
        done = fetched + version.steps * turn.step_seconds
        under = Under(client, version, change, turn.drops, version.held)
        self._agenda.add(Moment(done, client, version.sequence), Event(Kind.TRAINED, under, client))

    def _handle(self, event: Event) -> None:
        if event.kind is Kind.START:
            self._begin(event.client)
        elif event.kind is Kind.PERIOD:
            self._period()
        elif event.kind is Kind.TRAINED and event.turn is not None:
            self._trained(event.turn)
        else:
            self._ended(event)

    def _trained(self, turn: Under) -> None:
        client, version = turn.client, turn.version
        self._held[client] = turn.held
        data = self.clients[client].answer(version, turn.change()).pack()
        link = self.fleet.devices[client].link
        through = self._up.take(self.now, len(data), link.uplink)
        moment = Moment(through + self.fleet.delay(client, through), client, version.sequence)
        self._agenda.add(moment, Event(Kind.LOST if turn.drops else Kind.ARRIVED, turn, client, data))

    def _ended(self, event: Event) -> None:
        client, rounds = event.client, self.server.rule.in_rounds
        receipt = self._received(event) if event.kind is Kind.ARRIVED else None
        if receipt is not None:
            self._silent.clear()
            number = receipt.version
        else:
            self._silent[client] += 1
            number = self.server.give_up(client) if rounds else None
        if number is not None:
            self._tell(number)
        if not self._going:
            return
        if not rounds:
            few = max(SILENCE, (1 + ASKED_AGAIN) * self._many)
            self._check_answers(self._silent.total() < few, f"{few} turns")
            self._go_on(client, event.kind is Kind.ARRIVED)
        elif number is not None:
            self._again = 0
            self._round()
        elif not self.server.missing:
            self._nobody()

    def _received(self, event: Event) -> Receipt | None:
        found = self.server.receive(event.client, event.data)
        if isinstance(found, Receipt):
            self._arrived.append(found)
            self.kept[event.client] += found.kept
            return found
        self.refused.append((self.now, found))
        return None

    def _go_on(self, client: int, arrived: bool) -> None:
        """Let the next client begin: at once, or at the end of the period in which this one's update came."""
        if arrived and self._seconds:
            self._answered.append(client)
            return
        self._idle.add(client)
        self._another()

    def _nobody(self) -> None:
        """Repeat a round that nobody answered; then give up."""
        self.server.close()
        self._again += 1
        self._check_answers(self._again <= ASKED_AGAIN, f"{self._again} rounds")
        self._round()

    def _check_answers(self, enough: bool, waited: str) -> None:
        who = sorted(self._silent)
        more = f" and {len(who) - NAMED} others" if len(who) > NAMED else ""
        names = ", ".join(map(str, who[:NAMED])) + more
        text = f"no update came in {waited} until {self.now:.1f} s, of clients {names}"
        require(enough, LinkError, f"{text}; look at their drop_out")

    def _period(self) -> None:
        number = self.server.close()
        if number is not None:
            self._tell(number)
        if not self._going:
            return
        self._idle.update(self._answered)
        for _ in self._answered:
            self._another()
        self._answered.clear()
        self._next_period()

    def _tell(self, number: int) -> None:
        many = len(self._arrived)
        late = sum(receipt.staleness for receipt in self._arrived) / max(1, many)
        kept = sum(receipt.kept for receipt in self._arrived) / max(1, many)
        self._going = self.made(Made(number, self.now, many, late, kept))
        self._arrived.clear()
