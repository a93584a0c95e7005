"""The publisher's side: the live words of a state, and patches to its newest version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from thinwire.state import content
from thinwire.state.devices.beginning import first_words
from thinwire.state.disk import saved
from thinwire.state.layout import MAX_NBYTES, Array, Layout
from thinwire.state.log import ChangeLog, LogEntry, Past, logged, merge
from thinwire.state.patch_code.blocks import Block
from thinwire.state.patches import body, moves
from thinwire.state.patches.draft import Draft, Ends, Lane, More, drafted, in_use
from thinwire.state.patches.moves import KeyframeReading, Move, Reading, SectionReading
from thinwire.state.patches.patch import MAX_VERSION, Meta, Patch, Version, check_meta, is_time
from thinwire.state.threads import by_runs
from thinwire.state.words import Words
from thinwire.types import DesyncError, InputError, require

if TYPE_CHECKING:  # a relay needs no torch
    from torch import Tensor

    from thinwire.state.devices.taking import TensorIntake
    from thinwire.state.intake import Overflows

CACHED = 8  # patches to the newest version that are kept, each from another base

Made = TypeVar("Made", Patch, Patch | None)


class History:
    """The only owner of a state's live words and of the log of what each version changed.

    ``publish`` and ``adopt`` belong to one thread, ``patch``, ``recall`` and ``find`` to any: a keyframe,
    which takes as long as the state is large, and a patch are made beside each other. ``budget`` bounds the
    log in bytes (default: a quarter of the state); with versions in use (``keep``) it may take eight times
    that. ``start`` is the number after which versions are counted: a publisher that starts again gives its
    last. Where a cast overflows, ``publish`` warns, or refuses it with ``overflows.strict``.

    >>> import torch
    >>> layout = Layout.of({"w": torch.zeros(4)})
    >>> history = History(layout)
    >>> history.publish({"w": torch.ones(4)}, {"step": 1}).number
    1
    """

    def __init__(self, layout: Layout, budget: int | None = None, start: int = 0) -> None:
        require(0 <= start < MAX_VERSION - 1, InputError, f"start={start} is no version number")
        self.layout = layout
        self._words = Words(layout)
        self._log = ChangeLog(layout, layout.nbytes // 4 if budget is None else budget, self._in_use)
        self._users: list[Callable[[], Iterable[int]]] = []
        self._patches, self._keyframes = Lane(), Lane()
        self._newest = Version()
        self._known: dict[int, int] = {}  # versions that can be patched from, and their hashes
        self._start = start
        self._lock = threading.RLock()  # the live words and the log; held while they change
        self._cache: dict[int, Patch] = {}
        self._pasts: list[Past] = []  # of versions that patches are being made from
        self._latest: tuple[int, dict[int, Move]] = 0, {}  # the last version but one; what led on from it

    @cached_property
    def _taking(self) -> TensorIntake:
        """What brings the live words up to a trainer's tensors."""
        from thinwire.state.devices.taking import TensorIntake

        return TensorIntake(self.layout)

    @property
    def overflows(self) -> Overflows:
        """What is done where a cast overflows."""
        return self._taking.overflows

    @property
    def newest(self) -> Version:
        """The newest version; its number is 0 before the first."""
        return self._newest

    @property
    def log_nbytes(self) -> int:
        """Bytes the log takes."""
        return self._log.nbytes

    def keep(self, in_use: Callable[[], Iterable[int]]) -> None:
        """Let ``in_use`` say which versions patches will start from, the most important first.

        It is called by whoever publishes, when there is not room for all versions: it must not wait.
        """
        self._users = [*self._users, in_use]

    def release(self, in_use: Callable[[], Iterable[int]]) -> None:
        """Ask ``in_use`` no more. Harmless twice."""
        self._users = [user for user in self._users if user != in_use]

    def _in_use(self) -> list[int]:
        used = [number for user in self._users for number in user()]
        return in_use([self._keyframes, self._patches], used)

    def start(self, tensors: Mapping[str, Tensor] | Mapping[str, Array]) -> Version:
        """Hold ``tensors`` as version 0: a base from which a relay's publisher may know the way.

        It gets its number by ``confirm``, or by the first patch from it; before, no patch leads to it.
        Errors: ``InputError`` naming the tensor that does not fit, or when a version is held already.
        """
        require(not self._newest.hash, InputError, f"version {self._newest.number} is held already")
        words = first_words(self.layout, tensors)
        with self._lock:
            self._words = words
            self._forget_devices()
            return self._settle(Version(0, words.hash()))

    def publish(
        self, tensors: Mapping[str, Tensor], meta: Meta | None = None, published: float | None = None
    ) -> Version:
        """Make ``tensors`` the newest version and return it; ``published`` is in seconds since the epoch.

        Errors: ``InputError`` naming the tensor that does not fit; then nothing has changed.
        """
        kept, found = check_meta(meta or {}), self._taking.named(tensors)
        when = time.time() if published is None else float(published)
        require(is_time(when), InputError, f"published={when:g} is no time in seconds since the epoch")
        made = list[Move]()
        with self._taking.writable():
            return self._whole(made, lambda: self._bring_up(found, made, when, kept))

    def _bring_up(self, found: list[Tensor], made: list[Move], when: float, meta: Meta) -> Version:
        self.overflows.begin()
        if not self._newest.number:
            return self._first(found, when, meta)
        step, residents = self._taking.take(found, self._words, self._overwrite, made)
        now = content.add(self._newest.hash, step)
        self.overflows.tell(self.layout.slots)
        number = self._newest.number + 1
        self._taking.settle(residents)
        version = self._advance(Version(number, now, when, meta, _count(made)), made)
        self._taking.keep(residents)
        return version

    def _whole(self, made: list[Move], step: Callable[[], Version]) -> Version:
        """Return what ``step`` does; after an error or a Ctrl-C all is as it was, what ``made`` names too."""
        with self._lock:
            words, pasts, log = self._words, self._pasts, self._log.known()
            known = self._newest, self._known, self._cache, self._latest
            try:
                return step()
            except BaseException:
                self._words, self._pasts = words, pasts
                moves.write(words, (Move(m.piece, m.positions, m.new, m.old) for m in made))
                self._newest, self._known, self._cache, self._latest = known
                self._log.restore(log)
                raise

    def _first(self, found: list[Tensor], when: float, meta: Meta) -> Version:
        self._words = self._taking.first(found)
        self.overflows.tell(self.layout.slots)
        return self._settle(Version(self._start + 1, self._words.hash(), when, meta, self.layout.numel))

    def _settle(self, version: Version) -> Version:
        # first: whoever sees that there is a newer version sees what can be patched from
        self._known = {**self._log.bases(), version.number: version.hash}
        self._newest, self._cache = version, {}
        return version

    def _forget_devices(self) -> None:
        """Copy the live words to tensors' devices anew the next time."""
        if "_taking" in self.__dict__:
            self._taking.keep([])

    def _advance(self, version: Version, made: list[Move], base: int = 0) -> Version:
        """Note what led to ``version``; ``base``: what is held is called that, where it has no number."""
        base = self._newest.number or base
        changes = {m.piece: logged(m, self._words[m.piece]) for m in made}
        self._log.append(LogEntry(base, self._newest.hash, changes))
        few = {m.piece: m for m in made if m.positions is not None}  # others hold live words
        few = {i: m for i, m in few.items() if changes[i].positions is not None}  # nor more than the log
        # what was received lies in one array for all pieces, most of which may not be kept
        moved = {i: m if m.new.base is None else m._replace(new=m.new.copy()) for i, m in few.items()}
        self._latest = base, moved
        return self._settle(version)

    def reading(self, base_hash: int) -> SectionReading | None:
        """Return what reads a patch for ``adopt`` as it comes; None where it starts elsewhere.

        ``base_hash``: 0 for a keyframe.
        """
        if not base_hash:
            return KeyframeReading(self.layout)
        return Reading(self._words, self._newest) if base_hash == self._newest.hash else None

    def adopt(self, patch: Patch, reading: SectionReading | None = None) -> Version:
        """Advance by a patch that was received (a relay) and return the version it leads to.

        ``reading`` may have read some of it. Errors: ``PayloadError`` or ``DesyncError``; then nothing has
        changed.
        """
        moves.check_follows(patch, self.layout, self._newest)
        known = self._newest.number or patch.base  # 0: nothing that anybody could have got from here
        if patch.base:
            made, words = moves.moves(patch, self._words, self._newest, reading), self._words
        else:
            words = moves.whole(patch, self.layout, reading)
            made = moves.between(self._words, words) if known else []
        target = replace(patch.target, changed=_count(made) if known else self.layout.numel)

        def step() -> Version:
            self._forget_devices()
            if patch.base:
                for move in made:
                    self._overwrite(move.piece)
                moves.write(words, made)
            else:  # nobody writes to the words that there were
                self._words, self._pasts = words, []
            return self._advance(target, made, patch.base) if known else self._settle(target)

        return self._whole(made, step)

    def confirm(self, version: Version) -> Version:
        """Call the newest contents what the publisher, which a relay follows, calls them, and return that.

        Errors: ``DesyncError`` where contents differ, or the number is below that of what is held.
        """
        with self._lock:
            now = self._newest
            if version.hash != now.hash or not now.hash or version.number < now.number:
                raise DesyncError(f"version {version.number} is not version {now.number}, which is held")
            if version.number == now.number:
                return now
            return self._renumber(version) if now.number else self._settle(version)

    def outnumber(self, version: int) -> Version:
        """Give the newest contents a number above ``version``, unless theirs is, and return that version.

        A publisher that starts again counts from below what its followers hold: they take nothing older.
        """
        most = MAX_VERSION // 2  # whatever a peer says, there are numbers left
        require(0 <= version < most, InputError, f"version {version} is no version number")
        with self._lock:
            now = self._newest
            if now.number > version:
                return now
            if not now.number:
                self._start = max(self._start, version)
                return now
            return self._renumber(Version(version + 1, now.hash, now.published, now.meta))

    def _renumber(self, version: Version) -> Version:
        return self._whole([], lambda: self._advance(version, []))

    def find(self, version: int, hash: int) -> int:
        """Return the number of the newest version with that content that can be patched from; 0 for none.

        ``version`` is what the follower calls it: 0 for a base it has from elsewhere. Contents decide.
        """
        known = self._known
        if known.get(version) == hash:
            return version
        return max((n for n, h in known.items() if h == hash), default=0)

    def knows(self, version: int) -> bool:
        """Return whether ``version`` can be patched from."""
        return version in self._known

    def patch(self, base: int | None = None, mark: bool = True, more: More = lambda draft: None) -> Patch:
        """Return what leads from version ``base`` (None, or one no longer known: from nothing) to the newest.

        All versions between are merged. Both ends are kept for a while after this, unless ``mark`` is False:
        then it was made to see how large it is, or somebody says what is in use. ``more`` is called with the
        draft, on this thread, whenever there is more of it; whoever sends it finishes it.

        Errors: ``InputError`` when there is none yet, or none after base.
        """
        if base:
            with self._patches.lock:
                found = self._made(self._patches, base, mark, lambda: self._make(base, more))
            if found is not None:
                return found
        with self._keyframes.lock:
            return self._made(self._keyframes, 0, mark, lambda: self._keyframe(more))

    def recall(self, version: Version, more: More = lambda draft: None) -> Patch | None:
        """Return a keyframe of ``version``, whatever came after it; None where its contents are not known.

        Known is what ``find`` finds. The keyframe bears the number, time and meta data of ``version``.
        ``more`` as for ``patch``: from its first call on, the version may be forgotten.
        """
        with self._keyframes.lock:
            with self._lock:
                known = self.find(version.number, version.hash)
                if not known:
                    return None
                entries, past = self._log.since(known), self._remember()
            return self._keyframe_of(version, past, entries, more)

    def _made(self, lane: Lane, base: int, mark: bool, make: Callable[[], Made]) -> Made | Patch:
        """Return the cached patch from ``base``, or what ``make`` returns: None where base is gone."""
        target = self._newest
        require(target.number > 0, InputError, "nothing has been published yet")
        require(base != target.number, InputError, f"version {base} is the newest; nothing leads on from it")
        lane.wanted = mark
        cached = self._cache.get(base)
        try:
            found = cached if cached is not None and cached.version == target.number else make()
            with self._lock:
                if found is not None:
                    self._note(found, mark)
                    if mark and self._users:
                        lane.hand_over(found.base, found.version)
        finally:
            lane.under_way = Ends()
        return found

    def _note(self, patch: Patch, mark: bool) -> None:
        if mark:
            self._log.mark(patch.version)
            if patch.base:
                self._log.mark(patch.base)
        if patch.version == self._newest.number:
            kept = [(b, p) for b, p in self._cache.items() if b != patch.base]
            self._cache = dict([*kept, (patch.base, patch)][-CACHED:])

    def _make(self, base: int, more: More) -> Patch | None:
        with self._lock:
            entries, target = self._log.since(base), self._newest
            self._patches.under_way = Ends(base, target.number)
            if not entries:
                return None
            latest = self._latest[1] if self._latest[0] == base else {}
            past = self._remember()
        try:
            pieces = self.layout.blocks()
            merged = merge(entries, pieces)
            changed = list(merged.changes.items())

            def differences(run: slice) -> list[tuple[int, Block]]:
                known = {i: latest[i].difference(pieces[i].numel) for i, _ in changed[run] if i in latest}
                return [(i, known.get(i) or past.difference(change, i)) for i, change in changed[run]]

            found = by_runs(differences, [len(change.old) for _, change in changed])
            changes = dict(chain.from_iterable(found))
            sections = body.changes(
                self.layout, changes, lambda i, *run: past.before(merged.changes[i], i, *run)
            )
            draft = drafted(Draft(merged.base, merged.hash, target.number, target.hash), sections, more)
        finally:
            self._forget(past)
        return self._patch(draft, target, more)

    def _remember(self) -> Past:
        """Return the words of the newest version, which stay readable until they are forgotten."""
        past = Past(self._words)
        self._pasts = [*self._pasts, past]
        return past

    def _forget(self, past: Past) -> None:
        with self._lock:
            self._pasts = [other for other in self._pasts if other is not past]

    def _overwrite(self, piece: int) -> np.ndarray:
        """Return the live words of a piece, to be changed: whoever reads this version has got a copy."""
        words = self._words[piece]
        lacking = [past for past in self._pasts if past.lacks(piece)]
        if lacking:
            kept = words.copy()
            for past in lacking:
                past.keep(piece, kept)
        return words

    def _keyframe(self, more: More) -> Patch:
        with self._lock:
            target, past = self._newest, self._remember()
            self._keyframes.under_way = Ends(0, target.number)
        return self._keyframe_of(target, past, (), more)

    def _keyframe_of(self, target: Version, past: Past, since: Sequence[LogEntry], more: More) -> Patch:
        """Return what was there before the entries ``since``, which led to what ``past`` has."""
        numels = [piece.numel for piece in self.layout.blocks()]
        try:
            undone = merge(since, self.layout.blocks()).changes if since else {}
            sections = body.whole(self.layout, lambda i: past.before(undone.get(i), i, 0, numels[i]))
            draft = drafted(Draft(0, 0, target.number, target.hash), sections, more)
        finally:
            self._forget(past)
        return self._patch(draft, target, more)

    def _patch(self, draft: Draft, target: Version, more: More) -> Patch:
        about = target.published, target.meta, self.layout.digest
        patch = Patch(draft.base, draft.version, draft.base_hash, draft.hash, *about, b"")
        draft.head = patch.head_of(draft.nbytes, draft.crc)
        more(draft)  # its end may be sent before all of it is joined, which takes as long as to copy it
        return replace(patch, body=draft.body, crc=draft.crc)

    def save(self, path: str | Path) -> None:
        """Write the newest version as a file: who starts again from it knows what followers hold of it.

        Errors: ``InputError`` naming path and reason; then the file is as it was.
        """
        with self._lock:
            words, newest = self._words.copy(), self._newest
        require(newest.number > 0, InputError, "nothing has been published yet, so there is nothing to save")
        saved.save(path, words, newest)

    @classmethod
    def load(cls, path: str | Path, budget: int | None = None, max_nbytes: int = MAX_NBYTES) -> History:
        """Return the history of the version saved at ``path``. Errors: ``InputError``."""
        words, version = saved.load(path, max_nbytes)
        history = cls(words.layout, budget)
        history._words = words
        history._settle(version)
        return history


def _count(made: list[Move]) -> int:
    return sum(m.changed for m in made)
