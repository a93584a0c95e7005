"""Texts that have ended stay in their rows while nobody needs these: a prompt that begins like one is copied.

Whoever chats sends the whole conversation again each time. The first stage knows the tokens in all rows; the
others copy as it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.uses.serving.row_pool import NO_COPY, RowAllocator, RowCopy, TextRows

LEAST = 16  # tokens: fewer are computed along with the next ones
Tokens = npt.NDArray[np.int64]


class HeldText(NamedTuple):
    """Tokens whose keys and values are in these rows."""

    rows: TextRows
    tokens: Sequence[int] | Tokens


class Granted(NamedTuple):
    """Rows for a request, and which of them are copied from where."""

    rows: TextRows
    copy: RowCopy


class KeptTexts:
    """Give rows of a cache of ``many`` to requests, and keep what ends in them until rows are short.

    ``reuse``: whether anything is kept.

    >>> kept = KeptTexts(100)
    >>> rows, _ = kept.take(range(20), 40)
    >>> kept.leave(HeldText(rows, range(30)))
    >>> kept.take([*range(25), 99], 50)
    Granted(rows=TextRows(first=30, many=50), copy=RowCopy(first=0, many=25))
    """

    def __init__(self, many: int, reuse: bool = True) -> None:
        self._rows, self._reuse = RowAllocator(many), reuse
        self._left: list[HeldText] = []  # the one that was used longest ago first

    @property
    def many(self) -> int:
        """Rows in all."""
        return self._rows.many

    def check(self, many: int) -> None:
        """Raise ``InputError`` for a text of so many tokens, if it never fits."""
        self._rows.check(many)

    def take(self, prompt: Sequence[int], many: int, running: Iterable[HeldText] = ()) -> Granted | None:
        """Return ``many`` rows for a prompt, or None while there are not so many in one piece.

        ``running``: texts that are not at their end. The last token of a prompt is always left to be
        computed: what follows it is asked.
        """
        held = [*self._left, *running]
        while (rows := self._rows.take(many)) is None:
            if not self._left:
                return None
            self._rows.give_back(self._left.pop(0).rows)
        return Granted(rows, self._copied(prompt, held))

    def known(self, prompt: Sequence[int], running: Iterable[HeldText] = ()) -> int:
        """Return how many tokens of a prompt are in rows now."""
        return self._copied(prompt, [*self._left, *running]).many

    def _copied(self, prompt: Sequence[int], held: Sequence[HeldText]) -> RowCopy:
        """Return where most of a prompt is already: what was given away just now is still there."""
        own = np.asarray(prompt, np.int64)[:-1]
        if not self._reuse or not held:
            return NO_COPY
        shared = [_shared(own, text.tokens) for text in held]
        best = int(np.argmax(shared))
        if shared[best] < LEAST:
            return NO_COPY
        used = held[best]
        if any(text is used for text in self._left):
            self._left = [*(text for text in self._left if text is not used), used]
        return RowCopy(used.rows.first, shared[best])

    def leave(self, text: HeldText) -> None:
        """Take the rows of a text that has ended, and keep those that its tokens are in."""
        n, tokens = len(text.tokens), np.asarray(text.tokens, np.int64)
        known = any(_shared(tokens, other.tokens) == n for other in self._left)
        if not self._reuse or n < LEAST or known:
            self._rows.give_back(text.rows)
            return
        for other in [o for o in self._left if _shared(tokens, o.tokens) == len(o.tokens)]:
            self._rows.give_back(other.rows)
            self._left = [o for o in self._left if o is not other]
        self._left.append(HeldText(self._rows.shortened(text.rows, n), tokens))

    def forget(self) -> None:
        """Keep nothing of what has ended: where a stage begins anew, its rows are empty."""
        for text in self._left:
            self._rows.give_back(text.rows)
        self._left = []


def _shared(one: Tokens, other: Sequence[int] | Tokens) -> int:
    """Return how many tokens both begin with."""
    n = min(len(one), len(other))
    apart = np.flatnonzero(one[:n] != np.asarray(other, np.int64)[:n])
    return int(apart[0]) if len(apart) else n
