"""Modules that had another name before: importing one says in a sentence what it is called now.

For one release after 0.1.0's move to a wing a use.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from thinwire.moved.places import FOLDERS, PLACES


class _Signpost(MetaPathFinder):
    """Asked first: folders that an update left empty would be found as packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, old = fullname.partition(".")
        if package != "thinwire":
            return None
        if old in FOLDERS:
            return ModuleSpec(fullname, None, is_package=True)  # on the way to one that is asked for next
        new = new_name(old)
        if new is not None:  # no ModuleNotFoundError: ``from x import y`` would swallow that
            raise ImportError(f"{fullname} is {package}.{new} now; import it from there", name=fullname)
        return None


def new_name(old: str) -> str | None:
    """Return what a module is called now; None for one that never was.

    >>> new_name("engines.sync.push.follower"), new_name("engines")
    ('uses.following.push.follower', None)
    """
    words = old.split(".")
    heads = [(".".join(words[:n]), words[n:]) for n in range(len(words), 0, -1)]
    new = next((".".join([PLACES[head], *rest]) for head, rest in heads if head in PLACES), None)
    return new and (new_name(new) or new)  # which may have another name since


def put_up() -> None:
    """Let imports under old names end in that sentence, an ImportError. Does nothing the second time."""
    if not any(isinstance(finder, _Signpost) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Signpost())
