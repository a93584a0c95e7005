"""How models of ComfyUI are cut, and whether one is as it was when that was written.

Read in ComfyUI's ``comfy/ldm/wan/model.py`` of commit 56bf4365, ``comfy/ldm/modules/attention.py`` of
05080f60, ``comfy/samplers.py`` of 311c0140, and ``comfy/ldm/flux/model.py`` of that year. Run by hand with
ComfyUI 0.3.64 and 0.8.0; the tests have classes that are written after these files.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.diffusers_names.pipe_plans import PIPES, BlockList, PipePlan
from thinwire.uses.pictures.diffusers_names.plans import (
    PLANS,
    TOKENS,
    JoinOutput,
    SplitInput,
    SplitPlan,
    modules_of,
)

COMFY = "comfy"  # how a host calls whose classes these are
READ = "56bf4365"  # the commit
OPTIONS = "transformer_options"
_CHANGES = ("patches", "patches_replace", "optimized_attention_override")  # of the model, by other nodes


@dataclass(frozen=True)
class ComfyFamily:
    """A class of ComfyUI: how it is split, the modules whose attention is over the split tokens, and more.

    ``takes``: what modules must take, by path. ``never``: inputs that do not go with shares, and what they
    are; ``plain``: inputs of those modules that have attention which do not. ``pipe``: how its blocks are
    cut, where they can be.
    """

    split: SplitPlan
    attention: tuple[str, ...]
    takes: Mapping[str, tuple[str, ...]]
    never: Mapping[str, str]
    plain: tuple[str, ...] = ()
    pipe: PipePlan | None = None


_WAN: SplitPlan = {
    "blocks.*": {"freqs": SplitInput(1, 6)},
    "blocks.0": {"x": TOKENS},
    "head": JoinOutput(),
}
_JOINT = {"pe": SplitInput(2, 6, ("txt", "img"))}
FAMILIES: dict[str, ComfyFamily] = {
    "WanModel": ComfyFamily(
        _WAN,
        ("blocks.*.self_attn",),
        {"blocks.0": ("x", "freqs", OPTIONS), "blocks.0.self_attn": (OPTIONS,), "head": ("x",)},
        {},
        pipe=PipePlan((BlockList("blocks", "x"),), _WAN, frames=lambda model, inputs: inputs["x"].shape[2]),
    ),
    "Flux": ComfyFamily(
        {
            "double_blocks.*": _JOINT,  # after the tokens: of one module's hooks the last one begins
            "double_blocks.0": {"txt": TOKENS, "img": TOKENS},
            "single_blocks.*": _JOINT,
            "final_layer": JoinOutput(),
        },
        ("double_blocks.*", "single_blocks.*"),
        {"double_blocks.0": ("img", "txt", "pe", OPTIONS), "single_blocks.0": ("x", "pe", OPTIONS)},
        {"control": "a control network's", "attention_mask": "a mask"},
        ("attn_mask", "modulation_dims", "modulation_dims_img", "modulation_dims_txt"),
    ),
}


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
    PLANS.setdefault(kind, lambda model, _: family.split)
    if family.pipe is not None:
        PIPES.setdefault(kind, family.pipe)
    return family


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
