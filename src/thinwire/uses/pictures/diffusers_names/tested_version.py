"""All that is asked of diffusers beyond its public names, as tested with one version, and a check of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from torch import nn

from thinwire.types import InputError, MissingExtra, require

TESTED = "0.42"


def version() -> str:
    """Return the version of diffusers. Errors: ``MissingExtra``."""
    try:
        import diffusers
    except ImportError as e:
        raise MissingExtra("diffusion needs diffusers: pip install 'thinwire[diffusion]'") from e
    return str(diffusers.__version__)


def imported(name: str) -> Any:
    """Return a module of diffusers."""
    return import_module(f"diffusers.{name}")


PARALLEL_CONFIG = "_parallel_config"
ATTENTION_DISPATCH = "models.attention_dispatch"


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
    hooks, plans, dispatch = map(imported, ("hooks.hooks", "models._modeling_parallel", ATTENTION_DISPATCH))
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    names = getattr(registry, "_supported_arg_names", None) or {"no back end": ()}
    yield from (f"_AttentionBackendRegistry ({name})" for name in names if PARALLEL_CONFIG not in names[name])
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


HIDREAM = "diffusers.models.transformers.transformer_hidream_image", "MOEFeedForwardSwiGLU"
NUCLEUS = "diffusers.models.transformers.transformer_nucleusmoe_image", "NucleusMoELayer"
NUCLEUS_PACKED = NUCLEUS[0], "SwiGLUExperts"


def class_of(name: tuple[str, str]) -> Any:
    """Return a class by its module and its name."""
    return getattr(import_module(name[0]), name[1])


def check_experts() -> None:
    """Raise ``InputError`` unless diffusers' layers are as this file relies on."""
    check_host()
    lacks = ", ".join(_lacking_experts())
    text = f"diffusers {version()} has changed: {lacks} is not as in {TESTED}; pin 0.42.1"
    require(not lacks, InputError, text)


def _lacking_experts() -> Iterator[str]:
    for (owner, method), parameters in _METHODS.items():
        try:
            found = list(inspect.signature(getattr(class_of(owner), method)).parameters)
        except (ImportError, AttributeError):
            found = []
        if found != parameters:
            yield f"{owner[1]}.{method}"
        elif (method == "forward" and owner in _CALLS) or method == "moe_infer":
            text = inspect.getsource(class_of(owner).forward)
            if not all(call in text for call in _CALLS[owner]):
                yield f"{owner[1]}.forward"


# What each method must take, and which attributes of the layer it or this file reads.
_METHODS: dict[tuple[tuple[str, str], str], list[str]] = {
    (HIDREAM, "moe_infer"): ["self", "x", "flat_expert_indices", "flat_expert_weights"],
    (NUCLEUS, "forward"): ["self", "hidden_states", "hidden_states_unmodulated", "timestep"],
    (NUCLEUS_PACKED, "forward"): ["self", "x", "num_tokens_per_expert"],
    (NUCLEUS_PACKED, "_run_experts_for_loop"): ["self", "x", "num_tokens_per_expert"],
}
_CALLS: dict[tuple[str, str], tuple[str, ...]] = {
    HIDREAM: ("self.moe_infer(x, flat_topk_idx, topk_weight.view(-1, 1))",),
    NUCLEUS: (
        "self.experts(routed_input, num_tokens_per_expert)",
        "max(1, math.ceil(self.capacity_factor * slen / self.num_experts))",
        "torch.topk(affinity, k=capacity, dim=-1)",
    ),
}
