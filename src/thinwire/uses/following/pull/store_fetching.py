"""Read a store, without threads: look at the manifest, choose a route, fetch, check, apply.

Whatever is read may be damaged, gone or hostile: a file that does not lead where the manifest says is left
alone for a while, and another route taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.files.base import Folder
from thinwire.files.local_folder import open_folder
from thinwire.files.safetensors import unwrap
from thinwire.state.history import History
from thinwire.state.layout import MAX_NBYTES, Layout
from thinwire.state.patches.body import most
from thinwire.state.patches.patch import Patch, Version
from thinwire.state.replica import Replica
from thinwire.types import DesyncError, InputError, LinkError, PayloadError, ThinwireError, require
from thinwire.uses.following.mirror import Mirror
from thinwire.uses.following.pull.claim import read_manifest
from thinwire.uses.following.pull.manifest import LAYOUT, File, Manifest, Proof, StoredVersion
from thinwire.uses.following.pull.retention import farthest

if TYPE_CHECKING:  # a copy of arrays needs no torch
    from torch import Tensor

ATTEMPTS = 8  # routes tried at one look
AVOID = 30.0  # seconds that a bad file is left alone; twice as long each time


class Fetching:
    """Bring a mirror forward from a folder; ``look`` does it, on one thread at a time."""

    def __init__(
        self,
        folder: Folder,
        proof: Proof,
        mirror: Mirror | None = None,
        *,
        name: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._proof, self._name, self._clock = folder, proof, name, clock
        self.mirror = mirror if mirror is not None else Mirror()
        self._bad: dict[str, tuple[float, int]] = {}  # by name: not before when, and how often it was bad
        self.confirmed = False  # at some look what was held then was the newest version
        self.manifest: Manifest | None = None  # as it was read last
        self.trouble: Exception | None = None  # with the last file that was of no use
        self.nbytes = 0  # read, the manifest included
        self.patch_nbytes, self.seconds = 0, 0.0  # of files that were read, and the time that took
        self.reading, self.read_at = 0, -math.inf  # bytes of the file that is on its way; when the last was
        self.trip: float | None = None  # the shortest time that the manifest took, in seconds

    @property
    def replica(self) -> Replica | None:
        return self.mirror.replica

    @property
    def held(self) -> Version:
        return self.mirror.held

    def look(self, landed: Callable[[Version], None] = lambda version: None) -> bool:
        """Take what the folder has to offer, one published version after the other; return whether any.

        ``landed`` hears of each. Errors: ``InputError`` where the state is not the one that is followed,
        ``AuthError``, ``PayloadError`` for a manifest that cannot be, ``OSError`` where nothing can be read,
        ``LinkError`` where no file leads on, or the layout is lost.
        """
        before = self.held
        manifest = self._read_manifest()
        for _ in range(ATTEMPTS):
            chain = self._route(manifest)
            if not chain:
                break
            if not self._walk(chain, landed):
                manifest = self._read_manifest()
        self._check_reached(manifest)
        return self.held != before

    def _read_manifest(self) -> Manifest:
        began = time.perf_counter()
        manifest = read_manifest(self._folder, self._proof)
        took = time.perf_counter() - began
        self.trip = took if self.trip is None else min(self.trip, took)
        if self._name is not None and manifest.name != self._name:
            raise InputError(f"{self._folder.where} holds the state {manifest.name!r}, not {self._name!r}")
        if self.replica is None or manifest.digest != self.replica.layout.digest:
            layout = Layout.from_json(self._fetch_layout(manifest.layout), self.mirror.max_nbytes)
            fits = layout.digest == manifest.digest
            require(fits, PayloadError, f"{LAYOUT} is not the manifest's layout")
            self.mirror.agree(layout, manifest.name)
        self.manifest = manifest
        return manifest

    def _route(self, manifest: Manifest) -> list[File]:
        """Return the files to fetch: the way on from what is held, or from nothing where only that leads on.

        The latter begins at or below the number held, where a reader has rested until the versions after its
        own are kept no more, and ends above it. A file that was bad once may be good in a while.
        """
        now, place = self._clock(), self.place(manifest)
        known = [(f, *self._bad.get(f.name, (0.0, 0))) for f in manifest.files]
        rested = [f for f, until, _ in known if until <= now]
        onward = farthest((f for f in rested if f.version > self.held.number), place)
        hoped = (f for f, _, times in known if f.version > self.held.number and times < 2)
        if farthest(hoped, place):
            return onward
        reached = onward[-1].version if onward else max(self.held.number, place)
        afresh = farthest(rested, 0)
        return afresh if afresh and afresh[-1].version > reached else onward

    def place(self, manifest: Manifest) -> int:
        """Return the manifest's number for what is held: equal contents are the same; 0 for anything else."""
        held = self.held
        same = [v.number for v in manifest.versions if held.hash and v.hash == held.hash]
        return held.number if held.number in same else max(same, default=0)

    def _walk(self, chain: list[File], landed: Callable[[Version], None]) -> bool:
        """Apply files in order; return whether the manifest is still good: not where one of them is gone.

        Nobody sees what is not above the version held: that is built beside it, until a file leads above.
        """
        beside: Replica | None = None
        for file in chain:
            if beside is None and file.version <= self.held.number:
                beside = self.mirror.beside()
            apply = self.mirror.apply if beside is None else beside.apply
            try:
                version = apply(self._patch(file))
                if beside is not None:
                    if version.number <= self.held.number:
                        continue
                    version, beside = self.mirror.take(beside), None
            except FileNotFoundError as e:
                self._avoid(file, e)
                return False
            except (PayloadError, DesyncError) as e:
                self._avoid(file, e)
                return True
            landed(version)
        return True

    def _patch(self, file: File) -> Patch:
        """Fetch a file's patch, and check that it is the one which the manifest promises."""
        replica = self.replica
        if replica is None:
            raise PayloadError("a patch before any layout")
        limit = most(replica.layout)
        require(
            file.nbytes <= limit, PayloadError, f"{file.name} has {file.nbytes} bytes, at most {limit} fit"
        )
        began = time.perf_counter()
        data = self._fetch(file)
        self.seconds += time.perf_counter() - began
        self.patch_nbytes += len(data)
        patch = Patch.unpack(unwrap(data), limit)
        promised = (patch.base, patch.version) == (file.base, file.version)
        require(promised, PayloadError, f"{file.name} leads from {patch.base} to {patch.version}")
        return patch

    def _fetch_layout(self, file: File) -> bytes:
        try:
            return self._fetch(file)
        except FileNotFoundError as e:
            where = self._folder.where
            raise LinkError(
                f"{where} has lost {LAYOUT}; its publisher, while it runs, writes it again"
            ) from e

    def _fetch(self, file: File) -> bytes:
        self.reading = file.nbytes
        try:
            data = self._folder.read(file.name, file.nbytes)
        finally:
            self.reading, self.read_at = 0, self._clock()
        self.nbytes += len(data)
        whole = len(data) == file.nbytes and self._proof.fits(file.name, data, file.check)
        require(whole, PayloadError, f"{file.name} at {self._folder.where} is damaged")
        return data

    def _avoid(self, file: File, error: Exception) -> None:
        times = self._bad.get(file.name, (0.0, 0))[1] + 1
        self._bad[file.name] = self._clock() + AVOID * 2 ** min(times - 1, 10), times
        self.trouble = error

    def _check_reached(self, manifest: Manifest) -> None:
        newest, held, where = manifest.newest, self.held.number, self._folder.where
        self._bad = {f.name: self._bad[f.name] for f in manifest.files if f.name in self._bad}
        if newest is None:
            self.trouble = None
        elif self.place(manifest) == newest.number:
            self.trouble, self.confirmed = None, True
            self._confirm(manifest, newest)
        elif newest.number <= held:
            raise LinkError(
                f"{where} has versions up to {newest.number}, and version {held} is held: its publisher "
                "began anew; follow it anew"
            )
        else:
            reason = f" ({self.trouble})" if self.trouble else ""
            raise LinkError(f"no file at {where} leads from version {held} to {newest.number} now{reason}")

    def _confirm(self, manifest: Manifest, newest: StoredVersion) -> None:
        """Call a base by the number that its contents have in the folder."""
        if newest.number > self.held.number:
            self.mirror.confirm(Version(newest.number, newest.hash, newest.published, manifest.meta))


def look(folder: Folder, token: bytes | None = None, max_nbytes: int = MAX_NBYTES) -> tuple[Manifest, Layout]:
    """Return the manifest and the layout of a store.

    Errors: ``OSError`` where it cannot be read, ``AuthError``, ``PayloadError`` where it is damaged.
    """
    proof = Proof(token)
    manifest = read_manifest(folder, proof)
    data = folder.read(manifest.layout.name, manifest.layout.nbytes)
    whole = proof.fits(LAYOUT, data, manifest.layout.check)
    require(whole, PayloadError, f"{LAYOUT} at {folder.where} is damaged")
    return manifest, Layout.from_json(data, max_nbytes)


def recall(
    url: str | Path,
    token: bytes | None,
    layout: Layout,
    name: str = "state",
    options: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Tensor], Version] | None:
    """Return the newest tensors that a store holds, and which version they are.

    None where it has none of the state ``name`` with this layout, which is seen before they are fetched, and
    where nobody can publish: at a web server. ``options`` go to fsspec.
    """
    if str(url).startswith(("http://", "https://")):
        return None
    folder, proof, mirror = open_folder(url, **(options or {})), Proof(token), Mirror()
    try:
        if read_manifest(folder, proof).digest == layout.digest:
            mirror.agree(layout, name)
            Fetching(folder, proof, mirror, name=name).look()
    except (OSError, ThinwireError):  # whoever writes there next says what is wrong, or writes a keyframe
        pass
    replica = mirror.replica
    if replica is None or not replica.held.hash:
        return None
    replica.swap()
    return replica.tensors(), replica.held


def resume(
    history: History,
    url: str | Path,
    token: bytes | None = None,
    name: str = "state",
    options: Mapping[str, Any] | None = None,
) -> None:
    """Let a history without versions begin with the newest of a store, as that calls it.

    A publisher that starts again goes on from there: its readers need a patch. See ``recall``.
    """
    found = None if history.newest.number else recall(url, token, history.layout, name, options)
    if found is not None:
        tensors, version = found
        history.outnumber(version.number - 1)
        history.publish(tensors, version.meta, version.published)
