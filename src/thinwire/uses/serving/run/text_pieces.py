"""Tokens to text as they come: whole characters, up to a stop word that may just have begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"  # what stands for the beginning of a character


class TextPieces:
    """Turn the tokens of one answer into text, piece by piece; ``stops``: words that end it.

    ``tokenizer``: of transformers. ``stopped``: whether a stop word came; nothing follows then.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        self._tokens: list[int] = []
        self._before = self._read = (
            0  # tokens that are decoded for what stands around, and those that are text
        )
        self._held = ""  # may be the beginning of a stop word
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """Return what can be shown now that these tokens follow."""
        self._tokens += tokens
        known = self._decoded(self._before, self._read)
        found = self._decoded(self._before, len(self._tokens))
        if len(found) <= len(known) or found.endswith(BROKEN):
            return ""
        self._before, self._read = self._read, len(self._tokens)
        return self._shown(found[len(known) :])

    def end(self) -> str:
        """Return what is left at the end of the answer."""
        if self.stopped:
            return ""
        known = self._decoded(self._before, self._read)
        rest = self._decoded(self._before, len(self._tokens))[len(known) :]
        shown = self._shown(rest)
        held, self._held = self._held, ""
        return shown if self.stopped else shown + held

    def _decoded(self, start: int, stop: int) -> str:
        found: str = self._tokenizer.decode(self._tokens[start:stop], skip_special_tokens=True)
        return found

    def _shown(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        most = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - most :]
        return text[: len(text) - most]


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning of a stop word.

    >>> _begun("to the e", "end"), _begun("to", "end")
    (1, 0)
    """
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
