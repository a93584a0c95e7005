"""What a check of this machine finds, and what a test of a link takes unless told otherwise."""

from __future__ import annotations

from dataclasses import dataclass

PORT = 7100  # where a test of a link listens
SECONDS = 4.0  # of its transfer in each direction
OK, LACKS, BROKEN = "ok", "lacks", "broken"


@dataclass(frozen=True)
class Check:
    """One finding: ``status`` is ok, lacks (something optional) or broken (thinwire cannot work)."""

    name: str
    status: str
    finding: str
    remedy: str = ""
