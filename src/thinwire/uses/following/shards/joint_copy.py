"""The copies of all parts of a sharded state as one: a version is used once all of them have it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from thinwire.state.boxes import Box, parse
from thinwire.state.layout import PARTS, WORDS, Array, Layout, Slot
from thinwire.state.patches.moves import SectionReading
from thinwire.state.patches.patch import Patch, Version
from thinwire.state.replica import PATIENCE, TIMEOUT, Replica
from thinwire.state.values import Bits
from thinwire.types import InputError, LinkError, require
from thinwire.uses.following.mirror import Mirror
from thinwire.uses.following.shards.common_version import CommonVersion
from thinwire.uses.following.shards.shard_mark import Mark, without

if TYPE_CHECKING:  # models and tensors; a copy of arrays needs no torch
    from torch import Tensor, nn

    from thinwire.state.loaded.copied_blocks import CopiedBlock
    from thinwire.state.loaded.loader_recording import Load

    Found = tuple[list[CopiedBlock], Collection[int]]  # and the slots to be written whole each time


class PartMirror(Mirror):
    """What the patches of one part are applied to, in step with the other parts."""

    def __init__(self, common: CommonVersion, index: int, peer: str, *given: Any) -> None:
        super().__init__(*given)
        self._common, self._index, self._peer = common, index, peer

    def agree(self, layout: Layout, name: str) -> None:
        if self._base is not None and self.replica is None:
            self._base = _parts_of(self._base, layout)
        super().agree(layout, name)

    def apply(self, patch: Patch, reading: SectionReading | None = None) -> Version:
        with self._common.step(self._index, Mark.of(patch.meta, self._peer)):
            return super().apply(patch, reading)

    def confirm(self, version: Version) -> Version:
        found = super().confirm(version)
        self._common.confirm(self._index, Mark.of(found.meta, self._peer))
        return found


class ShardCut(NamedTuple):
    """A box of a whole tensor: the part that has it, and which slot it is there."""

    part: int
    slot: int
    box: Box


@dataclass(frozen=True)
class JointLayout:
    """The layout of whole tensors, and the boxes that make up each slot."""

    whole: Layout
    cuts: tuple[tuple[ShardCut, ...], ...]

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> JointLayout:
        """Return what the layouts of all parts make up.

        Errors: ``InputError`` with a tensor of which some is nowhere.
        """
        slots: dict[str, Slot] = {}
        cuts: dict[str, list[ShardCut]] = {}
        aliases: dict[str, str] = {}
        for part, layout in enumerate(layouts):
            for index, slot in enumerate(layout.slots):
                name, box = parse(slot.name)
                box = Box.whole(slot.shape) if box is None else box
                whole = Slot(name, box.shape, slot.kind, slot.bound)
                told = f"{name} is of another shape or dtype in some parts; start the trainer anew"
                require(slots.setdefault(name, whole) == whole, InputError, told)
                cuts.setdefault(name, []).append(ShardCut(part, index, box))
            aliases |= {parse(name)[0]: parse(target)[0] for name, target in layout.aliases}
        for name, slot in slots.items():
            there = sum(cut.box.numel for cut in cuts[name])
            told = f"the parts have {there:,} values of {name}, and it has {slot.numel:,}; follow all parts"
            require(there == slot.numel, InputError, told)
        return cls(Layout(tuple(slots.values()), tuple(aliases.items())), tuple(map(tuple, cuts.values())))


class JointCopy:
    """The parts of a state, as their mirrors hold them. In front is the same version of all.

    Whole tensors are made for ``arrays``, ``tensors`` and ``bits`` alone: models get each part's own values.
    """

    def __init__(self, mirrors: Sequence[PartMirror], common: CommonVersion) -> None:
        self._mirrors, self._common = mirrors, common
        self._shown: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # the hash each has
        self._begun = False

    @property
    def parts(self) -> list[Replica]:
        """The copy of each part. Errors: ``InputError`` before all parts hold one version."""
        found = [mirror.replica for mirror in self._mirrors if mirror.replica is not None]
        if not self._begun or len(found) < len(self._mirrors):
            raise InputError("no version has come of all parts yet; wait() for it")
        return found

    @cached_property
    def joint(self) -> JointLayout:
        return JointLayout.of([replica.layout for replica in self.parts])

    @property
    def layout(self) -> Layout:
        """That of the whole tensors."""
        return self.joint.whole

    @property
    def shown(self) -> Version:
        """The version in use: its number is that of the part that is followed first."""
        return _joined([replica.shown for replica in self.parts])

    @property
    def held(self) -> Version:
        """The newest version of all parts, while none of them moves."""
        return _joined([mirror.held for mirror in self._mirrors])

    def meet(self) -> None:
        """Put the first version that all have in front: nobody uses anything yet."""
        if not self._begun:
            self._begun = True
            self.swap()

    def swap(self, patience: float = PATIENCE) -> bool:
        """Put the newest version of all parts in front, models included; return False while they differ."""
        with self._common.lock:
            if not self._common.lock.wait_for(lambda: self._common.whole, patience):
                return False
            for replica in self.parts:
                replica.swap(TIMEOUT)
        return True

    def catch_up(self, timeout: float = TIMEOUT) -> None:
        """Put the newest version in front, waiting for parts that are being written.

        Errors: ``LinkError`` after ``timeout`` seconds.
        """
        end = monotonic() + timeout
        with self._common.lock:
            still = self._common.lock.wait_for(lambda: not self._common.moving, max(0.0, end - monotonic()))
            require(still, LinkError, f"waited {timeout:g} s for a version being written here; try again")
            self.swap(0.0)

    def show(self, model: nn.Module, kept: Collection[str] = ()) -> bool:
        """Write the newest version into the tensors of ``model``; return whether that is new to it.

        Errors: ``InputError`` naming the first tensor that does not fit, or that is not among ``kept`` and
        nothing in the state fills.
        """
        from thinwire.state.binding import check_filled
        from thinwire.state.loaded.module_blocks import module_blocks

        def find() -> Found:
            found = module_blocks(self.layout, model)
            check_filled(self.layout, model, frozenset(kept))
            return found

        return self._written(model, find)

    def fill(self, model: nn.Module, load: Load, kept: Collection[str]) -> bool:
        """Write it into ``model``, which ``load`` fills; return whether that is new to it.

        Errors: as ``loaded_blocks``; ``InputError`` with a tensor of which boxes cannot be told apart there.
        """
        from thinwire.state.loaded.loaded_model import loaded_blocks

        return self._written(model, lambda: (loaded_blocks(self.layout, model, load, kept), frozenset()))

    def _written(self, model: nn.Module, find: Callable[[], Found]) -> bool:
        before = self._shown.get(model)
        if not all(replica.fills(model) for replica in self.parts):
            self._write_to(model, *find())
            before = None
        self.swap()
        now = self._shown[model] = self.shown.hash
        return before != now

    def _write_to(self, model: nn.Module, blocks: Sequence[CopiedBlock], always: Collection[int]) -> None:
        from thinwire.state.loaded.cut_blocks import cut
        from thinwire.state.loaded.loaded_model import LoadedModel

        own: list[list[CopiedBlock]] = [[] for _ in self.parts]
        for block in blocks:
            for part, slot, box in self.joint.cuts[block.slot]:
                own[part] += cut(block, box, slot, self.layout.slots[block.slot].name)
        kept = [c for index in always for c in self.joint.cuts[index]]
        for i, replica in enumerate(self.parts):
            whole = {c.slot for c in kept if c.part == i}
            replica.write_to(model, LoadedModel(replica.layout, model, own[i], whole))

    def bits(self) -> dict[str, Bits]:
        """Return the bits of whole tensors by name, without aliases; put together anew, so theirs alone."""
        fronts = [replica.bits() for replica in self.parts]
        found: dict[str, Bits] = {}
        for whole, cuts in zip(self.layout.slots, self.joint.cuts, strict=True):
            more = (2,) if whole.kind in PARTS else ()
            words = np.empty((*whole.shape, *more), WORDS[whole.kind])
            for part, slot, box in cuts:
                bits = fronts[part][self.parts[part].layout.slots[slot].name]
                words[box.slices] = bits.words.reshape((*box.size, *more))
            found[whole.name] = Bits(whole.kind, whole.shape, words.reshape(-1))
        return found

    def arrays(self) -> dict[str, Array]:
        """Return whole tensors as arrays by name, aliases too."""
        return {name: bits.array for name, bits in self._named().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return whole tensors by name, aliases too."""
        from thinwire.state.devices.tensor_words import tensor_of

        return {name: tensor_of(*bits) for name, bits in self._named().items()}

    def _named(self) -> dict[str, Bits]:
        found = self.bits()
        return {name: found[self.layout.slots[i].name] for name, i in self.layout.index.items()}


def _joined(versions: Sequence[Version]) -> Version:
    """Return the version that parts make up; contents are the same where all of theirs are."""
    first, hashes = versions[0], b"".join(v.hash.to_bytes(8, "little") for v in versions)
    digest = hashlib.blake2b(hashes, digest_size=8).digest()
    when = max(v.published for v in versions)
    return Version(first.number, int.from_bytes(digest, "little"), when, without(first.meta))


def _parts_of(base: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return what a layout's boxes have of whole tensors, which a part then begins with.

    A tensor of another shape comes whole: it is named as what does not fit.
    """
    found: dict[str, Any] = {}
    for shard in layout.index:
        name, box = parse(shard)
        if name in base:
            x = base[name]
            found[shard] = x if box is None or tuple(x.shape) != box.shape else x[box.slices]
    return found
