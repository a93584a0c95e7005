"""What the exchanges of one rank took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Tally:
    """Counts and seconds so far; bytes are those of messages, to all peers together."""

    calls: int = 0
    exchanges: int = 0
    nbytes: int = 0
    output_nbytes: int = 0  # of these, for the joined outputs
    repairs: int = 0  # packets that could not be decoded, and were asked for as values
    wait_s: float = 0.0
    code_s: float = 0.0
