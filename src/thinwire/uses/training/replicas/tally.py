"""What exchanging cost: seconds by kind, and how many exchanges there were."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass
class Tally:
    """Counts since they were last taken."""

    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    exchanges: int = 0

    def take(self) -> Tally:
        """Return the counts and begin again."""
        taken = replace(self)
        self.__init__()  # type: ignore[misc]  # all fields to their defaults
        return taken
