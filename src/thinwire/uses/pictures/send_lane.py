"""What is sent of a card: packed and handed to the links in turn, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Job = Callable[[], object]


class SendLane:
    """Do the jobs that pack and send messages, in the order in which they are given.

    What a card sends is not there before it has computed it. A thread waits for that, and the caller goes on.
    What the CPU sends is there, so its jobs are done at once, by the caller. ``failed`` is called with what a
    job on the thread raised, which the next call of the lane raises as well.
    """

    def __init__(self, failed: Callable[[BaseException], object]) -> None:
        self._failed = failed
        self._threads: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._error: BaseException | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def do(self, device: torch.device, job: Job) -> None:
        """Do a job that reads tensors of ``device``, as they are once what is queued there is done."""
        self.check()
        if device.type != "cuda":
            job()
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "pictures")
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
        self._last = self._threads.submit(self._done, device, ready, job)

    def check(self) -> None:
        """Raise what a job has raised."""
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        """Wait until all jobs are done; raise what one has raised."""
        if self._last is not None:
            self._last.result()
        self.check()

    def close(self) -> None:
        """Do what is left, and end the thread."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _done(self, device: torch.device, ready: torch.cuda.Event, job: Job) -> None:
        if self._error is not None:  # the peers know that no more comes
            return
        try:
            side = self._streams[device] = self._streams.get(device) or torch.cuda.Stream(device)
            side.wait_event(ready)
            with torch.cuda.stream(side):  # behind what is sent alone, not behind what is queued meanwhile
                job()
        except BaseException as e:  # any: who waits for this message would wait for its deadline
            self._error = e
            self._failed(e)
