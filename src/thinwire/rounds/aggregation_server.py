"""The server: it gives versions out, checks what comes back, and makes versions of it by a rule."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.channels.references import under
from thinwire.codecs import Raw
from thinwire.rounds.aggregation import ArrivedUpdate, Federation, Rule, summed
from thinwire.rounds.client_profile import (
    Assignment,
    ClientProfile,
    FederatedPolicy,
    Situation,
)
from thinwire.rounds.download import Download, FullDownload
from thinwire.rounds.judging import Candidate, Judge, Judgement
from thinwire.rounds.local_training import Decay, Rates
from thinwire.rounds.parameters import (
    Parameters,
    Signature,
    byte_tensor,
    here,
    most_nbytes,
    unpack_row,
)
from thinwire.rounds.update_messages import HEAD, MOST_ROOM, Held, Update, VersionMessage
from thinwire.rounds.work import OwnData, WorkSource
from thinwire.staging import to_host
from thinwire.types import MAX_KEY, InputError, MissingExtra, PayloadError, ThinwireError, require

NORMS = 256  # of the last updates that policies are told
LARGEST = 1e24  # of a value in an update: the sum of millions of such is a float32 still


class Server:
    """Hold the weights, the clients and the updates that wait; no transport and no clock.

    ``model``: version 0, the ``Parameters`` of a model, with which those of clients are compared by name,
    shape and type; or a row [1, N] alone, of which only the number can be. A client is given versions by
    ``issue``, one at a time: each voids an earlier one that it did not answer, so no update counts twice,
    whatever is lost on the way. Rules in rounds want ``begin`` first, which says who is asked; ``close`` ends
    a round, or a period.

    ``work``: the samples that go with versions; ``judge``: how far updates are trusted; all are
    in full without one.

    Updates are added in the order of (client, sequence), so the bits of a version do not depend on the order
    in which they came.

    >>> from thinwire.rounds.aggregation import Synchronous
    >>> class Same:
    ...     def assign(self, devices, situation):
    ...         return [Assignment(steps=3)] * len(devices)
    >>> server = Server(torch.zeros(1, 4), Synchronous(), Same())
    >>> server.join(ClientProfile(id=7, step_seconds=0.1, samples=50))
    >>> server.begin([7])
    >>> version = server.issue(7)
    >>> version.number, version.sequence, version.steps, version.rate
    (0, 1, 3, 0.1)
    >>> server.receive(7, b"?")
    Rejected(client=7, reason='an update ends 7 bytes too early: it was cut')
    """

    def __init__(
        self,
        model: Tensor | Parameters,
        rule: Rule,
        policy: FederatedPolicy,
        download: Download | None = None,
        rates: Rates | None = None,
        work: WorkSource | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.signature = model.signature if isinstance(model, Parameters) else None
        weights = model.read() if isinstance(model, Parameters) else model
        row = weights.detach().reshape(1, -1).float().clone()
        fits = row.numel() > 0 and bool(row.isfinite().all())
        require(fits, InputError, "the first weights are empty or not finite; give those of a sound model")
        self.weights, self.version = row, 0
        self.rule, self.policy = rule, policy
        self.download, self.rates = download or FullDownload(), rates or Decay()
        self.work, self.judge = work or OwnData(), judge
        self.verdicts: dict[int, Judgement] = {}  # of those whose updates made the newest version
        self._sender = self.download.open(row)
        self._members: dict[int, ClientState] = {}
        self._norms: deque[float] = deque(maxlen=NORMS)
        self._asked: set[int] = set()
        self._gone = 0  # asked in this round, and given up
        self._round: dict[int, int] = {}  # who was there as the round began, and with how many samples
        self._waiting: dict[int, list[Update]] = {}  # by client, in the order of their sequence numbers
        self._rows: dict[tuple[int, int], Tensor] = {}  # of these, decoded, by client and sequence number
        self._starts: dict[int, Tensor] = {}  # what clients that train were given, for rules that mix
        self._assigned: tuple[int, dict[int, Assignment]] | None = None

    # -- clients -------------------------------------------------------------------------------------------

    def join(self, device: ClientProfile) -> None:
        """Take a client in, or back, or note that its device has changed."""
        known = self._members.get(device.id)
        if known is None:
            self._members[device.id] = ClientState(device)
        else:
            known.device, known.present = device, True
        self._assigned = None

    def leave(self, client: int) -> int | None:
        """Count no longer on a client, which may come back; return the version that this completes."""
        self._member(client).present = False
        if client not in self._round:  # else its round goes on as it was planned
            self._assigned = None
        return self.give_up(client)

    @property
    def clients(self) -> list[int]:
        """Those present, in order."""
        members = list(self._members.items())  # at once: a branch asks on another thread
        return sorted(c for c, m in members if m.present)

    @property
    def known(self) -> list[int]:
        """All that ever joined, in order."""
        return sorted(self._members)

    def names(self) -> dict[int, str]:
        """Return all that ever joined by number, and as they call themselves."""
        return {client: member.device.name for client, member in self._members.items()}

    def device(self, client: int) -> ClientProfile:
        """Return what a client said last of itself."""
        return self._member(client).device

    @property
    def missing(self) -> list[int]:
        """Those asked in this round whose updates have not come, in order."""
        return sorted(self._asked - self._waiting.keys())

    @property
    def answers(self) -> tuple[int, int]:
        """Of how many clients updates wait, and how many were asked in this round."""
        return len(self._waiting), len(self._asked) + self._gone

    @property
    def most_asked(self) -> int:
        """How many may be asked in a round."""
        return len(self._members)

    @property
    def waiting(self) -> int:
        """How many updates wait to be made a version of."""
        return sum(map(len, self._waiting.values()))

    def traffic(self, client: int) -> ClientTraffic:
        """Return what crossed between the server and a client."""
        return self._member(client).traffic

    def assignments(self) -> dict[int, Assignment]:
        """Return what the policy has each client that is present do now; asked once a version."""
        if self._assigned is None or self._assigned[0] != self.version:
            devices = [self._members[c].device for c in sorted(self._round.keys() | set(self.clients))]
            rates, v = self.rates, self.version
            numbers = v, rates.at(v), rates.first, rates.last
            situation = Situation(self.weights.numel(), *numbers, norms=tuple(self._norms))
            found = list(self.policy.assign(devices, situation)) if devices else []
            wrong = f"{self.policy!r} made {len(found)} assignments for {len(devices)} devices"
            require(len(found) == len(devices), InputError, wrong)
            self._assigned = v, {d.id: a for d, a in zip(devices, found, strict=True)}
        return self._assigned[1]

    @property
    def given(self) -> Tensor:
        """What clients start from who take the newest version, [1, N]; not to be written to."""
        return self._sender.given

    @property
    def newest(self) -> Held:
        """What clients hold that took the newest version, if downloads are deltas."""
        return Held(self.version, self._sender.check)

    # -- versions out --------------------------------------------------------------------------------------

    def begin(self, clients: Iterable[int]) -> None:
        """Open a round of these clients. Errors: ``InputError`` for one not present, or if one is open."""
        require(self.rule.in_rounds, InputError, f"{self.rule!r} knows no rounds; issue versions at any time")
        asked, wrong = set(clients), f"the round of version {self.version} is open; close it first"
        require(not self._asked, InputError, wrong)
        absent = sorted(asked - set(self.clients))
        require(not absent, InputError, f"clients {absent[:8]} are not here; ask others")
        require(len(asked) > 0, InputError, "nobody is asked in this round; ask one client at least")
        self._asked, self._gone = asked, 0
        self._round = {c: m.device.samples for c, m in self._members.items() if m.present}

    def issue(self, client: int, held: Held | None = None, after: int = 0) -> VersionMessage:
        """Return the newest version for ``client``, which holds ``held``, and what it is to do; count bytes.

        ``after``: the client's last sequence number, which is ahead where this server was set back.
        Errors: ``InputError`` for a client that is not present, or not asked in this round, or whose update
        has come.
        """
        member = self._member(client)
        require(member.present, InputError, f"client {client} has left; let it join again first")
        asked = not self.rule.in_rounds or client in self.missing
        require(asked, InputError, f"client {client} is not to train now; it is not asked, or has answered")
        wrong = f"client {client} says that it sent {after} updates; let it begin anew"
        require(0 <= after < MAX_KEY // 2, InputError, wrong)
        assignment = self.assignments()[client]
        form, packets = self._sender.lead(held)
        member.issued, member.started = max(member.issued, after) + 1, self.version
        numbers = self.version, member.issued, member.confirmed, self._sender.check
        rate, made = self.rates.at(self.version), self.signature.digest if self.signature else 0
        steps, codec = self.work.most(client, assignment.steps), assignment.codec
        work = self.work.give(client, steps)
        version = VersionMessage(*numbers, form, packets, steps, rate, codec, made, work)
        member.traffic.down += version.nbytes
        member.traffic.raw_down += 4 * self.weights.numel()
        if self.rule.mixes:
            self._starts[self.version] = self.given
            self._forget_starts()
        return version

    def _forget_starts(self) -> None:
        used = {m.started for m in self._members.values() if m.owes}
        used |= {u.version for updates in self._waiting.values() for u in updates}
        self._starts = {v: row for v, row in self._starts.items() if v in used}

    # -- updates in ----------------------------------------------------------------------------------------

    def receive(self, client: int, data: bytes | memoryview) -> Accepted | Rejected:
        """Take the bytes of an update that came from ``client``, as the transport knows it, or refuse them.

        A refusal changes nothing but the counted bytes. An update may complete a version: see the receipt.
        """
        member = self._members.get(client)
        if member is None:
            return Rejected(client, f"client {client} is not known; let it join first")
        member.traffic.up += len(data)
        member.traffic.raw_up += 4 * self.weights.numel()
        try:
            update, row, kept = checked(data, client, member, self.weights)
            self._check_round(update)
            self._check_samples(update)
        except PayloadError as e:
            member.traffic.refused += 1
            return Rejected(client, str(e))
        staleness = self.version - update.version
        member.confirmed = update.sequence
        self.work.settle(client, True, update.left)
        member.traffic.updates += 1
        member.traffic.staleness += staleness
        self._waiting.setdefault(client, []).append(update)
        if self.judge is not None:  # which wants all rows at once: none is decoded twice
            self._rows[client, update.sequence] = row
        due = self._advance_if_due()
        return Accepted(client, update.sequence, staleness, kept, due, update.samples)

    def _check_samples(self, update: Update) -> None:
        given, said = self.work.samples(update.client), update.samples
        left = [first + many for first, many in update.left]
        fits = said + sum(many for _, many in update.left) <= given and max(left, default=0) <= given
        wrong = f"it says that it was trained on {said} samples, and was given {given}"
        require(fits or not (given or left), PayloadError, wrong)

    def _check_round(self, update: Update) -> None:
        if self.rule.in_rounds and update.version != self.version:
            raise PayloadError(f"it is late: the round of version {update.version} is over")
        if self.rule.in_rounds and update.client not in self._asked:
            raise PayloadError("nobody waits for it: the client was given up in this round")

    def give_up(self, client: int) -> int | None:
        """Wait no longer in this round for a client; return the version that this completes, if any.

        In a round that nobody answered, ask again by ``close`` and ``begin``.
        """
        self.work.settle(client, done=False)
        if client in self._waiting or client not in self._asked:
            return None
        self._asked.discard(client)
        self._gone += 1
        return self._advance_if_due()

    def _advance_if_due(self) -> int | None:
        due = self.rule.is_due(self.waiting, len(self.missing))
        return self.close() if due else None

    def close(self) -> int | None:
        """Make a version of all updates that wait, and return its number; None where there are none.

        Ends the round or period. Errors: ``ThinwireError`` where the updates have no weight together, or the
        version would not be finite; then nothing has changed.
        """
        if self._waiting:
            return self._make(self._sum())
        self._end()
        return None

    def _make(self, change: Tensor) -> int:
        """Make a version by what the updates together take off the weights, [1, N] float64."""
        found = self.weights.double().sub_(change).float()
        wrong = f"version {self.version + 1} would not be finite; lower the step size or the server's rate"
        require(bool(found.isfinite().all()), ThinwireError, wrong)
        return self._go_on(found)

    def collect(self) -> dict[int, Tensor]:
        """Return what the updates that wait change, [1, N], by client; they wait no longer.

        For versions that are made elsewhere, by ``adopt``.
        """
        waiting, self._waiting = self._waiting, {}
        rows = {c: list(self._changes(updates)) for c, updates in sorted(waiting.items())}
        return {c: torch.stack(changes).sum(0) for c, changes in rows.items()}

    def adopt(self, weights: Tensor) -> int:
        """Make a version of ``weights`` [1, N], whoever made them, and return its number.

        Updates that wait are dropped. Errors: ``InputError`` for another number of values, or values that are
        not finite; then nothing has changed.
        """
        many, have = weights.numel(), self.weights.numel()
        require(many == have, InputError, f"a version of {many} values for a model of {have}; give as many")
        sound = bool(weights.isfinite().all())
        require(sound, InputError, f"version {self.version + 1} would not be finite; lower the step size")
        return self._go_on(weights.detach().to(self.weights.device).reshape(1, -1).float().clone())

    def _go_on(self, weights: Tensor) -> int:
        self._norms.append(float((weights.double() - self.weights).norm()))
        self._sender.advance(weights)
        self.weights, self.version, self._waiting = weights, self.version + 1, {}
        self._end()
        return self.version

    def _end(self) -> None:
        """End the round or period."""
        self._asked, self._gone, self._round = set(), 0, {}
        self._rows.clear()
        if self.rule.mixes:
            self._forget_starts()

    def _sum(self) -> Tensor:
        updates = [u for c in sorted(self._waiting) for u in self._waiting[c]]
        arrivals = [ArrivedUpdate(u.client, u.sequence, u.samples, self.version - u.version) for u in updates]
        there = {c: m.device.samples for c, m in self._members.items() if m.present or c in self._waiting}
        counted = list((self._round or there).values())
        asked = len(self._asked) + self._gone
        shares = self.rule.shares(arrivals, Federation(len(counted), sum(counted), asked))
        changes: Iterable[Tensor] = self._changes(updates)
        if self.judge is not None:
            changes = rows = list(changes)
            shares = self._trusted(self.judge, shares, updates, rows)
        return summed(self.weights, zip(shares, changes, strict=True))

    def _trusted(
        self, judge: Judge, shares: list[float], updates: Sequence[Update], rows: Sequence[Tensor]
    ) -> list[float]:
        """Return the shares by the judge's trust, as much in all as before; all 0 where nobody is trusted."""
        found = [
            Candidate(u.client, row, u.samples, self.version - u.version, self.device(u.client).members)
            for u, row in zip(updates, rows, strict=True)
        ]
        self.verdicts = dict(judge.weigh(self.version, self.weights, found))
        trusted = [
            s * self.verdicts.get(u.client, Judgement()).trust for s, u in zip(shares, updates, strict=True)
        ]
        total = sum(trusted)
        return [s * sum(shares) / total for s in trusted] if total > 0 else trusted

    def _changes(self, updates: Iterable[Update]) -> Iterator[Tensor]:
        for u in updates:
            change = self._rows.get((u.client, u.sequence))
            if change is None:
                change = unpack_row(u.packet, self.weights.numel(), u.client, self.weights.device)
            yield change + (self.weights - self._starts[u.version]) if self.rule.mixes else change

    def _member(self, client: int) -> ClientState:
        member = self._members.get(client)
        if member is None:
            raise InputError(f"client {client} is not known; let it join first")
        return member

    # -- to go on later ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that is kept, as plain tensors."""
        updates = [u for c in sorted(self._waiting) for u in self._waiting[c]]
        words = self.words()
        state = {"weights": here(self.weights), "words": byte_tensor(json.dumps(words).encode())}
        state |= {f"update.{i}": byte_tensor(u.pack()) for i, u in enumerate(updates)}
        state |= {f"start.{v}": here(row) for v, row in self._starts.items()}
        return state | {f"download.{name}": x for name, x in self._sender.state_dict().items()}

    def words(self) -> dict[str, Any]:
        """Return what is known beside weights and updates, as plain values."""
        return {
            "config": self._config(),
            "model": self.signature and list(self.signature),
            "version": self.version,
            "asked": sorted(self._asked),
            "gone": self._gone,
            "round": list(self._round.items()),
            "norms": list(self._norms),
            "members": {str(c): m.to_dict() for c, m in sorted(self._members.items())},
            "work": self.work.state(),
            "judge": self.judge.state() if self.judge is not None else {},
        }

    def state_at(self, number: int, row: Tensor, words: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the state between rounds of a server whose clients hold ``row`` [1, N] as their version.

        ``number``: of that version. What the codec of downloads dropped is not in it. ``words``: those of
        that server.
        """
        between = {"version": number, "asked": [], "gone": 0, "round": []}
        said = json.dumps({**words, **between}).encode()
        sender = self.download.open(here(row)).state_at(number)
        state = {"weights": here(row), "words": byte_tensor(said)}
        return state | {f"download.{name}": x for name, x in sender.items()}

    def behind(self, held: Held | None) -> int | None:
        """Return how many messages lead on from ``held``; None where only the whole version does."""
        return self._sender.behind(held)

    def lead(self, held: Held | None, work: bytes = b"") -> VersionMessage:
        """Return what leads somebody who holds ``held`` to the newest version, and no local steps with it.

        For machines that stand ready, with which ``work`` goes, and for clients before they take part.
        """
        form, packets = self._sender.lead(held)
        made = self.signature.digest if self.signature else 0
        numbers = self.version, 1, 0, self._sender.check
        return VersionMessage(*numbers, form, packets, 1, self.rates.first, Raw(), made, work)

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Load a state, with all clients away until they say that they are here. Errors: as below."""
        self.load_state_dict(state)
        for client in self.clients:
            self.leave(client)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state_dict`` returned, bit for bit.

        Errors: ``InputError`` where that server had other values, another rule or another download.
        """
        words = json.loads(state["words"].numpy().tobytes())
        wrong = f"the state is one of {words['config']}, and this server is one of {self._config()}"
        require(words["config"] == self._config(), InputError, wrong)
        if self.signature is not None:
            self.signature.check(Signature.read(words.get("model")), "the model of the state")
        device = self.weights.device
        self.weights, self.version = state["weights"].to(device, copy=True), words["version"]
        self._asked, self._gone = set(words["asked"]), words["gone"]
        self._round = dict(words.get("round", ()))
        self._norms = deque(words["norms"], NORMS)
        self._members = {int(c): ClientState.from_dict(m) for c, m in words["members"].items()}
        self.work.load(words.get("work", {}))
        if self.judge is not None:
            self.judge.load(words.get("judge", {}))
        starts = under(state, "start.").items()
        self._starts = {int(v): row.to(device, copy=True) for v, row in starts}
        self._waiting, self._assigned = {}, None
        for i in range(sum(name.startswith("update.") for name in state)):
            update = Update.unpack(state[f"update.{i}"].numpy().tobytes())
            self._waiting.setdefault(update.client, []).append(update)
        self._sender.load_state_dict(under(state, "download."), self.weights)

    def _config(self) -> str:
        rates: Any = replace(self.rates, horizon=0)  # type: ignore[type-var]  # which may move
        return f"{self.weights.numel()} values under {self.rule!r}, {self.download!r} and {rates!r}"


@dataclass(frozen=True)
class Rejected:
    """An update that was not taken, and why: one sentence. Nothing has changed but counts of bytes."""

    client: int
    reason: str


@dataclass(frozen=True)
class Accepted:
    """An update that was taken. ``version``: the number of the one that it completed, if it did.

    ``kept``: how many of its values are not zero; ``samples``: on how many it was trained.
    """

    client: int
    sequence: int
    staleness: int
    kept: int
    version: int | None = None
    samples: int = 0


def checked(
    data: bytes | memoryview, client: int, member: ClientState, weights: Tensor
) -> tuple[Update, Tensor, int]:
    """Return the update in ``data``, which ``client`` sent, if it may be taken; its row, and how many values.

    Errors: ``PayloadError`` saying why not, in one sentence.
    """
    values = weights.numel()
    most = HEAD.size + MOST_ROOM + most_nbytes(values)
    require(len(data) <= most, PayloadError, f"{len(data)} bytes for {values} values, at most {most} may be")
    try:
        update = Update.unpack(data)
        check_place(update, client, member)
        row = unpack_row(update.packet, values, client, weights.device)
        kept = check_values(row)
    except MissingExtra as e:
        raise PayloadError(f"it is coded in a way that this server cannot read: {e}") from e
    return update, row, kept


def check_place(update: Update, client: int, member: ClientState) -> None:
    """Raise ``PayloadError`` unless the update is the one that ``client`` owes."""
    n, issued, most = update.sequence, member.issued, member.device.samples
    if update.client != client:
        raise PayloadError(f"it bears the id of client {update.client}")
    if n <= member.confirmed:
        raise PayloadError(f"update {n} was taken already, or one after it was")
    if n < issued:
        raise PayloadError(f"update {n} is void: the client was given another version since")
    if n > issued:
        raise PayloadError(f"update {n} was not asked for; {issued} is the newest that was")
    if update.version != member.started:
        raise PayloadError(f"it starts from version {update.version}, and version {member.started} was given")
    if not 1 <= update.samples <= most:
        there = f", and the client has {most}" if update.samples else ""
        raise PayloadError(f"it says that it was trained on {update.samples} samples{there}")


def check_values(row: Tensor) -> int:
    """Return how many values are not zero.

    Errors: ``PayloadError`` for a NaN, an infinity, or values that no training makes.
    """
    found = to_host([*torch.aminmax(row), row.count_nonzero()]).tensors()  # a NaN is both, the lowest too
    low, high, many = (x.item() for x in found)
    if not (low == low and -low < math.inf > high):
        raise PayloadError("it holds a NaN or an infinity")
    if (largest := max(high, -low)) > LARGEST:
        raise PayloadError(f"it holds {largest:.2g}, beyond {LARGEST:g}, as a training that diverged")
    return int(many)


@dataclass
class ClientTraffic:
    """Bytes between the server and one client, and what the same would be uncompressed; counts of updates."""

    up: int = 0
    down: int = 0
    raw_up: int = 0
    raw_down: int = 0
    updates: int = 0  # taken
    refused: int = 0
    staleness: int = 0  # of all that were taken, together


@dataclass
class ClientState:
    """One client. ``present``: policies weigh it, and rounds may ask it."""

    device: ClientProfile
    present: bool = True
    issued: int = 0  # sequence number of what it was given last
    started: int = 0  # the version that this was
    confirmed: int = 0  # sequence number of its last update that was taken
    traffic: ClientTraffic = field(default_factory=ClientTraffic)

    @property
    def owes(self) -> bool:
        """Whether an update is to come from it."""
        return self.issued > self.confirmed

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ClientState:
        """Return the member that ``to_dict`` described."""
        values = values | {
            "device": ClientProfile(**values["device"]),
            "traffic": ClientTraffic(**values["traffic"]),
        }
        return cls(**values)
