"""Nodes that do not answer: a round does not wait for them for ever, and they are asked again more seldom."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from thinwire.uses.federated.conductor import REST
from thinwire.uses.federated.flower import host


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
            int(r.metadata.src_node_id) for r in replies if not (r.has_error() and host.is_gone(r.error.code))
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
