"""What a server looks at before it takes an update, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.types import MissingExtra, PayloadError, require
from thinwire.uses.federated.message import HEAD, Update
from thinwire.uses.federated.roster import Member
from thinwire.uses.federated.row import most_nbytes, unpack_row

LARGEST = 1e24  # of a value in an update: the sum of millions of such is a float32 still


@dataclass(frozen=True)
class Refusal:
    """An update that was not taken, and why: one sentence. Nothing has changed but counts of bytes."""

    client: int
    reason: str


@dataclass(frozen=True)
class Receipt:
    """An update that was taken. ``version``: the number of the one that it completed, if it did.

    ``kept``: how many of its values are not zero.
    """

    client: int
    sequence: int
    staleness: int
    kept: int
    version: int | None = None


def checked(data: bytes | memoryview, client: int, member: Member, values: int) -> tuple[Update, int]:
    """Return the update in ``data``, which ``client`` sent, if it may be taken, and how many values it has.

    Errors: ``PayloadError`` saying why not, in one sentence.
    """
    most = HEAD.size + Update.FORM.size + most_nbytes(values)
    require(len(data) <= most, PayloadError, f"{len(data)} bytes for {values} values, at most {most} may be")
    try:
        update = Update.unpack(data)
        check_place(update, client, member)
        row = unpack_row(update.packet, values, client)
        check_values(row)
    except MissingExtra as e:
        raise PayloadError(f"it is coded in a way that this server cannot read: {e}") from e
    return update, int(row.count_nonzero())


def check_place(update: Update, client: int, member: Member) -> None:
    """Raise ``PayloadError`` unless the update is the one that ``client`` owes."""
    require(update.client == client, PayloadError, f"it bears the id of client {update.client}")
    n, issued = update.sequence, member.issued
    require(n > member.confirmed, PayloadError, f"update {n} was taken already, or one after it was")
    require(n >= issued, PayloadError, f"update {n} is void: the client was given another version since")
    require(n == issued, PayloadError, f"update {n} was not asked for; {issued} is the newest that was")
    wrong = f"it starts from version {update.version}, and version {member.started} was given"
    require(update.version == member.started, PayloadError, wrong)
    most = member.device.samples
    require(update.samples >= 1, PayloadError, "it says that it was trained on 0 samples")
    wrong = f"it says that it was trained on {update.samples} samples, and the client has {most}"
    require(update.samples <= most, PayloadError, wrong)


def check_values(row: Tensor) -> None:
    """Raise ``PayloadError`` for a NaN, an infinity, or values that no training makes."""
    low, high = (float(bound) for bound in torch.aminmax(row))  # a NaN is both
    require(low == low and -low < float("inf") > high, PayloadError, "it holds a NaN or an infinity")
    wrong = f"it holds {max(high, -low):.2g}, beyond {LARGEST:g}, as a training that diverged"
    require(max(high, -low) <= LARGEST, PayloadError, wrong)
