"""What is sent of a card: handed to the links in turn, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread

import torch

Job = Callable[[], object]


class SendLane:
    """Do the jobs that wait for what sets out, and send it, in the order in which they are given.

    What a card sends is not there before it has computed it. A thread waits for that, and the caller goes on.
    What the CPU sends is there, so its jobs are done at once, by the caller. ``failed`` is called with what a
    job on the thread raised, which the next call of the lane raises as well.
    """

    def __init__(self, failed: Callable[[BaseException], object]) -> None:
        self._failed = failed
        self._jobs: SimpleQueue[Job | Event | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def do(self, device: torch.device, job: Job) -> None:
        """Do a job that waits for ``device`` and for nothing else there than what it sends."""
        self.check()
        if device.type != "cuda":
            job()
            return
        if self._thread is None:
            self._thread = Thread(target=self._run, name="pictures", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def check(self) -> None:
        """Raise what a job has raised."""
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        """Wait until all jobs are done; raise what one has raised."""
        if self._thread is not None:
            done = Event()
            self._jobs.put(done)
            done.wait()
        self.check()

    def renew(self) -> None:
        """Forget what a job has raised, once all that were given are done or left out."""
        with suppress(BaseException):
            self.flush()
        self._error = None

    def close(self) -> None:
        """Do what is left, and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Event):
                job.set()
            elif self._error is None:  # else the peers know that no more comes
                self._do(job)

    def _do(self, job: Job) -> None:
        try:
            job()
        except BaseException as e:  # any: who waits for this message would wait for its deadline
            self._error = e
            with suppress(Exception):  # of the links: the first error is the one to tell
                self._failed(e)
