"""The two members of a pair: the first talks to the keeper, the second to the first.

What the first says: a byte for the word, then a version as it came, to train or to hold, or how many steps
are timed, or the number of the last round. The second answers a version that it trains twice: that it can,
and what it changed; and the last word once: that it heard it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Raw
from thinwire.codecs.matrices.factors import placed
from thinwire.links.mesh import Peer
from thinwire.rounds.client import Client
from thinwire.rounds.parameters import Signature, join_rows, unpack_row
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import Update, VersionForm, VersionMessage
from thinwire.types import (
    WRONG_VALUES,
    DesyncError,
    LinkError,
    PayloadError,
    ThinwireError,
)
from thinwire.uses.training.swarm.member import SharedBlocks, SwarmMember
from thinwire.uses.training.swarm.pairs.model_part import ModelPart
from thinwire.uses.training.swarm.pairs.pair_crossing import WAIT, PairCrossing

GREETING, ORDER, READY, CHANGED = b"G", b"O", b"R", b"C"  # tags
VERSION, HOLD, TRIAL, OVER = b"v", b"h", b"t", b"o"  # words of an order
NUMBER = struct.Struct("<Q")
PARTING = 30.0  # seconds for a partner to hear that it is over; a keeper waits for longer


class PartnerLostError(ThinwireError):
    """The other half of a pair is gone; the text names it."""


@contextmanager
def lost(called: str) -> Iterator[None]:
    """Say that the partner is lost where the link to it fails, or what it says in the block is no sense."""
    try:
        yield
    except (LinkError, PayloadError, DesyncError, struct.error, *WRONG_VALUES) as e:
        raise PartnerLostError(f"{called} has lost a half: {e}") from e


class HalfMember(SwarmMember):
    """A member that trains its ``part`` of the model together with a partner; see ``SwarmMember``."""

    data: SharedBlocks
    part: ModelPart  # set by who makes it, as are the others
    crossing: PairCrossing
    partner: Peer
    called = "the pair"

    @property
    def values(self) -> int:
        """Values of the whole model."""
        return self.part.values

    @property
    def signature(self) -> Signature:
        """What the whole model is made of."""
        return self.part.signature

    def meet(self, partner: Peer, client: int) -> None:
        """Go on with this partner, as a client of this number. Errors: ``PartnerLostError``."""
        self.partner = partner
        self.data.forget()
        self.crossing.connect(partner)
        if client != self.id:
            self.residuals.forget(self.id)  # nobody can say what became of it
        self.id = client

    def part_of_steps(self, version: VersionMessage, start: Tensor) -> Tensor:
        """Return what this half's local steps changed, [1, n]; ``start`` [1, N] is of the whole model."""
        with lost(self.called):
            return Client.change(self, version, self.part.of(start))

    def try_steps(self, version: VersionMessage, start: Tensor) -> Tensor:
        """Take steps that are only timed: the moments stay as they are."""
        kept, self._local = self._local, self.moments.spec.open()
        try:
            return self.part_of_steps(version, start)
        finally:
            self._local = kept

    def hear(self, tag: bytes, what: str) -> bytes:
        """Return what the partner says next under a tag."""
        return self.partner.get(tag, WAIT, what)

    def greet(self, **values: Any) -> dict[str, Any]:
        """Tell the partner where this half stands, and return where the partner does."""
        held = list(self.held) if self.held is not None else None
        self.partner.mailbox.send(GREETING, json.dumps({"held": held, **values}).encode())
        found = json.loads(self.hear(GREETING, "its greeting"))
        if found["held"] != held:
            self._copy.drop()  # the next version comes whole, to both
        return dict(found)


class FirstHalf(HalfMember):
    """The half with the embedding, which is a client of the keeper for both."""

    def meet(self, partner: Peer, client: int) -> None:
        super().meet(partner, client)
        with lost(self.called):
            self.greet(client=client, sequence=self.sequence)

    def train(self, version: VersionMessage, start: Tensor | None = None) -> Update:
        """Return the update of both halves. Errors: also ``PartnerLostError``."""
        self.data.take(version)
        self._check_new(version)
        row = self._copy.take(version) if start is None else start
        with lost(self.called):
            self.partner.mailbox.send(ORDER, VERSION + version.pack())
            follows = self.hear(READY, "whether it can follow a version") == b"\1"
        if not follows:
            self._copy.drop()
            raise DesyncError("the other half of the pair cannot follow this version; ask for all of it")
        change = self.part_of_steps(version, row)
        with lost(self.called):
            theirs = self.hear(CHANGED, "what it changed")
            (size,) = NUMBER.unpack_from(theirs)
            packet, twin = theirs[NUMBER.size : NUMBER.size + size], theirs[NUMBER.size + size :]
            if self.part.twin is not None:
                at, many = self.part.twin
                change[:, at : at + many] += unpack_row(twin, many, self.id, change.device)
        update = self.answer(version, change)
        return replace(update, packet=join_rows([bytes(update.packet), packet]))

    def follow(self, version: VersionMessage) -> None:
        super().follow(version)
        self.partner.mailbox.send(ORDER, HOLD + version.pack())

    def change(self, version: VersionMessage, start: Tensor) -> Tensor:
        """Take steps together that are timed."""
        with lost(self.called):
            self.partner.mailbox.send(ORDER, TRIAL + NUMBER.pack(version.steps))
        return self.try_steps(version, start)

    def end(self, number: int) -> None:
        """Tell the partner that it is over, and wait until it heard: the relay ends with the keeper."""
        with suppress(LinkError):  # a partner that is lost by now is missed by nobody
            self.partner.mailbox.send(ORDER, OVER + NUMBER.pack(number))
            self.partner.get(READY, PARTING, "its goodbye")


class SecondHalf(HalfMember):
    """The half with the head, which does what the first one says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._twins = ClientResiduals()  # of a matrix that the first half sends

    def meet(self, partner: Peer, client: int) -> None:
        self.partner = partner
        with lost(self.called):
            found = self.greet()
            first, self.sequence = int(found["client"]), int(found["sequence"])
        super().meet(partner, first)

    def obey(self, patience: float) -> int:
        """Do what the first half says until it is over; return the number of the last round.

        Errors: ``PartnerLostError`` once the link fails, or after ``patience`` seconds without a word.
        """
        while True:
            with lost(self.called):
                order = self.partner.mailbox.get(ORDER, patience, "the next version")
                word, rest = order[:1], order[1:]
                if word == OVER:
                    self.partner.mailbox.send(READY, b"\1")
                    return int(NUMBER.unpack(rest)[0])
                if word == TRIAL:
                    steps = int(NUMBER.unpack(rest)[0])
            if word == TRIAL:
                trial = VersionMessage(0, 0, 0, 0, VersionForm.FULL, (), steps, 1e-6, Raw())
                self.try_steps(trial, torch.zeros(1, self.values))
            elif word == HOLD:
                with suppress(PayloadError, DesyncError):  # the next one is refused, and then comes whole
                    self.follow(VersionMessage.unpack(rest))
            else:
                self._train(rest)

    def _train(self, data: bytes) -> None:
        try:
            version = VersionMessage.unpack(data)
            self.data.take(version)
            row = self._copy.take(version)
        except (PayloadError, DesyncError):
            self._copy.drop()
            self.partner.mailbox.send(READY, b"\0")
            return
        self.partner.mailbox.send(READY, b"\1")
        change, sent = self.part_of_steps(version, row), self.part.sent
        self.residuals.settle(self.id, version.confirmed)
        codec = placed(version.codec, self.part.cut)
        packet = self.residuals.encode(self.id, version.sequence, change[:, :sent], codec)
        twin, self.sequence = b"", version.sequence
        if self.part.twin is not None:
            twin = self._twins.encode(self.id, version.sequence, change[:, sent:], version.codec)
            self._twins.settle(self.id, version.sequence)
        self.partner.mailbox.send(CHANGED, NUMBER.pack(len(packet)) + packet + twin)
