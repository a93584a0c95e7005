"""A hook that tells somebody of each call of a model before it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

from thinwire.uses.pictures.diffusers_names.tested_version import Hook, imported


class Listener(Protocol):
    """Who is told."""

    def call(self, stream: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call of the stream that ``cache_context`` names."""
        ...

    def reset(self) -> None:
        """Take the next call as the first of a picture."""
        ...


Given = dict[str, Any]


class ToldCalls(Hook):
    """Tell ``listener`` of each call; the state manager is how diffusers tells the stream's name.

    ``reduced``: returns of a call's arguments the named ones that all ranks make it with.
    """

    _is_stateful = True

    def __init__(
        self, listener: Listener, reduced: Callable[[tuple[Any, ...], Mapping[str, Any]], Given] | None = None
    ) -> None:
        hooks = imported("hooks.hooks")
        self._listener, self._reduced = listener, reduced
        self._state = hooks.StateManager(hooks.BaseState)

    def reset_state(self, module: nn.Module) -> nn.Module:
        self._listener.reset()
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        context = self._state._context
        kwargs = self._reduced(args, kwargs) if self._reduced else kwargs
        self._listener.call(context.name if context else None, args, kwargs)
        return args, kwargs
