"""Publish from a transformers Trainer: a callback that publishes every so many optimiser steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

from thinwire.types import InputError, MissingExtra, ThinwireError, require
from thinwire.uses.following.shards.local_shards import check_shaped, is_sharded
from thinwire.uses.following.shards.shard_publisher import ShardPublisher

if TYPE_CHECKING:
    from transformers import TrainerCallback


TIMEOUT = 60.0  # seconds
SHARDED = (
    "the model is sharded over processes: give a callable that makes a ShardPublisher of it to each, as in "
    "publish_callback(lambda: thinwire.ShardPublisher(model, ...))"
)


@runtime_checkable
class Publishes(Protocol):
    """A ``Publisher`` or a ``ShelfWriter``: what has tensors of its own and publishes them."""

    def flush(self, timeout: float = ...) -> None: ...

    @property
    def publish(self) -> Callable[..., object]:
        """It takes the step, and ``loss`` by name."""
        ...


class Closes(Publishes, Protocol):
    """The same, as it has to be where it is made for a training: that closes it, too."""

    def close(self) -> None: ...


Makes = Callable[[], Closes]


def publish_callback(
    publisher: Publishes | Makes | None, every: int = 1, timeout: float = TIMEOUT
) -> TrainerCallback:
    """Return a callback that publishes after each ``every`` optimiser steps, and what training ends with.

    ``publisher`` is a ``Publisher`` or a ``ShelfWriter``, which you close yourself, or a callable without
    arguments that makes one. The callable is for several processes: it is called on the main process when
    training begins. What it made is closed when training ends; if training fails, call the callback's
    ``close``. Only the main process publishes, so the others may also give None.

    A model that is sharded (FSDP2) is published by all processes: give a callable that makes a
    ``ShardPublisher`` to each, and it is called on all of them.

    Each version carries the last logged loss as ``loss``. After training, followers or the store have
    ``timeout`` seconds to take the last version. A warning names one that does not.

    Errors: ``InputError`` for ``every`` below 1; ``MissingExtra`` without transformers. These end the
    training: an error of ``publish``; at the beginning, a model that is sharded in a way that
    ``ShardPublisher`` refuses, or without one; a main process without a publisher, or a publisher of another
    model's parameters.

    Use: ``Trainer(..., callbacks=[publish_callback(lambda: Publisher(model, ...), every=4)])``.
    """
    require(every >= 1, InputError, f"every={every} steps is below 1; publish after each step at most")
    try:
        from transformers import TrainerCallback
    except ImportError as e:
        raise MissingExtra("a Trainer callback needs transformers: pip install 'thinwire[lm]'") from e
    training = _Training(publisher, timeout)

    class PublishCallback(TrainerCallback):
        """Made here, so that its base is imported only where it is used."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs.get("model")
            training.sharded = _is_sharded(args, model)
            if training.publishes(state):
                training.begin(model)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if training.publishes(state) and state.global_step % every == 0:
                training.publish(state)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if training.publishes(state):
                training.publish(state)  # the best model may have been loaded since the last step
                training.end()

        def close(self) -> None:
            """Close what was made for a training that failed. Safe to call at any time."""
            training.close()

    return PublishCallback()


class _Training:
    """The main process's publisher: the caller's, or one that is made for each training and closed after.

    A ``sharded`` model has one on each process.
    """

    def __init__(self, given: Publishes | Makes | None, timeout: float) -> None:
        self._timeout, self.sharded = timeout, False
        self._given: Publishes | None = None
        self._make: Makes | None = None
        self._made: Closes | None = None
        if isinstance(given, Publishes) and not isinstance(given, type):  # a class makes one
            self._given = given
        elif given is not None:
            told = f"publisher is a {type(given).__name__}; give a Publisher, a ShelfWriter or what makes one"
            require(callable(given), InputError, told)
            self._make = given

    @property
    def publisher(self) -> Publishes:
        found = self._made or self._given
        if found is None:
            raise InputError("the main process has no publisher; give it one, or a callable that makes one")
        return found

    def publishes(self, state: Any) -> bool:
        """Return whether this process does."""
        return self.sharded or bool(state.is_world_process_zero)

    def begin(self, model: Any) -> None:
        self.close()  # that of a training which failed has the address still
        self._made = None if self._make is None else self._make()
        try:
            if self.sharded:
                require(isinstance(self._made or self._given, ShardPublisher), InputError, SHARDED)
            _check_own(self.publisher, model)
        except InputError:
            self.close()
            raise

    def publish(self, state: Any) -> None:
        try:
            self.publisher.publish(state.global_step, **_loss(state.log_history))
        except BaseException:  # it ends the training, and nobody is told of its end then
            with suppress(ThinwireError, OSError):
                self.close()
            raise

    def end(self) -> None:
        """Let the last version arrive, and stop; the training was fine whether or not that works."""
        try:
            self.publisher.flush(self._timeout)
        except ThinwireError as e:
            warnings.warn(f"the last version has not reached everybody: {e}", stacklevel=2)
        try:
            self.close()
        except (ThinwireError, OSError) as e:
            warnings.warn(f"the publisher has not closed well: {e}", stacklevel=2)

    def close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made.close()


def _loss(history: list[dict[str, Any]]) -> dict[str, float]:
    """Return the last loss that was logged, where that is a finite number: it must not end the training."""
    found = next((entry["loss"] for entry in reversed(history) if "loss" in entry), None)
    try:
        value = math.nan if found is None else float(found)  # numpy's and torch's scalars are numbers, too
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    return {"loss": value} if math.isfinite(value) else {}


def _check_own(publisher: Publishes, model: Any) -> None:
    """Raise ``InputError`` where what is published is a module that the training leaves as it is.

    Wrappers and adapters share some parameters with what they wrap, so one that is shared will do.
    """
    source = getattr(publisher, "source", None)
    if not (isinstance(source, nn.Module) and isinstance(model, nn.Module)):
        return
    own, trained = list(source.parameters()), list(model.parameters())
    known = {id(x) for x in trained}
    if not own or not trained or any(id(x) in known for x in own):
        return
    places = {x.data_ptr() for x in trained} - {0}  # some wrappers make parameters anew of the same memory
    require(
        any(x.data_ptr() in places for x in own),
        InputError,
        f"the publisher's {type(source).__name__} shares no parameter with the {type(model).__name__} that "
        "is trained; publish trainer.model as training begins, or a mapping where other tensors are meant",
    )


def _is_sharded(args: Any, model: Any) -> bool:
    """Return whether each process has a part of the model only.

    The main process alone would wait for the others' parts for ever. Errors: ``InputError`` where the parts
    are no shards that can be published.
    """
    if isinstance(model, nn.Module):
        check_shaped(model)
        if is_sharded(model):
            return True
    fsdp = bool(getattr(args, "fsdp", None)) and getattr(args, "world_size", 1) > 1
    told = "the model is sharded over processes, and not by fully_shard (FSDP2); use version 2 of FSDP"
    require(not fsdp, InputError, told)
    return False
