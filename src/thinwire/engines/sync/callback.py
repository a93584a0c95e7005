"""Publish from a transformers Trainer: a callback that publishes every so many optimiser steps."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from thinwire.types import InputError, MissingExtra, ThinwireError, require

if TYPE_CHECKING:
    from transformers import TrainerCallback


TIMEOUT = 60.0  # seconds


class Publishes(Protocol):
    """A ``Publisher`` or a ``ShelfWriter``: what has tensors of its own and publishes them."""

    def flush(self, timeout: float = ...) -> None: ...

    def publish(self, step: int | None = None, **meta: str | int | float) -> object: ...


def publish_callback(publisher: Publishes, every: int = 1, timeout: float = TIMEOUT) -> TrainerCallback:
    """Return a callback that publishes after each ``every`` optimiser steps, and what training ends with.

    Only the main process publishes. The last loss that was logged goes with each version as ``loss``. After
    training followers, or the store, get ``timeout`` seconds to take the last version; who does not is named
    in a warning. The publisher is the caller's to close. Errors: ``InputError`` for ``every`` below 1,
    ``MissingExtra`` without transformers; what ``publish`` raises ends the training, and so does a model that
    is sharded over processes, at its beginning.

    Use: ``Trainer(..., callbacks=[publish_callback(publisher, every=4)])``.
    """
    require(every >= 1, InputError, f"every={every} steps is below 1; publish after each step at most")
    try:
        from transformers import TrainerCallback
    except ImportError as e:
        raise MissingExtra("a Trainer callback needs transformers: pip install 'thinwire[lm]'") from e

    class PublishCallback(TrainerCallback):
        """Made here, so that its base is imported only where it is used."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _check_whole(args, kwargs.get("model"))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % every == 0:
                self._publish(state)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._publish(state)  # the best model may have been loaded since the last step
            if state.is_world_process_zero:
                _flush(publisher, timeout)

        def _publish(self, state: Any) -> None:
            if state.is_world_process_zero:
                publisher.publish(state.global_step, **_loss(state.log_history))

    return PublishCallback()


def _flush(publisher: Publishes, timeout: float) -> None:
    """Let the last version arrive; the training was fine whether or not it does."""
    try:
        publisher.flush(timeout)
    except ThinwireError as e:
        warnings.warn(f"the last version has not reached everybody: {e}", stacklevel=2)


def _loss(history: list[dict[str, Any]]) -> dict[str, float]:
    """Return the last loss that was logged, where that is a finite number: it must not end the training."""
    found = next((entry["loss"] for entry in reversed(history) if "loss" in entry), None)
    try:
        value = math.nan if found is None else float(found)  # numpy's and torch's scalars are numbers, too
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    return {"loss": value} if math.isfinite(value) else {}


def _check_whole(args: Any, model: Any) -> None:
    """Raise ``InputError`` on every process where each has a part of the model only.

    The main process alone would wait for the others' parts for ever.
    """
    fsdp = bool(getattr(args, "fsdp", None)) and getattr(args, "world_size", 1) > 1
    if fsdp or (isinstance(model, nn.Module) and _is_sharded(model)):
        raise InputError(
            "the model is sharded over processes (FSDP, ZeRO-3 or DTensor), and this callback publishes from "
            "one; gather its tensors on all of them, and publish those from one"
        )


def _is_sharded(model: nn.Module) -> bool:
    wrapped = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())
    parts = (hasattr(x, "ds_id") or type(x.data).__name__ == "DTensor" for x in model.parameters())
    return wrapped or any(parts)
