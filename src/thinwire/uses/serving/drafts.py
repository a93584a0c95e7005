"""Who proposes tokens before the ring has been around: what the text said before, or a small model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from thinwire.uses.serving.token_picking import Picking

LONGEST, SHORTEST = 4, 2  # tokens of a phrase that is looked for


class Drafter(Protocol):
    """Proposes what may follow. One for all requests; a request is told by its number."""

    def draft(self, request: int, tokens: Sequence[int], many: int, picking: Picking) -> list[int]:
        """Return at most ``many`` tokens that may follow ``tokens``."""
        ...

    def forget(self, request: int) -> None:
        """Hear that a request is over."""
        ...


class PhraseDrafts:
    """Propose what followed the last time that the text had its last tokens: the longest phrase counts.

    Prompt lookup decoding (Saxena, 2023) [from memory]. It costs next to nothing, and is right where a text
    repeats itself or its prompt.

    >>> PhraseDrafts().draft(0, [5, 6, 7, 8, 9, 5, 6], 2, Picking())
    [7, 8]
    """

    def draft(self, request: int, tokens: Sequence[int], many: int, picking: Picking) -> list[int]:
        """Return what followed last time."""
        held = list(tokens)
        for size in range(min(LONGEST, len(held) - 1), SHORTEST - 1, -1):
            phrase = held[-size:]
            for at in range(len(held) - size - 1, -1, -1):
                if held[at] == phrase[0] and held[at : at + size] == phrase:
                    return held[at + size : at + size + many]
        return []

    def forget(self, request: int) -> None:
        """Have nothing to forget."""


class ModelDrafts:
    """Propose what a small causal model of the same tokens says, with the same noise where tokens are drawn.

    ``model``: of transformers, in evaluation mode. It keeps a cache a request.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._caches: dict[int, tuple[list[int], Any]] = {}  # the tokens whose keys and values are there

    def draft(self, request: int, tokens: Sequence[int], many: int, picking: Picking) -> list[int]:
        """Return what the model says follows."""
        from transformers import DynamicCache

        if many <= 0:
            return []
        known, cache = self._caches.get(request, ([], None))
        cache = DynamicCache(config=self._model.config) if cache is None else cache
        text = list(tokens)
        same = next(
            (i for i, (a, b) in enumerate(zip(known, text, strict=False)) if a != b),
            min(len(known), len(text)),
        )
        same = min(same, len(text) - 1)  # the last one is computed again where all is known
        if same < len(known):
            cache.crop(same - len(known))
        found, new = list[int](), text[same:]
        with torch.inference_mode():
            while len(found) < many:
                out = self._model(
                    input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                found.append(picking.pick(out.logits[0, -1], len(text) + len(found)))
                new = found[-1:]
        self._caches[request] = ([*text, *found[:-1]], cache)
        return found

    def forget(self, request: int) -> None:
        """Free the request's cache."""
        self._caches.pop(request, None)
