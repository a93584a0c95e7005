"""Messages opened by the threads that read them, so that whoever computes finds them on the device."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch

from thinwire.collectives import MeshExchange
from thinwire.staging import Beside, moment, used_here
from thinwire.types import Packet
from thinwire.uses.pictures.message_bytes import opened
from thinwire.uses.pictures.rank_message import RankMessage, TensorKind

Received = Sequence[Packet | None]  # of one rank; None is an empty one
ROOM = 1 << 30  # bytes
_CPU = torch.device("cpu")


class Arrived(NamedTuple):
    """A message that was read, and its packets where they are opened already."""

    message: RankMessage
    nbytes: int
    packets: Received | None = None
    device: torch.device | None = None  # where they are
    ready: torch.cuda.Event | None = None  # when


class Arrivals:
    """Read the messages of one exchange, and open those of a model's calls ahead of need.

    The thread of a link parses a message, and copies its packets to the device on a stream of their own. What
    fails there is left unopened, and fails anew for whoever takes it. ``room``: bytes of messages that may be
    open and not taken; others wait on the host.
    """

    def __init__(self, exchange: MeshExchange, room: int = ROOM) -> None:
        self._exchange, self._device, self._room = exchange, _CPU, room
        self._beside, self._lock, self._held, self._begun = Beside(), Lock(), 0, False

    def begin(self, device: torch.device) -> None:
        """Open what comes from now on, on ``device``; once more is of no effect."""
        if not self._begun:
            self._begun, self._device = True, device
            self._exchange.opened_by(self.open)

    def end(self) -> None:
        """Leave what comes from now on as it comes."""
        if self._begun:
            self._exchange.opened_by(None)

    def open(self, body: bytes) -> Arrived:
        """Return a message with its packets on the device, unless too many bytes wait there."""
        message, device = RankMessage.unpack(body), self._device
        found = Arrived(message, len(body))
        if message.stopped or not self._hold(len(body)):
            return found
        try:
            with self._beside.on(device):
                return found._replace(packets=_packets(message, device), device=device, ready=moment(device))
        except Exception:  # any, such as a full card: who takes the message tries again, and has the error
            self._hold(-len(body))
            return found

    def take(self, found: Arrived, device: torch.device) -> Received:
        """Return the packets of a message on ``device``, for what this thread queues there.

        The first one to experts stays on the host: it says which they are. Errors: ``PayloadError``.
        """
        if found.packets is None:
            return _packets(found.message, device)
        self._hold(-found.nbytes)
        if found.device != device:
            return _packets(found.message, device)
        for packet in found.packets:
            for section in packet.sections if packet is not None else ():
                for part in section.payload.parts:
                    used_here(part, found.ready)
        return found.packets

    def drop(self, found: Arrived) -> None:
        """Take a message that nobody reads."""
        self._hold(-found.nbytes if found.packets is not None else 0)

    def _hold(self, nbytes: int) -> bool:
        with self._lock:
            if self._held + nbytes > self._room:
                return False
            self._held += nbytes
            return True


def arrived(body: Any) -> Arrived:
    """Return a message as ``Arrivals`` has it, which came before it began to open them. ``PayloadError``."""
    return body if isinstance(body, Arrived) else Arrived(RankMessage.unpack(body), len(body))


def is_last(body: Any) -> bool:
    """Return whether a message says that the sender has left, or ended with an error."""
    return body.message.stopped if isinstance(body, Arrived) else bytes(body[1:2]) == b"\1"


def _packets(message: RankMessage, device: torch.device) -> Received:
    here = 1 if message.kind is TensorKind.TOKENS else 0
    return [*opened(message.data[:here], _CPU), *opened(message.data[here:], device)]
