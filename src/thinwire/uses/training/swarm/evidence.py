"""What is known of a member: its last rounds, whether it is named, and how it earns trust back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

ROUNDS, FAILURES = 3, 2  # named is who failed so often in its last rounds of which anything is known
PROBATION = 5  # rounds in a row in which a named member is to help
FITS = 16  # rounds over which a member's own blocks are held against others


@dataclass
class Standing:
    """One member, under its number. A round of which nothing is known leaves no mark.

    >>> member = Standing()
    >>> for version, reason in enumerate(["", "it sent noise", "", "it sent noise"]):
    ...     member.mark(version, reason)
    >>> member.named
    'it sent noise'
    """

    marks: list[int] = field(default_factory=list)  # of the last rounds, oldest first: 1 for one that failed
    named: str = ""  # why the member is named; empty: it is not
    since: int = 0  # the version at which it was
    helped: int = 0  # rounds in a row in which it helped since then
    measured: int = -1  # the version at which losses last said something
    silent: int = 0  # updates in a row that were all zeros
    copied: float = 0.0  # how sure it is that the member is the copier of those alike, in standard errors
    fits: list[float] = field(default_factory=list)  # how much more it helped its own blocks, in such

    def mark(self, version: int, failed: str) -> None:
        """Note a round: that it helped, or why it ``failed``; who is named helps to be so no more."""
        self.marks = [*self.marks, int(bool(failed))][-ROUNDS:]
        self.helped = 0 if failed else self.helped + 1
        if not self.named and sum(self.marks) >= FAILURES:
            self.named, self.since, self.helped = failed, version, 0
        elif self.named and self.helped >= PROBATION:
            self.named, self.marks, self.copied, self.fits = "", [], 0.0, []

    @property
    def suspect(self) -> bool:
        """Whether a round of late failed."""
        return any(self.marks) and not self.named

    def fit(self, errors: float) -> bool:
        """Note by how many standard errors it helped its own blocks more; return whether it never does."""
        self.fits = [*self.fits, max(-4.0, min(4.0, errors))][-FITS:]
        return len(self.fits) == FITS and sum(self.fits) < 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)
