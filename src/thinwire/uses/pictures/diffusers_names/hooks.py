"""Hooks on a model of diffusers, and on its attention: they call a session of ours.

A model's ``_cp_plan`` says which inputs of which modules are split and which outputs are joined. Hooks of
ours do both. The ``_parallel_config`` of an attention processor holds an ``AttentionLayer``, which diffusers
hands to the attention back end. Every back end is wrapped so that it first lets the layer fetch the keys and
values of all ranks, and then goes on as on one device. So every back end serves. Of a processor without
that field, what it asks of torch is handed to its layer (``sdpa_layers``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.diffusers_names.interfaces import (
    NO_GRADIENTS,
    Attention,
    Given,
    ShardedForward,
    Stock,
    WholeForward,
)
from thinwire.uses.pictures.diffusers_names.keys_beside import BESIDE, SHARES, apart
from thinwire.uses.pictures.diffusers_names.plans import (
    Never,
    SplitPlan,
    Whole,
    modules_of,
    plan_of,
    whole_of,
)
from thinwire.uses.pictures.diffusers_names.sdpa_layers import PICTURE, SdpaHook
from thinwire.uses.pictures.diffusers_names.tested_version import (
    ATTENTION_DISPATCH,
    PARALLEL_CONFIG,
    Hook,
    check_host,
    imported,
)


@contextmanager
def attached(model: nn.Module, session: ShardedForward, plan: SplitPlan | None = None) -> Iterator[None]:
    """Let ``model`` call ``session`` inside the block, and leave it as it was.

    Errors: ``InputError``, one sentence, for a model without a plan, with processors that ignore it, or
    taken apart already; ``MissingExtra`` without diffusers.
    """
    check_host()
    plan, heard, session = plan_of(model, plan), set[str](), uncompiled(session)
    _whole(model)
    with ExitStack() as undo:
        whole = whole_of(model, plan)
        undo.enter_context(_listening(model, session, heard, whole))
        standing = HookedModules(model, session, plan, whole)
        for path, parts in standing.places.items():
            for part in parts:
                undo.callback(hooked(part, hook_of(session, plan[path]), path))
        undo.callback(hooked(model, Root(session, model, heard, standing), "calls"))
        yield


@contextmanager
def listening(model: nn.Module, session: ShardedForward, whole: Collection[nn.Module] = ()) -> Iterator[None]:
    """Let ``session`` attend for the layers of ``model``, but for ``whole`` ones, inside the block."""
    with _listening(model, session, set(), whole):
        yield


@contextmanager
def _listening(
    model: nn.Module, session: ShardedForward, heard: set[str], whole: Collection[nn.Module] = ()
) -> Iterator[None]:
    with ExitStack() as undo:
        undo.enter_context(_BACKENDS)
        for name, (module, processor) in _processors_of(model, whole).items():
            layer = AttentionLayer(name, session, type(processor).__name__, heard)
            if hasattr(processor, PARALLEL_CONFIG):
                undo.callback(_restored(processor))
                setattr(processor, PARALLEL_CONFIG, layer)
                if layer.prompted:
                    undo.callback(hooked(module, BeginHook(layer), "image prompts"))
            else:
                undo.callback(hooked(module, SdpaHook(layer, processor), "attention"))
        yield


@contextmanager
def intercepted(model: nn.Module, passes: WholeForward) -> Iterator[None]:
    """Let ``passes`` stand in for the calls of ``model`` inside the block, and leave it as it was.

    Errors: as ``attached``, but any model serves.
    """
    check_host()
    undo = hooked(model, Instead(passes, model), "calls")
    try:
        yield
    finally:
        undo()


_NAMES = tuple(name for name in vars(ShardedForward) if not name.startswith("_"))


def uncompiled(session: object, names: Sequence[str] = _NAMES) -> Any:
    """Return a session that ``torch.compile`` does not look into: nothing in it can be compiled."""
    return SimpleNamespace(**{name: torch.compiler.disable(getattr(session, name)) for name in names})


def _whole(model: nn.Module) -> None:
    again = f"{type(model).__name__} is parallel already; leave that first"
    require(getattr(model, PARALLEL_CONFIG, None) is None, InputError, again)


def _processors_of(model: nn.Module, whole: Collection[nn.Module]) -> dict[str, tuple[nn.Module, Any]]:
    """Return layers and their attention processors by name; of those with a configuration, each once."""
    found: dict[str, tuple[nn.Module, Any]] = {}
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None or module in whole:
            continue
        taken = f"{type(model).__name__} is parallel already; leave that first"
        require(getattr(processor, PARALLEL_CONFIG, None) is None, InputError, taken)
        if not hasattr(processor, PARALLEL_CONFIG) or all(processor is not p for _, p in found.values()):
            found[name] = module, processor
    require(bool(found), InputError, f"{type(model).__name__} has no attention processors; use mode one")
    return found


class HookedModules:
    """The modules of a model that hooks hang on, and its layers of attention: none may be replaced."""

    def __init__(
        self, model: nn.Module, session: ShardedForward, plan: SplitPlan, whole: Collection[nn.Module]
    ) -> None:
        self._session = session
        self.places = {path: modules_of(model, path) for path, e in plan.items() if not isinstance(e, Whole)}
        parts = ((n, m) for n, m in model.named_modules() if m not in whole)
        self.layers = [(n, m) for n, m in parts if getattr(m, "processor", None) is not None]

    def check(self, model: nn.Module) -> None:
        """Raise ``InputError`` for one that was replaced since."""
        for path, parts in self.places.items():
            text = f"{path} was replaced while the model was parallel, as adapters do; load them before"
            require(modules_of(model, path) == parts, InputError, text)
        for name, layer in self.layers:
            text = f"the processor of {name} was replaced while the model was parallel; replace it before"
            require(self._hears(layer), InputError, text)

    def _hears(self, module: Any) -> bool:
        layer = getattr(module.processor, PARALLEL_CONFIG, None)
        registry = getattr(module, "_diffusers_hook", None)
        hook = registry and registry.get_hook(_NAME.format("attention"))
        if hook and hook.processor is module.processor:
            layer = hook.layer
        return isinstance(layer, AttentionLayer) and layer.session is self._session


def _restored(processor: Any) -> Callable[[], None]:
    own = vars(processor).get(PARALLEL_CONFIG, ...)

    def restore() -> None:
        if own is ...:
            vars(processor).pop(PARALLEL_CONFIG, None)
        else:
            setattr(processor, PARALLEL_CONFIG, own)

    return restore


_WHOLE_KEYS, _NATIVE = "IPAdapterAttnProcessor", "_native_attention"


@dataclass(frozen=True)
class AttentionLayer:
    """What stands in a processor in place of diffusers' own parallel configuration."""

    name: str
    session: ShardedForward
    kind: str  # of the processor
    heard: set[str]  # the kinds that have exchanged something in this pass
    asked: list[bool] = field(default_factory=list)  # in this call of its module, if it is prompted

    @property
    def prompted(self) -> bool:
        """Whether all its attentions but the first are to image prompts, which every rank has."""
        return self.kind.endswith(_WHOLE_KEYS)

    @torch.compiler.disable  # else each block is compiled anew, for its name
    def attend(self, stock: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """Call a back end, ``stock``, with what is other in its arguments on the whole sequence."""
        given = dict(given)
        picture = given.pop(PICTURE, 0)
        if self.kind in SHARES:
            stock, given = apart(stock, given, self.kind, picture)
        text = f"{self.name} attends causally, which its shares cannot; use mode one"
        require(not given.get("is_causal"), InputError, text)
        self.heard.add(self.kind)

        def on(whole: Attention) -> Any:
            own = {"query": whole.query, "key": whole.key, "value": whole.value, PARALLEL_CONFIG: None}
            return stock(**{**given, **own, **({} if whole.mask is None else {"attn_mask": whole.mask})})

        own = Attention(given["query"], given["key"], given["value"], given.get("attn_mask"))
        if self.prompted:
            self.asked.append(True)
            if len(self.asked) > 1:
                return on(own)
        plain = stock.__name__ == _NATIVE and not given.get("dropout_p")
        beside = stock.__name__ == BESIDE
        return self.session.attend(self.name, own, Stock(on, plain, given.get("scale"), beside))


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
        registry = imported(ATTENTION_DISPATCH)._AttentionBackendRegistry
        for name, stock in list(registry._backends.items()):
            self._undo.callback(registry._backends.__setitem__, name, stock)
            registry._backends[name] = _wrapped(stock)


_BACKENDS = _Backends()


def _wrapped(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def attention(*args: Any, **given: Any) -> Any:
        layer = given.get(PARALLEL_CONFIG)
        if isinstance(layer, AttentionLayer):
            return layer.attend(stock, given)
        return stock(*args, **given)

    return attention


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


def hooked(module: nn.Module, hook: Hook, name: str) -> Callable[[], None]:
    """Hang a hook on a module; return what takes it off again, and the registry if it is then empty."""
    own = vars(module).keys() & {"_diffusers_hook", "forward"}
    registry = imported("hooks.hooks").HookRegistry.check_if_exists_or_initialize(module)
    again = f"{type(module).__name__} is parallel already; leave that first"
    require(_NAME.format(name) not in registry.hooks, InputError, again)
    with _beneath_accelerate(module):
        registry.register_hook(hook, _NAME.format(name))
    registry.invalidate_child_registries_cache()

    def remove() -> None:
        with _beneath_accelerate(module):
            registry.remove_hook(_NAME.format(name), recurse=False)
        registry.invalidate_child_registries_cache()
        if not registry.hooks:
            kept = own | {"forward"} if _offloaded(module) else own
            for left in {"_diffusers_hook", "forward"} - kept:
                vars(module).pop(left, None)

    return remove


@contextmanager
def _beneath_accelerate(module: nn.Module) -> Iterator[None]:
    """Let the block change the forward that accelerate's hook calls.

    ``enable_model_cpu_offload`` replaces accelerate's hooks after each picture, and all that was around them.
    """
    if not _offloaded(module):
        yield
        return
    names = vars(module)
    outer, names["forward"] = names["forward"], names["_old_forward"]
    try:
        yield
    finally:
        names["_old_forward"], names["forward"] = names["forward"], outer


def _offloaded(module: nn.Module) -> bool:
    """Say whether a module's forward is accelerate's, which calls the one that was there before."""
    made = getattr(vars(module).get("forward"), "func", None)
    return "_old_forward" in vars(module) and getattr(made, "__module__", "").startswith("accelerate.")


class SplitHook(Hook):
    """Cut the inputs that are named, and the outputs that are numbered, to this rank's share."""

    def __init__(self, session: ShardedForward, entries: Mapping[str | int, Any]) -> None:
        self._session, self._entries = session, entries
        self._names: list[str] = []

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        kind = getattr(module, "kind", type(module))  # of a block that is not here: what it stands for
        parameters = inspect.signature(kind.forward).parameters
        self._names, more = list(parameters)[1:], any(p.kind == p.VAR_KEYWORD for p in parameters.values())
        unknown = [n for n in self._entries if isinstance(n, str) and n not in self._names and not more]
        text = f"a plan splits {', '.join(unknown)} of {kind.__name__}, which does not take it"
        require(not unknown, InputError, text)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        given = list(args)
        for name, entry in self._entries.items():
            if name in kwargs:
                kwargs[name] = self._cut(name, kwargs[name], entry)
            elif name in self._names[: len(given)]:
                place = self._names.index(name)
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
            require(x is None or not entry.when(x), InputError, text)
            return x
        if isinstance(x, Mapping):
            return {key: self._cut(name, part, entry) for key, part in x.items()}
        if isinstance(x, list | tuple):
            entries = entry if isinstance(entry, list | tuple) else [entry] * len(x)
            cut = [self._cut(name, *pair) for pair in zip(x, entries, strict=True)]
            return cut if isinstance(x, list) else tuple(cut)
        if not isinstance(x, Tensor) or entry is None or entry.expected_dims not in (None, x.dim()):
            return x  # as diffusers does: a time for all tokens alike is not split
        called = getattr(entry, "name", "") or str(name)
        return self._session.cut(called, x, entry.split_dim, getattr(entry, "of", ()))


class BeginHook(Hook):
    """Tell a layer that a call of its module begins."""

    def __init__(self, layer: AttentionLayer) -> None:
        self.layer = layer

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        self.layer.asked.clear()
        return args, kwargs


class JoinHook(Hook):
    """Put the outputs of all ranks together."""

    def __init__(self, session: ShardedForward, entries: Any) -> None:
        self._session = session
        self._entries = list(entries) if isinstance(entries, list | tuple) else [entries]

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        parts = [output] if isinstance(output, Tensor) else list(output)
        pairs = zip(parts, self._entries, strict=True)
        parts = [x if e is None or x is None else self._session.join(x, e.gather_dim) for x, e in pairs]
        return parts[0] if isinstance(output, Tensor) else tuple(parts)


def hook_of(session: ShardedForward, entries: Any) -> Hook:
    """Return what does as a plan says of a module."""
    return (SplitHook if isinstance(entries, Mapping) else JoinHook)(session, entries)


class Calls(Hook):
    """See each call of the model; the state manager is how diffusers tells the stream's name."""

    _is_stateful = True

    def __init__(self, session: ShardedForward | WholeForward, model: nn.Module) -> None:
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
        return Given(context.name if context else None, inputs, lambda: self._check(module, inputs))

    def _check(self, module: nn.Module, inputs: Mapping[str, Any]) -> None:
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

    _session: WholeForward

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward, given = self.fn_ref.original_forward, self._given(module, *args, **kwargs)

        def compute(changed: Mapping[str, Any] | None = None) -> Any:
            if changed:
                return forward(**_own_each({**given.inputs, **changed}))
            return forward(*map(_own, args), **_own_each(kwargs))

        try:
            return self._session.run(given, compute)
        except BaseException as e:
            self._session.fail(e)
            raise


def _own(x: Any) -> Any:
    """Return an input that the model may write to: some take what they have read out of a dictionary."""
    return dict(x) if isinstance(x, dict) else x


def _own_each(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _own(x) for name, x in kwargs.items()}


class Root(Calls):
    """Begin and end a call of a model whose tokens are divided."""

    _session: ShardedForward

    def __init__(
        self, session: ShardedForward, model: nn.Module, heard: set[str], standing: HookedModules
    ) -> None:
        super().__init__(session, model)
        self._heard, self._standing = heard, standing

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._heard.clear()
        given = self._given(module, *args, **kwargs)
        try:
            self._session.begin(given)
            output = self.fn_ref.original_forward(*args, **kwargs)
            deaf = {type(layer.processor).__name__ for _, layer in self._standing.layers} - self._heard
            text = (
                f"{min(deaf, default='')} has exchanged nothing, so the picture would be wrong; use mode one"
            )
            require(not deaf, InputError, text)
            self._session.end()
        except BaseException as e:
            self._session.fail(e)
            raise
        return output

    def _check(self, module: nn.Module, inputs: Mapping[str, Any]) -> None:
        super()._check(module, inputs)
        self._standing.check(module)
