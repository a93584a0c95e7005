"""How long rounds take: a trip around the ring, a token more in it, drafts of one depth."""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 0.9  # of an average, against what was measured last
MANY = 32  # tokens: a pass of as many says what one more takes, whatever a pass takes anyhow
GUESS = 1 / 32  # of a trip: a token more, before such a pass was timed


@dataclass
class RingTimes:
    """What was measured lately, in seconds.

    >>> times = RingTimes()
    >>> times.note_pass(128, 0.256)
    >>> times.note(4, 0.108)
    >>> round(times.trip, 3), times.token
    (0.1, 0.002)
    """

    trip: float = 0.0  # of a round without drafts; 0 before one was timed
    draft: float = 0.0  # to propose all drafts of one depth
    _token: float = 0.0

    @property
    def token(self) -> float:
        """Seconds of one more token in a round, in all stages."""
        return self._token or GUESS * self.trip

    def note(self, many: int, seconds: float) -> None:
        """Take in a round with so many drafts."""
        self.trip = _mean(self.trip, max(seconds / 8, seconds - self.token * many))

    def note_pass(self, tokens: int, seconds: float) -> None:
        """Take in how long all stages computed a pass; one of few tokens says nothing."""
        if tokens >= MANY:
            self._token = _mean(self._token, seconds / tokens)

    def note_draft(self, seconds: float) -> None:
        """Take in how long drafts of one depth took."""
        self.draft = _mean(self.draft, seconds)


def _mean(before: float, seconds: float) -> float:
    return KEPT * before + (1 - KEPT) * seconds if before else seconds
