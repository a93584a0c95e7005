"""What a follower holds: a replica, made when the layout is known, and checked against what it is for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from thinwire.dtypes import check_torch
from thinwire.state.layout import MAX_NBYTES, Array, Layout
from thinwire.state.patches.moves import SectionReading
from thinwire.state.patches.patch import Patch, Version
from thinwire.state.replica import CHECK_EVERY, Replica, check_interval
from thinwire.types import InputError, PayloadError, require

if TYPE_CHECKING:  # models and tensors; a copy of arrays needs no torch
    from torch import Tensor, nn

    from thinwire.state.binding import Members
    from thinwire.state.loaded.loader_recording import Load

Base = Mapping[str, "Tensor"] | Mapping[str, Array]


class Shown(NamedTuple):
    """What a model was shown last: a content's hash, and the tensors that it had then."""

    hash: int
    members: Members


class Mirror:
    """What a follower's patches are applied to, and the only owner of its replica.

    It begins with the state in the file ``saved``, if that is there; else with the tensors of ``base``, or
    with the weights of ``into``: contents the publisher may know. No model is touched but in ``show``, which
    is for the thread that uses it.

    Errors: ``InputError`` where the file is damaged or no saved state, or does not fit the model.
    """

    def __init__(
        self,
        into: nn.Module | None = None,
        saved: Path | None = None,
        max_nbytes: int = MAX_NBYTES,
        base: Base | None = None,
        check_every: int = CHECK_EVERY,
    ) -> None:
        check_interval(check_every)
        told = f"base is a {type(base).__name__}; give a mapping, or leave it out"
        require(base is None or isinstance(base, Mapping), InputError, told)
        if into is not None:
            check_model(into)
        self._check_every = check_every
        self._into, self.max_nbytes, self._base = into, max_nbytes, base
        self._shown: WeakKeyDictionary[nn.Module, Shown] = WeakKeyDictionary()
        self._filled: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # the hash each has
        self.name = ""  # of the state, as its publisher calls it
        self.replica: Replica | None = None
        if saved is not None and saved.is_file():
            self.replica, self._base = Replica.load(saved, max_nbytes, check_every), None
            if into is not None:
                check_fits(self.replica.layout, into)

    @property
    def held(self) -> Version:
        """The newest complete version; number and hash 0 before any."""
        return self.replica.held if self.replica is not None else Version()

    @property
    def above(self) -> int:
        return self.held.number

    def agree(self, layout: Layout, name: str) -> None:
        """Make the replica, or check that it is of this layout; ``InputError`` naming what does not fit."""
        self.name = name
        if self.replica is not None:
            check_same(self.replica.layout, layout)
            return
        replica = Replica(layout, self._check_every)
        if begin(layout, self._into, self._base, replica.start):
            replica.swap()  # nobody uses it yet
        self.replica, self._base = replica, None

    def fill(self, replica: Replica, model: nn.Module, load: Load, kept: Collection[str]) -> bool:
        """Write the newest version into ``model``, which ``load`` fills; return whether that is new.

        Errors: as ``loaded_blocks``.
        """
        before = self._filled.get(model) if replica.fills(model) else None
        if before is None:
            replica.fill(model, load, kept)
        replica.swap()
        self._filled[model] = replica.hash
        return before != replica.hash

    def show(self, replica: Replica, model: nn.Module, kept: Collection[str] = ()) -> bool:
        """Let ``model``, and all shown before, use the replica's newest version.

        Return whether contents are others than when ``model`` was shown last, or its tensors are. Errors:
        ``InputError`` naming the first tensor that does not fit, or that is not among ``kept`` and nothing
        in the state fills.
        """
        from thinwire.state import binding, tensor_kinds

        tensor_kinds.reshard(model)
        before = self._shown.get(model)
        if before is None or not before.members.same(model):
            check_fits(replica.layout, model)
            binding.check_filled(replica.layout, model, frozenset(kept))
            replica.bind(model)
            before = None
        replica.swap()  # which another model, or whoever looks at the tensors, may have done meanwhile
        members = binding.Members(replica.layout, model) if before is None else before.members
        self._shown[model] = Shown(replica.hash, members)
        return before is None or before.hash != replica.hash

    def reading(self, base_hash: int) -> SectionReading | None:
        """Return what reads a patch from ``base_hash`` (0: a keyframe) as it comes; None if not here."""
        return self.replica.reading(base_hash) if self.replica is not None else None

    def apply(self, patch: Patch, reading: SectionReading | None = None) -> Version:
        """Bring the replica forward; ``reading`` may have read some of the patch."""
        if self.replica is None:
            raise PayloadError("a patch before the layout")
        return self.replica.apply(patch, reading)

    def beside(self) -> Replica:
        """Return an empty replica for a way that begins below what is held; ``take`` it at its end."""
        if self.replica is None:
            raise PayloadError("a patch before the layout")
        return self.replica.beside()

    def take(self, beside: Replica) -> Version:
        """Hold what ``beside`` holds; ``DesyncError`` where that is not newer."""
        if self.replica is None:
            raise PayloadError("a version before the layout")
        return self.replica.take(beside)

    def prepare(self) -> None:
        """Do what can be done before the next patch comes."""
        if self.replica is not None:
            self.replica.prepare()

    def confirm(self, version: Version) -> Version:
        """Call what is held as its publisher does; ``DesyncError`` where that is something else."""
        if self.replica is None:
            raise PayloadError("a version before the layout")
        return self.replica.confirm(version)


def begin(
    layout: Layout,
    into: nn.Module | None,
    base: Base | None,
    start: Callable[[Base], object],
) -> bool:
    """Let ``start`` hold the tensors of ``base``, else the weights of ``into``; return whether it does.

    A model's own weights that no bound can hold are none, and so are shards. Errors: ``InputError`` naming
    what does not fit.
    """
    found: Base | None = base
    if into is not None:
        from thinwire.state import binding

        check_fits(layout, into)
        found = binding.owned(into) if base is None else base
    if found is None:
        return False
    try:
        start(_of_slots(layout, found))
    except InputError as e:
        if base is None:
            return False
        raise InputError(f"the base does not fit what is published: {e}; leave the base out") from e
    return True


def check_model(into: object) -> None:
    """Raise ``InputError`` unless ``into`` is a module of torch's."""
    check_torch("a model to update needs")
    from torch import nn

    told = f"into is a {type(into).__name__}; give a module, or leave it out"
    require(isinstance(into, nn.Module), InputError, told)


def check_fits(layout: Layout, model: nn.Module) -> None:
    """Raise ``InputError`` naming what of a state does not fit a model, which stays as it is."""
    from thinwire.state import binding

    binding.bind(layout, model)


def _of_slots(layout: Layout, tensors: Base) -> Base:
    """Return the tensor of each slot, under its own name or one that is tied to it; others are left out."""
    found: dict[str, Any] = {}
    for name in (*(s.name for s in layout.slots), *(alias for alias, _ in layout.aliases)):
        if name in tensors:
            found.setdefault(layout.slots[layout.index[name]].name, tensors[name])
    return found


def check_same(mine: Layout, theirs: Layout) -> None:
    """Raise ``InputError`` naming the first tensor in which a publisher's layout differs from one's own.

    >>> import torch
    >>> a, b = (Layout.of({"w": torch.zeros(n)}) for n in (2, 3))
    >>> check_same(a, b)
    Traceback (most recent call last):
    thinwire.types.InputError: w is float32 [3] at the publisher and float32 [2] here: follow it anew
    """
    if mine.digest == theirs.digest:
        return
    own, other = ({s.name: s for s in layout.slots} for layout in (mine, theirs))
    for name in [*own, *other]:
        a, b = own.get(name), other.get(name)
        if a != b:
            there, here = ("missing" if s is None else _text(s.shape, s.kind, s.bound) for s in (b, a))
            raise InputError(f"{name} is {there} at the publisher and {here} here: follow it anew")
    ties = dict(mine.aliases).items() ^ dict(theirs.aliases).items()
    name = min((name for name, _ in ties), default="its order of tensors")
    require(False, InputError, f"{name} is tied differently at the publisher and here: follow it anew")


def _text(shape: tuple[int, ...], kind: str, bound: float | None) -> str:
    lossy = "" if bound is None else f" to within {bound:g}"
    return f"{kind} {list(shape)}{lossy}"
