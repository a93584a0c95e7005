"""A link made slow: rate, delay, jitter and loss of another link, in this process."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic

import numpy as np

from thinwire.links.inbox import failed, pending, renewed
from thinwire.links.link import Link, LinkEstimate
from thinwire.links.message import Message
from thinwire.links.metered import on_the_wire, redial
from thinwire.links.shape import SEGMENT, LinkShape
from thinwire.types import LinkError


@dataclass(frozen=True)
class MessageLateness:
    """How far behind its timetable a shaped link delivered: what the emulation itself adds, in seconds."""

    messages: int = 0
    mean: float = 0.0
    worst: float = 0.0


@dataclass
class _Waiting:
    due: float
    data: Message
    label: str
    done: Future[None]
    shaped: bool


class Shaped:
    """Delay what is sent over ``link`` as ``shape`` says; each direction is shaped by its sender.

    The model is a serialiser, a FIFO of any length and a propagation delay (see ``Timetable``). There are
    no TCP dynamics in it: no slow start, no idle restart, no congestion control, no drops from a full
    queue, and loss costs line time and one round trip. Bytes are messages with their frame headers; TCP and
    IP headers are free. Sending never blocks; a send is done when ``link`` has it. ``seed`` draws jitter
    and loss.
    """

    def __init__(
        self, link: Link, shape: LinkShape, seed: int = 0, clock: Callable[[], float] = monotonic
    ) -> None:
        self.shape = shape
        self._link = link
        self._clock = clock
        self._secure = bool(getattr(link, "secure", False))
        self._timetable = Timetable(shape, seed)
        self._queue: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._lifts = 0
        self._sending: _Waiting | None = None  # it has left the queue and is being handed over
        self._closed: LinkError | None = None
        self._messages, self._late, self._worst = 0, 0.0, 0.0
        self._thread: threading.Thread | None = None
        if not shape.is_none:
            self._thread = threading.Thread(target=self._run, name=f"shaper to {self.peer}", daemon=True)
            self._thread.start()

    @property
    def peer(self) -> str:
        return self._link.peer

    @property
    def lateness(self) -> MessageLateness:
        """How exact the emulation was so far, by the messages that it shaped."""
        with self._changed:
            return MessageLateness(self._messages, self._late / max(1, self._messages), self._worst)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Send without shaping inside the block, still in order: for traffic outside the experiment.

        A message sent so waits for earlier shaped ones. Only this end's sends are concerned.
        """
        with self._changed:
            self._lifts += 1
        try:
            yield
        finally:
            with self._changed:
                self._lifts -= 1

    def send(self, data: Message, label: str = "control") -> Future[None]:
        if self._thread is None:
            return self._link.send(data, label)
        with self._changed:
            if self._closed is not None:
                return failed(self._closed)
            size = on_the_wire(data, self._secure)
            shaped = not self._lifts
            due = self._timetable.arrival(self._clock(), size, shaped)
            waiting = _Waiting(due, data, label, pending(), shaped)
            self._queue.append(waiting)
            if len(self._queue) == 1:
                self._changed.notify_all()
        return waiting.done

    def recv(self) -> Future[Message]:
        return self._link.recv()

    def more(self) -> deque[Message]:
        return self._link.more()

    def estimate(self) -> LinkEstimate:
        return self._link.estimate()

    def redial(self) -> None:
        """Ask the link below for a new connection, where it can make one."""
        redial(self._link)

    def close(self, timeout: float = 5.0) -> None:
        end = monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: not (self._queue or self._sending), timeout)
            self._closed = self._closed or LinkError(f"this end closed the link to {self.peer}")
            dropped, self._queue = self._queue, deque()
            self._changed.notify_all()
        for waiting in dropped:
            waiting.done.set_exception(LinkError(str(self._closed)))
        if self._thread is not None:
            self._thread.join(10.0)
        self._link.close(max(0.0, end - monotonic()))

    def _run(self) -> None:
        try:
            while (waiting := self._next()) is not None:
                sent = self._link.send(waiting.data, waiting.label)
                sent.add_done_callback(partial(_pass_on, waiting.done))
                with self._changed:
                    self._sending = None
                    self._changed.notify_all()
        except Exception as e:  # told to whoever sends, who would else wait for ever
            self._fail(LinkError(f"the shaped link to {self.peer} failed: {type(e).__name__}: {e}"))
            raise

    def _fail(self, error: LinkError) -> None:
        with self._changed:
            self._closed = self._closed or error
            lost = [*([self._sending] if self._sending else []), *self._queue]
            self._sending, self._queue = None, deque()
            self._changed.notify_all()
        for waiting in lost:
            waiting.done.set_exception(renewed(self._closed))

    def _next(self) -> _Waiting | None:
        with self._changed:
            while self._closed is None:
                if not self._queue:
                    self._changed.wait()
                    continue
                late = self._clock() - self._queue[0].due
                if late >= 0:
                    if self._queue[0].shaped:
                        self._note(late)
                    self._sending = self._queue.popleft()
                    return self._sending
                self._changed.wait(-late)
        return None

    def _note(self, late: float) -> None:
        self._messages += 1
        self._late += late
        self._worst = max(self._worst, late)


def _pass_on(done: Future[None], source: Future[None]) -> None:
    error = source.exception()
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


class Timetable:
    """When each message of one direction arrives: a serialiser at the shape's rate, then propagation.

    A message holds the line for size / rate seconds, first come, first served; it arrives when its last
    byte has left and the delay and its jitter have passed, never before an earlier one. Every segment of
    ``SEGMENT`` bytes is lost with probability ``loss``; lost segments hold the line once more, and a
    message that lost any is one round trip late.
    """

    def __init__(self, shape: LinkShape, seed: int = 0) -> None:
        self.shape = shape
        self._rng = np.random.default_rng(seed)
        self._line_free = 0.0
        self._last = 0.0

    def arrival(self, now: float, nbytes: int, shaped: bool = True) -> float:
        """Return when a message of ``nbytes`` sent at ``now`` arrives; not ``shaped``: at once, in order."""
        due = self._crossing(now, nbytes) if shaped else now
        self._last = max(self._last, due)
        return self._last

    def _crossing(self, now: float, nbytes: int) -> float:
        shape, resent = self.shape, self._resent(nbytes)
        start = max(now, self._line_free)
        self._line_free = start + ((nbytes + resent * SEGMENT) / shape.rate if shape.rate else 0.0)
        late = 2 * shape.delay if resent else 0.0
        jitter = shape.jitter * self._rng.random() if shape.jitter else 0.0
        return self._line_free + shape.delay + jitter + late

    def _resent(self, nbytes: int) -> int:
        total, lost = 0, math.ceil(nbytes / SEGMENT)
        while self.shape.loss and lost:  # a segment sent again can be lost again
            lost = int(self._rng.binomial(lost, self.shape.loss))
            total += lost
        return total
