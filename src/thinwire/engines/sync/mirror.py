"""What a follower holds: a replica, made when the layout is known, and checked against what it is for."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from thinwire.engines.sync.fetching import start_from
from thinwire.state.layout import MAX_NBYTES, Layout
from thinwire.state.patch import Patch, Version
from thinwire.state.replica import Replica
from thinwire.types import InputError, PayloadError, require


class Mirror:
    """The target of a follower's patches. ``saved``: a file to go on from, if there; ``into``: a model.

    Errors: ``InputError`` where the saved state does not fit the model.
    """

    def __init__(
        self, into: nn.Module | None = None, saved: Path | None = None, max_nbytes: int = MAX_NBYTES
    ) -> None:
        self.into, self._saved, self.max_nbytes = into, saved, max_nbytes
        self.name = ""  # of the state, as its publisher calls it
        self.replica: Replica | None = None
        if saved is not None and saved.is_file():
            self.replica = Replica.load(saved, max_nbytes)
            if into is not None:
                self.replica.bind(into)

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
        replica = Replica(layout)
        if self.into is not None:
            start_from(replica, self.into)
        self.replica = replica

    def apply(self, patch: Patch) -> Version:
        """Bring the replica forward."""
        if self.replica is None:
            raise PayloadError("a patch before the layout")
        return self.replica.apply(patch)


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
            there, here = ("missing" if s is None else _text(s.shape, s.dtype, s.bound) for s in (b, a))
            raise InputError(f"{name} is {there} at the publisher and {here} here: follow it anew")
    ties = dict(mine.aliases).items() ^ dict(theirs.aliases).items()
    name = min((name for name, _ in ties), default="its order of tensors")
    require(False, InputError, f"{name} is tied differently at the publisher and here: follow it anew")


def _text(shape: tuple[int, ...], dtype: object, bound: float | None) -> str:
    lossy = "" if bound is None else f" to within {bound:g}"
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}{lossy}"
