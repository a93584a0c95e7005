"""The workers of a host: reached, told what to load, and connected with each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic
from typing import Any

from thinwire.links.address import Address
from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import EventKind
from thinwire.links.mesh import Peer, connect_mesh
from thinwire.types import InputError, LinkError, ThinwireError, require
from thinwire.uses.pictures.workers.worker_words import (
    MeetingBoard,
    WorkerJob,
    WorkerWord,
    pack,
    text_of,
    unpack,
)

TICK = 0.1  # seconds
LAST_WORDS = 1.0  # seconds for a worker to say why it failed
PATCHED = "; LoRAs and other patches of this side's model must be in the worker's folder too"
Words = tuple[WorkerWord, dict[str, Any]]


class WorkerLine:
    """The way to one worker."""

    def __init__(self, address: Address, token: bytes | None) -> None:
        self.address, self.name = address, f"the worker {address}"
        self._spoke = Spoke.connect(address.host, address.port, token=token)

    def reach(self, deadline: float) -> None:
        """Wait until it is there. Errors: ``LinkError``, ``AuthError``."""
        end = monotonic() + deadline
        while not self._spoke.joined:
            self._spoke.recv(TICK)
            late = monotonic() > end
            text = f"waited {deadline:g} s for {self.name}; start thinwire worker there, and see its --listen"
            require(not late, LinkError, f"{text}{self._spoke.tried}")

    def say(self, word: WorkerWord, **values: Any) -> None:
        """Tell it something. Errors: ``LinkError``."""
        self.send(pack(word, **values))

    def send(self, data: bytes) -> None:
        """Send a message as it is. Errors: ``LinkError``."""
        require(self._spoke.send(data), LinkError, f"{self.name} has left; see what it says")

    def hear(self, timeout: float = 0.0) -> Words | None:
        """Return what it has said next, or None. Errors: ``LinkError`` where it has left or is busy.

        ``InputError`` for what it refuses.
        """
        event = self._spoke.recv(timeout)
        if event is None or event.kind is EventKind.JOINED:
            return None
        why = event.data.decode(errors="replace")
        require(event.kind is EventKind.DATA, LinkError, f"{self.name} has left: {why}")
        word, values = unpack(event.data, self.name)
        if word is WorkerWord.REFUSED:
            raise (LinkError if values.get("busy") else InputError)(f"{self.name}: {text_of(values)}")
        return word, values

    def last_words(self) -> str:
        """Return why its call failed, if it says so; it may have said before why an earlier one did."""
        end, told = monotonic() + LAST_WORDS, ""
        with suppress(ThinwireError):
            while monotonic() < end:
                found = self.hear(TICK)
                if found is not None and found[0] is WorkerWord.FAILED:
                    told = f"; {self.name} said: {text_of(found[1])}"
                    end = min(end, monotonic() + LAST_WORDS / 2)
        return told

    def close(self) -> None:
        """Hang up."""
        self._spoke.close()


class WorkerCrew:
    """All workers of a host, in the order of their ranks from 1."""

    def __init__(self, lines: Sequence[WorkerLine], deadline: float, patience: float) -> None:
        self._lines, self._deadline, self._patience = lines, deadline, patience
        self._met = set[int]()  # ranks
        self._board = MeetingBoard(self._note, self._read)

    def begin(self, jobs: Sequence[WorkerJob]) -> None:
        """Let each load its model, and wait until all have."""
        for line, job in zip(self._lines, jobs, strict=True):
            line.reach(self._deadline)
            line.send(job.pack())
        end = monotonic() + self._patience
        for line in self._lines:
            while (found := line.hear(TICK)) is None or found[0] is not WorkerWord.READY:
                text = f"waited {self._patience:g} s for {line.name} to load its model"
                require(monotonic() < end, LinkError, f"{text}; give a greater patience=")
        for line in self._lines:
            line.say(WorkerWord.CONNECT)

    def connect(self, token: bytes | None, silence: float) -> dict[int, Peer]:
        """Return links to all, which are then linked with each other too."""
        options: dict[str, Any] = {"deadline": silence, "connect_timeout": self._deadline, "token": token}
        peers = connect_mesh(0, len(self._lines) + 1, self._board, first_dials=True, **options)
        end = monotonic() + self._deadline
        try:
            while missing := set(peers) - self._met:
                self._read(TICK)
                names = " and ".join(self._lines[rank - 1].name for rank in sorted(missing))
                require(
                    monotonic() < end,
                    LinkError,
                    f"waited {self._deadline:g} s for {names} to meet the others",
                )
        except BaseException:
            for peer in peers.values():
                peer.close(0.0)
            raise
        return peers

    @contextmanager
    def named(self) -> Iterator[None]:
        """Say in errors of the block which worker a rank is, and what a lost one has said."""
        try:
            yield
        except ThinwireError as e:
            ranks = [int(found) for found in dict.fromkeys(re.findall(r"\brank (\d+)", str(e)))]
            lines = [(rank, self._lines[rank - 1]) for rank in ranks if 0 < rank <= len(self._lines)]
            told = "".join(f"; rank {rank} is {line.name}" for rank, line in lines)
            if isinstance(e, LinkError):
                told += "".join(line.last_words() for _, line in lines)
            if "its weights" in str(e) or "adapters" in str(e):
                told += PATCHED
            if not told:
                raise
            raise type(e)(f"{e}{told}") from e

    def _note(self, key: str, value: str, but: int = 0) -> None:
        for rank, line in enumerate(self._lines, 1):
            if rank != but:
                line.say(WorkerWord.NOTE, key=key, value=value)

    def _read(self, timeout: float = 0.0) -> None:
        """Take what the workers have said; pass on what one has for the others."""
        for rank, line in enumerate(self._lines, 1):
            while (found := line.hear(timeout)) is not None:
                if found[0] is WorkerWord.NOTE:
                    self._note(*self._board.put(found[1]), but=rank)
                elif found[0] is WorkerWord.MET:
                    self._met.add(rank)
                elif found[0] is WorkerWord.FAILED:
                    raise LinkError(f"{line.name} cannot begin: {text_of(found[1])}")


@contextmanager
def hired(
    addresses: Sequence[Address], token: bytes | None, deadline: float, patience: float
) -> Iterator[WorkerCrew]:
    """Hold the ways to workers in the block."""
    with ExitStack() as stack:
        lines = list[WorkerLine]()
        for address in addresses:
            lines.append(WorkerLine(address, token))
            stack.callback(lines[-1].close)
        yield WorkerCrew(lines, deadline, patience)


def close(peers: Mapping[int, Peer]) -> None:
    """Hand over what is sent, and close all links."""
    for peer in peers.values():
        peer.close(1.0)
