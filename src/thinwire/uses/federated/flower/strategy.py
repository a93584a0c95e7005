"""Any strategy of Flower, over compressed messages in both directions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.rounds.aggregation import Periodic
from thinwire.rounds.aggregation_server import Accepted, Rejected, Server
from thinwire.rounds.client_profile import FederatedPolicy
from thinwire.rounds.client_scheduler import REST
from thinwire.rounds.download import Download
from thinwire.rounds.local_training import Decay
from thinwire.types import InputError, require
from thinwire.uses.federated.flower import flwr_names
from thinwire.uses.federated.flower.nodes import Devices, Nodes, alike
from thinwire.uses.federated.flower.records import WHOLE, ArrayLayout, only, replaced

RULE = Periodic()  # nothing is due by itself: the strategy ends its rounds


class Compressed:
    """Wrap a strategy of Flower: send plans and coded versions, and decode replies before it aggregates.

    Clients need ``compression_mod``. ``policy`` says what each node does, ``Fixed(steps, codec)`` the same
    for all; ``download`` how versions are sent: whole, or as a ``DeltaDownload``. With ``feedback`` nodes
    keep what they did not send. A reply that is refused is not aggregated; ``refused`` says why.

    Arrays whose names are like one of ``whole`` travel as they are: name those that training moves otherwise
    than by gradient steps. A node that does not answer is left out of the next round, then of three, of
    seven. Once a share ``quorum`` of the messages is answered, the others have as long again as that took.

    >>> from thinwire.rounds.client_profile import Fixed
    >>> Compressed(strategy=None, policy=Fixed(5)).refused
    []
    """

    def __init__(
        self,
        strategy: Any,
        policy: FederatedPolicy,
        download: Download | None = None,
        feedback: bool = True,
        rates: Decay | None = None,
        device: Devices = alike,
        whole: Sequence[str] = WHOLE,
        quorum: float = 1.0,
    ) -> None:
        require(0 < quorum <= 1, InputError, f"quorum={quorum} is no share; give one above 0, up to 1")
        self.strategy, self._policy, self._download = strategy, policy, download
        self._feedback, self._rates, self._device = feedback, rates, device
        self._whole, self._quorum = tuple(whole), quorum
        self._nodes: Nodes | None = None
        self._absent = Absent()

    def start(self, grid: Any, initial_arrays: Any, *args: Any, **options: Any) -> Any:
        """Run the wrapped strategy's own ``start``, from ``initial_arrays``, with this one in its place."""
        flwr_names.check_host()
        patient = QuorumGrid(grid, self._quorum) if self._quorum < 1 else grid
        return type(self.strategy).start(self, patient, initial_arrays, *args, **options)

    def summary(self) -> None:
        """Log what the wrapped strategy logs."""
        self.strategy.summary()

    @property
    def server(self) -> Server:
        """Weights, versions and counts of bytes. Errors: ``InputError`` before the first round."""
        return self._opened.server

    @property
    def refused(self) -> list[Rejected]:
        """What was not aggregated, and why; by the server's own ids of nodes."""
        return [] if self._nodes is None else self._nodes.refused

    @property
    def _opened(self) -> Nodes:
        if self._nodes is None:
            raise InputError("no round has begun; call start first")
        return self._nodes

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        """Return the strategy's messages, with plans and coded versions."""
        if server_round <= 1:  # another run, whose nodes hold nothing of the last one
            self._nodes, self._absent = None, Absent()
        asked = self.strategy.configure_train(server_round, arrays, config, grid)
        return self._filled(arrays, self._absent.ask(server_round, asked))

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        """Return the strategy's messages, with coded versions."""
        asked = self.strategy.configure_evaluate(server_round, arrays, config, grid)
        return self._filled(arrays, self._absent.ask(server_round, asked))

    def _filled(self, arrays: Any, messages: Iterable[Any]) -> list[Any]:
        """Let ``arrays`` be the newest version, and the messages bring it."""
        nodes = self._nodes = self._nodes or self._open(arrays)
        row = nodes.layout.row(arrays, "the model of the strategy")
        if not torch.equal(row, nodes.server.weights):
            nodes.server.adopt(row)
        asked = list(messages)
        for node in sorted(m.metadata.dst_node_id for m in asked):
            nodes.join(node)
        return [nodes.fill(m) for m in asked]

    def _open(self, arrays: Any) -> Nodes:
        layout = ArrayLayout.of(arrays, self._whole)
        server = Server(layout.row(arrays, "the model"), RULE, self._policy, self._download, self._rates)
        weighted_by = getattr(self.strategy, "weighted_by_key", "num-examples")
        return Nodes(server, layout, self._feedback, weighted_by, self._device)

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
        """Decode the replies, in the order of nodes, and let the strategy aggregate them."""
        nodes, taken, failed = self._opened, [], []
        came = sorted(replies, key=_node)
        self._absent.heard(server_round, came)
        for reply in came:
            answer = nodes.take(reply, _node(reply)) if _node(reply) in nodes.ids else None
            if isinstance(answer, Accepted):
                taken.append(reply)
            elif reply.has_error():  # the strategy counts these
                failed.append(reply)
        changes = nodes.server.collect()
        for reply in taken:
            self._decode(reply, changes[nodes.ids[_node(reply)]])
        return self.strategy.aggregate_train(server_round, taken + failed)

    def _decode(self, reply: Any, change: torch.Tensor) -> None:
        key, arrays = only(reply.content.array_records, "array", "a reply")
        layout = self._opened.layout
        record = layout.record(self.server.weights - change, layout.rest(arrays))
        reply.content = replaced(reply.content, {key: record})

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        """Let the strategy aggregate what nodes measured."""
        found = list(replies)
        self._absent.heard(server_round, found)
        for reply in found:
            self._opened.heard(reply, _node(reply))
        return self.strategy.aggregate_evaluate(server_round, found)


def _node(reply: Any) -> int:
    """Return which node replied; errors may be of the server itself."""
    return int(reply.metadata.src_node_id)


@dataclass
class Absent:
    """Leave a node that did not answer out of the next round, then of three, of seven, and so on."""

    _asked: set[int] = field(default_factory=set)
    _missed: Counter[int] = field(default_factory=Counter)  # messages in a row
    _until: dict[int, int] = field(default_factory=dict)  # the round in which a node is asked again

    def ask(self, number: int, messages: Iterable[Any]) -> list[Any]:
        """Return the messages of a round to those who are not left out; all, where nobody else is there."""
        every = list(messages)
        some = [m for m in every if self._until.get(m.metadata.dst_node_id, 0) <= number] or every
        self._asked = {m.metadata.dst_node_id for m in some}
        return some

    def heard(self, number: int, replies: Iterable[Any]) -> None:
        """Note who answered the messages of a round, and who did not."""
        came = {
            int(r.metadata.src_node_id)
            for r in replies
            if not (r.has_error() and flwr_names.is_gone(r.error.code))
        }
        for node in self._asked & came:
            self._missed.pop(node, None)
        for node in self._asked - came:
            self._missed[node] = min(REST, self._missed[node] + 1)
            self._until[node] = number + (1 << self._missed[node])
        self._asked = set()


class QuorumGrid:
    """A grid that waits for a share of the replies, and for the others as long again as these took."""

    def __init__(self, grid: Any, quorum: float, poll: float = 0.1) -> None:
        self._grid, self._quorum, self._poll = grid, quorum, poll

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        """Send messages; return the replies that came in time, at latest after ``timeout`` seconds."""
        began = time.monotonic()
        left = {number for number in self._grid.push_messages(list(messages)) if number}
        many, replies, until = len(left), list[Any](), began + timeout if timeout is not None else None
        while left:
            found = list(self._grid.pull_messages(list(left)))
            left -= {reply.metadata.reply_to_message_id for reply in found}
            replies += found
            now = time.monotonic()
            if found and left and len(replies) >= self._quorum * many:
                soon = 2 * now - began
                until = soon if until is None else min(until, soon)
            if until is not None and now >= until:
                break
            if left and not found:
                time.sleep(self._poll)
        return replies
