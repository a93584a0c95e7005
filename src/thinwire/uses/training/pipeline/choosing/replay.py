"""How long a pipeline's optimiser step takes: its schedule replayed, operation by operation.

Not a formula but the order of operations of torch's schedules, with these rules: a rank computes one thing
at a time; a send never stalls it; a receive waits for its message; messages from one rank to another share
a line, first come, first served, and arrive a one-way delay after their last byte has left. How TCP's window
opens after a pause is ``tcp_window``'s to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from thinwire.links.tcp.idle import FIRST_WINDOW, Line
from thinwire.types import InputError, require

SCHEDULES = ("eager1f1b", "1f1b", "gpipe", "interleaved1f1b")
Op = tuple[int, bool, int]  # stage, whether it is a backward pass, micro-batch


@dataclass(frozen=True)
class Stage:
    """Seconds of one micro-batch's passes through a stage, and of its optimiser step."""

    forward: float
    backward: float
    update: float = 0.0


@dataclass(frozen=True)
class Hop:
    """Seconds that one micro-batch's message takes over one boundary in one direction.

    ``transfer``: its bytes on the line; ``delay``: one way; ``encode`` and ``decode``: of the two ranks;
    ``window``: what TCP sends at once after a long pause, 0 where pauses change nothing.
    """

    transfer: float = 0.0
    delay: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    window: float = 0.0

    @classmethod
    def over(
        cls,
        nbytes: float,
        rate: float | None,
        delay: float,
        restarts: bool,
        encode: float = 0.0,
        decode: float = 0.0,
    ) -> Hop:
        """Return the hop of a message of ``nbytes`` over a line of ``rate`` bytes/s, ``None`` for no limit.

        ``restarts``: whether TCP begins there with a small window after each pause.
        """
        if not rate:
            return cls(0.0, delay, encode, decode)
        return cls(nbytes / rate, delay, encode, decode, FIRST_WINDOW / rate if restarts else 0.0)


@dataclass(frozen=True)
class Pipeline:
    """Stages, and between stages k and k + 1 a hop each way.

    Errors: ``InputError`` for an unknown schedule, and for numbers that do not fit together.
    """

    stages: tuple[Stage, ...]
    forward: tuple[Hop, ...]
    backward: tuple[Hop, ...]
    microbatches: int
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        n, hops = len(self.stages), (len(self.forward), len(self.backward))
        require(self.schedule in SCHEDULES, InputError, f"no schedule {self.schedule!r}; use {SCHEDULES}")
        require(n > 0, InputError, "a pipeline of 0 stages takes no step; give it one or more")
        require(
            hops == (n - 1, n - 1),
            InputError,
            f"{n} stages have {n - 1} hops each way, not {hops[0]} and {hops[1]}",
        )
        require(self.microbatches > 0, InputError, f"{self.microbatches} micro-batches are not 1 or more")
        odd = self.schedule == "interleaved1f1b" and n % 2
        require(not odd, InputError, f"{n} stages do not interleave two a rank; use an even number")

    @property
    def ranks(self) -> int:
        """Processes: one a stage, or one for every two stages where they are interleaved."""
        return len(self.stages) // 2 if self.schedule == "interleaved1f1b" else len(self.stages)


@lru_cache(maxsize=256)  # a decision asks for the same ones again and again, between two steps
def step_seconds(pipeline: Pipeline) -> float:
    """Return the seconds of one optimiser step in steady state.

    The gradient norm is agreed on before the optimiser steps, as training does: every rank's part goes
    to rank 0, which passes the sum on and goes ahead.

    >>> step_seconds(Pipeline((Stage(1, 2), Stage(1, 2)), (Hop(delay=0.25),), (Hop(delay=0.25),), 1))
    6.5
    """
    replay = _Replay(pipeline)
    starts = replay.step([0.0] * pipeline.ranks)
    if any(hop.window for hop in (*pipeline.forward, *pipeline.backward)):
        starts = replay.step(starts)  # by then windows are as wide as each step leaves them
    return replay.step(starts)[0] - starts[0]


def uncrowded_seconds(pipeline: Pipeline) -> float:
    """Return the step's seconds did no message wait for another on its line, or for TCP's window to open.

    A bound from below.

    >>> hop = (Hop(transfer=0.5, delay=0.25),)
    >>> uncrowded_seconds(Pipeline((Stage(1, 2), Stage(1, 2)), hop, hop, 1))
    7.5
    """
    forward, backward = (
        tuple(replace(hop, transfer=0.0, delay=hop.delay + hop.transfer) for hop in hops)
        for hops in (pipeline.forward, pipeline.backward)
    )
    return step_seconds(replace(pipeline, forward=forward, backward=backward))


def without_links(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with messages that take no time on their way; coding still does."""
    forward, backward = (
        tuple(replace(hop, transfer=0.0, delay=0.0) for hop in hops)
        for hops in (pipeline.forward, pipeline.backward)
    )
    return replace(pipeline, forward=forward, backward=backward)


@lru_cache(maxsize=256)
def operations(schedule: str, rank: int, stages: int, microbatches: int) -> tuple[Op, ...]:
    """Return a rank's passes in the order of torch's schedule of that name (torch 2.13) [source], or ours.

    >>> [("B" if back else "F") + str(m) for _, back, m in operations("1f1b", 0, 2, 3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    if schedule == "interleaved1f1b":
        return tuple(_interleaved(rank, stages // 2, microbatches))
    ahead = min(microbatches, stages - rank)
    if schedule == "gpipe" or (schedule == "eager1f1b" and rank < stages - 1):
        ahead = microbatches
    ops: list[Op] = [(rank, False, m) for m in range(ahead)]
    for m in range(microbatches):
        ops.append((rank, True, m))
        if ahead + m < microbatches:
            ops.append((rank, False, ahead + m))
    return tuple(ops)


def _interleaved(rank: int, ranks: int, microbatches: int) -> Iterator[Op]:
    """Yield the passes of two stages a rank: rounds of micro-batches, first through one, then the other."""
    rounds = max(1, microbatches // ranks)
    require(
        microbatches % rounds == 0,
        InputError,
        f"{microbatches} micro-batches do not divide into {rounds} rounds; use a multiple of {ranks}",
    )
    size, total = microbatches // rounds, 2 * microbatches
    ahead = min(total, size + 2 * (ranks - 1 - rank))
    done = {(stage, back): 0 for stage in (rank, rank + ranks) for back in (False, True)}

    def one(back: bool, k: int) -> Op:
        second = (k // size) % 2 != back  # backward begins with the later stage
        stage = rank + ranks * second
        done[stage, back] += 1
        return stage, back, done[stage, back] - 1

    for k in range(total + ahead):
        if k < total:
            yield one(False, k)
        if k >= ahead:
            yield one(True, k - ahead)


class _Replay:
    """The clocks of the ranks and the lines between them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.ranks = pipeline, pipeline.ranks
        n, m = len(pipeline.stages), pipeline.microbatches
        self.programs = [operations(pipeline.schedule, r, n, m) for r in range(self.ranks)]
        self._lines: dict[tuple[int, int], Line] = {}  # from one rank to another
        self._arrived: dict[Op, float] = {}  # messages, by the pass that waits for them
        self._far = max((hop.delay for hop in (*pipeline.forward, *pipeline.backward)), default=0.0)

    def step(self, starts: list[float]) -> list[float]:
        """Return when each rank can start the next step, given when it could start this one."""
        clocks, at = list(starts), [0] * self.ranks
        self._arrived.clear()
        while any(at[r] < len(p) for r, p in enumerate(self.programs)):
            before = list(at)
            for r, program in enumerate(self.programs):
                while at[r] < len(program) and self._ready(program[at[r]]):
                    clocks[r] = self._run(clocks[r], program[at[r]])
                    at[r] += 1
            if before == at:
                raise InputError(f"{self.pipeline.schedule} cannot run with {self.pipeline.microbatches}")
        return self._updated(clocks)

    def _updated(self, clocks: list[float]) -> list[float]:
        """Exchange the gradient norms and take the optimiser step."""
        known = max(clock + self._far * (r > 0) for r, clock in enumerate(clocks))
        updates = [0.0] * self.ranks
        for k, stage in enumerate(self.pipeline.stages):
            updates[k % self.ranks] += stage.update
        told = [known + self._far * (r > 0) for r in range(self.ranks)]
        return [max(*pair) + update for *pair, update in zip(clocks, told, updates, strict=True)]

    def _source(self, op: Op) -> tuple[int, Hop] | None:
        """Return the stage that a pass waits for and the hop between; ``None`` at the pipeline's ends."""
        stage, back, _ = op
        if back:
            inside = stage + 1 < len(self.pipeline.stages)
            return (stage + 1, self.pipeline.backward[stage]) if inside else None
        return (stage - 1, self.pipeline.forward[stage - 1]) if stage else None

    def _ready(self, op: Op) -> bool:
        return self._source(op) is None or op in self._arrived

    def _run(self, clock: float, op: Op) -> float:
        """Run one pass on a rank whose clock stands at ``clock``; return when it is free again."""
        stage, back, m = op
        if (source := self._source(op)) is not None:
            clock = max(clock, self._arrived[op]) + source[1].decode
        costs = self.pipeline.stages[stage]
        clock += costs.backward if back else costs.forward
        target: Op = (stage - 1 if back else stage + 1, back, m)
        if not 0 <= target[0] < len(self.pipeline.stages):
            return clock
        hop = (self.pipeline.backward if back else self.pipeline.forward)[min(stage, target[0])]
        clock += hop.encode
        ends = (stage % self.ranks, target[0] % self.ranks)
        left = self._lines.setdefault(ends, Line()).send(clock, hop.transfer, 2 * hop.delay, hop.window)
        self._arrived[target] = left + hop.delay
        return clock
