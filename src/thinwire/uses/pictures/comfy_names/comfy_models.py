"""Whether a model of ComfyUI is as it was when it was written how to cut it, and what its calls may have."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.comfy_names.comfy_families import FAMILIES, OPTIONS, ComfyFamily
from thinwire.uses.pictures.diffusers_names.pipe_plans import PIPES
from thinwire.uses.pictures.diffusers_names.plans import PLANS, modules_of

COMFY = "comfy"  # how a host calls whose classes these are
READ = "56bf4365"  # the commit
_CHANGES = ("patches", "patches_replace", "optimized_attention_override")  # of the model, by other nodes


def known_family(model: nn.Module) -> ComfyFamily:
    """Return the family of a model of ComfyUI, once all that is asked of it is there.

    Its plans are known to ``parallel`` from then on. Errors: ``InputError``, one sentence.
    """
    kind = type(model).__name__
    found = FAMILIES.get(kind)
    text = f"ComfyUI's {kind} cannot be cut yet; choose a model of {' or '.join(FAMILIES)}"
    require(found is not None, InputError, text)
    family: ComfyFamily = found  # type: ignore[assignment]  # require has checked it
    for path, names in family.takes.items():
        text = f"ComfyUI has changed: {kind} has no {path}, as it had at {READ}; take one of about then"
        try:
            module = modules_of(model, path)[0]
        except InputError as e:
            raise InputError(text) from e
        taken = inspect.signature(type(module).forward).parameters
        lacks = [name for name in names if name not in taken]
        text = f"ComfyUI has changed: {path} of {kind} takes no {', '.join(lacks)}, as it did at {READ}"
        require(not lacks, InputError, f"{text}; take one of about then")
    PLANS.setdefault(type(model), lambda model, _: family.split)  # diffusers has some of the same names
    PIPES.setdefault(type(model), family.pipe)
    return family


def loaded_family(model: nn.Module) -> ComfyFamily:
    """Return the family of a model that is about to run. Errors: ``InputError``; its weights must be its own.

    Where memory is low, ComfyUI adds a LoRA to weights only as it computes, so that they look unchanged.
    """
    functions = [f"{of}{kind}" for of in ("weight", "bias") for kind in ("_function", "_lowvram_function")]
    changed = [name for name, part in model.named_modules() if any(getattr(part, f, None) for f in functions)]
    text = f"ComfyUI changes {''.join(changed[:1])} of this model as it computes, as it does for a LoRA where"
    advice = (
        "memory is low, and workers do not have that; save the merged model and load that on all machines"
    )
    require(not changed, InputError, f"{text} {advice}")
    return known_family(model)


def sendable(
    model: nn.Module, family: ComfyFamily, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the named arguments of a call without what workers cannot have and do not need.

    Errors: ``InputError`` for what would make another picture there, such as another node's patch.
    """
    given = inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
    given |= kwargs
    for name, what in family.never.items():
        text = f"{what} ({name}) does not go with several machines yet; leave it out of the workflow"
        require(given.get(name) is None, InputError, text)
    time = given.get("timestep")
    many = isinstance(time, Tensor) and time.dim() > 1 and time[0].numel() > 1
    text = "this model gives each frame a time of its own, which does not go with several machines yet"
    require(not many, InputError, f"{text}; take another model")
    options = dict(kwargs.get(OPTIONS) or {})
    wrappers = options.pop("wrappers", None) or {}
    others = [name for name in _CHANGES if options.pop(name, None)]
    others += ["wrappers"] if wrappers.get("diffusion_model") else []
    text = f"another node changes the model ({', '.join(others)} in {OPTIONS}), which workers do not have"
    require(not others, InputError, f"{text}; leave that node out")
    plain = {name: x for name, x in options.items() if isinstance(name, str) and _is_plain(x)}
    return {**kwargs, OPTIONS: plain}


def _is_plain(x: Any) -> bool:
    if isinstance(x, Mapping):
        return all(isinstance(key, str) and _is_plain(value) for key, value in x.items())
    if isinstance(x, list | tuple):
        return all(map(_is_plain, x))
    return x is None or isinstance(x, bool | int | float | str | Tensor)
