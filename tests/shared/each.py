"""Many values in one case, for properties that hold for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test with one value after the other, as ``parametrize`` does in as many cases.

    Where one fails, a note says which. Fixtures are made once, so it is for tests that leave nothing behind.
    """
    asked = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    values = list(values)

    def decorate(test: Test) -> Test:
        def run(**others: Any) -> None:
            for value in values:
                given = dict(zip(asked, [value] if len(asked) == 1 else value, strict=True))
                try:
                    test(**given, **others)
                except BaseException as e:
                    e.add_note(f"with {given}")
                    raise

        kept = [p for p in inspect.signature(test).parameters.values() if p.name not in asked]
        run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorate
