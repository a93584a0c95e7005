"""The follower's side: a state in two buffers, of which one is used while the other is brought forward."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.state.devices.beginning import first_words
from thinwire.state.disk import saved
from thinwire.state.layout import MAX_NBYTES, Array, Layout
from thinwire.state.patch_code.indexing import read, write
from thinwire.state.patches import moves
from thinwire.state.patches.moves import KeyframeReading, Move, Reading, SectionReading
from thinwire.state.patches.patch import Meta, Patch, Version
from thinwire.state.threads import by_runs
from thinwire.state.values import Bits, Place, View
from thinwire.state.words import Words
from thinwire.types import DesyncError, InputError, LinkError, require

if TYPE_CHECKING:  # a copy of arrays needs no torch
    from torch import Tensor, nn

    from thinwire.state.binding import Bound
    from thinwire.state.loaded.loaded_model import LoadedModel
    from thinwire.state.loaded.loader_recording import Load

PATIENCE = 0.02  # seconds that a swap waits for words being written; it comes again after the next step
TIMEOUT = 60.0  # seconds that ``catch_up`` waits for them
_WHOLE = 8  # a buffer that is behind by more than this share of the words is copied, not caught up
CHECK_EVERY = 256  # 2 ns a word then: far below what versions take anyway
_PLACES = 64  # and so is one behind by more than so many changes a piece, on average: they take memory too


class Replica:
    """A follower's copy. ``apply`` brings the back buffer forward, ``swap`` makes it the front: what is used.

    ``swap`` and ``tensors`` belong to the thread that uses the tensors, what brings versions here to another,
    ``save`` to any. Tensors are for reading, and hold until the next ``swap``: then their memory is written
    again.
    ``version``, ``hash``, ``published`` and ``meta`` are the front's; ``held`` is the newest complete one,
    which patches must start from. Nothing older than ``held`` is ever taken.

    Models with memory of their own (``fill``) need no front: until somebody looks at tensors or binds a
    model, there is one buffer, which is brought forward between two swaps.

    The hash of a patch is checked by what it changes; every ``check_every`` patches (0: never) all words are
    hashed too, which shows whether anybody else wrote to them.

    >>> import torch
    >>> layout = Layout.of({"w": torch.zeros(4)})
    >>> replica = Replica(layout)
    >>> replica.start({"w": torch.ones(4)}).number, replica.swap(), replica.tensors()["w"].tolist()
    (0, True, [1.0, 1.0, 1.0, 1.0])
    """

    def __init__(self, layout: Layout, check_every: int = CHECK_EVERY) -> None:
        check_interval(check_every)
        self.layout = layout
        self._check_every, self._unchecked = check_every, 0  # patches
        self.pause = 0.0  # seconds the last swap took
        self._front: View | None = None
        self._back: View | None = None
        self._shown = Version()
        self._held = Version()
        self._ready = False  # the back buffer holds a version newer than the front's
        self._behind: list[Place] | None = None  # where back and front differ; None: anywhere
        self._differing = 0  # how many words that may be
        self._touched: set[int] | None = None  # slots in which back and front may differ; None: in all
        self._bound: Bound | None = None  # before any model
        self._loaded: list[LoadedModel] = []
        self._viewed = False  # somebody may read the front: a second buffer is brought forward beside it
        self._saved: View | None = None  # a buffer that is being written to a file: nobody writes to it then
        self._saving = threading.Lock()
        self._lock = threading.Lock()  # which buffer is which
        self._applying = threading.Lock()

    @property
    def held(self) -> Version:
        """The newest complete version, in use or not."""
        return self._held

    @property
    def shown(self) -> Version:
        """The version in use; number 0 for none, and for a base from elsewhere."""
        return self._shown

    @property
    def version(self) -> int:
        """The number of the version in use."""
        return self._shown.number

    @property
    def hash(self) -> int:
        return self._shown.hash

    @property
    def published(self) -> float:
        """Seconds since the epoch by the publisher's clock."""
        return self._shown.published

    @property
    def meta(self) -> Meta:
        return self._shown.meta

    def start(self, tensors: Mapping[str, Tensor] | Mapping[str, Array]) -> Version:
        """Hold ``tensors`` as version 0: a base from which the publisher may know the way. Then ``swap``.

        Arrays are taken bit by bit. Errors: ``InputError`` naming the tensor that does not fit, or when a
        version is held already.
        """
        with self._applying:
            require(not self._held.hash, InputError, f"version {self._held.number} is held already")
            words = first_words(self.layout, tensors)
            return self._install(words, Version(0, words.hash()))

    def reading(self, base_hash: int) -> SectionReading | None:
        """Return what reads a patch from ``base_hash`` as it comes; None where that is not held.

        ``base_hash``: 0 for a keyframe, for which a buffer goes at once.
        """
        with self._applying:
            self._merge()
            if not base_hash:
                self._make_room()
                return KeyframeReading(self.layout)
            newest = self._newest()
            fits = newest is not None and base_hash == self._held.hash
            return Reading(newest.words, self._held) if newest is not None and fits else None

    def apply(self, patch: Patch, reading: SectionReading | None = None) -> Version:
        """Bring the back buffer to the version that ``patch`` leads to, and return that.

        ``reading`` may have read some of it. Errors: ``PayloadError`` for a patch that cannot be,
        ``DesyncError`` for one that does not start at what is held, is not newer, or leads to other contents;
        then nothing has changed.
        """
        with self._applying:
            self._merge()
            moves.check_follows(patch, self.layout, self._held)
            if not patch.base:
                self._make_room()
                return self._install(moves.whole(patch, self.layout, reading), patch.target)
            newest = self._newest()
            if newest is None:
                raise DesyncError(
                    f"a patch from version {patch.base}, and nothing is held; ask for a keyframe"
                )
            made = moves.moves(patch, newest.words, self._held, reading)
            self._check_contents()
            self._move(made, patch.target)
            return self._held

    def prepare(self) -> None:
        """Do what can be done before the next patch comes: bring the buffer behind up to the one in use."""
        with self._applying:
            self._merge()
            if not self._ready and self._front is not None and self._behind != []:
                self._caught_up()

    @property
    def _alone(self) -> bool:
        """Whether models with memory of their own are all that uses this."""
        return bool(self._loaded) and self._bound is None and not self._viewed

    def _merge(self) -> None:
        """Let the front be the buffer that is brought forward, where nobody reads it."""
        with self._lock:
            if self._alone and self._front is not None and not self._ready:
                self._one(self._front)

    def _one(self, newest: View) -> None:
        """Keep one buffer, which all models have the values of."""
        self._front, self._back, self._ready = None, newest, True
        self._behind, self._differing, self._touched = [], 0, set()

    def _check_contents(self) -> None:
        """Raise ``DesyncError`` where it is time to look and a buffer is not what it should be.

        Until they are, or all come anew, no patch counts.
        """
        self._unchecked += 1
        if not self._check_every or self._unchecked < self._check_every:
            return
        with self._lock:
            ready, front, back, shown = self._ready, self._front, self._back, self._shown
        if not ready:
            back = self._caught_up()  # then both are what is held
        try:
            for view, version in ((back, self._held), (front, shown)):
                if view is not None:
                    _check(view.words, version)
        except DesyncError:
            self._behind = None  # the next time, the back is copied from the front
            raise
        self._unchecked = 0

    def _newest(self) -> View | None:
        """Return the buffer with what is held: nobody writes to it but whoever applies, in front or not."""
        with self._lock:  # a swap between the two looks would show the older buffer
            return self._back if self._ready else self._front

    def confirm(self, version: Version) -> Version:
        """Hold what is held as ``version``, which the publisher says it is, and return that.

        A base from elsewhere gets its number so, and so does what a publisher numbered anew. Errors:
        ``DesyncError`` where contents differ, or the number is below that of what is held.
        """
        with self._applying, self._lock:
            if version.hash != self._held.hash or version.number < self._held.number:
                raise DesyncError(
                    f"version {version.number} is not version {self._held.number}, which is held"
                )
            self._held = version
            if not self._ready:
                self._shown = version
        return version

    def beside(self) -> Replica:
        """Return an empty replica of this layout, for patches that lead past what is held from before it.

        Nobody sees what it holds; ``take`` it when that is newer. As for a keyframe, a buffer goes for it.
        """
        with self._applying:
            self._make_room()
        return Replica(self.layout, 0)  # nobody else can write to it

    def take(self, beside: Replica) -> Version:
        """Hold what ``beside`` holds, which nobody uses from then on, and return that.

        Errors: ``DesyncError`` where it is not newer than what is held; then nothing has changed.
        """
        with self._applying:
            newest, version = beside._newest(), beside.held
            if newest is None or version.number <= self._held.number:
                raise DesyncError(f"version {version.number} is not newer than {self._held.number} here")
            return self._install(newest.words, version)

    def _make_room(self) -> None:
        with self._lock:
            if not self._ready:  # of no more use: what is held is in front
                self._back, self._behind = None, None

    def _install(self, words: Words, version: Version) -> Version:
        view = View(words)
        with self._lock:
            self._back, self._behind, self._touched = view, None, None
            self._ready, self._held, self._unchecked = True, version, 0
        return version

    def _move(self, made: list[Move], version: Version) -> None:
        with self._lock:
            if self._ready and self._back is not None:
                if self._back is self._saved:
                    self._back = View(self._back.words.copy())
                self._write_ready(self._back, made)
                self._held = version
                return
        back = self._caught_up()
        self._write(back, made)
        with self._lock:
            self._ready, self._held = True, version

    def _write_ready(self, back: View, made: list[Move]) -> None:
        """Bring a buffer forward that could be swapped: not while it is between two versions."""
        try:
            self._write(back, made)
        except BaseException:
            self._ready, self._held = False, self._shown
            raise

    def _write(self, back: View, made: list[Move]) -> None:
        known, self._behind = self._behind, None  # stays so if writing is cut short
        moves.write(back.words, made)
        for m in made:
            back.refresh(m.piece, m.positions)
            if self._touched is not None:
                self._touched.add(self.layout.blocks()[m.piece].slot)
        if known is not None:
            known += [(m.piece, m.positions) for m in made]
            self._differing += sum(len(m.old) for m in made)
            few = len(known) <= _PLACES * len(self.layout.blocks())
            self._behind = known if few and self._differing * _WHOLE <= self.layout.numel else None

    def _caught_up(self) -> View:
        """Return the back buffer with the words of the front, which nobody can swap away."""
        front = self._front
        if front is None:
            raise DesyncError("nothing is held yet; ask for a keyframe")
        if self._back is None or self._back is self._saved:
            self._back = View(front.words.copy())
        elif self._behind is None:
            self._back.copy_from(front)
        else:
            self._copy(front, self._back, self._behind)
        self._behind, self._differing, self._touched = [], 0, set()
        return self._back

    def _copy(self, front: View, back: View, places: list[Place]) -> None:
        """Copy words at some places, some perhaps twice; then both copies are the same."""

        def copy(run: slice) -> None:
            for piece, positions in places[run]:
                write(back.words[piece], positions, read(front.words[piece], positions))
                back.refresh(piece, positions)

        by_runs(copy, [self.layout.blocks()[i].numel if at is None else at.size for i, at in places])

    def swap(self, patience: float = PATIENCE) -> bool:
        """Put the newest version in front, bound models included; False where there is none to put there.

        Waits at most ``patience`` seconds for words being written: then what is in front stays for now.
        """
        began = time.perf_counter()
        if not self._lock.acquire(timeout=patience):
            return False
        try:
            self._loaded = [loaded for loaded in self._loaded if loaded.alive]
            new = self._ready and not (self._alone and self._shown is self._held)
            if new:
                self._put_in_use()
        finally:
            self._lock.release()
        self.pause = time.perf_counter() - began
        return new

    def _put_in_use(self) -> None:
        """Let all models have the newest version, which is in the back buffer; called with the lock."""
        newest = self._back
        if newest is None:
            return
        if not self._alone:
            self._front, self._back, self._ready = newest, self._front, False
            self._shown = self._held
        if self._bound is not None:
            self._bound.point(newest, self._touched, self._behind)
        for loaded in self._loaded:
            loaded.point(newest, self._touched, self._behind)
        if self._alone:
            self._one(newest)
            self._shown = self._held

    def catch_up(self, timeout: float = TIMEOUT) -> None:
        """Put the newest version in front, as ``swap``, and wait for it while its words are being written.

        Errors: ``LinkError`` after ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while not self.swap(max(PATIENCE, end - time.monotonic())) and self._shown.hash != self._held.hash:
            late = time.monotonic() >= end
            require(not late, LinkError, f"waited {timeout:g} s for a version being written here; try again")

    def tensors(self) -> dict[str, Tensor]:
        """Return the front's tensors by name, aliases too, not copied: until the next ``swap``, by whomever.

        Errors: ``InputError`` before any.
        """
        return dict(self._used().tensors)

    def arrays(self) -> dict[str, Array]:
        """Return the same as arrays, without torch: see ``Bits.array`` for what numpy has no dtype for."""
        return dict(self._used().arrays)

    def bits(self) -> dict[str, Bits]:
        """Return the bits of the front's tensors by name, without aliases, not copied, as ``tensors``."""
        front = self._used()
        return {slot.name: front.bits(i) for i, slot in enumerate(self.layout.slots)}

    def _used(self) -> View:
        with self._lock:
            self._look()
            front = self._front
        if front is None:
            raise InputError("nothing is in front yet; apply a patch, then swap")
        return front

    def _look(self) -> None:
        """Have a front from now on, with the newest version where there was none; called with the lock."""
        alone = self._alone and self._front is None and self._shown.hash > 0
        self._viewed |= alone or self._front is not None
        if alone:
            self._put_in_use()

    def bind(self, model: nn.Module) -> None:
        """Let parameters and buffers of ``model`` be the front's tensors, now and after each ``swap``.

        Models bound before stay so. One may have more tensors than the state. Buffers, and what is on
        another device, are copied to; other parameters share the front's memory: nobody else may write to
        them. Errors: ``InputError`` naming the first tensor that is missing, or of another shape or dtype.
        """
        from thinwire.state import binding

        found = binding.bind(self.layout, model)
        with self._lock:
            self._look()
            self._bound = self._bound or binding.Bound()
            self._bound.add(found)
            if self._front is not None:
                self._bound.point(self._front)

    def fill(self, model: nn.Module, load: Load, kept: Collection[str] = ()) -> None:
        """Let ``model``, which ``load`` fills from a checkpoint, have the front's values, now and later.

        It keeps its own memory, and only what changed is written: see ``loaded_blocks``, also for errors.
        """
        from thinwire.state.loaded.loaded_model import LoadedModel, loaded_blocks

        loaded = LoadedModel(self.layout, model, loaded_blocks(self.layout, model, load, kept))
        with self._lock:
            self._add(model, loaded)

    def write_to(self, model: nn.Module, loaded: LoadedModel) -> None:
        """Let ``model`` have the front's values where ``loaded`` says, now and after each ``swap``.

        There is a front then: the model may have other parts from replicas that are swapped at the same time.
        """
        with self._lock:
            self._viewed = True
            self._add(model, loaded)

    def _add(self, model: nn.Module, loaded: LoadedModel) -> None:
        self._loaded = [other for other in self._loaded if not other.of(model)] + [loaded]
        if self._front is not None:
            loaded.point(self._front)
        elif self._alone and self._shown.hash and self._ready:  # others have values of it already
            self._put_in_use()

    def fills(self, model: nn.Module) -> bool:
        """Return whether ``fill`` was given this model, whose parameters are where they were."""
        return any(loaded.same(model) for loaded in self._loaded)

    def check(self) -> None:
        """Raise ``DesyncError`` unless the words in front hash to what they should: about 1 ns each."""
        with self._lock:
            front, shown = self._front, self._shown
        if front is not None:
            _check(front.words, shown)

    def save(self, path: str | Path) -> None:
        """Write what is held as a safetensors file, whole or not at all.

        Patches are applied meanwhile, to a copy where need be. Errors: ``InputError``, also where somebody
        wrote to the tensors: all words are hashed before.
        """
        with self._saving:
            with self._lock:
                newest, held = self._back if self._ready else self._front, self._held
                self._saved = newest
            try:
                if newest is None:
                    raise InputError("nothing is held yet, so there is nothing to save")
                saved.save(path, newest.words, held)
            finally:
                with self._lock:
                    self._saved = None

    @classmethod
    def load(cls, path: str | Path, max_nbytes: int = MAX_NBYTES, check_every: int = CHECK_EVERY) -> Replica:
        """Return the replica saved at ``path``, in front. Errors: ``InputError``."""
        words, version = saved.load(path, max_nbytes)
        replica = cls(words.layout, check_every)
        replica._install(words, version)
        replica.swap()
        return replica


def check_interval(patches: int) -> None:
    """Raise ``InputError`` unless ``patches`` is a number that ``check_every`` may be."""
    require(patches >= 0, InputError, f"check_every={patches}; 0 for never, or a number of patches")


def _check(words: Words, version: Version) -> None:
    """Raise ``DesyncError`` unless ``words`` hash to what ``version`` should."""
    if words.hash() != version.hash:
        raise DesyncError(f"the tensors of version {version.number} were written to; ask for a keyframe")
