"""What a reception moves on: the patches that come are applied to it."""

from __future__ import annotations

from typing import Protocol

from thinwire.state.layout import Layout
from thinwire.state.patches.moves import Reading
from thinwire.state.patches.patch import Patch, Version


class Target(Protocol):
    """What patches are applied to: a replica, a relay's history, or both."""

    @property
    def held(self) -> Version:
        """The newest complete version."""
        ...

    @property
    def above(self) -> int:
        """The newest version number that is known here or further down."""
        ...

    def agree(self, layout: Layout, name: str) -> None:
        """Take the publisher's layout; ``InputError`` where it does not fit. Called again if it changes."""
        ...

    def reading(self, base_hash: int) -> Reading | None:
        """Return what reads a patch from ``base_hash`` as it comes; None where that is not held."""
        ...

    def apply(self, patch: Patch, reading: Reading | None = None) -> Version:
        """Move on by a patch; ``PayloadError`` or ``DesyncError`` where that fails, with nothing changed.

        ``reading`` may have read some of it.
        """
        ...

    def prepare(self) -> None:
        """Do what can be done before the next patch comes."""
        ...

    def confirm(self, version: Version) -> Version:
        """Call what is held as the publisher does, and return that; errors as ``apply``."""
        ...
