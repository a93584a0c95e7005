"""A server of Flower that waits for nobody: our asynchronous rules over its grid of messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.rounds.aggregation import ArrivedUpdate, Federation
from thinwire.rounds.aggregation_server import Accepted, Rejected, Server
from thinwire.rounds.client_profile import FederatedPolicy
from thinwire.rounds.local_training import Decay
from thinwire.types import InputError, LinkError, ThinwireError, require
from thinwire.uses.federated.flower import flwr_names
from thinwire.uses.federated.flower.nodes import Devices, Nodes, alike
from thinwire.uses.federated.flower.records import WHOLE, ArrayLayout
from thinwire.uses.federated.recipes import Method

LOOK = 1.0  # seconds between two looks at which nodes there are
TRIES = 2  # errors in a row after which a node is asked no more
Made = Callable[[int, Any], None]  # hears a version's number and arrays


@dataclass
class Asynchronous:
    """Ask each node again as soon as it has answered; make versions by the rule of ``method``.

    That is ``FedBuff``, ``FedAsync``, or ``Periodic``, whose nodes wait for the end of the period. Clients
    need ``compression_mod``. ``weighted_by``: the metric that says how many samples a node has. Arrays whose
    names are like one of ``whole`` travel as they are, and a version has the mean of those that it was made
    of, by samples; of other types it has the newest.

    >>> from thinwire.rounds.client_profile import Fixed
    >>> Asynchronous(Method(), Fixed(5))
    Traceback (most recent call last):
    ...
    thinwire.types.InputError: Synchronous() asks in rounds; take a strategy of Flower, in Compressed
    """

    method: Method
    policy: FederatedPolicy
    rates: Decay | None = None
    device: Devices = alike
    weighted_by: str = "num-examples"
    whole: Sequence[str] = WHOLE

    def __post_init__(self) -> None:
        wrong = f"{self.method.rule!r} asks in rounds; take a strategy of Flower, in Compressed"
        require(not self.method.rule.in_rounds, InputError, wrong)

    def start(
        self,
        grid: Any,
        initial_arrays: Any,
        versions: int,
        *,
        config: Any = None,
        timeout: float = 3600.0,
        poll: float = 0.5,
        made: Made | None = None,
    ) -> AsynchronousRun:
        """Train until so many versions are made; call this in the main function of a ``ServerApp``.

        ``config``: a ``ConfigRecord`` for all train messages. ``timeout``: seconds that a node may take, and
        that may pass without any answer. ``poll``: seconds between two looks for replies.
        Errors: ``LinkError`` naming the nodes where nobody answers in time; ``ThinwireError`` with the last
        reason where no node is left that does not fail.
        """
        flwr_names.check_host()
        layout = ArrayLayout.of(initial_arrays, self.whole)
        row = layout.row(initial_arrays, "the model")
        server = Server(row, self.method.rule, self.policy, self.method.download, self.rates)
        nodes = Nodes(server, layout, self.method.feedback, self.weighted_by, self.device)
        content = {"arrays": initial_arrays, "config": config or flwr_names.app().ConfigRecord()}
        run = AsynchronousRun(
            grid, nodes, layout.rest(initial_arrays), content, timeout, made or (lambda number, arrays: None)
        )
        while server.version < versions:
            if not run.step():
                time.sleep(poll)
        return run


@dataclass
class AsynchronousRun:
    """An asynchronous run: who was asked, who answered, and what came of it."""

    grid: Any
    nodes: Nodes
    rest: dict[str, Any]
    content: dict[str, Any]
    timeout: float
    made: Made
    _asked: dict[str, tuple[int, float]] = field(default_factory=dict)  # node and deadline, by message
    _answered: set[int] = field(default_factory=set)  # nodes that wait for the end of the period
    _failures: dict[int, int] = field(default_factory=dict)  # in a row, by node
    _rests: list[tuple[Accepted, int, dict[str, Any]]] = field(default_factory=list)  # of the next version
    _looked: float = -LOOK

    def __post_init__(self) -> None:
        self._heard = self._period = time.monotonic()

    @property
    def server(self) -> Server:
        """Weights, versions and counts of bytes."""
        return self.nodes.server

    @property
    def refused(self) -> list[Rejected]:
        """Updates and errors that made no version; by the server's own ids of nodes."""
        return self.nodes.refused

    @property
    def arrays(self) -> Any:
        """The newest version, as an ``ArrayRecord``."""
        return self.nodes.layout.record(self.server.weights, self.rest)

    @property
    def _failing(self) -> set[int]:
        """The nodes that are asked no more."""
        return {node for node, n in self._failures.items() if n >= TRIES}

    def step(self) -> bool:
        """Ask who is idle, take what has come; return whether anything has."""
        now = time.monotonic()
        if now - self._looked >= LOOK or not self._asked:
            self._ask(self.grid.get_node_ids(), now)
        replies = list(self.grid.pull_messages(list(self._asked))) if self._asked else []
        for reply in sorted(replies, key=lambda r: self._asked[r.metadata.reply_to_message_id]):
            self._take(reply)
        self._end_period(now)
        self._check_time(now)
        return bool(replies)

    def _ask(self, known: Iterable[int], now: float) -> None:
        """Send the newest version to all that are there and not at work."""
        self._looked = now
        busy = {node for node, _ in self._asked.values()} | self._answered
        self._send(sorted(set(known) - busy - self._failing))

    def _send(self, idle: list[int]) -> None:
        flwr, until = flwr_names.app(), time.monotonic() + self.timeout
        messages = [
            flwr.Message(flwr.RecordDict(self.content), node, flwr_names.TRAIN, ttl=self.timeout)
            for node in idle
        ]
        numbers = self.grid.push_messages([self.nodes.fill(m) for m in messages]) if idle else []
        # What was not sent has no number, or there are none at all; the next look asks again.
        self._asked |= {number: (node, until) for node, number in zip(idle, numbers, strict=False) if number}

    def _take(self, reply: Any) -> None:
        node, _ = self._asked.pop(reply.metadata.reply_to_message_id)
        self._heard = time.monotonic()
        answer = self.nodes.take(reply, node)
        if isinstance(answer, Rejected):
            self._fail(node, reply, answer.reason)
            return
        self._failures.pop(node, None)
        self._rests.append((answer, self.nodes.samples(answer.client), self.nodes.rest(reply)))
        if answer.version is not None:
            self._go_on(answer.version)
        if self.server.rule.seconds:
            self._answered.add(node)
        else:
            self._send([node])

    def _go_on(self, number: int) -> None:
        """Let a version begin: what travels whole is of those that it was made of."""
        rule, rests, self._rests = self.server.rule, self._rests, []
        for name, before in self.rest.items():
            found = [(r, n, rest[name]) for r, n, rest in rests if name in rest]
            if not found or not str(before.dtype).startswith("float"):
                self.rest[name] = found[-1][-1] if found else before
                continue
            mean = sum(n * array.numpy().astype("float64") for _, n, array in found) / sum(
                n for _, n, _ in found
            )
            if rule.mixes:
                arrivals = [ArrivedUpdate(r.client, r.sequence, n, r.staleness) for r, n, _ in found]
                share = min(1.0, sum(rule.shares(arrivals, Federation(1, 1))))
                mean = (1 - share) * before.numpy() + share * mean
            self.rest[name] = flwr_names.app().Array(mean.astype(before.dtype))
        if self.rest:
            self.content = {**self.content, "arrays": self.arrays}
        self.made(number, self.arrays)

    def _fail(self, node: int, reply: Any, reason: str) -> None:
        if reply.has_error() and flwr_names.is_gone(reply.error.code):
            self.server.leave(self.nodes.ids[node])
            return
        self._failures[node] = self._failures.get(node, 0) + 1
        if self._failures[node] >= TRIES:
            self.server.leave(self.nodes.ids[node])
        wrong = f"all nodes failed {TRIES} times in a row, node {node} last: {reason}"
        require(self.nodes.ids.keys() != self._failing, ThinwireError, wrong)

    def _end_period(self, now: float) -> None:
        seconds = self.server.rule.seconds
        if not seconds or now - self._period < seconds:
            return
        self._period = now
        number = self.server.close()
        if number is not None:
            self._go_on(number)
        idle, self._answered = sorted(self._answered), set()
        self._send(idle)

    def _check_time(self, now: float) -> None:
        for number, (node, until) in list(self._asked.items()):
            if now > until:  # it may come back, and is asked again then
                del self._asked[number]
                self.server.leave(self.nodes.ids[node])
        who = ", ".join(str(n) for n in sorted(self.nodes.ids)[:8]) or "none has joined"
        late = f"no node answered in {self.timeout:g} s; known nodes: {who}"
        require(now - self._heard <= self.timeout, LinkError, late)
