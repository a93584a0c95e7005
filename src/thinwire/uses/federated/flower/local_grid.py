"""A grid of Flower in this process: each message calls a ClientApp at once, without servers between."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.types import InputError, require
from thinwire.uses.federated.flower import flwr_names


@dataclass
class LocalGrid:
    """Nodes that call ``app`` in this process, for trials and tests: rounds take as long as the training.

    ``nodes``: the ``node_config`` of each, by id. ``pulls``: how many looks for replies a node's answer takes
    (1 unless given), so that some are late. ``up`` and ``down`` are the bytes of all records that crossed, as
    Flower counts them. An app that raises answers with an error, as it does in a node of Flower.

    For example ``FedAvg().start(LocalGrid(app, {1: {"partition-id": 0}, 2: {"partition-id": 1}}), arrays)``.
    """

    app: Any
    nodes: Mapping[int, Mapping[str, Any]]
    run_config: Mapping[str, Any] = field(default_factory=dict)
    pulls: Mapping[int, int] = field(default_factory=dict)
    up: int = 0
    down: int = 0

    def __post_init__(self) -> None:
        flwr_names.check_host()
        flwr_names.be_server()
        self.contexts: dict[int, Any] = {}  # by node; their state outlives messages
        self._pending: dict[str, tuple[Any, int]] = {}  # messages, and looks until they are answered
        self._numbers = itertools.count(1)

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Take messages to nodes; return their ids."""
        return [self._push(message) for message in messages]

    def _push(self, message: Any) -> str:
        node = message.metadata.dst_node_id
        require(node in self.nodes, InputError, f"there is no node {node}; known: {list(self.nodes)[:8]}")
        number = f"message-{next(self._numbers)}"
        sent = copy.deepcopy(message)  # as what goes to another process
        flwr_names.number(sent, number)
        self.down += _nbytes(sent)
        self._pending[number] = sent, self.pulls.get(node, 1)
        return number

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        """Return the replies that are due."""
        replies = []
        for number in message_ids:
            message, looks = self._pending[number]
            self._pending[number] = message, looks - 1
            if looks <= 1:
                del self._pending[number]
                replies.append(self._reply(message))
        return replies

    def _reply(self, message: Any) -> Any:
        node = message.metadata.dst_node_id
        if node not in self.contexts:
            self.contexts[node] = flwr_names.context(node, self.nodes[node], self.run_config)
        try:
            reply = self.app(message, self.contexts[node])
        except Exception as e:
            reply = flwr_names.raised(message, e)
        if reply.has_error():  # some of Flower's mods reply to the reply
            reply = flwr_names.failed(message, reply.error.reason, reply.error.code)
        self.up += _nbytes(reply)
        return copy.deepcopy(reply)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        """Send messages and return the replies to all of them."""
        numbers, replies = self.push_messages(messages), []
        while numbers:
            replies += (found := self.pull_messages(numbers))
            gone = {reply.metadata.reply_to_message_id for reply in found}
            numbers = [number for number in numbers if number not in gone]
        return replies


def _nbytes(message: Any) -> int:
    return 0 if message.has_error() else sum(record.count_bytes() for record in message.content.values())
