"""What ``thinwire publish`` does with what it reads."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
import typer
from torch import Tensor

from thinwire.dtypes import dtype_of
from thinwire.files.watch import LOOK, Watch
from thinwire.links.address import Address
from thinwire.links.security import is_loopback
from thinwire.runs.records.progress import megabytes
from thinwire.runs.terminal.addresses import reached_at
from thinwire.runs.terminal.live import Live, Trouble, warned
from thinwire.state.binding import WRAPPED
from thinwire.state.layout import Dtypes
from thinwire.state.patches.patch import Meta
from thinwire.types import InputError, PayloadError, require
from thinwire.uses.following.commands.options import PublishConfig, parse_bounds, parse_dtypes
from thinwire.uses.following.hosts.disk_deltas.delta_watch import DeltaWatch
from thinwire.uses.following.publish_targets import PublishTargets
from thinwire.uses.layered import LAYERS, Layered, layered_form

NAMER = "a wrapper such as DistributedDataParallel"
Watched = Watch | DeltaWatch


def publish_file(file: Path, config: PublishConfig, token: bytes | None, stack: ExitStack) -> None:
    """Publish until somebody ends it, or with ``once`` until a follower or the store has it."""
    dtypes = {name: dtype_of(kind) for name, kind in parse_dtypes(config.dtype).items()}
    watch, at = _watch(file, config, dtypes), config.at
    _await(watch, config.wait)
    _check_apart(file, at[2] if at is not None else None)
    scene = read_layered(file) if config.layers else None
    tensors = watch.first(config.wait) if scene is None else scene.state(0)
    kind = _by_name(dtypes, tensors), parse_bounds(config.bound)
    targets = PublishTargets(tensors, *kind, config.name, token, config.strict)
    stack.callback(targets.close)
    if at is not None:
        targets.listen(*at)
    if config.store is not None:
        with warned():  # of a wait for the last publisher
            targets.keep(config.store)
    live = stack.enter_context(Live(lambda: _line(targets), config.quiet))
    live.note(_title(targets))
    if scene is not None:
        publish_layers(scene, targets, live, config.once)
    else:
        _publish_tensors(watch, targets, live, config.once)


def _watch(file: Path, config: PublishConfig, dtypes: dict[str, torch.dtype]) -> Watched:
    """Return what notices changes of a checkpoint, or of the folder that deltas against it are written to."""
    if config.deltas is None:
        return Watch(file, config.rest)

    def cast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kinds = _by_name(dict(dtypes), tensors)
        by_name = kinds if isinstance(kinds, Mapping) else dict.fromkeys(tensors, kinds)
        floats = {name for name, x in tensors.items() if x.is_floating_point() and by_name.get(name)}
        return {n: x.to(dtype_of(by_name[n] or x.dtype)) if n in floats else x for n, x in tensors.items()}

    return DeltaWatch(file, config.deltas, config.rest, cast)


def _await(watch: Watched, wait: float) -> None:
    if wait and not watch.stamp():
        typer.echo(f"waiting for {watch.path}, for up to {wait:g} s", err=True)
    watch.await_files(wait)


def _check_apart(file: Path, state: Path | None) -> None:
    """Raise ``InputError`` where what is saved would be published, or written over it."""
    if state is not None and file.exists():
        inside = file.samefile(state.parent) or (state.exists() and file.samefile(state))
        require(not inside, InputError, f"--state {state} is in what is published; give another place for it")


def _publish_tensors(watch: Watched, targets: PublishTargets, live: Live, once: bool) -> None:
    """Publish what was read, and wait until it is there, or go on with each change of the file."""
    with warned(live.note):  # of casts that overflow
        targets.publish(None, _notes(watch))
    live.tick()
    if once:
        targets.finish()
    else:
        _follow_file(watch, targets, live)


def _notes(watch: Watched) -> Meta:
    """Return what goes along with a version: the step that a trainer calls it."""
    return watch.notes if isinstance(watch, DeltaWatch) else {}


def _follow_file(watch: Watched, targets: PublishTargets, live: Live) -> None:
    """Publish each change of the file, until somebody ends it."""
    reading = Trouble(live, f"{watch.path} can be read again")
    saving = Trouble(live, "the state is saved again")
    while True:
        time.sleep(LOOK)
        targets.check()
        saving.tell(targets.save())
        found = None
        with suppress(InputError, OSError):  # a later one may be whole again
            found = watch.take() if watch.changed() else None
        stays = f"; version {targets.newest.number} stays the newest"
        reading.tell(watch.trouble and watch.trouble + stays)
        if found is None:
            continue
        try:
            with warned(live.note):
                targets.replace(found, watch.path, _notes(watch))
        except InputError as e:
            live.note(f"note: {e}{stays}")
            continue
        targets.check()
        live.tick()


def _by_name(dtypes: dict[str, torch.dtype], tensors: dict[str, Tensor]) -> Dtypes:
    """Return the dtype of each tensor that is cast, or the one for all floats; names may be patterns."""
    every = dtypes.pop("", None)
    if not dtypes:
        return every
    found = {name: every for name, x in tensors.items() if x.is_floating_point()} if every else {}
    for pattern, dtype in dtypes.items():
        found |= dict.fromkeys(fnmatch.filter(tensors, pattern) or [pattern], dtype)
    return found


def _title(targets: PublishTargets) -> str:
    """Return what is published, and how to follow it."""
    layout, push, ways = targets.history.layout, targets.push, []
    if push is not None:
        only = " on this machine" if is_loopback(push.host) else ""
        ways += [f"'thinwire follow {Address(host, push.port)}'{only}" for host in reached_at(push.host)]
    if targets.pull is not None:
        ways.append(f"'thinwire follow {targets.pull.where}'")
    about = f"{len(layout.slots)} tensors, {megabytes(layout.nbytes)}"
    told = f"publishing {targets.name!r}: {about}; {' or '.join(ways)}"
    if all(slot.name.startswith(WRAPPED) for slot in layout.slots):
        told += f"\nnote: all names begin with {WRAPPED!r}, as {NAMER} has them; save its .module"
    return told


def _line(targets: PublishTargets) -> str:
    """Return where it stands."""
    newest = targets.newest
    share = newest.changed / max(1, targets.history.layout.numel)
    parts = [f"version {newest.number}", f"{100 * share:.3g} % changed"]
    if targets.push is not None:
        followers = targets.push.followers
        upto = sum(f.version >= newest.number for f in followers)
        parts += [f"{megabytes(targets.push.sent)} sent", f"{upto} of {len(followers)} followers have it"]
    if targets.pull is not None:
        status = targets.pull.status
        there = "" if status.version >= newest.number else f" (version {status.version} there)"
        parts.append(f"{megabytes(status.nbytes)} stored{there}")
        parts += [f"note: {status.error}"] if status.error else []
    return ", ".join(parts)


def read_layered(path: Path) -> Layered:
    """Return the packed scene at a path. Errors: ``InputError`` naming it, ``OSError``."""
    try:
        return layered_form().layered(path.read_bytes())
    except PayloadError as e:
        raise InputError(f"--layers: {path} is no whole packed scene: {e}") from e


def publish_layers(scene: Layered, targets: PublishTargets, live: Live, once: bool) -> None:
    """Publish all layers, each when those who follow have the one before; then, unless ``once``, stay."""
    had = targets.history.newest.meta.get(LAYERS, 1)  # where it goes on from what an earlier one left
    for layers in range(had if isinstance(had, int) and 1 <= had <= scene.count else 1, scene.count + 1):
        targets.publish(scene.state(layers), {LAYERS: layers})
        live.tick()
        if once:
            targets.finish()
        elif layers < scene.count:
            while not targets.arrived():
                targets.check()
                time.sleep(LOOK)
    while not once:
        targets.check()
        time.sleep(LOOK)
