"""The uses of thinwire, a wing each. This is the only list of them: whoever adds one adds its name here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.uses.use import Use

NAMES = ("training", "pictures", "federated", "following", "scenes", "models", "serving", "doctor")


def uses() -> tuple[Use, ...]:
    """Return every use, in the order of the list.

    >>> [kind for use in uses() for kind in use.kinds][:3]
    ['pipeline', 'replicas', 'swarm']
    """
    return tuple(import_module(f"{__name__}.{name}").USE for name in NAMES)
