"""How versions reach clients: as they are, or as messages of one compressed model that all share."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import SHARED, Receiver, Scheme, Sender
from thinwire.channels.memory import Delta
from thinwire.channels.references import under
from thinwire.codecs import Cast, Codec, Raw, TopK, Uniform
from thinwire.rounds.model_copy import NAME, ModelCopy, layout_of, sum_of, whole
from thinwire.rounds.parameters import byte_tensor, here
from thinwire.rounds.update_messages import Held, VersionForm, VersionMessage
from thinwire.spec import Spec
from thinwire.staging import to_host
from thinwire.state.history import History
from thinwire.types import InputError, require

Lead = tuple[VersionForm, tuple[bytes, ...]]  # how a version is sent, and its packets
LOG = 8  # models that the history may take: with 8 bytes a word that moved, it reaches as far as the messages


class VersionSender(Protocol):
    """The server's end of all downloads: what clients are given of the newest version."""

    @property
    def given(self) -> Tensor:
        """What clients start from, [1, N], not to be written to."""
        ...

    @property
    def check(self) -> int:
        """A sum over what clients start from."""
        ...

    def advance(self, weights: Tensor) -> None:
        """Go on to the next version, [1, N]."""
        ...

    def lead(self, held: Held | None) -> Lead:
        """Return what leads a client that holds ``held`` to the newest version, in the fewest bytes."""
        ...

    def behind(self, held: Held | None) -> int | None:
        """Return how many messages lead on from ``held``; None where only the whole does."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return what is kept, as plain tensors."""
        ...

    def state_at(self, number: int) -> dict[str, Tensor]:
        """Return the same, as if its version 0 were version ``number``."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor], weights: Tensor) -> None:
        """Load what ``state_dict`` returned at ``weights``."""
        ...


@runtime_checkable
class Download(Protocol):
    """A way to send versions, as a value."""

    def open(self, weights: Tensor) -> VersionSender:
        """Return the sender whose version 0 is ``weights`` [1, N]."""
        ...


@dataclass(frozen=True, repr=False)
class FullDownload(Spec):
    """Send each version as it is, by ``codec``: ``Raw()`` or a ``Cast``. The default of published methods."""

    codec: Codec = Raw()  # noqa: RUF009 -- frozen

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = f"a version cannot be sent whole by {self.codec!r}; take Raw(), a Cast, or DeltaDownload"
        require(isinstance(self.codec, (Raw, Cast)), InputError, wrong)

    def open(self, weights: Tensor) -> VersionSender:
        return FullSender(self.codec, weights)


@dataclass(frozen=True, repr=False)
class DeltaDownload(Spec):
    """Let all clients share one compressed model, which moves by what was sent, coded by ``codec``.

    A version adds the coded difference between the server's weights and the shared model, so what one drops
    the next ones bring. A client that missed versions gets what takes fewest bytes: the messages of these, a
    patch from what it holds, or the whole. With a quantiser for ``codec`` this is the shared hidden state of
    QAFeL (arXiv 2410.00242) [quoted].
    """

    codec: Codec = TopK(0.02, Uniform(4, group=64))  # noqa: RUF009 -- frozen

    def open(self, weights: Tensor) -> VersionSender:
        return SharedSender(self.codec, weights)


@dataclass(frozen=True, repr=False)
class PassedDownload(Spec):
    """Give on what the server above sends, as it comes; for branches."""

    def open(self, weights: Tensor) -> PassedSender:
        return PassedSender(weights)


class FullSender:
    """Code the newest version once, when it is first asked for."""

    def __init__(self, codec: Codec, weights: Tensor) -> None:
        self._sender = Sender(Scheme(codec))
        self.advance(weights)

    def advance(self, weights: Tensor) -> None:
        self._weights = weights
        self._coded: tuple[bytes, Tensor, int] | None = None

    @property
    def given(self) -> Tensor:
        return self._code()[1]

    @property
    def check(self) -> int:
        return self._code()[2]

    def lead(self, held: Held | None) -> Lead:
        return VersionForm.FULL, (self._code()[0],)

    def behind(self, held: Held | None) -> int | None:
        return 0  # each version goes whole: none is worth holding

    def _code(self) -> tuple[bytes, Tensor, int]:
        if self._coded is None:
            packet, given = self._sender.encode(self._weights, [SHARED])
            self._coded = wire.pack(packet), given, sum_of(given)
        return self._coded

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def state_at(self, number: int) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor], weights: Tensor) -> None:
        self.advance(weights)


class SentVersions:
    """The newest version of a shared model, ``given`` [1, N], and the messages that clients may have missed.

    Messages are kept while together they take fewer bytes than the model. Patches are made for versions as
    old as these: then a server that goes on from its state sends what it would have sent.
    """

    def __init__(self, given: Tensor, number: int, check: int) -> None:
        self._set(given, number, check)

    def _set(self, given: Tensor, number: int, check: int) -> None:
        """Let a version be the first one that is known."""
        self._given, self._number = given, number
        self._checks = deque([check])  # of the version before each message, and the newest
        self._log: deque[bytes] = deque()
        self._begin(given)

    def _add(self, message: bytes, given: Tensor, check: int) -> None:
        """Go on to the version ``given``, to which ``message`` leads."""
        self._number, self._given = self._number + 1, given
        self._checks.append(check)
        self._log.append(message)
        self._publish(given)
        most = 4 * given.numel()
        while self._log and sum(map(len, self._log)) > most:
            self._oldest = self._tail.decode(wire.unpack(self._log.popleft(), max_nbytes=most))
            self._checks.popleft()

    def _begin(self, oldest: Tensor) -> None:
        """Let messages and patches begin at the values of the oldest version."""
        first = self._number - len(self._log)
        self._tail = Receiver()  # holds the version before the first message
        self._oldest = self._tail.decode(wire.unpack(whole(oldest, first), max_nbytes=oldest.nbytes))
        values = oldest.numel()
        self._history = History(layout_of(values), LOG * 4 * values, start=first)
        self._publish(oldest)

    def _publish(self, row: Tensor) -> None:
        (words,) = to_host([row]).tensors()  # where a history keeps them
        self._history.publish({NAME: words}, published=0.0)  # as number + 1: none is 0 there
        self._patches: dict[int, bytes] = {}  # to this version, by the number of the base; -1: from nothing

    @property
    def given(self) -> Tensor:
        return self._given

    @property
    def check(self) -> int:
        return self._checks[-1]

    @property
    def kept(self) -> int:
        """How many messages are kept."""
        return len(self._log)

    def lead(self, held: Held | None) -> Lead:
        behind = self.behind(held)
        if held is None or behind is None:
            return VersionForm.WHOLE, (self._patch(-1),)
        missed = tuple(islice(self._log, len(self._log) - behind, None))
        if behind < 2:  # a message alone is less than the words that it moved
            return VersionForm.MISSED, missed
        ways: list[Lead] = [(VersionForm.MISSED, missed), (VersionForm.WHOLE, (self._patch(-1),))]
        if self._history.knows(held.number + 1):
            ways.append((VersionForm.PATCH, (self._patch(held.number),)))
        return min(ways, key=lambda way: sum(map(len, way[1])))

    def behind(self, held: Held | None) -> int | None:
        if held is None or not 0 <= (behind := self._number - held.number) < len(self._checks):
            return None
        return behind if self._checks[-1 - behind] == held.check else None

    def _patch(self, base: int) -> bytes:
        if base not in self._patches:
            self._patches[base] = self._history.patch(base + 1 or None, mark=False).pack()
        return self._patches[base]


class SharedSender(SentVersions):
    """Move the shared model by what is sent."""

    def __init__(self, codec: Codec, weights: Tensor) -> None:
        self._sender = Sender(Scheme(codec, Delta()))
        packet, given = self._sender.encode(weights, [SHARED])  # the first goes as it is
        super().__init__(given, 0, packet.entries[0].check)

    def advance(self, weights: Tensor) -> None:
        packet, given = self._sender.encode(weights, [SHARED])
        self._add(wire.pack(packet), given, packet.entries[0].check)

    def state_dict(self) -> dict[str, Tensor]:
        log = {f"log.{i}": byte_tensor(m) for i, m in enumerate(self._log)}
        numbers = torch.tensor([self._number, *self._checks], dtype=torch.int64, device="cpu")
        sender = {f"sender.{name}": here(x) for name, x in self._sender.state_dict().items()}
        rows = {"given": here(self._given), "oldest": here(self._oldest)}
        return rows | {"numbers": numbers} | log | sender

    def state_at(self, number: int) -> dict[str, Tensor]:
        state = self.state_dict()
        state["numbers"] = torch.tensor([number, self.check], dtype=torch.int64, device="cpu")
        versions = state["sender.versions"].clone()
        versions[:, 1] = number + 1
        return state | {"sender.versions": versions}

    def load_state_dict(self, state: Mapping[str, Tensor], weights: Tensor) -> None:
        self._number, *checks = state["numbers"].tolist()
        self._checks, self._given = deque(checks), state["given"].to(weights.device, copy=True)
        self._log = deque(state[f"log.{i}"].numpy().tobytes() for i in range(len(checks) - 1))
        self._sender.load_state_dict(under(state, "sender."))
        self._begin(state["oldest"].to(weights.device, copy=True))
        again = Receiver()
        again.load_state_dict(self._tail.state_dict())
        for message in self._log:
            self._publish(again.decode(wire.unpack(message, max_nbytes=4 * weights.numel())))


class PassedSender(SentVersions):
    """Give on what another server sent, as it came: its clients and these hold the same bits.

    ``copy`` follows that server.
    """

    def __init__(self, weights: Tensor) -> None:
        self.copy = ModelCopy(weights.numel(), device=weights.device)
        super().__init__(weights, 0, sum_of(weights))

    def advance(self, weights: Tensor) -> None:
        raise InputError("this server makes no versions of its own; they come from the one above")

    def follow(self, version: VersionMessage) -> None:
        """Go on to a version of the server above. Errors: those of ``ModelCopy.take``."""
        if version.form is not VersionForm.MISSED:
            row = self.copy.take(version)
            self._set(row, version.number, version.check)
            return
        for number, data in enumerate(version.packets, version.number - len(version.packets) + 1):
            check = wire.unpack(data, max_nbytes=4 * self._given.numel()).entries[0].check
            part = replace(version, number=number, check=check, packets=(data,))
            self._add(bytes(data), self.copy.take(part), check)
        self.copy.take(replace(version, packets=()))

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def state_at(self, number: int) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor], weights: Tensor) -> None:
        """Nothing is kept: the server above has it."""
