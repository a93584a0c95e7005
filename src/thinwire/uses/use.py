"""What a use adds to the lists that all uses share, as names: modules are imported when they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

# The panels of ``thinwire --help``, in order.
TRAINING, SERVING, PICTURES, STATES, PACKAGES, NETWORKS, LOOKING = PANELS = (
    "Train",
    "Serve text",
    "Make pictures",
    "Share a state",
    "Ship scenes and models",
    "Networks",
    "Look",
)


class Command(NamedTuple):
    """A command: the function that does it, and the panel of the help that it stands in."""

    home: str
    panel: str


class RunKind(NamedTuple):
    """A kind of run: the class of its record, and the module that shows its runs."""

    record: str
    show: str


@dataclass(frozen=True)
class Use:
    """One thing that people do with thinwire. Each wing has one, under the name ``USE``.

    What it adds is named from its ``package``: ``.module`` or ``.module:name``. ``kinds``: of its runs, by
    what ``run.json`` calls them. ``demos``: by name; the one without a name is ``""``. ``registries``: of its
    recipes. ``readers``: modules that know its files (``uses.readers``). ``layered``: the module of what is
    published layer by layer (``uses.layered``).

    >>> Use("importlib").named(".util:find_spec").__name__
    'find_spec'
    """

    package: str
    commands: tuple[Command, ...] = ()
    kinds: Mapping[str, RunKind] = field(default_factory=dict)
    demos: Mapping[str, str] = field(default_factory=dict)
    registries: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    layered: str | None = None

    def named(self, home: str) -> Any:
        """Return the module or what it has under a name, imported now."""
        module, _, name = home.partition(":")
        found = import_module(module, self.package)
        return getattr(found, name) if name else found
