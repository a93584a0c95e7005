"""What is published layer by layer: the seam between following and the use whose files have layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from thinwire.types import InputError
from thinwire.uses import uses

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = "scene_layers"  # of a version: how many it has


class Layered(Protocol):
    """A file in layers, as a state."""

    @property
    def count(self) -> int:
        """How many layers there are."""

    def state(self, layers: int) -> dict[str, Tensor]:
        """Return the state that has the first ``layers``."""


class Form(Protocol):
    """A module of a use that makes states of such files, and files of such states."""

    def layered(self, data: bytes) -> Layered:
        """Return what a whole file holds. Errors: ``PayloadError``."""

    def scene_of(self, state: Mapping[str, Tensor], layers: object) -> bytes:
        """Return the file that a state with so many ``layers`` holds. Errors: ``PayloadError``."""


def layered_form() -> Form:
    """Return the module of the use whose files have layers."""
    for use in uses():
        if use.layered is not None:
            form: Form = use.named(use.layered)
            return form
    raise InputError("no use here has files in layers; install thinwire whole")
