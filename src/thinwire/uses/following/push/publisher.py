"""Publish a state: the trainer's end. Followers connect to it, wherever they are."""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic, sleep

from thinwire.links.hub.hub import Hub
from thinwire.links.hub.station import SILENCE
from thinwire.links.tcp.congestion import AUTO
from thinwire.state.history import History
from thinwire.state.layout import Bounds, Dtypes, Layout
from thinwire.state.patch_code.patch_stream import check_coder
from thinwire.state.patches.patch import Version
from thinwire.types import Closing, InputError, LinkError, require
from thinwire.uses.following.published_tensors import Names, Source, notes_of, tensors_of
from thinwire.uses.following.push.feed import Feed, FollowerStatus, check_name
from thinwire.uses.following.state_names import check_text

TIMEOUT = 60.0  # seconds
POLL = 0.01  # seconds


class Publisher(Closing):
    """Make a module's or a mapping's tensors available to any number of followers, version after version.

    - ``host``, ``port``: the address to listen at; port 0 takes a free one. Off loopback a ``token`` is
      needed, and only its holders can follow.
    - ``name``: the name of the state.
    - ``dtype``: casts floats to the dtype that followers use, or the named tensors, each to its own.
    - ``bounds``: lets the named tensors, or all floats, be off by so much in their own units. The rounding to
      ``dtype`` comes on top, at most as much again.
    - ``strict``: refuses a version in which values are too large for ``dtype``, instead of a warning that
      names the tensor and how many they are.
    - ``names``: a function from a tensor's name to the name it is published by; None leaves the tensor out.
    - ``state``: a file to go on from if it exists. ``save`` and ``close`` write it. Followers that have the
      version in it need no keyframe.
    - ``budget``: bound on the log of changes in bytes (default: a quarter of the state). The log may take
      eight times as much for versions that followers have or are about to have.
    - ``silence``: seconds without a sign of a follower after which it counts as gone.
    - ``congestion``: TCP's congestion control, by name. ``auto`` is bbr where programs may choose it, because
      bbr keeps its rate after a pause; ``system`` is the machine's own.

    Errors: ``InputError`` for tensors that cannot be followed, an address that cannot be bound (perhaps
    another publisher listens there), one off loopback without a token, a ``state`` of other tensors, or a
    congestion control that this machine does not offer. ``MissingExtra`` without zstandard.

    At the end of a ``with`` block, unless by an error, it waits until all followers have the newest version.

    >>> import torch
    >>> publisher = Publisher({"w": torch.zeros(4)})
    >>> publisher.publish(step=10).number
    1
    >>> publisher.close()
    """

    def __init__(
        self,
        source: Source,
        host: str = "127.0.0.1",
        port: int = 0,
        token: bytes | None = None,
        name: str = "state",
        dtype: Dtypes = None,
        bounds: Bounds = None,
        *,
        names: Names | None = None,
        strict: bool = False,
        state: str | Path | None = None,
        budget: int | None = None,
        silence: float = SILENCE,
        congestion: str = AUTO,
    ) -> None:
        check_coder()
        self.source, self._names, self._state = source, names, None if state is None else Path(state)
        layout = Layout.of(tensors_of(source, names), dtype, bounds)
        self.history = _history(self._state, layout, budget)
        self.history.overflows.strict = strict
        check_text(name)
        check_name(name)
        hub = Hub.bind(host, port, token=token, silence=silence, control=congestion)
        self.host, self.port = hub.host, hub.port
        # what the history begins with may be older than what followers hold: it is a base, and no news
        self._feed = Feed(self.history, hub, name, later=True)
        self._closed = False

    def publish(
        self, step: int | None = None, tensors: Source | None = None, **meta: str | int | float
    ) -> Version:
        """Make the tensors as they are now the newest version, and return it without waiting for anybody.

        ``tensors``: published in place of those given at the start. The version carries ``step`` and
        ``meta``. Errors: ``InputError`` for tensors that no longer fit, and after ``close``; any error that
        ended the serving of followers.
        """
        require(not self._closed, InputError, "this publisher is closed: nobody would get the version")
        self._feed.check()
        found = tensors_of(self.source if tensors is None else tensors, self._names)
        version = self.history.publish(found, notes_of(step, meta))
        self._feed.wake()
        return version

    @property
    def newest(self) -> Version:
        """The newest version; its number is 0 before the first."""
        return self.history.newest

    @property
    def followers(self) -> list[FollowerStatus]:
        """The current followers, and the version of each."""
        return self._feed.followers

    @property
    def sent(self) -> int:
        """Wire bytes sent to all followers so far."""
        return self._feed.sent

    def check(self) -> None:
        """Raise the error that ended the serving of followers, if there was one."""
        self._feed.check()

    def flush(self, timeout: float = TIMEOUT) -> None:
        """Wait until all current followers have the newest version; ``LinkError`` names one that does not.

        A follower that has connected but not yet said which version it has does not count.
        """
        newest, end = self._feed.newest.number, monotonic() + timeout
        while behind := [f.name for f in self.followers if f.greeted and f.version < newest]:
            self._feed.check()
            if monotonic() > end:
                raise LinkError(f"waited {timeout:g} s for follower {behind[0]} to hold version {newest}")
            sleep(POLL)

    def save(self, path: str | Path | None = None) -> None:
        """Write the newest version to ``path``, or else to ``state``, for a publisher that starts again.

        Call it with each checkpoint of the training. Errors: ``InputError`` without a path or a version.
        """
        target = self._state if path is None else path
        if target is None:
            raise InputError("there is no place to save to; give a path, or state= from the start")
        self.history.save(target)

    def close(self, timeout: float = 0.0) -> None:
        """Stop, and save if there is a ``state``. Followers keep their copies, and dial until one is back.

        With a ``timeout``, followers have so many seconds to take the newest version; without one, patches in
        flight are lost. Safe to call twice. Errors: as ``flush`` and ``save``, after it has stopped.
        """
        closed, self._closed = self._closed, True
        try:
            if timeout > 0 and not closed:
                self.flush(timeout)
        finally:
            self._feed.close()
            if self._state is not None and self.newest.number and not closed:
                self.save()

    def _leave(self, error: BaseException | None) -> None:
        self.close(TIMEOUT if error is None else 0.0)


def _history(state: Path | None, layout: Layout, budget: int | None) -> History:
    """Return the history to go on from."""
    if state is None or not state.is_file():
        return History(layout, budget)
    found = History.load(state, budget, sys.maxsize)  # its own file, as large as it was saved
    if found.layout.digest != layout.digest:
        raise InputError(
            f"{state} holds a state of other names, shapes or dtypes; delete it, or give another file"
        )
    return found
