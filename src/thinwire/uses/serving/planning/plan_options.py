"""Options of a plan for serving: the machines, their link, and the texts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.links.profile import plain_shape
from thinwire.links.shape import MTU, SEGMENT, LinkShape
from thinwire.runs.options import option
from thinwire.runs.ranks.run_config import MACHINES
from thinwire.types import InputError, require
from thinwire.uses.serving.run.options import SERVING, StagesConfig

MOST = 16  # machines
PARTS = "speed", "memory"
EXAMPLE = "write it like speed=0.5,memory=8, or give a file that --measure printed there"


@dataclass(frozen=True)
class OtherMachine:
    """Another machine by its speed against this one, and its memory in bytes (None: as this one's)."""

    speed: float = 1.0
    memory: float | None = None


@dataclass(frozen=True)
class PlannedConfig(StagesConfig):
    """Say what is to be served on which machines."""

    machine: tuple[str, ...] = option(
        (),
        MACHINES,
        "Another machine, in the order of stages: its speed against this one and its memory in GB, as in "
        "speed=0.5,memory=8, or a file that --measure printed there (default: one like this).",
        metavar="MACHINE",
        free=True,
    )
    memory: float | None = option(
        None,
        MACHINES,
        "Memory for the model on this machine, in GB (default: what is free).",
        metavar="GB",
        above=0,
        most=1e6,
        free=True,
    )
    disk: float | None = option(
        None,
        MACHINES,
        "GB/s that this machine's disk reads, for a model of experts (default: measured on its files).",
        metavar="GB/S",
        above=0,
        most=1e4,
        free=True,
    )
    prompt_tokens: int = option(1024, SERVING, "Tokens of a prompt.", metavar="N", least=1, most=1 << 20)
    tokens: int = option(
        128, SERVING, "Tokens that a prompt is continued by.", metavar="N", least=2, most=1 << 16
    )
    at_once: int = option(1, SERVING, "Texts at the same time.", metavar="N", least=1, most=64)
    right_drafts: float = option(
        0.0,
        SERVING,
        "Share of drafts that are right where those before it are; above 0 plans with drafts too.",
        metavar="SHARE",
        least=0,
        below=1,
    )

    def validate(self) -> None:
        """Refuse machines and links that no plan is made for."""
        super().validate()
        many = f"{1 + len(self.machine)} machines; give {MOST - 1} besides this one at most"
        require(len(self.machine) < MOST, InputError, many)
        for text in self.machine:
            if not is_file(text):
                parse_machine(text)
        need = self.at_once * (self.prompt_tokens + self.tokens)
        short = f"{need} tokens at once are more than the --cache of {self.cache}; raise it, or ask for less"
        require(need <= self.cache, InputError, short)
        if self.link != "none":
            self.shape  # noqa: B018  # its errors

    @property
    def shape(self) -> LinkShape:
        """The link by what TCP carries on it: with --emulate headers take their part of the rate."""
        given = plain_shape(self.link, "a plan takes one rate and one delay, as in 20mbit,20ms")
        rate = given.rate and given.rate * (SEGMENT / MTU if self.emulate else 1.0)
        return LinkShape(rate, given.delay + given.jitter / 2)

    @property
    def machines(self) -> int:
        """Machines that are planned for."""
        return 1 + (len(self.machine) or 1)


def is_file(text: str) -> bool:
    """Say whether a text names a file and not a speed."""
    return "=" not in text


def parse_machine(text: str) -> OtherMachine:
    """Read a machine's speed and memory. Errors: ``InputError`` that names the part.

    >>> parse_machine("speed=0.5,memory=8")
    OtherMachine(speed=0.5, memory=8000000000.0)
    """
    found = dict[str, float]()
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        wrong = f"--machine {text!r} has the part {part.strip()!r}; {EXAMPLE}"
        require(name in PARTS and name not in found, InputError, wrong)
        try:
            found[name] = float(value)
        except ValueError as e:
            raise InputError(wrong) from e
        require(0 < found[name] < math.inf, InputError, wrong)
    memory = found.get("memory")
    return OtherMachine(found.get("speed", 1.0), None if memory is None else memory * 1e9)
