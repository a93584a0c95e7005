"""How versions reach clients: as they are, or as messages of one compressed model that all share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from thinwire.channels import wire
from thinwire.channels.channel import SHARED, Scheme, Sender
from thinwire.codecs import Cast, Codec, Raw, TopK, Uniform
from thinwire.spec import Spec
from thinwire.types import InputError, require
from thinwire.uses.federated.message import Form, Held
from thinwire.uses.federated.model_copy import sum_of
from thinwire.uses.federated.shared import Lead, SharedOutlet


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
    the next ones bring. A client that missed versions gets what takes fewest bytes: the messages of these, a
    patch from what it holds, or the whole. With a quantiser for ``codec`` this is the shared hidden state of
    QAFeL (arXiv 2410.00242) [quoted].
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
