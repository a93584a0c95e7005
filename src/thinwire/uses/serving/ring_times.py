"""How long rounds take: a trip around the ring, a token more in it, a draft."""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 0.9  # of an average, against what was measured last
SOME = 0.05  # drafts squared: with less spread between rounds they tell nothing of a token's seconds


@dataclass
class RingTimes:
    """What rounds took lately, in seconds: a line through tokens and seconds, of which old rounds fade.

    >>> times = RingTimes()
    >>> for many in (0, 4, 0, 4, 0, 4) * 20:
    ...     times.note(many, 0.1 + 0.01 * many)
    >>> round(times.trip, 3), round(times.token, 3)
    (0.1, 0.01)
    """

    draft: float = 0.0  # to propose one token
    token: float = 0.0  # one more token in a round
    _many: float = 0.0  # means, variance and covariance
    _seconds: float = 0.0
    _spread: float = 0.0
    _common: float = 0.0

    @property
    def trip(self) -> float:
        """Seconds of a round without drafts; 0 before one was timed."""
        return max(0.0, self._seconds - self.token * self._many)

    def note(self, many: int, seconds: float) -> None:
        """Take in a round with so many drafts."""
        if not self._seconds:
            self._many, self._seconds = float(many), seconds
            return
        apart, late = many - self._many, seconds - self._seconds
        self._many += (1 - KEPT) * apart
        self._seconds += (1 - KEPT) * late
        self._spread = KEPT * (self._spread + (1 - KEPT) * apart * apart)
        self._common = KEPT * (self._common + (1 - KEPT) * apart * late)
        if self._spread > SOME:
            self.token = max(0.0, self._common / self._spread)

    def note_draft(self, seconds: float) -> None:
        """Take in what one draft took."""
        self.draft = KEPT * self.draft + (1 - KEPT) * seconds if self.draft else seconds
