"""A program of ranks for tests of those who start them. It loads no torch: each rank is a process anew."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from thinwire.runs.ranks.run_config import RunConfig
from thinwire.types import InputError, LinkError

LONG = 90.0  # seconds; a limit, not an expectation


@dataclass(frozen=True)
class Two(RunConfig):
    """Two ranks that need nothing."""

    ranks = 2  # type: ignore[assignment]


def play(config: RunConfig) -> None:
    """Do, as a rank, what the orders say."""
    from thinwire.runs.ranks.rank_main import await_order, next_order, say

    print("what a library prints is no word of the rank's")
    say("ready", seed=config.seed)
    error, *text = await_order("do", LONG)
    if error == "echo":
        say("echo", text=text)
    elif error == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("deaf")
        next_order(LONG)
    elif error == "wait":
        next_order(LONG)
    elif error == "leave":
        os._exit(7)
    else:
        raise {"link": LinkError, "input": InputError, "odd": ValueError}[error](" ".join(text))


def filled(config: RunConfig) -> None:
    """Fail as torch does where a card has no room left."""
    raise RuntimeError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79 GiB."
    )
