"""States, models, publishers and strangers for the tests of publishers and followers over sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import torch
from tcp_proxy import TcpProxy
from torch import Tensor, nn
from waiting import HOST, LONG, until

from thinwire.links.hub.hub import Hub
from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import EventKind
from thinwire.state.layout import Layout
from thinwire.uses.following.push.protocol import (
    DOWN,
    MAGIC,
    MAX_NAME,
    NOTHING,
    PROTOCOL,
    UP,
    Ack,
    Begin,
    Chunk,
    End,
    Hello,
    LayoutIs,
    unpack,
)
from thinwire.uses.following.push.publisher import Publisher
from thinwire.uses.following.push.state_relay import StateRelay


def weights(seed: int = 0, rows: int = 300) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(rows, 200, generator=g),
        "bias": torch.randn(50, generator=g),
        "steps": torch.zeros(3, dtype=torch.int64),
    }


def train(w: dict[str, Tensor], by: float = 1e-4) -> None:
    """Move some values of a state, as a step of an optimiser does."""
    w["embed"] += by * torch.randn(w["embed"].shape)
    w["bias"][:5] += by
    w["steps"] += 1


def used(w: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of a state as followers use it."""
    return {n: x.bfloat16().clone() if x.is_floating_point() else x.clone() for n, x in w.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def publisher(w: dict[str, Tensor], **options: object) -> Publisher:
    return Publisher(w, dtype=torch.bfloat16, **options)  # type: ignore[arg-type]


class Model(nn.Module):
    """A model that holds the state of ``weights``."""

    def __init__(self, rows: int = 300, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(rows, 200, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(50, dtype=dtype))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))


def give_up(end: Publisher | StateRelay, line: TcpProxy) -> None:
    """Let all followers be lost for silence, and notice nothing of it."""
    assert end._feed is not None
    hub, patience = end._feed._hub, end._feed._hub._silence
    line.stall()
    hub._silence = 0.1
    until(lambda: not end.followers)
    hub._silence = patience


@contextmanager
def stranger(port: int) -> Iterator[Spoke]:
    spoke = Spoke.connect(HOST, port)
    try:
        until(lambda: (e := spoke.recv(0.1)) is not None and e.kind is EventKind.JOINED)
        yield spoke
    finally:
        spoke.close(0.5)


class Liar:
    """A publisher that says what it is told to, after a proper greeting."""

    def __init__(self) -> None:
        self.layout = Layout.of(used(weights()))
        self.hub = Hub.bind()
        self.peer = b""

    def answer(self, session: int, json: bytes | None = None, digest: bytes | None = None) -> None:
        found = self.layout.to_json() if json is None else json
        digest = bytes.fromhex(self.layout.digest) if digest is None else digest
        name = b"liar".ljust(MAX_NAME, b"\0")
        self.hub.send(
            self.peer, LayoutIs(PROTOCOL, session, b"i" * 16, digest, 1, name, memoryview(found)).pack()
        )

    def hear(self) -> object:
        while True:
            event = self.hub.recv(LONG)
            assert event is not None, "the follower fell silent"
            if event.kind is EventKind.DATA:
                self.peer = event.peer
                return unpack(event.data, UP)

    def transfer(
        self, begin: Begin, head: bytes, body: bytes, before_end: Callable[[], object] = lambda: None
    ) -> None:
        """Send a patch, and hear that its bytes came."""
        self.hub.send(self.peer, begin.pack())
        for at in range(0, len(body), 1 << 16):
            self.hub.send(self.peer, Chunk(begin.transfer, at, bytes(body[at : at + (1 << 16)])).pack())
            assert isinstance(self.hear(), Ack)
        before_end()
        self.hub.send(self.peer, End(begin.transfer, len(body), head).pack())

    def greet(self) -> Hello:
        """Get to where the follower knows the layout and waits for patches."""
        hello = self.hear()
        assert isinstance(hello, Hello) and hello.layout == NOTHING
        self.answer(hello.session)
        again = self.hear()
        assert isinstance(again, Hello) and again.layout.hex() == self.layout.digest
        self.answer(again.session, b"")
        return again


def small(rows: int = 20) -> dict[str, Tensor]:
    return {"w": torch.arange(50.0 * rows).reshape(rows, 50), "b": torch.zeros(7)}


class Small(nn.Module):
    """A model that holds the state of ``weights``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(20, 50))
        self.b = nn.Parameter(torch.zeros(7))


def hello(session: int, layout: bytes, version: int = 0, content: int = 0, above: int = 0) -> bytes:
    return Hello(MAGIC, PROTOCOL, session, NOTHING, layout, version, content, above, 0, 0, 0, 0).pack()


def answer(spoke: Spoke, kind: type, timeout: float = LONG) -> object | None:
    """Return the next message of that kind; None where none comes."""
    end = monotonic() + timeout
    while (left := end - monotonic()) > 0:
        event = spoke.recv(left)
        if event is not None and event.kind is EventKind.DATA:
            message = unpack(event.data, DOWN)
            if isinstance(message, kind):
                return message
    return None


ROWS = 1000  # whole, some hundred times what messages without patches take in a test


def step(w: dict[str, Tensor], row: int = 0) -> None:
    """Change a few values."""
    w["embed"][row] += 1
    w["steps"] += 1


def few(nbytes: int, p: Publisher) -> bool:
    """Return whether so many received bytes are those of patches, and not of the whole state."""
    return nbytes < p.history.layout.nbytes / 10
