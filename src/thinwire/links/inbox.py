"""Match arriving messages with the futures that wait for them, both in order."""

from __future__ import annotations

import copy
from collections import deque
from concurrent.futures import Future
from threading import Lock
from typing import TypeVar

from thinwire.links.message import Message
from thinwire.types import LinkError

ASLEEP = 2.0  # seconds between two turns of the thread above which this process, not the peer, was stopped

T = TypeVar("T")


def renewed(error: Exception) -> Exception:
    """Return a copy of ``error``: one instance raised in two threads would mix their tracebacks."""
    try:
        found = copy.copy(error)  # with all its arguments: some take more than a text
    except Exception:  # a class that cannot be made from its arguments
        return RuntimeError(f"{type(error).__name__}: {error}")
    return found.with_traceback(None)


def pending() -> Future[None]:
    """Return the future of a send: a message that was queued cannot be cancelled."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def failed(error: Exception) -> Future[None]:
    """Return a future that has already failed with ``error``."""
    future: Future[None] = Future()
    future.set_exception(renewed(error))
    return future


def within(future: Future[T], timeout: float, what: str, peer: str) -> T:
    """Return a future's result, waiting ``timeout`` seconds at most.

    Errors: the future's own; ``LinkError`` for the deadline: "waited 20 s for WHAT from PEER".

    >>> within(Future(), 0.01, "a probe", "rank 1")
    Traceback (most recent call last):
    thinwire.types.LinkError: waited 0.01 s for a probe from rank 1
    """
    try:
        return future.result(timeout)
    except TimeoutError as e:
        raise LinkError(f"waited {timeout:g} s for {what} from {peer}") from e


class Inbox:
    """Messages of one link that nobody has asked for yet, or futures that no message has come for.

    >>> box = Inbox()
    >>> first = box.get()
    >>> box.put(b"a")
    >>> first.result()
    b'a'
    """

    def __init__(self) -> None:
        self.nbytes = 0  # of what nobody has asked for
        self._lock = Lock()
        self._messages: deque[Message] = deque()
        self._waiting: deque[Future[Message]] = deque()
        self._error: Exception | None = None

    def put(self, *messages: Message) -> None:
        """Hand ``messages`` to the oldest waiting futures, or keep them."""
        found = []
        with self._lock:
            self._messages.extend(messages)
            self.nbytes += sum(map(len, messages))
            while self._messages and (taker := self._taker()) is not None:
                found.append((taker, self._next()))
        for taker, data in found:  # outside the lock: its callbacks may call get
            taker.set_result(data)

    def get(self) -> Future[Message]:
        """Return a future for the next message; after ``fail`` it fails once the kept messages are out."""
        future: Future[Message] = Future()
        with self._lock:
            if self._messages:
                future.set_result(self._next())
            elif self._error is not None:
                future.set_exception(renewed(self._error))
            else:
                self._waiting.append(future)
        return future

    def more(self) -> deque[Message]:
        """Return the messages that are here already; they are the caller's."""
        with self._lock:
            messages, self._messages, self.nbytes = self._messages, deque(), 0
        return messages

    def fail(self, error: Exception) -> None:
        """Fail every waiting and later future with ``error``; the first error stays."""
        with self._lock:
            self._error = self._error or error
            waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(renewed(self._error))

    def _next(self) -> Message:
        message = self._messages.popleft()
        self.nbytes -= len(message)
        return message

    def _taker(self) -> Future[Message] | None:
        while self._waiting:
            future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                return future
        return None
