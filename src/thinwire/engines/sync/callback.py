"""Publish from a transformers Trainer: a callback that publishes every so many optimiser steps."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Protocol

from thinwire.types import InputError, MissingExtra, ThinwireError, require

if TYPE_CHECKING:
    from transformers import TrainerCallback


TIMEOUT = 60.0  # seconds


class Publishes(Protocol):
    """A ``Publisher`` or a ``ShelfWriter``: what has tensors of its own and publishes them."""

    def flush(self, timeout: float = ...) -> None: ...

    def publish(self, step: int | None = None, **meta: str | int | float) -> object: ...


def publish_callback(publisher: Publishes, every: int = 1, timeout: float = TIMEOUT) -> TrainerCallback:
    """Return a callback that publishes after each ``every`` optimiser steps, and after the last one.

    Only the main process publishes. The last loss that was logged goes with each version as ``loss``. After
    training followers, or the store, get ``timeout`` seconds to take the last version; who does not is named
    in a warning. The publisher is the caller's to close. Errors: ``InputError`` for ``every`` below 1,
    ``MissingExtra`` without transformers; what ``publish`` raises ends the training.

    Use: ``Trainer(..., callbacks=[publish_callback(publisher, every=4)])``.
    """
    require(every >= 1, InputError, f"every={every} steps is below 1; publish after each step at most")
    try:
        from transformers import TrainerCallback
    except ImportError as e:
        raise MissingExtra("a Trainer callback needs transformers: pip install 'thinwire[lm]'") from e

    class PublishCallback(TrainerCallback):
        """Made here, so that its base is imported only where it is used."""

        def __init__(self) -> None:
            self._published = -1

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % every == 0:
                self._publish(state)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._publish(state)
            if state.is_world_process_zero:
                _flush(publisher, timeout)

        def _publish(self, state: Any) -> None:
            if state.is_world_process_zero and state.global_step != self._published:
                self._published = state.global_step
                publisher.publish(state.global_step, **_loss(state.log_history))

    return PublishCallback()


def _flush(publisher: Publishes, timeout: float) -> None:
    """Let the last version arrive; the training was fine whether or not it does."""
    try:
        publisher.flush(timeout)
    except ThinwireError as e:
        warnings.warn(f"the last version has not reached everybody: {e}", stacklevel=2)


def _loss(history: list[dict[str, float]]) -> dict[str, float]:
    """Return the last loss that was logged."""
    found = next((entry["loss"] for entry in reversed(history) if "loss" in entry), None)
    return {} if found is None else {"loss": float(found)}
