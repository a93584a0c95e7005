"""``thinwire publish``: make a checkpoint available, each change of it a version."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from thinwire.cli.terminal.live import Live, warned
from thinwire.cli.terminal.places import PORT, Address, Congestion, TokenFile, check_port, check_state
from thinwire.engines.sync.pull.look import resume
from thinwire.engines.sync.pull.writer import ShelfWriter
from thinwire.engines.sync.push.publisher import Publisher
from thinwire.engines.sync.using import SLOW
from thinwire.files.watch import LOOK, PART_REST, REST, Watch
from thinwire.lab.machine.interrupts import stopped_by_signals
from thinwire.lab.machine.network import interfaces
from thinwire.lab.records.progress import megabytes
from thinwire.links.mesh import EVERYWHERE
from thinwire.links.security import is_loopback, read_token
from thinwire.links.tcp import congestion as control
from thinwire.recipes.state import DTYPES
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.patches.patch import Version
from thinwire.types import InputError, LinkError, require

PATIENCE = 300.0  # seconds that --once waits for a follower
ATTEMPTS = 2  # that --once has at a store which takes no file: to sweep it may have helped
MAX_SECONDS = 86_400.0  # of --rest and --wait
SAVE_EVERY = 60.0  # seconds between two saves of --state at least, but for the last
HERE = "ADDRESS_OF_THIS_MACHINE"  # where none is known
PUSH, PULL = "For followers that connect", "For followers that fetch"
File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A safetensors file, or the folder of a model that has some."),
]
Dtype = Annotated[
    str | None, typer.Option(metavar="bf16|fp16|fp32", help="Cast floats to what followers use.")
]
Bound = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]ERROR",
        help="Let floats, or the tensor NAME, be off by so much in their own units; again for another name. "
        "What --dtype rounds comes on top, and must not be more.",
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=PUSH)]
Port = Annotated[
    int | None,
    typer.Option(
        help=f"Port to listen at, {PORT} if there is no --store; 0 takes a free one.", rich_help_panel=PUSH
    ),
]
Store = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Folder or store to write versions to.", rich_help_panel=PULL),
]
Name = Annotated[str, typer.Option(help="What the state is called.")]
State = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Save the newest version there, each minute and at the end, and go on from it: followers need "
        "no keyframe then.",
        rich_help_panel=PUSH,
    ),
]
Once = Annotated[
    bool, typer.Option("--once", help="Publish what is there, and end when a follower or the store has it.")
]
Rest = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help=f"Read what has not changed for so long: {REST:g}, or {PART_REST:g} where only some of several "
        "files have changed since the last version.",
    ),
]
Wait = Annotated[
    float, typer.Option(metavar="SECONDS", help="Wait so long for FILE, if training is still to write it.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no live line.")]


def publish(
    file: File,
    dtype: Dtype = None,
    bound: Bound = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    token_file: TokenFile = None,
    state: State = None,
    store: Store = None,
    name: Name = "state",
    rest: Rest = None,
    wait: Wait = 0.0,
    congestion: Congestion = control.AUTO,
    once: Once = False,
    quiet: Quiet = False,
) -> None:
    """Make a checkpoint available to followers, and each change of it a version, until Ctrl-C.

    FILE is read when its size and time have rested: see --rest. Followers connect to --host and --port, or
    fetch from --store, a path or any URL that fsspec writes to; both can be given. With a token links are
    encrypted, and files in a store are signed.

    [bold]Examples[/bold]

    thinwire publish out/model.safetensors --dtype bf16

    thinwire publish out/ --dtype bf16 --host 0.0.0.0 --token-file secret --store s3://bucket/policy
    """
    token = read_token(token_file)
    port = PORT if port is None and store is None else port
    if port is not None:
        check_port(port)
    saved = port is not None or state is None
    require(saved, InputError, "--state is for --port; a store is what its publisher needs")
    state = check_state(state)
    kind, bounds = _dtype(dtype), parse_bounds(bound or [])
    watch = _watch(file, rest)
    _check_wait(wait)
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals())
        try:
            _await(watch, wait)
            _check_apart(file, state)
            outlets = Outlets(watch.first(), kind, bounds, name, token)
            stack.callback(outlets.close)
            if port is not None:
                outlets.listen(host, port, state, congestion)
            if store is not None:
                outlets.keep(store)
            live = stack.enter_context(Live(outlets.line, quiet))
            live.note(outlets.title())
            outlets.publish()
            live.tick()
            if once:
                outlets.finish()
            else:
                _follow_file(watch, outlets, live)
        except KeyboardInterrupt:  # how it is meant to end
            if once:
                raise


def _watch(file: Path, rest: float | None) -> Watch:
    good = rest is None or 0 < rest <= MAX_SECONDS
    require(good, InputError, f"--rest is {rest}; it must be above 0 seconds, and at most {MAX_SECONDS:g}")
    return Watch(file, rest)


def _check_wait(wait: float) -> None:
    good = 0 <= wait <= MAX_SECONDS
    require(good, InputError, f"--wait is {wait}; it must be 0 seconds or more, and at most {MAX_SECONDS:g}")


def _await(watch: Watch, wait: float) -> None:
    if wait and not watch.stamp():
        typer.echo(f"waiting for {watch.path}, for up to {wait:g} s", err=True)
    watch.await_files(wait)


def _check_apart(file: Path, state: Path | None) -> None:
    """Raise ``InputError`` where what is saved would be published, or written over it."""
    if state is not None and file.exists():
        inside = file.samefile(state.parent) or (state.exists() and file.samefile(state))
        require(not inside, InputError, f"--state {state} is in what is published; give another place for it")


def _follow_file(watch: Watch, outlets: Outlets, live: Live) -> None:
    """Publish each change of the file, until somebody ends it."""
    while True:
        time.sleep(LOOK)
        outlets.check()
        trouble = outlets.save()
        if trouble is not None:
            live.note(f"note: {trouble}")
        if not watch.changed():
            continue
        try:
            found = watch.take()
            if found is None:
                continue
            outlets.replace(found, watch.path)
        except (InputError, OSError) as e:  # a later one may be whole again
            live.note(f"note: {e}; version {outlets.newest.number} stays the newest")
            continue
        outlets.check()
        live.tick()


def _dtype(name: str | None) -> torch.dtype | None:
    require(
        name is None or name in DTYPES,
        InputError,
        f"--dtype is {name!r}; it must be one of {', '.join(DTYPES)}",
    )
    return None if name is None else DTYPES[name]


def parse_bounds(texts: list[str]) -> dict[str, float] | float | None:
    """Return what --bound says: one bound for all floats, or one by name. Errors: ``InputError``.

    >>> parse_bounds(["1e-4"]), parse_bounds(["head=0.1", "embed=0.2"])
    (0.0001, {'head': 0.1, 'embed': 0.2})
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError as e:
            raise InputError(f"--bound {text!r} is not ERROR or NAME=ERROR; write it like 1e-4") from e
        require(found[name] > 0, InputError, f"--bound is {text}; an error must be above 0")
    mixed = "" in found and len(texts) > 1
    require(not mixed, InputError, "--bound is given for all floats and again; give names, or one number")
    return found.get("", found) if found else None


class Outlets:
    """Where one state goes: to followers that connect, to a store, or to both."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        dtype: torch.dtype | None,
        bounds: dict[str, float] | float | None,
        name: str,
        token: bytes | None,
    ) -> None:
        self._tensors, self._kind = tensors, (dtype, bounds)
        self._name, self._token = name, token
        self._push: Publisher | None = None
        self._pull: ShelfWriter | None = None
        self._own: History | None = None
        self.newest = Version()
        self._state: Path | None = None
        self._saved, self._save_at = 0, -SAVE_EVERY  # number of the version, and when the next may be

    @property
    def history(self) -> History:
        """The versions."""
        if self._push is not None:
            return self._push.history
        if self._own is None:
            self._own = History(Layout.of(self._tensors, *self._kind))
        return self._own

    def listen(self, host: str, port: int, state: Path | None = None, congestion: str = control.AUTO) -> None:
        """Let followers connect; go on from the file ``state`` if it is there."""
        at = host, port, self._token, self._name
        self._push = Publisher(self._tensors, *at, *self._kind, state=state, congestion=congestion)
        self._state = state

    def save(self) -> InputError | None:
        """Write a version that is not in the file yet, unless that was done lately; return what went wrong.

        The versions go on then, and the file is tried again.
        """
        now, newest = time.monotonic(), self.newest.number
        if self._push is None or self._state is None or self._saved == newest or now < self._save_at:
            return None
        self._save_at = now + SAVE_EVERY
        try:
            self._push.save()
        except InputError as e:
            return e
        self._saved = newest
        return None

    def keep(self, url: str) -> None:
        """Write versions to a store, on from what it holds, so that readers need a patch only."""
        resume(self.history, url, self._token, self._name)
        with warned():  # of a wait for the last publisher
            self._pull = ShelfWriter(url, self.history, name=self._name, token=self._token)

    def publish(self) -> None:
        """Make the tensors that it began with the newest version."""
        self._publish()
        self.check()

    def replace(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Make ``tensors`` the newest version.

        Errors: ``InputError``, naming their ``path``, where they do not fit: then all is as before.
        """
        if self._push is not None:
            self._push.check()  # what ended the feed is not the tensors' fault
        self._tensors.update(tensors)
        try:
            self._publish()
        except InputError as e:
            reason = str(e).partition("; ")[0]
            raise InputError(
                f"{path} does not fit what is published: {reason}; restore it, or start a new publisher"
            ) from e

    def _publish(self) -> None:
        publishing = self._push.publish if self._push is not None else self._keep_own
        try:
            self.newest = publishing()
        finally:
            self._tensors.clear()  # the bits of a version are in the history

    def _keep_own(self) -> Version:
        return self.history.publish(self._tensors)

    def check(self) -> None:
        """Raise what has ended the feed or the store's writer, if anything did; wake that if it is behind."""
        if self._push is not None:
            self._push.check()
        pull = self._pull
        if pull is not None and (pull.status.error or pull.status.version < self.newest.number):
            pull.offer()

    def finish(self) -> None:
        """Wait until the store, or a follower and all others that are there, have the newest version."""
        if self._pull is not None:
            self._fill(self._pull)
        if self._push is None:
            return
        ends, push = time.monotonic() + PATIENCE, self._push
        while not any(f.greeted and f.version >= push.newest.number for f in push.followers):
            push.check()
            if time.monotonic() > ends:
                raise LinkError(self._waited_in_vain(push))
            time.sleep(LOOK)
        push.flush(max(0.0, ends - time.monotonic()))

    def _fill(self, pull: ShelfWriter) -> None:
        """Wait until the store has the newest version; where it takes no file, for another attempt only."""
        patience = PATIENCE + self.history.layout.nbytes / SLOW
        ends = time.monotonic() + patience
        while pull.status.version < self.newest.number:
            self.check()
            if pull.status.failures >= ATTEMPTS:
                pull.close(0.0)  # raises what it was
            whole = time.monotonic() < ends
            require(whole, LinkError, f"{pull.where} did not take the newest version in {patience:.0f} s")
            time.sleep(LOOK)

    def _waited_in_vain(self, push: Publisher) -> str:
        behind = [f"{f.name} holds version {f.version}" for f in push.followers]
        why = "; ".join(behind[:3]) if behind else "nobody follows; start 'thinwire follow' with this address"
        return f"no follower took version {push.newest.number} within {PATIENCE:g} s: {why}"

    def close(self) -> None:
        """Write what is new to the store, and stop."""
        try:
            if self._pull is not None:
                self._pull.close()
        finally:
            if self._push is not None:
                self._push.close()

    def title(self) -> str:
        """Return what is published, and how to follow it."""
        layout, ways = self.history.layout, []
        if self._push is not None:
            only = " on this machine" if is_loopback(self._push.host) else ""
            ways += [f"'thinwire follow {Address(host, self._push.port)}'{only}" for host in self._hosts()]
        if self._pull is not None:
            ways.append(f"'thinwire follow {self._pull.where}'")
        about = f"{len(layout.slots)} tensors, {megabytes(layout.nbytes)}"
        return f"publishing {self._name!r}: {about}; {' or '.join(ways)}"

    def _hosts(self) -> list[str]:
        """Return by which addresses others reach the publisher: it may listen at all of this machine's."""
        host = self._push.host if self._push is not None else ""
        if host not in EVERYWHERE:
            return [host]
        own = [i.address for i in interfaces() if host == "::" or ":" not in i.address]
        return own or [HERE]

    def line(self) -> str:
        """Return where it stands."""
        newest = self.newest
        share = newest.changed / max(1, self.history.layout.numel)
        parts = [f"version {newest.number}", f"{100 * share:.3g} % changed"]
        if self._push is not None:
            followers = self._push.followers
            upto = sum(f.version >= newest.number for f in followers)
            parts += [f"{megabytes(self._push.sent)} sent", f"{upto} of {len(followers)} followers have it"]
        if self._pull is not None:
            status = self._pull.status
            there = "" if status.version >= newest.number else f" (version {status.version} there)"
            parts.append(f"{megabytes(status.nbytes)} stored{there}")
            parts += [f"note: {status.error}"] if status.error else []
        return ", ".join(parts)
