"""A batch of rollouts: what waits for a worker, who has what, and what came, with the age of its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from thinwire.types import PayloadError, require
from thinwire.uses.following.hosts.rollout_messages import Completions, Sample, Tokens, unpack_samples


@dataclass(frozen=True)
class RolloutAge:
    """How old the weights were that made a part of a batch.

    ``version``: the one that a worker used; ``behind``: how many the trainer had published since; ``age``:
    seconds since it was published, by the publisher's clock, when the part was made; ``waited``: seconds that
    the worker waited for weights, 0 unless those it had were beyond ``max_age``; ``samples`` and ``tokens``:
    what it made; ``seconds``: from its prompts' leaving to its samples' arrival.
    """

    batch: int
    worker: str
    version: int
    behind: int
    age: float
    waited: float
    samples: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class RolloutBatch:
    """A batch that is whole.

    ``version``: the newest when it was asked for; ``step``: the trainer's; ``began``: when, monotonic
    seconds; ``sent`` and ``received``: wire bytes of prompts and samples, all headers of ours included.
    """

    number: int
    step: int | None
    version: int
    began: float
    seconds: float
    parts: tuple[RolloutAge, ...]
    sent: int
    received: int


class RolloutListener(Protocol):
    """Who hears what a pool does: a record of it, say."""

    def begin(self, config: Mapping[str, Any]) -> None:
        """Hear how the pool is set: ``host``, ``port``, ``max_age``, ``timeout``."""

    def came(self, worker: str) -> None:
        """Hear that a worker is ready."""

    def went(self, worker: str, prompts: int) -> None:
        """Hear that a worker is gone, and how many prompts went from it to others."""

    def made(self, batch: RolloutBatch) -> None:
        """Hear of a batch that is whole."""

    def note(self, text: str) -> None:
        """Hear a sentence that whoever trains must know."""

    def end(self, error: BaseException | None) -> None:
        """Hear that the pool is closed, and the error that ended it, if one did."""


@dataclass
class PromptPart:
    """Prompts that one worker has, or that wait for one.

    ``at``: the place of the first one in its batch; ``given``: when it had them, monotonic seconds;
    ``waits``: for newer weights.
    """

    at: int
    prompts: Sequence[Tokens]
    peer: bytes = b""
    given: float = 0.0
    waits: bool = False


@dataclass
class OpenBatch:
    """A batch that is being made. ``given`` has its parts that are under way, by number."""

    number: int
    version: int
    prompts: Sequence[Tokens]
    settings: Mapping[str, Any]
    step: int | None = None
    began: float = field(default_factory=monotonic)
    waiting: list[PromptPart] = field(default_factory=list)
    given: dict[int, PromptPart] = field(default_factory=dict)
    ages: list[RolloutAge] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting.append(PromptPart(0, self.prompts))
        self._made: list[Sample | None] = [None] * len(self.prompts)

    @property
    def whole(self) -> bool:
        """Whether there is a sample for each prompt."""
        return all(made is not None for made in self._made)

    @property
    def samples(self) -> list[Sample]:
        """What is there, in the order of the prompts."""
        return [made for made in self._made if made is not None]

    def split(self, many: int) -> list[PromptPart]:
        """Take what has waited longest, in ``many`` parts that are alike, or fewer."""
        part = self.waiting.pop(0)
        each = -(-len(part.prompts) // many)
        cuts = range(0, len(part.prompts), each)
        return [PromptPart(part.at + i, part.prompts[i : i + each]) for i in cuts]

    def take_back(self, peer: bytes) -> int:
        """Let what a worker had wait for others; return how many prompts that are."""
        gone = [number for number, part in self.given.items() if part.peer == peer]
        parts = [self.given.pop(number) for number in gone]
        self.waiting += [PromptPart(part.at, part.prompts) for part in parts]
        return sum(len(part.prompts) for part in parts)

    def put(self, peer: bytes, worker: str, message: Completions) -> RolloutAge | None:
        """Put samples in their places and return their age; None for those that are no longer wanted.

        Errors: ``PayloadError`` for anything but a sample for each prompt.
        """
        part = self.given.get(message.part)
        if part is None or part.peer != peer:
            return None  # of a batch that is over, or a part that another one has by now
        told = f"weights {message.age} s old, after {message.waited} s of waiting"
        require(all(0 <= x < math.inf for x in (message.age, message.waited)), PayloadError, told)
        samples = unpack_samples(message.body)
        short = f"{len(samples)} samples for {len(part.prompts)} prompts"
        require(len(samples) == len(part.prompts), PayloadError, short)
        del self.given[message.part]
        self._made[part.at : part.at + len(samples)] = samples
        age = RolloutAge(
            self.number,
            worker,
            message.version,
            max(0, self.version - message.version),
            message.age,
            message.waited,
            len(samples),
            sum(len(sample.tokens) for sample in samples),
            monotonic() - part.given,
        )
        self.ages.append(age)
        return age
