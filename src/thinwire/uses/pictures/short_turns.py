"""How long one thread may keep the interpreter from the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from torch import nn

TURN = 5e-4  # seconds; Python's own are ten times as long, and each message takes several
_lock, _before = Lock(), list[float]()  # what was set before, once for each block


@contextmanager
def short_turns(model: nn.Module) -> Iterator[None]:
    """Let the threads of the links have the interpreter soon inside the block, if a card computes ``model``.

    The thread that computes only tells the card what to do, and may be told to wait; a message may not.
    """
    if not any(p.device.type == "cuda" for p in model.parameters()):
        yield
        return
    with _lock:
        _before.append(sys.getswitchinterval())
        sys.setswitchinterval(min(TURN, _before[0]))
    try:
        yield
    finally:
        with _lock:
            first = _before[0]
            _before.pop()
            if not _before:
                sys.setswitchinterval(first)
