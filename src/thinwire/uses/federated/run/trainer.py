"""Who computes the local steps: this process, or several others, which come to the same bits.

A worker, ``python -m thinwire.uses.federated.run.trainer CONFIG SEED``, reads weights and a turn on stdin and
answers with the difference on stdout, until stdin closes. Nothing is pickled: both are a small head and
float32 values. It ends with its starter; a ``ProcessPoolExecutor``'s outlives one that is killed.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from thinwire.rounds.local_training import TrainingError
from thinwire.runs.machine.devices import is_card, told
from thinwire.runs.machine.processor import cores, resident_peak
from thinwire.staging import to_host
from thinwire.types import ThinwireError, require
from thinwire.uses.federated.run.federated_setup import LocalTurn, Setup
from thinwire.uses.federated.run.options import FederatedConfig

WORKER = "thinwire.uses.federated.run.trainer"
ANSWER = struct.Struct("<BQ")  # whether it failed, bytes that follow
PATIENCE = 3.0  # seconds for the turns of a run that is over
Change = Callable[[], Tensor]  # waits for a turn's difference, [1, N]
Worker = subprocess.Popen[bytes]


class Trainer(Protocol):
    """Computes turns; ``start`` begins one, and what it returns waits for its end."""

    def start(self, turn: LocalTurn, weights: Tensor) -> Change:
        """Begin a turn from ``weights`` [1, N]."""
        ...

    def forget(self) -> None:
        """Drop all turns that were begun; what comes next is of another run."""
        ...

    def peaks(self) -> list[int]:
        """Return the largest resident set so far of each process besides this one, bytes."""
        ...

    def close(self) -> None:
        """Stop computing."""
        ...


class InProcessTrainer:
    """Computes a turn in this process, when its result is asked for."""

    def __init__(self, compute: Callable[[LocalTurn, Tensor], Tensor]) -> None:
        self._compute = compute

    def start(self, turn: LocalTurn, weights: Tensor) -> Change:
        return lambda: self._compute(turn, weights)

    def forget(self) -> None:
        """Do nothing: no turn is begun before it is asked for."""

    def peaks(self) -> list[int]:
        return []

    def close(self) -> None:
        """Do nothing."""


class TrainerPool:
    """Computes turns in ``count`` processes, each with the data and a model of its own."""

    def __init__(self, config: FederatedConfig, seed: int, count: int) -> None:
        self._command = [sys.executable, "-m", WORKER, config.to_json(), str(seed)]
        self._workers = [self._new_worker(place) for place in range(count)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, "federated worker")
        self._under_way: set[Future[Tensor]] = set()

    def _new_worker(self, place: int) -> Worker:
        there = os.environ | {"LOCAL_RANK": str(place)}  # by which it takes its turn of the cards
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": there}
        return subprocess.Popen(self._command, **pipes)

    def start(self, turn: LocalTurn, weights: Tensor) -> Change:
        future = self._threads.submit(self._compute, turn, weights)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future.result

    def forget(self) -> None:
        """Drop all turns that were begun; processes that ended, or go on for seconds, are started anew."""
        for future in list(self._under_way):
            future.cancel()
        late = wait(list(self._under_way), PATIENCE).not_done
        for i, worker in enumerate(self._workers):
            if late or worker.poll() is not None:
                _end(worker)
                self._workers[i] = self._new_worker(i)
        wait(late)
        self._idle = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def peaks(self) -> list[int]:
        return [peak for worker in self._workers if (peak := resident_peak(worker.pid))]

    def close(self) -> None:
        """End the processes, whatever they compute."""
        for future in list(self._under_way):
            future.cancel()
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            _end(worker)

    def _compute(self, turn: LocalTurn, weights: Tensor) -> Tensor:
        idle = self._idle
        worker = idle.get()
        try:
            return _asked(worker, turn, weights)
        finally:
            idle.put(worker)  # even one that has ended: then who asks it next hears so, and does not wait


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute as workers do in the block: two threads would add up gradients in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def workers_of(config: FederatedConfig, device: torch.device) -> int:
    """Return how many processes compute: as asked, or one a core; one alone where all would share a card."""
    return config.workers or (1 if is_card(device) else cores())


def _end(worker: Worker) -> None:
    worker.kill()
    worker.wait()
    for stream in (worker.stdin, worker.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


def _asked(worker: Worker, turn: LocalTurn, weights: Tensor) -> Tensor:
    stdin, stdout = worker.stdin, worker.stdout
    require(stdin is not None and stdout is not None, ThinwireError, "a worker has no pipes")
    try:
        send_row(stdin, turn.pack(), weights)  # type: ignore[arg-type]  # as just required
        failed, nbytes = ANSWER.unpack(read_exactly(stdout, ANSWER.size))  # type: ignore[arg-type]
        body = read_exactly(stdout, nbytes)  # type: ignore[arg-type]
    except (OSError, EOFError) as e:
        worker.kill()
        how = f"the process that computed client {turn.client}, version {turn.version} ended with code"
        remedy = "where that is -9 for lack of memory, give fewer --workers"
        raise ThinwireError(f"{how} {worker.wait()}; {remedy}") from e
    if failed:
        raise TrainingError(body.decode())
    return row_of(body)


def send_row(stream: IO[bytes], head: bytes, row: Tensor) -> None:
    """Write a head and the float32 values of a row."""
    (values,) = to_host([row]).views()
    stream.write(head + values)
    stream.flush()


def read_exactly(stream: IO[bytes], nbytes: int) -> bytes:
    """Read so many bytes. Errors: ``EOFError`` where the other end has closed."""
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise EOFError("the other end has closed")
    return data


def row_of(data: bytes) -> Tensor:
    """Return the row [1, N] of float32 bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(1, -1)


def main(text: str, seed: str) -> None:
    """Answer turns until nobody asks any more."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    torch.set_num_threads(1)
    setup = Setup.of(FederatedConfig.from_json(text), int(seed))
    while True:
        try:
            turn = LocalTurn.unpack(read_exactly(asked, LocalTurn.FORM.size))
            weights = row_of(read_exactly(asked, 4 * setup.values))
        except EOFError:
            return
        _answer(answers, setup, turn, weights)


def _answer(answers: IO[bytes], setup: Setup, turn: LocalTurn, weights: Tensor) -> None:
    try:
        with told():
            change = setup.compute(turn, weights)
    except ThinwireError as e:
        text = str(e).encode()
        answers.write(ANSWER.pack(1, len(text)) + text)
        answers.flush()
        return
    send_row(answers, ANSWER.pack(0, 4 * change.numel()), change)


if __name__ == "__main__":
    main(*sys.argv[1:])
