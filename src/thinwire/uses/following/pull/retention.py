"""What a store keeps, and which of its files lead to a version. Pure: manifests in, manifests out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter

from thinwire.types import InputError, require
from thinwire.uses.following.pull.manifest import MAX_VERSIONS, File, Manifest, StoredVersion


@dataclass(frozen=True)
class RetentionPolicy:
    """How many versions a store keeps, and what it has besides the patch from each to the next.

    - ``versions``: the number of versions.
    - ``span``: after so many versions, also one patch across them all (0: none). It is smaller than their
      patches together, for readers that fell behind.
    - ``keyframe_every``: versions between two keyframes. None writes one when the patches since the last
      take ``share`` of its bytes.
    - ``grace``: seconds that a file stays after the manifest no longer names it, for readers of an older
      manifest.

    The way from the last keyframe never has more files than a manifest can name.
    """

    versions: int = 32
    span: int = 8
    keyframe_every: int | None = None
    share: float = 0.5
    grace: float = 60.0

    def __post_init__(self) -> None:
        fits = 1 <= self.versions <= MAX_VERSIONS
        require(fits, InputError, f"versions={self.versions} to keep is not in 1..{MAX_VERSIONS}")
        require(self.span >= 0, InputError, f"span={self.span} versions is below 0")
        every = self.keyframe_every
        fits = every is None or 1 <= every <= MAX_VERSIONS
        require(fits, InputError, f"keyframe_every={every} versions is not in 1..{MAX_VERSIONS}")
        require(self.share > 0, InputError, f"share={self.share} of a keyframe is not above 0")
        require(self.grace >= 0, InputError, f"grace={self.grace} s is below 0")

    def keyframe_due(self, manifest: Manifest) -> bool:
        """Return whether to write a keyframe of the newest version, because the last one is too long ago.

        The last one need not be the one that newcomers begin with, which may be older. Counted from that,
        each version would get a keyframe where a new one costs more than the patches.
        """
        newest, last = manifest.newest, _last_keyframe(manifest)
        if newest is None:
            return False
        since = None if last is None else _onward(manifest, last.version)
        if last is None or since is None or len(since) >= MAX_VERSIONS:
            return True
        if self.keyframe_every is not None:
            return sum(v.number > last.version for v in manifest.versions) >= self.keyframe_every
        return sum(f.nbytes for f in since) > self.share * last.nbytes

    def trimmed(self, manifest: Manifest, whole: int = 0) -> Manifest:
        """Return the manifest of what to keep: the newest versions, and a way to them from nothing.

        The way from the last keyframe is kept too, and that from ``whole``, a version whose keyframe is being
        written.
        """
        newest, last = manifest.newest, _last_keyframe(manifest)
        if newest is None:
            return manifest
        starts = {whole, last.version if last is not None else 0} - {0}
        ways = [cheapest(manifest.files, 0, newest.number), *(_onward(manifest, n) for n in starts)]
        stay = {v.number for v in manifest.versions[-self.versions :]} | starts
        stay |= {f.version for way in ways for f in way or ()}
        return replace(
            manifest,
            versions=tuple(v for v in manifest.versions if v.number in stay),
            files=tuple(f for f in manifest.files if f.version in stay and f.base in stay | {0}),
        )

    def span_base(self, manifest: Manifest) -> StoredVersion | None:
        """Return the version from which to write a patch across ``span`` versions to the newest, if any.

        Each run of ``span`` versions gets at most one such patch.
        """
        if self.span < 2 or len(manifest.versions) <= self.span:
            return None
        window = manifest.versions[-self.span - 1 :]
        numbers, known = {v.number for v in window[1:]}, [v.number for v in manifest.versions]
        spans = [f for f in manifest.files if f.version in numbers and _jumps(f, known)]
        return None if spans else window[0]


Keeping = RetentionPolicy  # its first name, public


def _last_keyframe(manifest: Manifest) -> File | None:
    return max((f for f in manifest.files if not f.base), key=attrgetter("version"), default=None)


def _onward(manifest: Manifest, version: int) -> list[File] | None:
    """Return the cheapest patches from ``version`` to the newest; None if none lead there."""
    newest = manifest.newest
    if newest is None or newest.number == version:
        return []
    return cheapest((f for f in manifest.files if f.base), version, newest.number)


def _jumps(file: File, known: list[int]) -> bool:
    """Return whether a patch leads across versions between its ends, of those ``known``, in order."""
    after = bisect_right(known, file.base)
    return file.base > 0 and after < len(known) and known[after] < file.version


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
