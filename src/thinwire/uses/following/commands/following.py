"""What ``thinwire follow`` does with the versions that come."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.dtypes import torch_is_there
from thinwire.files.checkpoint import read_bits, read_checkpoint
from thinwire.files.local_folder import open_folder
from thinwire.links.address import Address
from thinwire.replacing import replacing
from thinwire.runs.machine.files import file_trouble
from thinwire.runs.records.progress import megabytes
from thinwire.runs.terminal.addresses import largest
from thinwire.runs.terminal.live import LOOK, Live, Trouble, await_coming
from thinwire.runs.terminal.shell_command import ShellCommand
from thinwire.types import InputError, LinkError, ThinwireError, require
from thinwire.uses.following.commands.options import FollowConfig
from thinwire.uses.following.follower_base import TIMEOUT, write_version
from thinwire.uses.following.hosts.disk_deltas.delta_writer import DeltaWriter
from thinwire.uses.following.mirror import Base
from thinwire.uses.following.pull.store_fetching import look
from thinwire.uses.following.pull.store_reader import ReaderStatus, ShelfReader
from thinwire.uses.following.push.follower import Follower, FollowingStatus
from thinwire.uses.layered import LAYERS, layered_form

STATE_EVERY = 10.0  # seconds between two saves of --state at least
# Seconds until what could not be written is tried again: at first, and, twice as long each time, at last.
RETRY, SLOWEST = 1.0, 60.0
Reader = Follower | ShelfReader


@dataclass(frozen=True)
class Following:
    """Whom to follow, and what to do with each version."""

    place: Address | str
    token: bytes | None
    config: FollowConfig

    def run(self, stack: ExitStack) -> None:
        """Follow until the publisher of a store has ended, or with ``once`` until the newest is here."""
        config, (out, state) = self.config, self.config.files
        most, patience = largest(config.max_gb), config.patience
        if isinstance(self.place, str):
            patience = max(patience, 2 * config.poll)  # a sign is seen at a look
        known = {"state": state, "name": config.name, "patience": patience, "max_nbytes": most}
        reader = self._reader(known)
        stack.callback(reader.close)
        live = stack.enter_context(Live(lambda: line(reader), config.quiet))
        command = None if config.exec is None else ShellCommand(config.exec, config.exec_timeout)
        taking = Taking(reader, out, state, command, live, config.once, self._deltas())
        if config.once:
            taking.take(_newest(reader, self.place, self.token, patience, most))
        else:
            _keep_up(reader, taking, config.every)

    def _deltas(self) -> DeltaWriter | None:
        """Return what keeps --deltas up to date."""
        config = self.config
        base = None if config.base is None else Path(config.base)
        if config.deltas is None:
            return None
        return DeltaWriter(config.deltas, config.delta_format, config.anchor_every, base)

    def _reader(self, known: dict[str, Any]) -> Reader:
        # nobody else keeps the base, which is let go of once it was begun with
        config, state = self.config, known["state"]
        if isinstance(self.place, str):
            return ShelfReader(self.place, self.token, base=self._start(state), poll=config.poll, **known)
        more: Any = {"relay": config.serve, "congestion": config.congestion} | known
        return Follower(*self.place, self.token, base=self._start(state), **more)

    def _start(self, state: Path | None) -> Base | None:
        """Return the tensors of --base, unless there is a saved state to go on from."""
        saved = state is not None and state.is_file()
        if self.config.base is None or saved:
            return None
        if torch_is_there():  # tensors may be cast to what is published
            return read_checkpoint(Path(self.config.base))
        return {name: bits.array for name, bits in read_bits(Path(self.config.base)).items()}


def _newest(reader: Reader, place: Address | str, token: bytes | None, patience: float, most: int) -> int:
    """Wait until what the publisher has now is here, and return its number."""
    if isinstance(reader, ShelfReader):
        _arrived(reader, lambda: reader.held.number > 0, patience)
        held = reader.held
        try:
            newest = look(open_folder(str(place)), token, most)[0].newest
        except OSError as e:  # of any kind, as the store's library has it
            raise LinkError(f"{reader.where} cannot be read any more: {e}; see whether it is there") from e
        known = newest is not None and (newest.number, newest.hash) == (held.number, held.hash)
        if newest is None or (newest.number <= held.number and not known):
            raise LinkError(
                f"{reader.where} is older than version {held.number}, which is held; follow it anew"
            )
        number = newest.number
        _arrived(reader, lambda: reader.confirmed and reader.held.number >= number, patience)
        return reader.held.number

    def confirmed() -> bool:
        reader.wait(0)  # raises what went wrong
        return reader.confirmed

    if await_coming(confirmed, lambda: reader.status.nbytes, patience) is not None:
        raise LinkError(f"no version came from {place} within {patience:g} s: {reader.diagnosis()}")
    return reader.held.number


def _arrived(reader: ShelfReader, done: Callable[[], bool], patience: float) -> None:
    """Wait until ``done``; ``LinkError`` where a store has been silent for longer than ``patience``."""
    while not done():
        reader.wait(0)  # raises what went wrong
        time.sleep(LOOK)
        if reader.silence > patience:
            why = reader.status.error or "its publisher gives no sign"
            raise LinkError(f"no version came from {reader.where} for {patience:g} s: {why}")


def _keep_up(reader: Reader, taking: Taking, every: float) -> None:
    last = -every
    for version in reader:
        time.sleep(max(0.0, last + every - time.monotonic()))
        last = time.monotonic()
        taking.take(version.number)


class Taking:
    """What is done with a version: it is put to use, written, saved, and told to a command.

    What cannot be written is told once and tried again, with the newest version then: a disk may have space
    again. With ``once`` that is an error, and so is a command that fails: there is no later version.
    """

    def __init__(
        self,
        reader: Reader,
        out: Path | None,
        state: Path | None,
        command: ShellCommand | None,
        live: Live,
        once: bool = False,
        deltas: DeltaWriter | None = None,
    ) -> None:
        self._once, self._deltas = once, deltas
        self._reader, self._out, self._state, self._command, self._live = reader, out, state, command, live
        self._saved_at = -STATE_EVERY
        self._taken = 0  # hash of the newest one
        self._writing = Trouble(live, f"{out or 'what --deltas names'} can be written again")
        self._saving = Trouble(live, f"{state} can be written again")

    def take(self, number: int) -> None:
        """Take the newest version, which is ``number`` or newer, unless it was taken already."""
        pause = RETRY
        while True:
            try:
                self._take(number)
            except OSError as e:
                if self._once:
                    raise
                self._writing.tell(f"{file_trouble(e) or e}; it is tried again")
            else:
                self._writing.tell("")
                return
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST)
            self._reader.wait(0)  # raises what has ended it meanwhile

    def _take(self, number: int) -> None:
        replica = self._reader.replica
        writes = self._out is not None or self._deltas is not None
        if writes:
            replica.catch_up(TIMEOUT)  # for nobody else: from then on there are two buffers
        version = replica.shown if writes else replica.held
        if self._deltas is not None:  # a host waits for a version in which nothing has changed, too
            self._deltas.write(replica.bits(), version)
        if version.hash == self._taken:
            return
        number = max(number, version.number)
        if self._out is not None:
            if LAYERS in version.meta:
                own = {slot.name for slot in replica.layout.slots}  # a tied name stands for one of these
                tensors = {name: x for name, x in replica.tensors().items() if name in own}
                with replacing(self._out) as part:
                    part.write_bytes(layered_form().scene_of(tensors, version.meta[LAYERS]))
            else:
                write_version(self._out, replica, number)
        self._taken = version.hash
        if self._state is not None and time.monotonic() - self._saved_at >= STATE_EVERY:
            self._save()
        self._live.tick()
        if self._command is not None:
            self._run(self._command, number)

    def _save(self) -> None:
        """Save what is held; where that fails, the next version tries again, and the end."""
        self._saved_at, trouble = time.monotonic(), ""
        try:
            self._reader.save()
        except InputError as e:
            if self._once:
                raise
            trouble = str(e)
        self._saving.tell(trouble)

    def _run(self, command: ShellCommand, number: int) -> None:
        known = {"THINWIRE_VERSION": str(number)}
        if self._deltas is not None:
            known |= {"THINWIRE_FILE": self._deltas.place, "THINWIRE_DELTA": str(self._deltas.number)}
        known |= {} if self._out is None else {"THINWIRE_FILE": str(self._out.absolute())}
        trouble = command.run(known)
        require(not (trouble and self._once), ThinwireError, f"--exec {trouble} at version {number}")
        if trouble:
            self._live.note(f"note: --exec {trouble} at version {number}")


def line(reader: Reader) -> str:
    """Return where a follower stands."""
    status: FollowingStatus | ReaderStatus = reader.status
    if not status.held:
        return f"nothing yet{_trouble(status) or _waiting(reader)}"
    parts = [f"version {status.held}"]
    parts += [f"{max(0.0, status.age):.1f} s old"] if status.age is not None else []
    parts += [f"{megabytes(status.nbytes)} received"]
    parts += [f"{status.ratio:.3g} times fewer than whole"] if status.ratio else []
    parts += [f"round trip {1e3 * status.trip:.3g} ms"] if status.trip is not None else []
    relay = reader.relay if isinstance(reader, Follower) else None
    if relay is not None:
        parts.append(f"{max(0, len(relay.followers) - 1)} others at {Address(relay.host, relay.port)}")
    return ", ".join(parts) + _trouble(status)


def _trouble(status: FollowingStatus | ReaderStatus) -> str:
    if status.error:
        return f"; note: {status.error}"
    lost = isinstance(status, FollowingStatus) and status.held and not status.connected
    return "; not connected" if lost else ""


def _waiting(reader: Reader) -> str:
    """Return what a follower that holds nothing waits for."""
    if isinstance(reader, ShelfReader):
        return ""
    if reader.status.connected:
        return f"; connected to {reader.peer}"
    return f"; {reader.peer} is gone, dialling" if reader.reached else f"; nothing answers at {reader.peer}"
