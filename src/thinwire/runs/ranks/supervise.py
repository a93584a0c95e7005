"""The processes of a run: started, watched until they end or one fails, and none of them left behind."""

from __future__ import annotations

import json
import math
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from thinwire import types
from thinwire.runs.machine.interrupts import GRACE, POLL, held_back, stop
from thinwire.runs.ranks.launcher import Launcher
from thinwire.runs.ranks.run_config import RunConfig
from thinwire.types import LinkError, ThinwireError

READY = 180.0  # seconds that a process may take to load
TURN = 0.25  # seconds
LATE = 1.0  # seconds for what a process that has ended wrote to be read
SIGNALLED = 128  # and the signal's number: the exit code that shells give a killed process
Heard = tuple[int, dict[str, Any]]  # a rank, and what it said


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first, by its return code: below zero, the signal that ended it."""

    rank: int
    returned: int

    @property
    def exit_code(self) -> int:
        """What the whole program should end with."""
        return self.returned if self.returned > 0 else SIGNALLED - self.returned

    @property
    def how(self) -> str:
        if self.returned < 0:
            return f"was ended by {signal.Signals(-self.returned).name}"
        return f"failed with exit code {self.returned}"

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}; the others were stopped"


class Supervisor(ExitStack):
    """Any processes, by rank, to the end of a ``with`` block: then none is left, whatever happened.

    ``require_alive`` raises once the network between them is gone.
    """

    def __init__(self, require_alive: Callable[[], None]) -> None:
        super().__init__()
        self.processes: list[subprocess.Popen[Any]] = []
        self.callback(lambda: stop(self.processes, signal.SIGTERM))
        self._require_alive = require_alive
        self._died: dict[int, float] = {}  # when a rank was seen to have failed

    @property
    def running(self) -> bool:
        """Whether one of them is."""
        return None in [p.poll() for p in self.processes]  # a list: each of them must be asked

    def watch(self, seconds: float = math.inf) -> RankFailure | None:
        """Wait until all have ended, or ``seconds``; return at once who failed first, if one did."""
        end = time.monotonic() + seconds
        while (failure := self.failure()) is None and self.running and time.monotonic() < end:
            time.sleep(POLL)
        return failure

    def failure(self) -> RankFailure | None:
        """Return who failed first; None while nobody did, or others may still say more."""
        for rank, p in enumerate(self.processes):
            if p.poll() and rank not in self._died:
                self._died[rank] = time.monotonic()
        if self._died and self._is_settled():
            codes = {rank: self.processes[rank].returncode for rank in self._died}
            # One that was killed is the cause of what the others say that ended with it.
            rank = min(codes, key=lambda r: (codes[r] > 0, self._died[r], r))
            return RankFailure(rank, codes[rank])
        if self.running:
            self._require_alive()  # or the ranks would blame each other
        return None

    def _is_settled(self) -> bool:
        return True


class Workers(Supervisor):
    """Ranks that run ``program`` (``worker.py``), whose words are heard, and which take orders.

    A failure is raised as an error of this process: that of the rank that failed first, once the others had
    time to say why. ``names`` are what people call the ranks, each of which then has a log of its name in
    the run's folder; ``remedy`` says what to do once one was killed. While a word is awaited, ``turn`` is
    called several times a second, and with each word.
    """

    def __init__(
        self,
        place: Launcher,
        program: str,
        names: Sequence[str] = (),
        remedy: Callable[[], str] = lambda: "start again",
        turn: Callable[[Heard | None], object] = lambda heard: None,
    ) -> None:
        super().__init__(place.require_alive)
        self._place, self._program, self._names, self._remedy = place, program, names, remedy
        self._turn = turn
        self._heard: queue.Queue[Heard] = queue.Queue()
        self._errors: dict[int, BaseException] = {}
        self._listeners: list[threading.Thread] = []
        self._messages: list[str] = []  # where to look for each rank's

    def run(self, config: RunConfig) -> None:
        """Start all ranks and wait for their end. Errors: as ``wait``."""
        for _ in range(config.ranks):
            self.start(config)
        self.wait()

    def start(self, config: RunConfig, handed: Mapping[str, int] | None = None) -> int:
        """Start the next rank and return its number; what it prints goes to its log, or comes here.

        ``handed``: as of ``Launcher.start``.
        """
        rank = len(self.processes)
        self._launch(config, rank, handed or {})
        return rank

    def restart(self, config: RunConfig, rank: int) -> None:
        """Start a rank that has ended once more; nobody hears that it had."""
        self._died.pop(rank, None)
        self._errors.pop(rank, None)
        stop([self.processes[rank]])
        self._launch(config, rank, {})

    def _launch(self, config: RunConfig, rank: int, handed: Mapping[str, int]) -> None:
        log = Path(config.out) / f"{self._names[rank].replace(' ', '-')}.log" if self._names else None
        new = slice(rank, rank + 1)  # in place of an earlier one
        with log.open("ab" if self.processes[new] else "wb") if log else nullcontext() as stderr, held_back():
            process = self._place.start(config, rank, self._program, stderr, handed)
            self.processes[new] = [process]  # in the same breath, or an interrupt would leave it behind
        self._messages[new] = [f"in {log}" if log else "above"]
        listener = threading.Thread(target=self._listen, args=(rank, process.stdout), daemon=True)
        self._listeners[new] = [listener]
        listener.start()

    def order(self, rank: int, word: str) -> None:
        """Say one line to a rank; one that has gone does not hear it."""
        stdin = self.processes[rank].stdin
        if stdin is not None:
            with suppress(OSError):
                stdin.write(f"{word}\n")
                stdin.flush()

    def hear(self, seconds: float) -> Heard:
        """Wait for what any of them says next. Errors: ``LinkError`` after ``seconds``; as ``wait``."""
        heard = self._next(time.monotonic() + seconds)
        if heard is None:
            raise LinkError(f"no process said anything for {seconds:g} s; see their logs")
        return heard

    def until(self, kind: str, rank: int, seconds: float = READY) -> dict[str, Any]:
        """Wait until ``rank`` says a word of this kind, and return it. Errors: as ``hear``."""
        end = time.monotonic() + seconds
        while (heard := self._next(end)) is not None:
            if (heard[0], heard[1]["kind"]) == (rank, kind):
                return heard[1]
        late = f"{self._name(rank)} did not get to {kind!r} within {seconds:g} s"
        raise LinkError(f"{late}; its messages are {self._messages[rank]}")

    def _next(self, end: float) -> Heard | None:
        heard = None
        while heard is None and (left := end - time.monotonic()) > 0:
            self._raise(self.failure())
            with suppress(queue.Empty):
                heard = self._heard.get(timeout=min(TURN, left))
            self._turn(heard)
        return heard

    def dismiss(self) -> None:
        """Order all to stop, and wait a moment until they have. Errors: as ``wait``."""
        for rank in range(len(self.processes)):
            self.order(rank, "stop")
        self.wait(GRACE)

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until all have ended, or ``seconds``.

        Errors: what the first failing rank raised; ``LinkError`` for one that was killed; what the network
        between them raises.
        """
        self._raise(self.watch(seconds))

    def _raise(self, failure: RankFailure | None) -> None:
        if failure is not None:
            raise self._error(failure)

    def _is_settled(self) -> bool:
        """Return whether nobody needs more time: a lost peer may be another's fault, all else says it all."""
        told = any(not isinstance(e, LinkError) for e in list(self._errors.values()))
        codes = {self.processes[rank].returncode for rank in self._died}
        late = time.monotonic() - min(self._died.values()) > GRACE
        return not self.running or told or late or codes != {LinkError.exit_code}

    def _error(self, failure: RankFailure) -> BaseException:
        who = self._name(failure.rank)
        if failure.returned < 0:
            return LinkError(f"{who} {failure.how}; {self._remedy()}")
        for rank in self._died:
            self._listeners[rank].join(LATE)
        errors = list(self._errors.values())  # in the order in which they came
        if errors:  # one rank's own trouble makes the others lose a peer: the cause is the more telling
            return min(errors, key=lambda e: (not isinstance(e, KeyboardInterrupt), isinstance(e, LinkError)))
        return ThinwireError(f"{who} {failure.how}; its messages are {self._messages[failure.rank]}")

    def _name(self, rank: int) -> str:
        return f"the {self._names[rank]} process" if self._names else f"rank {rank}"

    def _listen(self, rank: int, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with suppress(ValueError, KeyError, TypeError):
                    said = json.loads(line)
                    if said["kind"] == "error":
                        prefix = f"{self._name(rank)}: " if self._names else ""
                        cls = getattr(types, said["error"], KeyboardInterrupt)  # the worker names no others
                        self._errors[rank] = cls(prefix + said["text"])
                    else:
                        self._heard.put((rank, said))
