"""``thinwire publish``: make a checkpoint available, each change of it a version."""

from __future__ import annotations

import fnmatch
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from thinwire.cli.terminal.layered import publish_layers, read_layered
from thinwire.cli.terminal.live import Live, Trouble, warned
from thinwire.cli.terminal.places import PORT, Address, Congestion, TokenFile, check_state
from thinwire.engines.sync.outlets import Outlets
from thinwire.files.watch import LOOK, PART_REST, REST, Watch
from thinwire.lab.machine.interrupts import stopped_by_signals
from thinwire.lab.machine.network import interfaces
from thinwire.lab.records.progress import megabytes
from thinwire.links.address import check_port
from thinwire.links.mesh import EVERYWHERE
from thinwire.links.security import is_loopback, read_token
from thinwire.links.tcp import congestion as control
from thinwire.recipes.state import DTYPES
from thinwire.state.binding import WRAPPED
from thinwire.state.layout import Dtypes
from thinwire.types import InputError, require

MAX_SECONDS = 86_400.0  # of --rest and --wait
HERE = "ADDRESS_OF_THIS_MACHINE"  # where none is known
NAMER = "a wrapper such as DistributedDataParallel"
PUSH, PULL = "For followers that connect", "For followers that fetch"
File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A safetensors file, a model's folder, or a Trainer's output_dir."),
]
Dtype = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]bf16|fp16|fp32",
        help="Cast floats, or those called NAME (* stands for any text), to what followers use; again for "
        "another name, which counts before what is for all.",
    ),
]
Bound = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]ERROR",
        help="Let floats, or the tensor NAME, be off by so much in their own units; again for another name. "
        "What --dtype rounds comes on top, and must not be more.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse what --dtype makes infinite or cuts off, instead of a note."),
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
Layers = Annotated[
    bool, typer.Option("--layers", help="FILE is a packed scene: publish each of its layers as a version.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no live line.")]


def publish(
    file: File,
    dtype: Dtype = None,
    bound: Bound = None,
    strict: Strict = False,
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
    layers: Layers = False,
    quiet: Quiet = False,
) -> None:
    """Make a checkpoint available to followers, and each change of it a version, until Ctrl-C.

    FILE is read when its size and time have rested: see --rest. Of a Trainer's output_dir it is the newest
    checkpoint. Followers connect to --host and --port, or fetch from --store, a path or any URL that fsspec
    writes to; both can be given. With a token links are encrypted, and files in a store are signed.

    [bold]Examples[/bold]

    thinwire publish out/model.safetensors --dtype bf16

    thinwire publish out/ --dtype bf16 --host 0.0.0.0 --token-file secret --store s3://bucket/policy

    thinwire publish scene.tw --layers --host 0.0.0.0 --token-file secret
    """
    token = read_token(token_file)
    port, state = _port(port, store, state), check_state(state)
    dtypes, bounds = parse_dtypes(dtype or []), parse_bounds(bound or [])
    watch = _watch(file, rest, wait)
    with ExitStack() as stack:
        stack.enter_context(stopped_by_signals())
        try:
            _await(watch, wait)
            _check_apart(file, state)
            scene = read_layered(file) if layers else None
            tensors = watch.first(wait) if scene is None else scene.state(0)
            outlets = Outlets(tensors, _by_name(dtypes, tensors), bounds, name, token, strict)
            stack.callback(outlets.close)
            if port is not None:
                outlets.listen(host, port, state, congestion)
            if store is not None:
                with warned():  # of a wait for the last publisher
                    outlets.keep(store)
            live = stack.enter_context(Live(lambda: _line(outlets), quiet))
            live.note(_title(outlets))
            if scene is not None:
                publish_layers(scene, outlets, live, once)
            else:
                _publish_file(watch, outlets, live, once)
        except KeyboardInterrupt:  # how it is meant to end
            if once:
                raise


def _port(port: int | None, store: str | None, state: Path | None) -> int | None:
    """Return the port to listen at; None where there is only a store."""
    port = PORT if port is None and store is None else port
    if port is not None:
        check_port(port, "--port")
    saved = port is not None or state is None
    require(saved, InputError, "--state is for --port; a store is what its publisher needs")
    return port


def _watch(file: Path, rest: float | None, wait: float) -> Watch:
    good = rest is None or 0 < rest <= MAX_SECONDS
    require(good, InputError, f"--rest is {rest}; it must be above 0 seconds, and at most {MAX_SECONDS:g}")
    good = 0 <= wait <= MAX_SECONDS
    require(good, InputError, f"--wait is {wait}; it must be 0 seconds or more, and at most {MAX_SECONDS:g}")
    return Watch(file, rest)


def _await(watch: Watch, wait: float) -> None:
    if wait and not watch.stamp():
        typer.echo(f"waiting for {watch.path}, for up to {wait:g} s", err=True)
    watch.await_files(wait)


def _check_apart(file: Path, state: Path | None) -> None:
    """Raise ``InputError`` where what is saved would be published, or written over it."""
    if state is not None and file.exists():
        inside = file.samefile(state.parent) or (state.exists() and file.samefile(state))
        require(not inside, InputError, f"--state {state} is in what is published; give another place for it")


def _publish_file(watch: Watch, outlets: Outlets, live: Live, once: bool) -> None:
    """Publish what was read, and wait until it is there, or go on with each change of the file."""
    with warned(live.note):  # of casts that overflow
        outlets.publish()
    live.tick()
    if once:
        outlets.finish()
    else:
        _follow_file(watch, outlets, live)


def _follow_file(watch: Watch, outlets: Outlets, live: Live) -> None:
    """Publish each change of the file, until somebody ends it."""
    reading = Trouble(live, f"{watch.path} can be read again")
    saving = Trouble(live, "the state is saved again")
    while True:
        time.sleep(LOOK)
        outlets.check()
        saving.tell(outlets.save())
        found = None
        with suppress(InputError, OSError):  # a later one may be whole again
            found = watch.take() if watch.changed() else None
        stays = f"; version {outlets.newest.number} stays the newest"
        reading.tell(watch.trouble and watch.trouble + stays)
        if found is None:
            continue
        try:
            with warned(live.note):
                outlets.replace(found, watch.path)
        except InputError as e:
            live.note(f"note: {e}{stays}")
            continue
        outlets.check()
        live.tick()


def parse_dtypes(texts: list[str]) -> dict[str, torch.dtype]:
    """Return what --dtype says by name, that for all floats under an empty one. Errors: ``InputError``.

    >>> parse_dtypes(["bf16", "*norm*=fp32"])
    {'': torch.bfloat16, '*norm*': torch.float32}
    """
    found = {}
    for text in texts:
        name, _, kind = text.rpartition("=")
        told = f"--dtype is {text!r}; it must be one of {', '.join(DTYPES)}"
        require(kind in DTYPES, InputError, f"{told}, or NAME= and one of them" if name else told)
        found[name] = DTYPES[kind]
    return found


def _by_name(dtypes: dict[str, torch.dtype], tensors: dict[str, Tensor]) -> Dtypes:
    """Return the dtype of each tensor that is cast, or the one for all floats; names may be patterns."""
    every = dtypes.pop("", None)
    if not dtypes:
        return every
    found = {name: every for name, x in tensors.items() if x.is_floating_point()} if every else {}
    for pattern, dtype in dtypes.items():
        found |= dict.fromkeys(fnmatch.filter(tensors, pattern) or [pattern], dtype)
    return found


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


def _title(outlets: Outlets) -> str:
    """Return what is published, and how to follow it."""
    layout, push, ways = outlets.history.layout, outlets.push, []
    if push is not None:
        only = " on this machine" if is_loopback(push.host) else ""
        ways += [f"'thinwire follow {Address(host, push.port)}'{only}" for host in _hosts(push.host)]
    if outlets.pull is not None:
        ways.append(f"'thinwire follow {outlets.pull.where}'")
    about = f"{len(layout.slots)} tensors, {megabytes(layout.nbytes)}"
    told = f"publishing {outlets.name!r}: {about}; {' or '.join(ways)}"
    if all(slot.name.startswith(WRAPPED) for slot in layout.slots):
        told += f"\nnote: all names begin with {WRAPPED!r}, as {NAMER} has them; save its .module"
    return told


def _hosts(host: str) -> list[str]:
    """Return by which addresses others reach a publisher: it may listen at all of this machine's."""
    if host not in EVERYWHERE:
        return [host]
    own = [i.address for i in interfaces() if host == "::" or ":" not in i.address]
    return own or [HERE]


def _line(outlets: Outlets) -> str:
    """Return where it stands."""
    newest = outlets.newest
    share = newest.changed / max(1, outlets.history.layout.numel)
    parts = [f"version {newest.number}", f"{100 * share:.3g} % changed"]
    if outlets.push is not None:
        followers = outlets.push.followers
        upto = sum(f.version >= newest.number for f in followers)
        parts += [f"{megabytes(outlets.push.sent)} sent", f"{upto} of {len(followers)} followers have it"]
    if outlets.pull is not None:
        status = outlets.pull.status
        there = "" if status.version >= newest.number else f" (version {status.version} there)"
        parts.append(f"{megabytes(status.nbytes)} stored{there}")
        parts += [f"note: {status.error}"] if status.error else []
    return ", ".join(parts)
