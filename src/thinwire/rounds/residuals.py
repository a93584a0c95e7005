"""What clients have not delivered yet: what codecs dropped, and updates that the server did not take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Scheme, Sender
from thinwire.channels.memory import ErrorFeedback, Memory, NoMemory
from thinwire.channels.references import Store, under
from thinwire.codecs import Codec, Raw
from thinwire.rounds.parameters import byte_tensor, here, unpack_row
from thinwire.types import InputError, require


class SentUpdate(NamedTuple):
    """An update that is under way, or lost."""

    sequence: int
    packet: bytes


class ClientResiduals:
    """One sender for any number of clients, each under its own id; the packets that they sent last.

    ``memory`` is ``ErrorFeedback``, or ``NoMemory``: then what is dropped, refused or lost is gone.
    ``references`` is the form of the residuals: ``Raw()`` is fp32, ``Cast("float16")`` takes half of it,
    ``Uniform(8, group=64)`` about a quarter. ``store``: where they are, by default on the device where they
    are coded; ``TensorStore("cpu")`` has those of many clients in the host's memory, a ``DiskStore`` on disk.

    A lost update is kept as its packet, which decodes to the bits that the server would have added.

    >>> import torch
    >>> from thinwire.codecs import TopK
    >>> residuals = ClientResiduals()
    >>> packet = residuals.encode(3, 1, torch.tensor([[4.0, 1.0]]), TopK(0.5))
    >>> residuals.settle(3, confirmed=1)
    >>> unpack_row(residuals.encode(3, 2, torch.zeros(1, 2), TopK(0.5)), values=2, key=3)
    tensor([[0., 1.]])
    """

    def __init__(
        self, memory: Memory | None = None, references: Codec | None = None, store: Store | None = None
    ) -> None:
        memory = memory or ErrorFeedback()
        fits = isinstance(memory, (ErrorFeedback, NoMemory)) and memory.key == "sample"
        require(fits, InputError, f"updates cannot go under {memory!r}; take ErrorFeedback() or NoMemory()")
        self._sender = Sender(Scheme(memory=memory, references=references or Raw()), store)
        self._sent: dict[int, SentUpdate] = {}

    def encode(self, client: int, sequence: int, change: Tensor, codec: Codec) -> bytes:
        """Return the packet for ``change`` [1, N] and all that ``client`` has not delivered yet.

        It is coded on the device of ``change``, where the residual then is; see ``store``.

        Errors: ``InputError`` for a NaN or an infinity; then nothing has changed.
        """
        lost = self._sent.get(client)
        if lost is not None:
            change = change + unpack_row(lost.packet, change.numel(), client, change.device)
        packet = wire.pack(self._sender.encode(change, [client], codec=codec)[0])
        if isinstance(self._sender.scheme.memory, ErrorFeedback):
            self._sent[client] = SentUpdate(sequence, packet)
        return packet

    def settle(self, client: int, confirmed: int) -> None:
        """Forget the update under way, if it is the one that the server took last."""
        sent = self._sent.get(client)
        if sent is not None and sent.sequence == confirmed:
            del self._sent[client]

    def prefetch(self, client: int) -> None:
        """Let a store on disk begin to read the residual of ``client``."""
        self._sender.prefetch([client])

    def forget(self, client: int) -> None:
        """Drop all that is kept for ``client``, which will not come back."""
        self._sender.reset([client])
        self._sent.pop(client, None)

    @property
    def sent(self) -> int:
        """How many packets are kept."""
        return len(self._sent)

    def state_dict(self) -> dict[str, Tensor]:
        """Return residuals and packets as plain tensors, on the CPU."""
        packets = {f"sent.{c}.{s.sequence}": byte_tensor(s.packet) for c, s in self._sent.items()}
        return packets | {f"sender.{name}": here(x) for name, x in self._sender.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned."""
        self._sender.load_state_dict(under(state, "sender."))
        self._sent = {}
        for name, x in under(state, "sent.").items():
            client, sequence = map(int, name.split("."))
            self._sent[client] = SentUpdate(sequence, x.numpy().tobytes())

    def close(self) -> None:
        """Free what is kept."""
        self._sender.close()
        self._sent.clear()
