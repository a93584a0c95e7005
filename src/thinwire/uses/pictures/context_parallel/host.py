"""The seam: all that is asked of diffusers beyond its public names, as tested with version 0.42.1.

A model's ``_cp_plan`` says which inputs of which modules are split and which outputs are joined. Hooks of
ours do both. The ``_parallel_config`` of an attention processor holds a ``Layer``, which diffusers hands
to the attention back end; every back end is wrapped so that it first lets the layer fetch the keys and values
of all ranks, and then goes on as on one device. So every back end serves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from thinwire.types import InputError, MissingExtra, require
from thinwire.uses.pictures.context_parallel.host_hooks import (
    Hook,
    Instead,
    JoinHook,
    Root,
    SplitHook,
    hooked,
    imported,
)
from thinwire.uses.pictures.context_parallel.host_plan import Plan, Whole, modules_of, plan_of, whole_of
from thinwire.uses.pictures.context_parallel.seam import Attention, Passes, Session, Stock

TESTED = "0.42"
_CONFIG = "_parallel_config"
_WHOLE_KEYS = "IPAdapterAttnProcessor"
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
        if self.kind.endswith(_WHOLE_KEYS) and own.key.shape[1] != own.query.shape[1]:
            return on(own)  # of the image prompt, which every rank has
        plain = stock.__name__ == _NATIVE and not given.get("dropout_p")
        return self.session.attend(self.name, own, Stock(on, plain, given.get("scale")))


@contextmanager
def attached(model: nn.Module, session: Session, plan: Plan | None = None) -> Iterator[None]:
    """Let ``model`` call ``session`` inside the block, and leave it as it was.

    Errors: ``InputError``, one sentence, for a model without a plan, with processors that ignore the seam, or
    taken apart already; ``MissingExtra`` without diffusers.
    """
    check_host()
    plan, heard, session = plan_of(model, plan), set[str](), _uncompiled(session)
    _whole(model)
    with ExitStack() as undo:
        whole = whole_of(model, plan)
        undo.enter_context(_listening(model, session, heard, whole))
        places = {path: modules_of(model, path) for path, e in plan.items() if not isinstance(e, Whole)}
        for path, parts in places.items():
            entries = plan[path]
            for part in parts:
                kind = SplitHook if isinstance(entries, Mapping) else JoinHook
                undo.callback(hooked(part, kind(session, entries), path))
        undo.callback(hooked(model, Root(session, model, heard, _is_of(session), whole, places), "calls"))
        yield


@contextmanager
def listening(model: nn.Module, session: Session) -> Iterator[None]:
    """Let ``session`` attend for the layers of ``model`` inside the block, and leave it as it was."""
    with _listening(model, _uncompiled(session), set()):
        yield


@contextmanager
def _listening(
    model: nn.Module, session: Session, heard: set[str], whole: Collection[nn.Module] = ()
) -> Iterator[None]:
    with ExitStack() as undo:
        undo.enter_context(_BACKENDS)
        for name, processor in _processors_of(model, whole).items():
            undo.callback(_restored(processor))
            setattr(processor, _CONFIG, Layer(name, session, type(processor).__name__, heard))
        yield


@contextmanager
def intercepted(model: nn.Module, passes: Passes) -> Iterator[None]:
    """Let ``passes`` stand in for the calls of ``model`` inside the block, and leave it as it was.

    Errors: as ``attached``, but any model serves.
    """
    check_host()
    undo = hooked(model, Instead(passes, model), "calls")
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
    hooks, plans, dispatch = map(imported, ("hooks.hooks", "models._modeling_parallel", _DISPATCH))
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
    yield from (f"ModelHook.{n}" for n in sorted(known) if not hasattr(Hook, n))
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
        "_get_child_registries",
    ),
    "StateManager": ("set_context",),
    "BaseState": ("reset",),
    "CacheContext": ("__dataclass_fields__",),
}


def _whole(model: nn.Module) -> None:
    again = f"{type(model).__name__} is parallel already; leave that first"
    require(getattr(model, _CONFIG, None) is None, InputError, again)


def _processors_of(model: nn.Module, whole: Collection[nn.Module]) -> dict[str, Any]:
    """Return the attention processors, each once, by the name of the first layer that has it."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None or module in whole:
            continue
        text = f"the processor of {name}, {type(processor).__name__}, ignores parallelism; use mode one"
        require(hasattr(processor, _CONFIG), InputError, text)
        taken = f"{type(model).__name__} is parallel already; leave that first"
        require(getattr(processor, _CONFIG) is None, InputError, taken)
        if all(processor is not other for other in found.values()):
            found[name] = processor
    require(bool(found), InputError, f"{type(model).__name__} has no attention processors; use mode one")
    return found


def _is_of(session: Session) -> Callable[[Any], bool]:
    def holds(processor: Any) -> bool:
        layer = getattr(processor, _CONFIG, None)
        return isinstance(layer, Layer) and layer.session is session

    return holds


def _restored(processor: Any) -> Callable[[], None]:
    own = vars(processor).get(_CONFIG, ...)

    def restore() -> None:
        if own is ...:
            vars(processor).pop(_CONFIG, None)
        else:
            setattr(processor, _CONFIG, own)

    return restore


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
        registry = imported(_DISPATCH)._AttentionBackendRegistry
        for name, stock in list(registry._backends.items()):
            self._undo.callback(registry._backends.__setitem__, name, stock)
            registry._backends[name] = _wrapped(stock)


_BACKENDS = _Backends()


def _wrapped(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def attention(*args: Any, **given: Any) -> Any:
        layer = given.get(_CONFIG)
        if isinstance(layer, Layer):
            return layer.attend(stock, given)
        return stock(*args, **given)

    return attention
