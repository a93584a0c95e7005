"""How versions reach clients: as they are, or as messages of one compressed model that all share."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import Scheme, Sender
from thinwire.channels.frame import SHARED
from thinwire.channels.memory import Delta
from thinwire.channels.references import under
from thinwire.codecs import Cast, Codec, Raw, TopK, Uniform
from thinwire.engines.federated.message import Form, Held
from thinwire.engines.federated.model_copy import sum_of, whole
from thinwire.spec import Spec
from thinwire.types import InputError, require

Lead = tuple[Form, tuple[bytes, ...]]  # how a version is sent, and its packets


class Outlet(Protocol):
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

    def state_dict(self) -> dict[str, Tensor]:
        """Return what is kept, as plain tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor], weights: Tensor) -> None:
        """Load what ``state_dict`` returned at ``weights``."""
        ...


@runtime_checkable
class Download(Protocol):
    """A way to send versions, as a value."""

    def open(self, weights: Tensor) -> Outlet:
        """Return the outlet whose version 0 is ``weights`` [1, N]."""
        ...


@dataclass(frozen=True, repr=False)
class FullDownload(Spec):
    """Send each version as it is, by ``codec``: ``Raw()`` or a ``Cast``. The default of published methods."""

    codec: Codec = Raw()  # noqa: RUF009 -- frozen

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = f"a version cannot be sent whole by {self.codec!r}; take Raw(), a Cast, or DeltaDownload"
        require(isinstance(self.codec, (Raw, Cast)), InputError, wrong)

    def open(self, weights: Tensor) -> Outlet:
        return FullOutlet(self.codec, weights)


@dataclass(frozen=True, repr=False)
class DeltaDownload(Spec):
    """Let all clients share one compressed model, which moves by what was sent, coded by ``codec``.

    A version adds the coded difference between the server's weights and the shared model, so what one drops
    the next ones bring. With a quantiser it is the shared hidden state of QAFeL (arXiv 2410.00242) [quoted].
    """

    codec: Codec = TopK(0.02, Uniform(4, group=64))  # noqa: RUF009 -- frozen

    def open(self, weights: Tensor) -> Outlet:
        return SharedOutlet(self.codec, weights)


class FullOutlet:
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
        return Form.FULL, (self._code()[0],)

    def _code(self) -> tuple[bytes, Tensor, int]:
        if self._coded is None:
            packet, given = self._sender.encode(self._weights, [SHARED])
            self._coded = wire.pack(packet), given, sum_of(given)
        return self._coded

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor], weights: Tensor) -> None:
        self.advance(weights)


class SharedOutlet:
    """Keep the shared model, and the messages since versions that clients may hold.

    Messages are kept while together they take fewer bytes than the whole.
    """

    def __init__(self, codec: Codec, weights: Tensor) -> None:
        self._sender = Sender(Scheme(codec, Delta()))
        self._number = -1
        self._log: deque[bytes] = deque()  # the newest messages; the last led to the newest version
        self._checks: deque[int] = deque()  # of the version before each of them, and of the newest
        self._move(weights)  # nobody can follow what comes first: it is sent whole

    def advance(self, weights: Tensor) -> None:
        self._log.append(self._move(weights))
        while self._log and sum(map(len, self._log)) > 4 * weights.numel():
            self._log.popleft()
            self._checks.popleft()

    def _move(self, weights: Tensor) -> bytes:
        packet, self._given = self._sender.encode(weights, [SHARED])
        self._number += 1
        self._whole: bytes | None = None
        self._checks.append(packet.entries[0].check)
        return wire.pack(packet)

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
        behind = -1 if held is None else self._number - held.number
        if held is not None and 0 <= behind <= len(self._log) and self._checks[-1 - behind] == held.check:
            return Form.MISSED, tuple(islice(self._log, len(self._log) - behind, None))
        if self._whole is None:
            self._whole = whole(self._given, self._number)
        return Form.WHOLE, (self._whole,)

    def state_dict(self) -> dict[str, Tensor]:
        log = {f"log.{i}": torch.frombuffer(bytearray(m), dtype=torch.uint8) for i, m in enumerate(self._log)}
        numbers = torch.tensor([self._number, *self._checks], dtype=torch.int64)
        sender = {f"sender.{name}": x for name, x in self._sender.state_dict().items()}
        return {"numbers": numbers, "given": self._given.clone()} | log | sender

    def load_state_dict(self, state: Mapping[str, Tensor], weights: Tensor) -> None:
        self._number, *checks = state["numbers"].tolist()
        self._checks, self._whole, self._given = deque(checks), None, state["given"].clone()
        self._log = deque(state[f"log.{i}"].numpy().tobytes() for i in range(len(checks) - 1))
        self._sender.load_state_dict(under(state, "sender."))
