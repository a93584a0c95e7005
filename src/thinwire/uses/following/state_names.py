"""What a state may be called."""

from __future__ import annotations

from thinwire.types import InputError, require


def check_text(name: str) -> None:
    """Raise ``InputError`` for a state's name that nobody could read."""
    fits = bool(name.strip()) and name.isprintable()
    require(fits, InputError, f"the name {name[:40]!r} is no text of printable characters; give another")
