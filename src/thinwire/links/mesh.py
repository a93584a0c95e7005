"""Connect every rank with every other: one stack of links a pair, found through a store.

The lower rank of a pair listens and publishes its address, the higher one connects; or, if only the others'
ports are open, rank 0 connects to all::

    Mailbox(Reliable(Shaped(Metered(ZmqLink))))
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Protocol

from thinwire.links.address import Route, parse_address
from thinwire.links.link import LinkEstimate
from thinwire.links.mailbox import Mailbox
from thinwire.links.metered import Metered, wire_bytes
from thinwire.links.names import interface_names
from thinwire.links.pair import probe as probes
from thinwire.links.pair.reliable import AHEAD, LIMIT, MAX_SEGMENT, Reliable, piece_size
from thinwire.links.pair.segment import HEADER, label_of
from thinwire.links.pair.zmq_link import ZmqLink
from thinwire.links.relay.handshake import INSTANCE
from thinwire.links.relay.tunnel import RelayedLink, check_relay, relayed_link
from thinwire.links.security import check_host
from thinwire.links.shape import LinkShape
from thinwire.links.shaped import Shaped
from thinwire.links.tcp import congestion
from thinwire.links.tcp.counts import KernelCounts
from thinwire.types import WRONG_VALUES, InputError, LinkError, require

GRACE = 5.0  # seconds
LEAST, POLL = 0.002, 0.05  # seconds between two looks at the store
LOOK = 0.1  # seconds between two looks at whether anything moves
EVERYWHERE = ("0.0.0.0", "::")
AnyLink = ZmqLink | RelayedLink
Made = tuple[int, AnyLink]  # the other rank, and the link to it
_LIFE = secrets.token_hex(8)  # of this process; a copy made by fork has the number of another
_met: Counter[str] = Counter()  # meshes that this process has made, by key
_answered: set[str] = set()  # words of the questions that it has answered
_UNMET = (RuntimeError, TimeoutError, KeyError)  # how stores say that there is nothing, or that they are gone


@dataclass(frozen=True)
class Peer:
    """One other rank: where to send, and what is known of the way there."""

    rank: int
    mailbox: Mailbox
    reliable: Reliable
    shaped: Shaped
    meter: Metered
    kernel: KernelCounts

    @property
    def name(self) -> str:
        """``rank 1 (127.0.0.1:4567)``."""
        return self.mailbox.peer

    def wire_bytes(self, tag: bytes, nbytes: int) -> int:
        """Return the wire bytes of a message of ``nbytes`` under ``tag``, headers included, if sent once.

        Where the line is fast, and cuts messages otherwise, they are so up to a thousandth.
        """
        piece = self.reliable.piece
        whole, rest = divmod(1 + len(tag) + nbytes, piece)
        pieces = [piece] * whole + ([rest] if rest or not whole else [])
        return sum(wire_bytes(HEADER + n, self.meter.secure) for n in pieces)

    def get(self, tag: bytes, deadline: float, what: str, others: Iterable[Peer] = ()) -> bytes:
        """Return the next message with this tag; ``LinkError`` after ``deadline`` seconds without any move.

        A message that still arrives, or waits behind what this end still sends, is slow and not late. What
        moves to and from ``others`` counts as well: the peer may be waiting for one of them.
        """
        return get_all({self.rank: self}, tag, deadline, what, others)[self.rank]

    def probe(self, nbytes: int = probes.NBYTES, seconds: float = probes.SECONDS) -> Future[LinkEstimate]:
        """Measure the idle link to this peer with at most ``nbytes`` and about ``seconds`` of line time."""
        return probes.probe(self.mailbox, self.reliable, nbytes, seconds)

    @property
    def restarts(self) -> bool:
        """Whether the TCP that carries the link is known to shut its window in pauses."""
        tcp = self.kernel.read()
        if tcp is None or not self.shaped.shape.is_none:  # what is shaped in this process is slow above TCP
            return False
        return congestion.restarts(tcp.congestion)

    def measure(self) -> LinkEstimate:
        """Probe the idle link, and let the live estimate know how its TCP behaves; some seconds at most.

        After it the estimate is the line's also where messages are too small to fill TCP's window.
        """
        self.reliable.expect_restarts(self.restarts)
        return probes.measure(self.mailbox, self.reliable)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Send to this peer at full speed inside the block: for traffic outside the experiment."""
        with self.shaped.lifted():
            yield

    def redial(self) -> None:
        """Let TCP begin anew by another connection: one of the two ends dials, and nothing is lost."""
        self.shaped.redial()

    def close(self, timeout: float = 5.0) -> None:
        """Flush for at most ``timeout`` seconds and close the whole stack."""
        self.mailbox.close(timeout)


class StallDeadline:
    """A deadline in seconds that begins anew whenever something moves to or from one of some peers."""

    def __init__(self, peers: Iterable[Peer], deadline: float) -> None:
        self._peers, self._deadline = tuple(peers), deadline
        self._end, self._before = monotonic() + deadline, self._moved()

    def check(self, what: str, peer: Peer) -> None:
        """Raise ``LinkError`` that names who is awaited, and for what, once nothing moves any more."""
        now = self._moved()
        if now != self._before:
            self._end, self._before = monotonic() + self._deadline, now
        text = f"waited {self._deadline:g} s for {what} from {peer.name}; see what happens there"
        require(monotonic() <= self._end, LinkError, text)

    def _moved(self) -> list[tuple[int, int]]:
        return [peer.reliable.moved for peer in self._peers]


def get_all(
    peers: Mapping[int, Peer],
    tag: bytes,
    deadline: float,
    what: str,
    others: Iterable[Peer] = (),
    final: Callable[[Any], bool] | None = None,
) -> dict[int, Any]:
    """Return the next message with this tag from each peer, by rank in ascending order; see ``Peer.get``.

    ``final``: whether a message says that the rest need not come; what has come until then is returned.
    """
    progress = StallDeadline((*peers.values(), *others), deadline)
    waiting, found = dict(sorted(peers.items())), dict[int, Any]()
    while waiting:
        for i, (rank, peer) in enumerate(list(waiting.items())):
            body = peer.mailbox.look(tag, 0.0 if i else min(LOOK, deadline))
            if body is None:
                continue
            found[rank] = body
            del waiting[rank]
            if final is not None and final(body):
                return found
        for peer in waiting.values():
            progress.check(what, peer)
    return dict(sorted(found.items()))


def connect_mesh(
    rank: int,
    world: int,
    store: RendezvousStore | None,
    host: str = "127.0.0.1",
    token: bytes | None = None,
    shape: LinkShape | None = None,
    deadline: float = 20.0,
    connect_timeout: float = 60.0,
    advertise: str | None = None,
    port: int = 0,
    seed: int = 0,
    prefix: str = "thinwire/links",
    relay: str | None = None,
    control: str = congestion.AUTO,
    first_dials: bool = False,
) -> dict[int, Peer]:
    """Return a connected peer for every other rank. All ranks call this, with one ``world`` and ``token``.

    - ``store``: where the ranks publish their addresses, such as torch's ``TCPStore``.
    - ``host``, ``port``: the address to listen at; each further pair takes the next port, 0 takes free ones.
    - ``advertise``: the address that others use, if not ``host``; ``HOST:PORT`` if a router maps a port.
    - ``shape``: makes what this rank sends as slow as such a link, and ``seed`` draws its jitter and losses.
    - ``deadline``: a peer is lost after so many seconds of silence.
    - ``relay``: the address of a running ``thinwire relay``, ``HOST:PORT`` or ``HOST:PORT/RUN``. This rank
      dials out to it; store, host, port and advertise are not used. Two runs with one token need two names.
    - ``control``: TCP's congestion control, by name. ``first_dials``: rank 0 dials all, and never listens.
    - ``prefix``: of the keys in the store. Meshes that are made one after the other may share it; those of
      other ranks, or made at the same time, may not.

    Errors: ``InputError`` for an address off loopback, or a relay, without a token; ``LinkError`` that names
    the rank that did not come within ``connect_timeout`` seconds; ``AuthError`` for a wrong token.
    """
    require(0 <= rank < world, InputError, f"rank {rank} is not one of the {world} ranks 0 to {world - 1}")
    end, peers = monotonic() + connect_timeout, dict[int, Peer]()
    meeting = Meeting(store, prefix, rank)
    options: dict[str, Any] = {"connect_timeout": connect_timeout, "control": control}

    def tend() -> None:
        meeting.answer(other for other, peer in peers.items() if not peer.reliable.alive.is_set())

    def add(other: int, link: AnyLink) -> None:
        draw = seed * world * world + rank * world + other  # each direction has its own jitter and loss
        peers[other] = stack(other, link, shape or LinkShape(), draw, deadline, connect_timeout)

    if relay is not None:
        links = _relayed(rank, world, Route.parse(relay), check_relay(token), end, options)
    else:
        options |= {"token": token, "max_message": MAX_SEGMENT}
        links = _direct(rank, world, meeting, (host, port), advertise, tend, end, options, first_dials)
    try:
        for other, link in links:
            add(other, link)
        _await_all(peers.values(), tend, end)
    except BaseException:
        for peer in peers.values():
            peer.close(0.0)
        raise
    meeting.met()
    return peers


def _await_all(peers: Iterable[Peer], tend: Callable[[], object], end: float) -> None:
    """Wait for a sign of life from all, and let those who come know meanwhile where this rank listens."""
    for peer in peers:
        pause = LEAST
        while not peer.reliable.alive.wait(pause) and monotonic() < end + GRACE:
            tend()
            pause = min(2 * pause, POLL)
        # the link below gives up first, because it knows better why nobody came (a wrong token?)
        peer.reliable.wait_alive(max(0.0, end - monotonic()))


def pair_number(low: int, high: int, world: int) -> int:
    """Number the pairs of ranks from 0: 0-1, 0-2, ..., 1-2, ...

    >>> [pair_number(*pair, world=3) for pair in ((0, 1), (0, 2), (1, 2))]
    [0, 1, 2]
    """
    return low * (2 * world - low - 1) // 2 + high - low - 1


def _sides(rank: int, world: int, first_dials: bool) -> tuple[list[int], list[int]]:
    """Return for which other ranks this one listens, and to which it connects."""
    lower, higher = list(range(rank)), list(range(rank + 1, world))
    if not first_dials:
        return higher, lower
    return (lower[:1] + higher, lower[1:]) if rank else ([], higher)


def _relayed(
    rank: int, world: int, route: Route, token: bytes, end: float, options: dict[str, Any]
) -> Iterator[Made]:
    """Make the links of ``rank`` through a relay: first those where it listens, which wait for nobody."""
    instance = secrets.token_bytes(INSTANCE)
    for other in (*range(rank + 1, world), *range(rank)):
        latest = max(end, monotonic() + 1.0)
        way: dict[str, Any] = {"instance": instance, "max_message": MAX_SEGMENT, "end": latest}
        yield other, relayed_link(route, token, rank, other, **way, **options)


def _direct(
    rank: int,
    world: int,
    meeting: Meeting,
    at: tuple[str, int],
    advertise: str | None,
    tend: Callable[[], object],
    end: float,
    options: dict[str, Any],
    first_dials: bool,
) -> Iterator[Made]:
    """Make the links of ``rank`` to the addresses that the ranks publish in the store."""
    (host, port), (awaited, left) = at, _sides(rank, world, first_dials)
    check_host(host, options["token"])
    shown, mapped = parse_address(advertise or host)
    if shown in (*EVERYWHERE, *interface_names()):
        raise InputError(f"others cannot reach {shown}; also say by which address they reach this rank")
    meeting.check()
    for other in awaited:
        name = secrets.token_hex(16)  # known to those who can read the store
        pair = pair_number(min(rank, other), max(rank, other), world)
        link = ZmqLink.bind(name.encode(), host, port and port + pair, peer=f"rank {other}", **options)
        yield other, link
        meeting.listen(other, shown, link.port if mapped is None else mapped + pair, name)
    for other in left:
        meeting.ask(other)
    began, pause = monotonic(), LEAST
    while left:
        tend()
        for other in list(left):
            if (found := meeting.address(other)) is not None:
                address, number, name = found
                yield other, ZmqLink.connect(name.encode(), address, number, peer=f"rank {other}", **options)
                left.remove(other)
        late, waited = monotonic() > end, f"waited {end - began:.0f} s"
        if left:
            require(not late, LinkError, f"{waited} for rank {left[0]} to publish its address, in vain")
            sleep(pause := min(2 * pause, POLL))


def stack(
    rank: int,
    link: AnyLink,
    shape: LinkShape,
    seed: int,
    deadline: float,
    first: float,
    max_message: int = LIMIT,
) -> Peer:
    """Put the stack of links on ``link``; ``first``: seconds that the peer's first sign of life may take.

    ``max_message``: bytes of the largest message that is read. Between ranks it is what a sender may have on
    its way: one of activations is as large as the model, the batch and the sequence make it.
    """
    meter = Metered(link, label_of)
    shaped = Shaped(meter, shape, seed)
    kernel = link.kernel_counts() if isinstance(link, RelayedLink) else KernelCounts(link.port, link.binds)
    reliable = Reliable(
        shaped,
        deadline,
        first_deadline=first + GRACE,
        max_message=max_message,
        piece=piece_size(shape.rate, deadline),
        kernel=kernel,
        ahead=AHEAD if shape.is_none else None,
    )
    return Peer(rank, Mailbox(reliable), reliable, shaped, meter, kernel)


class RendezvousStore(Protocol):
    """What is needed of a ``torch.distributed`` store."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it up to the store's own timeout."""
        ...


class Meeting:
    """The pairs of ``rank`` at a store, under ``prefix``: higher ranks are told where it is, lower asked.

    Each question has a word of its own, and each answer is under its question's word. So nobody reads what an
    earlier mesh, a run that failed or a process that was started again has left in the store.
    A store without torch's ``check`` is asked by ``get``, which waits. Errors of all: ``LinkError`` where the
    store does not answer.
    """

    def __init__(self, store: RendezvousStore | None, prefix: str, rank: int) -> None:
        self._store: Any = store  # which ``check`` finds to be one
        self._prefix, self._rank = prefix, rank
        self._check: Any = getattr(store, "check", None)
        self._told: dict[int, tuple[str, dict[str, str]]] = {}  # the address, and for which meshes of whom
        self._asked: dict[int, str] = {}  # the word of each question to a lower rank

    def check(self) -> None:
        """Raise ``InputError`` where there is no store."""
        require(
            self._store is not None,
            InputError,
            "without a relay the ranks meet at a store; pass one to connect_mesh",
        )

    def listen(self, other: int, host: str, port: int, name: str) -> None:
        """Let ``answer`` tell the higher rank ``other`` that address."""
        self._told[other] = json.dumps([host, port, name]), {}

    def answer(self, others: Iterable[int]) -> None:
        """Tell those of ``others`` that have asked for this mesh where this rank listens.

        What a process that was told asks for its next mesh is left to this rank's next one.
        """
        for other in self._told.keys() & set(others):
            word = self._look(self._key(self._rank, other))
            if word and word not in _answered:
                self._tell(word, self._key(self._rank, other, word), *self._told[other])

    def _tell(self, word: str, key: str, told: str, meshes: dict[str, str]) -> None:
        if self._check is not None and self._exists(key):
            return  # by an earlier process of this rank
        life, _, rest = word.partition("/")
        mesh = rest.partition("/")[0]
        if meshes.setdefault(life, mesh) == mesh:
            _answered.add(word)
            self._set(key, told)

    def ask(self, other: int) -> None:
        """Ask the lower rank ``other`` where it listens."""
        key = self._key(other, self._rank)
        self._asked[other] = f"{_LIFE}-{os.getpid()}/{_met[key]}/{secrets.token_hex(8)}"
        self._set(key, self._asked[other])

    def address(self, other: int) -> tuple[str, int, str] | None:
        """Return the host, port and name that the lower rank ``other`` has answered; None before.

        Errors: ``InputError`` where another process is this rank under the same prefix.
        """
        word, key = self._asked[other], self._key(other, self._rank)
        found = self._look(self._key(other, self._rank, word))
        if found is None:
            require(
                self._look(key) in (None, word),
                InputError,
                f"another process came as rank {self._rank} to the mesh {self._prefix!r} of this store; give "
                "each process a rank of its own, and meshes that are made at the same time another prefix",
            )
            return None
        try:
            host, port, name = json.loads(found)
            return str(host), int(port), str(name)
        except WRONG_VALUES as e:
            raise LinkError(f"the address that rank {other} published cannot be read") from e

    def met(self) -> None:
        """Note that the mesh is made: the next question is for another one."""
        _met.update(self._key(other, self._rank) for other in self._asked)

    def _key(self, low: int, high: int, word: str = "ask") -> str:
        return f"{self._prefix}/{low}-{high}/{word}"

    def _set(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except _UNMET as e:
            raise _gone(e) from e

    def _exists(self, key: str) -> bool:
        try:
            return bool(self._check([key]))
        except _UNMET as e:
            raise _gone(e) from e

    def _look(self, key: str) -> str | None:
        """Return a value, or None where there is none, or none came while the store waited."""
        if self._check is not None and not self._exists(key):
            return None
        try:
            return bytes(self._store.get(key)).decode(errors="replace")
        except _UNMET as e:
            if self._check is None:
                return None
            raise _gone(e) from e


def _gone(error: Exception) -> LinkError:
    why = str(error).partition("\n")[0][:200]
    return LinkError(f"the store where the ranks meet does not answer ({why}); see whether its holder runs")
