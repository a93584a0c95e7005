"""Hooks of diffusers: they cut the inputs of modules, join outputs, and see the calls of a model.

As tested with version 0.42.1; ``host.check_host`` compares what they rely on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.context_parallel.host_plan import Never, modules_of
from thinwire.uses.pictures.context_parallel.seam import NO_GRADIENTS, Given, Passes, Session

_NAME = "thinwire {}"
_CACHES = (  # what the names of hooks begin with that skip layers, or look at tokens beside their own
    "faster_cache",
    "fbc_",
    "mag_cache",
    "pyramid_attention",
    "sea_cache",
    "smoothed_energy",
    "taylorseer",
    "text_kv_cache",
)


def imported(name: str) -> Any:
    """Return a module of diffusers."""
    return import_module(f"diffusers.{name}")


def hooked(module: nn.Module, hook: Hook, name: str) -> Callable[[], None]:
    """Hang a hook on a module; return what takes it off again, and the registry if it is then empty."""
    own = vars(module).keys() & {"_diffusers_hook", "forward"}
    registry = imported("hooks.hooks").HookRegistry.check_if_exists_or_initialize(module)
    again = f"{type(module).__name__} is parallel already; leave that first"
    require(_NAME.format(name) not in registry.hooks, InputError, again)
    registry.register_hook(hook, _NAME.format(name))
    registry.invalidate_child_registries_cache()

    def remove() -> None:
        registry.remove_hook(_NAME.format(name), recurse=False)
        registry.invalidate_child_registries_cache()
        if not registry.hooks:
            for left in {"_diffusers_hook", "forward"} - own:
                vars(module).pop(left, None)

    return remove


class Hook:
    """A ``ModelHook``, not derived from it so that this module can be read without diffusers."""

    _is_stateful = False
    fn_ref: Any = None

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        return module

    deinitalize_hook = detach_hook = reset_state = initialize_hook

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output


class SplitHook(Hook):
    """Cut the inputs that are named, and the outputs that are numbered, to this rank's share."""

    def __init__(self, session: Session, entries: Mapping[str | int, Any]) -> None:
        self._session, self._entries = session, entries

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        names, given = list(inspect.signature(type(module).forward).parameters)[1:], list(args)
        for name, entry in self._entries.items():
            if name in kwargs:
                kwargs[name] = self._cut(name, kwargs[name], entry)
            elif name in names[: len(given)]:
                place = names.index(name)
                given[place] = self._cut(name, given[place], entry)
        return tuple(given), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        entries = {i: entry for i, entry in self._entries.items() if isinstance(i, int)}
        if not entries:
            return output
        parts = [output] if isinstance(output, Tensor) else list(output)
        for i, entry in entries.items():
            parts[i] = self._cut(f"output {i}", parts[i], entry)
        return parts[0] if isinstance(output, Tensor) else tuple(parts)

    def _cut(self, name: object, x: Any, entry: Any) -> Any:
        """Return this rank's share of an input, or of all in a list of them."""
        if isinstance(entry, Never):
            text = f"{name} does not go with several ranks: {entry.cause}; leave it out, or use mode batch"
            require(not x, InputError, text)
            return x
        if isinstance(x, list | tuple):
            entries = entry if isinstance(entry, list | tuple) else [entry] * len(x)
            return tuple(self._cut(name, *pair) for pair in zip(x, entries, strict=True))
        if not isinstance(x, Tensor) or entry.expected_dims not in (None, x.dim()):
            return x  # as diffusers does: a time for all tokens alike is not split
        return self._session.cut(str(name), x, entry.split_dim, getattr(entry, "of", ()))


class JoinHook(Hook):
    """Put the outputs of all ranks together."""

    def __init__(self, session: Session, entries: Any) -> None:
        self._session = session
        self._entries = list(entries) if isinstance(entries, list | tuple) else [entries]

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        parts = [output] if isinstance(output, Tensor) else list(output)
        pairs = zip(parts, self._entries, strict=True)
        parts = [x if e is None else self._session.join(x, e.gather_dim) for x, e in pairs]
        return parts[0] if isinstance(output, Tensor) else tuple(parts)


class Calls(Hook):
    """See each call of the model; the state manager is how diffusers tells the stream's name."""

    _is_stateful = True

    def __init__(self, session: Session | Passes, model: nn.Module) -> None:
        hooks = imported("hooks.hooks")
        self._session, self._state = session, hooks.StateManager(hooks.BaseState)
        self._signature = inspect.signature(type(model).forward)

    def reset_state(self, module: nn.Module) -> nn.Module:
        self._session.reset()
        return module

    def _given(self, module: nn.Module, *args: Any, **kwargs: Any) -> Given:
        context = self._state._context
        inputs = self._signature.bind_partial(module, *args, **kwargs).arguments
        inputs.pop("self")
        return Given(context.name if context else None, inputs, lambda: self._check(module))

    def _check(self, module: nn.Module) -> None:
        """Raise ``InputError`` for what no rank can compute."""
        require(not torch.is_grad_enabled(), InputError, NO_GRADIENTS)
        text = "caches that skip layers do not go with several ranks; call disable_cache() first"
        require(not getattr(module, "is_cache_enabled", False), InputError, text)
        registry: Any = module._diffusers_hook
        names = {name for each in (registry, *registry._get_child_registries()) for name in each.hooks}
        found = min((name for name in names if name.startswith(_CACHES)), default="")
        text = (
            f"the hook {found!r} uses what other steps or tokens have left, which does not go with several "
        )
        require(not found, InputError, f"{text}ranks; take it off first (remove_hook)")


class Instead(Calls):
    """Let the session decide whether the model computes."""

    _session: Passes

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward, given = self.fn_ref.original_forward, self._given(module, *args, **kwargs)
        try:
            return self._session.run(given, lambda: forward(*args, **kwargs))
        except BaseException as e:
            self._session.fail(e)
            raise


class Root(Calls):
    """Begin and end a call of a model whose tokens are divided."""

    _session: Session

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        heard: set[str],
        own: Callable[[Any], bool],
        whole: Collection[nn.Module],
        places: Mapping[str, list[nn.Module]],
    ) -> None:
        super().__init__(session, model)
        self._heard, self._own, self._places = heard, own, places
        parts = ((n, m) for n, m in model.named_modules() if m not in whole)
        self._layers = [(n, m) for n, m in parts if getattr(m, "processor", None) is not None]

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._heard.clear()
        given = self._given(module, *args, **kwargs)
        try:
            self._session.begin(given)
            output = self.fn_ref.original_forward(*args, **kwargs)
            deaf = {type(layer.processor).__name__ for _, layer in self._layers} - self._heard
            text = (
                f"{min(deaf, default='')} has exchanged nothing, so the picture would be wrong; use mode one"
            )
            require(not deaf, InputError, text)
        except BaseException as e:
            self._session.fail(e)
            raise
        self._session.end()
        return output

    def _check(self, module: nn.Module) -> None:
        super()._check(module)
        for path, parts in self._places.items():
            text = f"{path} was replaced while the model was parallel, as adapters do; load them before"
            require(modules_of(module, path) == parts, InputError, text)
        for name, layer in self._layers:
            text = f"the processor of {name} was replaced while the model was parallel; replace it before"
            require(self._own(layer.processor), InputError, text)
