"""Which files to fetch: the cheapest chain in bytes from what a reader holds to the newest version."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from thinwire.uses.following.pull.manifest import File


def cheapest(files: Iterable[File], held: int, goal: int) -> list[File] | None:
    """Return the files that lead from version ``held`` (0: nothing) to ``goal`` in the fewest bytes.

    Of equal ones, the fewest files. A keyframe (base 0) can be taken whatever is held. None where no chain
    leads there.

    >>> files = [File("a", 0, 1, 100, ""), File("b", 1, 2, 10, ""), File("c", 0, 2, 105, "")]
    >>> [f.name for f in cheapest(files, 0, 2)], [f.name for f in cheapest(files, 1, 2)]
    (['c'], ['b'])
    """
    last = _last(files, held)
    return _back(last, goal) if goal in last else None


def farthest(files: Iterable[File], held: int) -> list[File]:
    """Return the cheapest chain to the newest version that any chain leads to; empty where none leads on."""
    last = _last(files, held)
    return _back(last, max(last)) if last else []


def _last(files: Iterable[File], held: int) -> dict[int, File]:
    """Return, for each version that a chain leads to, the last file of the cheapest: all in one pass."""
    # A file's base is below its version, so in order of versions each base is settled before it is used.
    cost: dict[int, tuple[int, int]] = {0: (0, 0), held: (0, 0)}
    last: dict[int, File] = {}
    for file in sorted(files, key=attrgetter("version")):
        if file.base not in cost or file.version <= held:
            continue
        nbytes, hops = cost[file.base]
        offer = (nbytes + file.nbytes, hops + 1)
        if file.version not in cost or offer < cost[file.version]:
            cost[file.version], last[file.version] = offer, file
    return last


def _back(last: dict[int, File], goal: int) -> list[File]:
    chain = []
    while goal in last:
        chain.append(last[goal])
        goal = last[goal].base
    return chain[::-1]
