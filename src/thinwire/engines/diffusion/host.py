"""The seam: all that is asked of diffusers beyond its public names, as tested with version 0.42.1.

A model's ``_cp_plan`` says which inputs of which modules are split and which outputs are joined. Hooks of
ours do both. The ``_parallel_config`` of an attention processor holds a ``Layer``, which diffusers hands
to the attention back end; every back end is wrapped so that it first lets the layer fetch the keys and values
of all ranks, and then goes on as on one device. So every back end serves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.engines.diffusion.seam import Attention, Passes, Session, Stock
from thinwire.types import InputError, MissingExtra, require

TESTED = "0.42"
_CONFIG = "_parallel_config"
_HOOK = "thinwire {}"
_DISPATCH, _NATIVE = "models.attention_dispatch", "_native_attention"


@dataclass(frozen=True)
class Layer:
    """What stands in a processor in place of diffusers' own parallel configuration."""

    name: str
    session: Session
    kind: str  # of the processor
    heard: set[str]  # the kinds that have exchanged something in this pass

    def attend(self, stock: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """Call a back end, ``stock``, with what is other in its arguments on the whole sequence."""
        text = f"{self.name} attends causally, which its shares cannot; use mode one"
        require(not given.get("is_causal"), InputError, text)
        self.heard.add(self.kind)

        def on(whole: Attention) -> Any:
            own = {"query": whole.query, "key": whole.key, "value": whole.value, _CONFIG: None}
            return stock(**{**given, **own, **({} if whole.mask is None else {"attn_mask": whole.mask})})

        own = Attention(given["query"], given["key"], given["value"], given.get("attn_mask"))
        plain = stock.__name__ == _NATIVE and not given.get("dropout_p")
        return self.session.attend(self.name, own, Stock(on, plain, given.get("scale")))


@contextmanager
def attached(model: nn.Module, session: Session) -> Iterator[None]:
    """Let ``model`` call ``session`` inside the block, and leave it as it was.

    Errors: ``InputError``, one sentence, for a model without a plan, with processors that ignore the seam, or
    taken apart already; ``MissingExtra`` without diffusers.
    """
    check_host()
    plan, heard, session = _plan_of(model), set[str](), _uncompiled(session)
    with ExitStack() as undo:
        undo.enter_context(_listening(model, session, heard))
        for path, entries in plan.items():
            for module in _modules(model, path):
                kind = _Split if isinstance(entries, dict) else _Join
                undo.callback(_hooked(module, kind(session, entries), path))
        undo.callback(_hooked(model, _Root(session, model, heard), "calls"))
        yield


@contextmanager
def listening(model: nn.Module, session: Session) -> Iterator[None]:
    """Let ``session`` attend for the layers of ``model`` inside the block, and leave it as it was."""
    with _listening(model, _uncompiled(session), set()):
        yield


@contextmanager
def _listening(model: nn.Module, session: Session, heard: set[str]) -> Iterator[None]:
    with ExitStack() as undo:
        undo.enter_context(_BACKENDS)
        for name, processor in _processors_of(model).items():
            undo.callback(_restored(processor))
            setattr(processor, _CONFIG, Layer(name, session, type(processor).__name__, heard))
        yield


@contextmanager
def intercepted(model: nn.Module, passes: Passes) -> Iterator[None]:
    """Let ``passes`` stand in for the calls of ``model`` inside the block, and leave it as it was.

    Errors: as ``attached``, but any model serves.
    """
    check_host()
    undo = _hooked(model, _Instead(passes, model), "calls")
    try:
        yield
    finally:
        undo()


def _uncompiled(session: Session) -> Any:
    """Return a session that ``torch.compile`` does not look into: nothing in it can be compiled."""
    names = [name for name in vars(Session) if not name.startswith("_") and hasattr(session, name)]
    return SimpleNamespace(**{name: torch.compiler.disable(getattr(session, name)) for name in names})


def version() -> str:
    """Return the version of diffusers. Errors: ``MissingExtra``."""
    try:
        import diffusers
    except ImportError as e:
        raise MissingExtra("diffusion needs diffusers: pip install 'thinwire[diffusion]'") from e
    return str(diffusers.__version__)


def _module(name: str) -> Any:
    return import_module(f"diffusers.{name}")


def check_host() -> None:
    """Raise ``InputError`` unless diffusers has all that this file relies on."""
    found = version()
    text = f"diffusers {found} is not {TESTED}; pip install 'thinwire[diffusion]' brings one that is"
    require(found.startswith(f"{TESTED}."), InputError, text)
    try:
        lacks = ", ".join(_lacking())
    except (ImportError, AttributeError) as e:  # a module or class that is gone
        lacks = str(e)
    require(not lacks, InputError, f"diffusers {found} has changed: {lacks} is not as expected; pin 0.42.1")


def _lacking() -> Iterator[str]:
    hooks, plans, dispatch = map(_module, ("hooks.hooks", "models._modeling_parallel", _DISPATCH))
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    names = getattr(registry, "_supported_arg_names", None) or {"no back end": ()}
    yield from (f"_AttentionBackendRegistry ({name})" for name in names if _CONFIG not in names[name])
    if getattr(registry, "_backends", {}).keys() != names.keys():
        yield "_AttentionBackendRegistry._backends"
    if "parallel_config" not in inspect.signature(dispatch.dispatch_attention_fn).parameters:
        yield "dispatch_attention_fn"
    for own, methods in _HOOKS.items():
        yield from (f"{own}.{m}" for m in methods if not hasattr(getattr(hooks, own, None), m))
    known = {n for n in vars(hooks.ModelHook) if not n.startswith("__")}
    yield from (f"ModelHook.{n}" for n in sorted(known) if not hasattr(_Hook, n))
    for name, fields in _PLANS.items():
        if set(getattr(getattr(plans, name, None), "__dataclass_fields__", ())) != fields:
            yield name


_PLANS = {
    "ContextParallelInput": {"split_dim", "expected_dims", "split_output"},
    "ContextParallelOutput": {"gather_dim", "expected_dims"},
}
_HOOKS = {
    "HookRegistry": (
        "check_if_exists_or_initialize",
        "register_hook",
        "remove_hook",
        "invalidate_child_registries_cache",
    ),
    "StateManager": ("set_context",),
    "BaseState": ("reset",),
    "CacheContext": ("__dataclass_fields__",),
}


def _plan_of(model: nn.Module) -> Mapping[str, Any]:
    kind, plan = type(model).__name__, getattr(model, "_cp_plan", None)
    text = f"{kind} has no plan for how to split it (_cp_plan); give a transformer of diffusers that has one"
    require(isinstance(model, nn.Module) and isinstance(plan, Mapping), InputError, text)
    again = f"{kind} is parallel already; leave that first"
    require(getattr(model, _CONFIG, None) is None, InputError, again)
    return plan  # type: ignore[return-value]  # require has checked it


def _processors_of(model: nn.Module) -> dict[str, Any]:
    """Return the attention processors, each once, by the name of the first layer that has it."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None:
            continue
        text = f"the processor of {name}, {type(processor).__name__}, ignores parallelism; use mode one"
        require(hasattr(processor, _CONFIG), InputError, text)
        taken = f"{type(model).__name__} is parallel already; leave that first"
        require(getattr(processor, _CONFIG) is None, InputError, taken)
        if all(processor is not other for other in found.values()):
            found[name] = processor
    require(bool(found), InputError, f"{type(model).__name__} has no attention processors; use mode one")
    return found


def _restored(processor: Any) -> Callable[[], None]:
    own = vars(processor).get(_CONFIG, ...)

    def restore() -> None:
        if own is ...:
            vars(processor).pop(_CONFIG, None)
        else:
            setattr(processor, _CONFIG, own)

    return restore


def _modules(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules that a path of a plan names; a star stands for each of a list."""
    found = [model]
    for atom in filter(None, path.split(".")):
        found = [m for one in found for m in (one.children() if atom == "*" else [one.get_submodule(atom)])]
    return found


class _Backends:
    """The wrapped back ends of the process; entered once for each model, and taken off with the last."""

    def __init__(self) -> None:
        self._lock, self._users = Lock(), 0
        self._undo = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._wrap()
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._undo.close()

    def _wrap(self) -> None:
        registry = _module(_DISPATCH)._AttentionBackendRegistry
        for name, stock in list(registry._backends.items()):
            self._undo.callback(registry._backends.__setitem__, name, stock)
            registry._backends[name] = _whole(stock)


_BACKENDS = _Backends()


def _whole(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def attention(*args: Any, **given: Any) -> Any:
        layer = given.get(_CONFIG)
        if isinstance(layer, Layer):
            return layer.attend(stock, given)
        return stock(*args, **given)

    return attention


def _hooked(module: nn.Module, hook: _Hook, name: str) -> Callable[[], None]:
    """Hang a hook on a module; return what takes it off again, and the registry if it is then empty."""
    own = vars(module).keys() & {"_diffusers_hook", "forward"}
    registry = _module("hooks.hooks").HookRegistry.check_if_exists_or_initialize(module)
    again = f"{type(module).__name__} is parallel already; leave that first"
    require(_HOOK.format(name) not in registry.hooks, InputError, again)
    registry.register_hook(hook, _HOOK.format(name))
    registry.invalidate_child_registries_cache()

    def remove() -> None:
        registry.remove_hook(_HOOK.format(name), recurse=False)
        registry.invalidate_child_registries_cache()
        if not registry.hooks:
            for left in {"_diffusers_hook", "forward"} - own:
                vars(module).pop(left, None)

    return remove


class _Hook:
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


class _Split(_Hook):
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
        parts = [output] if isinstance(output, Tensor) else list(output)
        for i, entry in self._entries.items():
            if isinstance(i, int):
                parts[i] = self._cut(f"output {i}", parts[i], entry)
        return parts[0] if isinstance(output, Tensor) else tuple(parts)

    def _cut(self, name: object, x: Any, entry: Any) -> Any:
        if isinstance(x, list | tuple):
            return tuple(self._cut(name, *pair) for pair in zip(x, entry, strict=True))
        if not isinstance(x, Tensor) or entry.expected_dims not in (None, x.dim()):
            return x  # as diffusers does: a time for all tokens alike is not split
        return self._session.cut(str(name), x, entry.split_dim)


class _Join(_Hook):
    """Put the outputs of all ranks together."""

    def __init__(self, session: Session, entries: Any) -> None:
        self._session = session
        self._entries = list(entries) if isinstance(entries, list | tuple) else [entries]

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        parts = [output] if isinstance(output, Tensor) else list(output)
        pairs = zip(parts, self._entries, strict=True)
        parts = [x if e is None else self._session.join(x, e.gather_dim) for x, e in pairs]
        return parts[0] if isinstance(output, Tensor) else tuple(parts)


class _Calls(_Hook):
    """See each call of the model; the state manager is how diffusers tells the stream's name."""

    _is_stateful = True

    def __init__(self, session: Session | Passes, model: nn.Module) -> None:
        hooks = _module("hooks.hooks")
        self._session, self._state = session, hooks.StateManager(hooks.BaseState)
        self._signature = inspect.signature(type(model).forward)

    def reset_state(self, module: nn.Module) -> nn.Module:
        self._session.reset()
        return module

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any]]:
        cached = "caches that skip layers do not go with several ranks; call disable_cache() first"
        require(not getattr(module, "is_cache_enabled", False), InputError, cached)
        context = self._state._context
        inputs = self._signature.bind_partial(module, *args, **kwargs).arguments
        return context.name if context else None, {k: v for k, v in inputs.items() if k != "self"}


class _Instead(_Calls):
    """Let the session decide whether the model computes."""

    _session: Passes

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = self.fn_ref.original_forward
        return self._session.run(*self._call(module, *args, **kwargs), lambda: forward(*args, **kwargs))


class _Root(_Calls):
    """Begin and end a call of a model whose tokens are divided."""

    _session: Session

    def __init__(self, session: Session, model: nn.Module, heard: set[str]) -> None:
        super().__init__(session, model)
        self._heard = heard
        self._layers = [(n, m) for n, m in model.named_modules() if getattr(m, "processor", None) is not None]

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        self._check()
        self._heard.clear()
        self._session.begin(*self._call(module, *args, **kwargs))
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        deaf = {type(module.processor).__name__ for _, module in self._layers} - self._heard
        text = f"{min(deaf, default='')} has exchanged nothing, so the picture would be wrong; use mode one"
        require(not deaf, InputError, text)
        self._session.end()
        return output

    def _check(self) -> None:
        for name, module in self._layers:
            layer = getattr(module.processor, _CONFIG, None)
            text = f"the processor of {name} was replaced while the model was parallel; replace it before"
            require(isinstance(layer, Layer) and layer.session is self._session, InputError, text)
