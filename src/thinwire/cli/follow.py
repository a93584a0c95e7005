"""``thinwire follow``: keep a copy of a published state, as a file that other programs read."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from thinwire.assets.splats.state_form import LAYERS, scene_of
from thinwire.cli.terminal.command import SECONDS, ShellCommand
from thinwire.cli.terminal.live import LOOK, Live, Trouble, await_coming
from thinwire.cli.terminal.places import (
    Address,
    Congestion,
    MaxGb,
    TokenFile,
    check_file,
    check_seconds,
    check_state,
    largest,
    limited,
    parse_place,
)
from thinwire.engines.sync.pull.look import look
from thinwire.engines.sync.pull.reader import POLL, ReaderStatus, ShelfReader
from thinwire.engines.sync.push.follower import Follower, FollowingStatus
from thinwire.engines.sync.using import PATIENCE, TIMEOUT
from thinwire.files.checkpoint import read_checkpoint, write_checkpoint
from thinwire.files.folder import open_folder
from thinwire.files.place import shown
from thinwire.lab.machine.files import file_trouble
from thinwire.lab.machine.interrupts import stopped_by_signals
from thinwire.lab.records.progress import megabytes
from thinwire.links.security import read_token
from thinwire.links.tcp.congestion import AUTO
from thinwire.replacing import replacing
from thinwire.types import InputError, LinkError, ThinwireError, require

STATE_EVERY = 10.0  # seconds between two saves of --state at least
# Seconds until what could not be written is tried again: at first, and, twice as long each time, at last.
RETRY, SLOWEST = 1.0, 60.0
Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A publisher's or relay's HOST:PORT, or a store's path or URL."),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE.safetensors", help="Write each version there, whole or not at all."),
]
Every = Annotated[float, typer.Option(metavar="SECONDS", help="Write at most so often: the newest then.")]
State = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Go on from what was saved there, and save what is held."),
]
Start = Annotated[
    Path | None,
    typer.Option(
        "--base",
        metavar="FILE",
        help="Start from this checkpoint; one patch follows if its values are known.",
    ),
]
Relay = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Serve other followers there, from what comes here.")
]
Execute = Annotated[
    str | None,
    typer.Option(
        "--exec",
        metavar="COMMAND",
        help="Run a shell command after each version, with THINWIRE_VERSION and THINWIRE_FILE set.",
    ),
]
Deadline = Annotated[
    float,
    typer.Option("--exec-timeout", metavar="SECONDS", help="Kill what --exec runs after so long, and go on."),
]
Name = Annotated[
    str | None, typer.Option(help="What the state is called: refuse one that is called anything else.")
]
Once = Annotated[
    bool,
    typer.Option("--once", help="End when the newest version is here, with code 3 if --exec failed."),
]
Poll = Annotated[float, typer.Option(metavar="SECONDS", help="Look into a store so often.")]
Patience = Annotated[
    float, typer.Option(metavar="SECONDS", help="Give up after so long without a sign of the publisher.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no live line.")]


Reader = Follower | ShelfReader


def follow(
    source: Source,
    out: Out = None,
    every: Every = 0.0,
    state: State = None,
    base: Start = None,
    relay: Relay = None,
    congestion: Congestion = AUTO,
    command: Execute = None,
    deadline: Deadline = SECONDS,
    name: Name = None,
    token_file: TokenFile = None,
    once: Once = False,
    poll: Poll = POLL,
    patience: Patience = PATIENCE,
    max_gb: MaxGb = None,
    quiet: Quiet = False,
) -> None:
    """Keep a copy of a published state fresh: bit-identical, always the newest version that came.

    Ends with Ctrl-C, or when the publisher of a store says that it has ended. A publisher that goes away is
    waited for.

    [bold]Examples[/bold]

    thinwire follow 192.0.2.7:7200 --token-file secret --out policy.safetensors --state held.safetensors

    thinwire follow s3://bucket/policy --out policy.safetensors --exec 'touch reload'
    """
    check_seconds(every, "--every", "at least")
    for option, seconds in (("--poll", poll), ("--patience", patience), ("--exec-timeout", deadline)):
        check_seconds(seconds, option)
    most = largest(max_gb)
    place, serve = _places(source, relay)
    patience = max(patience, 2 * poll) if isinstance(place, str) else patience  # a sign is seen at a look
    out, state = _files(out, state)
    token = read_token(token_file)
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals())
        stack.enter_context(limited(shown(source)))
        try:
            known: Any = {"state": state, "name": name, "patience": patience, "max_nbytes": most}
            reader: Reader = (  # nobody else keeps the base, which is let go of once it was begun with
                ShelfReader(place, token, base=_start(base, state), poll=poll, **known)
                if isinstance(place, str)
                else Follower(
                    *place, token, base=_start(base, state), relay=serve, congestion=congestion, **known
                )
            )
            stack.callback(reader.close)
            live = stack.enter_context(Live(lambda: line(reader), quiet))
            run = None if command is None else ShellCommand(command, deadline)
            taking = Taking(reader, out, state, run, live, once)
            if once:
                taking.take(_newest(reader, place, token, patience, most))
            else:
                _keep_up(reader, taking, every)
        except KeyboardInterrupt:  # how it is meant to end
            if once:
                raise


def _places(source: str, relay: str | None) -> tuple[Address | str, Address | None]:
    """Return whom to follow, and where to serve others, if anywhere."""
    place = parse_place(source)
    serve = None if relay is None else Address.parse(relay, "--relay")
    own = serve is None or not isinstance(place, str)
    require(own, InputError, "--relay needs a publisher's HOST:PORT; a store needs no relay")
    return place, serve


def _files(out: Path | None, state: Path | None) -> tuple[Path | None, Path | None]:
    """Return what to write to for --out and for --state, which are two files."""
    out, state = check_file(out, "--out"), check_state(state)
    apart = out is None or state is None or out.resolve() != state.resolve()
    require(apart, InputError, f"--out and --state are both {out}; give each a file of its own")
    return out, state


def _start(base: Path | None, state: Path | None) -> dict[str, Tensor] | None:
    """Return the tensors of --base, unless there is a saved state to go on from."""
    saved = state is not None and state.is_file()
    return None if base is None or saved else read_checkpoint(base)


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
    ) -> None:
        self._once = once
        self._reader, self._out, self._state, self._command, self._live = reader, out, state, command, live
        self._saved_at = -STATE_EVERY
        self._taken = 0  # hash of the newest one
        self._writing = Trouble(live, f"{out} can be written again")
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
        if self._out is not None:
            replica.catch_up(TIMEOUT)  # for nobody else: from then on there are two buffers
        version = replica.held if self._out is None else replica.shown
        if version.hash == self._taken:
            return
        number = max(number, version.number)
        if self._out is not None:
            own = {slot.name for slot in replica.layout.slots}  # a tied name stands for one of these
            tensors = {name: x for name, x in replica.tensors().items() if name in own}
            notes = {"thinwire.hash": f"{version.hash:016x}"} | {k: str(v) for k, v in version.meta.items()}
            if LAYERS in version.meta:
                with replacing(self._out) as part:
                    part.write_bytes(scene_of(tensors, version.meta[LAYERS]))
            else:
                write_checkpoint(self._out, tensors, notes | {"thinwire.version": str(number)})
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
