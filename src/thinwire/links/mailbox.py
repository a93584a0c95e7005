"""Messages filed by tag, so that each part of a program waits for its own and for nothing else."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from thinwire.links.inbox import renewed
from thinwire.links.link import Link
from thinwire.links.message import Data, Message, Parts, buffers_of
from thinwire.links.pair.buffers import joined
from thinwire.types import InputError, LinkError, PayloadError, require

Handler = Callable[[bytes, bytes], None]  # tag, body
Opener = Callable[[bytes], object]  # body
T = TypeVar("T")
MAX_TAG = 255  # bytes
SMALL = 1 << 12  # bytes that cost less to copy than to keep apart
FILLER = b"\0filler"  # the tag of messages that are sent for the sending's sake; dropped on arrival


@dataclass(frozen=True)
class _Unopened:
    """What stands for a message that could not be opened."""

    error: Exception


class Mailbox:
    """Send and receive tagged messages over one link; a thread reads and files what comes.

    On the wire: u8 length of the tag, tag, body. A failure of the link wakes every waiter at once; what was
    filed before can still be had. Messages that nobody gets stay in memory.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._filed: defaultdict[bytes, deque[Any]] = defaultdict(deque)
        self._handlers: dict[bytes, Handler] = {FILLER: lambda tag, body: None}
        self._openers: dict[bytes, Opener] = {}
        self._claimed: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._handling = threading.RLock()  # held while a message is filed or handled: they keep their order
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"mailbox of {self.peer}", daemon=True)
        self._thread.start()

    @property
    def peer(self) -> str:
        return self._link.peer

    @property
    def error(self) -> Exception | None:
        """Why nothing more is to be had, or None."""
        return self._error

    def send(self, tag: bytes, body: Data, label: str = "control") -> Future[None]:
        """Send ``body`` to the peer's waiter or handler for ``tag`` (1 to 255 bytes); never blocks.

        A large ``body`` is not copied: it stays as it is until the send is done.
        """
        require(0 < len(tag) <= MAX_TAG, InputError, f"a tag has 1 to {MAX_TAG} bytes, not {len(tag)}")
        message = Parts(bytes((len(tag),)) + tag, body)
        return self._link.send(message if len(body) > SMALL else bytes(message), label)

    def get(self, tag: bytes, timeout: float, what: str) -> bytes:
        """Return the next message with this tag, waiting ``timeout`` seconds at most.

        ``what`` is for the ``LinkError`` of a deadline: "waited 60 s for WHAT from rank 1 (127.0.0.1:4567)".
        """
        found = self.look(tag, timeout)
        require(found is not None, LinkError, f"waited {timeout:g} s for {what} from {self.peer}")
        return found

    def look(self, tag: bytes, timeout: float = 0.0) -> Any:
        """Return the next message with this tag, or None where none comes within ``timeout`` seconds.

        That is its body, or what an opener made of it; what that raised is raised here.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._filed.get(tag) or self._error is not None, timeout)
            found = self._take(tag) if self._filed.get(tag) else None
            if found is None and self._error is not None:
                raise renewed(self._error)
        if isinstance(found, _Unopened):
            raise found.error
        return found

    def on(self, prefix: bytes, handler: Handler) -> None:
        """Call ``handler(tag, body)`` on the reader thread for tags with this prefix, the longest that fits.

        Messages that came before are handled first, on the caller's thread, before this returns. A handler
        that raises fails the mailbox, on either thread.
        """
        with self._handling:  # what comes meanwhile waits for its turn
            with self._changed:
                waiting = [(t, self._filed.pop(t)) for t in list(self._filed) if t.startswith(prefix)]
                self._handlers[prefix] = handler
            try:
                for tag, body in ((t, body) for t, bodies in waiting for body in bodies):
                    self._handle(handler, tag, body)
            except LinkError as e:
                self.fail(e)

    def opens(self, prefix: bytes, opener: Opener | None) -> None:
        """File what ``opener(body)`` returns in place of each message with this prefix, from now on.

        So it is opened on the reader thread, while whoever waits for it still has something else to do. What
        has come before stays as it is. None: messages are filed as they come.
        """
        with self._handling:
            if opener is None:
                self._openers.pop(prefix, None)
            else:
                self._openers[prefix] = opener

    def claim(self, name: str) -> str:
        """Return ``name`` for tags of one's own, numbered where it was claimed before, by both ends alike."""
        with self._changed:
            number = self._claimed[name]
            self._claimed[name] += 1
        return f"{name}#{number}" if number else name

    def forget(self, prefix: bytes) -> None:
        """Drop the handlers and openers of tags with this prefix, and what was filed under it."""
        with self._handling, self._changed:
            for tags in (self._handlers, self._openers, self._filed):
                for tag in [tag for tag in tags if tag.startswith(prefix)]:
                    del tags[tag]

    def close(self, timeout: float = 5.0) -> None:
        """Flush and close the link; waiters get a ``LinkError``. Safe to call twice."""
        self._link.close(timeout)
        self.fail(LinkError(f"this end closed the link to {self.peer}"))
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def fail(self, error: Exception) -> None:
        """Wake every waiter with ``error``, the first that came: what they wait for is not going to come.

        The link stays, so that what this end said before still gets there.
        """
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _take(self, tag: bytes) -> Any:
        filed = self._filed[tag]
        body = filed.popleft()
        if not filed:
            del self._filed[tag]  # tags are often used once
        return body

    def _run(self) -> None:
        try:
            while self._error is None:
                self._receive(self._link.recv().result())
                more = self._link.more()
                while more:
                    self._receive(more.popleft())
        except Exception as e:  # any: a reader that dies in silence leaves its waiters to their deadlines
            self.fail(e)

    def _receive(self, message: Message) -> None:
        with self._handling:
            if self._error is None:  # by ``on``, meanwhile
                self._file(message)

    def _file(self, message: Message) -> None:
        first, *rest = buffers_of(message)
        size = 1 + first[0] if first else 0
        if not 1 < size <= len(first):
            raise PayloadError(f"a message from {self.peer} has no tag")
        tag = bytes(first[1:size])
        body = joined([memoryview(first)[size:], *rest] if len(first) > size else rest)
        handler = _longest(self._handlers, tag)
        if handler is not None:
            self._handle(handler, tag, body)
            return
        opener = _longest(self._openers, tag)
        found = body if opener is None else _opened(opener, body)
        with self._changed:
            self._filed[tag].append(found)
            self._changed.notify_all()

    def _handle(self, handler: Handler, tag: bytes, body: bytes) -> None:
        try:
            handler(tag, body)
        except Exception as e:
            raise LinkError(f"the handler of {tag!r} from {self.peer} failed: {e}") from e


def _longest(known: Mapping[bytes, T], tag: bytes) -> T | None:
    fitting = [p for p in known if tag.startswith(p)]
    return known[max(fitting, key=len)] if fitting else None


def _opened(opener: Opener, body: bytes) -> object:
    try:
        return opener(body)
    except Exception as e:  # any: it is whose who awaits the message
        return _Unopened(e)
