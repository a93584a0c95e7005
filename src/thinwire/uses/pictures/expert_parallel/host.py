"""The seam: all that is asked of diffusers' layers of experts beyond public names, as tested with 0.42.1.

HiDream's layer calls its method ``moe_infer`` with tokens, their experts and weights; each instance gets one
of ours. NucleusMoE's layer calls its experts with rows in their order; which tokens those are follows from
what its gate said, by the layer's own rule.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.context_parallel.host import TESTED, check_host, version
from thinwire.uses.pictures.context_parallel.host_plan import has_plan
from thinwire.uses.pictures.expert_parallel.seam import Layer, Session

_TOKENS = "diffusers.models.transformers.transformer_hidream_image", "MOEFeedForwardSwiGLU"
_EXPERTS = "diffusers.models.transformers.transformer_nucleusmoe_image", "NucleusMoELayer"
_PACKED = _EXPERTS[0], "SwiGLUExperts"
# What each method must take, and which attributes of the layer it or this file reads.
_METHODS: dict[tuple[tuple[str, str], str], list[str]] = {
    (_TOKENS, "moe_infer"): ["self", "x", "flat_expert_indices", "flat_expert_weights"],
    (_EXPERTS, "forward"): ["self", "hidden_states", "hidden_states_unmodulated", "timestep"],
    (_PACKED, "forward"): ["self", "x", "num_tokens_per_expert"],
    (_PACKED, "_run_experts_for_loop"): ["self", "x", "num_tokens_per_expert"],
}
_CALLS: dict[tuple[str, str], tuple[str, ...]] = {
    _TOKENS: ("self.moe_infer(x, flat_topk_idx, topk_weight.view(-1, 1))",),
    _EXPERTS: (
        "self.experts(routed_input, num_tokens_per_expert)",
        "max(1, math.ceil(self.capacity_factor * slen / self.num_experts))",
        "torch.topk(affinity, k=capacity, dim=-1)",
    ),
}


def _class(name: tuple[str, str]) -> Any:
    return getattr(import_module(name[0]), name[1])


def check_experts() -> None:
    """Raise ``InputError`` unless diffusers' layers are as this file relies on."""
    check_host()
    lacks = ", ".join(_lacking())
    text = f"diffusers {version()} has changed: {lacks} is not as in {TESTED}; pin 0.42.1"
    require(not lacks, InputError, text)


def _lacking() -> Iterator[str]:
    for (owner, method), parameters in _METHODS.items():
        try:
            found = list(inspect.signature(getattr(_class(owner), method)).parameters)
        except (ImportError, AttributeError):
            found = []
        if found != parameters:
            yield f"{owner[1]}.{method}"
        elif (method == "forward" and owner in _CALLS) or method == "moe_infer":
            text = inspect.getsource(_class(owner).forward)
            if not all(call in text for call in _CALLS[owner]):
                yield f"{owner[1]}.forward"


def layers_of(model: nn.Module) -> list[tuple[nn.Module, Layer]]:
    """Return the layers of experts of a model, in order. Errors: ``InputError`` for one that has none."""
    check_experts()
    found: list[tuple[nn.Module, Layer]] = []
    for name, module in model.named_modules():
        if isinstance(module, _class(_TOKENS)):
            experts: Any = module.experts
            many, chosen, compute = len(experts), module.num_activated_experts, _from(experts)
        elif isinstance(module, _class(_EXPERTS)):
            many, chosen, compute = module.num_experts, 0, _from_packed(module.experts)
        else:
            continue
        found.append((module, Layer(len(found), name, int(many), int(chosen), compute)))
    text = f"{type(model).__name__} has no layers of experts that are known here (HiDream's, NucleusMoE's); "
    other = "use thinwire.parallel" if has_plan(model) else "give a transformer of diffusers that has some"
    require(bool(found), InputError, text + other)
    return found


def routed(found: Sequence[tuple[nn.Module, Layer]]) -> dict[str, tuple[nn.Module, int]]:
    """Return each expert of ``layers_of`` that is a module of its own, and its number, by name."""
    return {
        f"{layer.name}.experts.{i}": (expert, i)
        for module, layer in found
        if layer.chosen
        for i, expert in enumerate(module.experts)  # type: ignore[arg-type]
    }


def _from(experts: Sequence[nn.Module]) -> Callable[[int, Tensor], Tensor]:
    return lambda expert, x: experts[expert](x)


def _from_packed(packed: Any) -> Callable[[int, Tensor], Tensor]:
    loop = _class(_PACKED)._run_experts_for_loop

    def compute(expert: int, x: Tensor) -> Tensor:
        own = slice(expert, expert + 1)
        alone = SimpleNamespace(gate_up_proj=packed.gate_up_proj[own], down_proj=packed.down_proj[own])
        made: Tensor = loop(alone, x, torch.tensor([len(x)]))
        return made

    return compute


@contextmanager
def attached(layers: Sequence[tuple[nn.Module, Layer]], session: Session) -> Iterator[None]:
    """Let ``session`` stand in for the experts of these layers in the block; leave them as they were."""
    with ExitStack() as undo:
        for module, layer in layers:
            seam = _by_token if layer.chosen else _by_expert
            seam(module, layer, session, undo)
        yield


def _by_token(module: nn.Module, layer: Layer, session: Session, undo: ExitStack) -> None:
    @torch.compiler.disable
    def moe_infer(x: Tensor, flat_expert_indices: Tensor, flat_expert_weights: Tensor) -> Tensor:
        shape = (len(x), layer.chosen)
        return session.choose(layer, x, flat_expert_indices.view(shape), flat_expert_weights.view(shape))

    _replaced(module, "moe_infer", moe_infer, undo)


def _by_expert(module: Any, layer: Layer, session: Session, undo: ExitStack) -> None:
    seen: dict[str, Tensor] = {}

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["x"] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def gated(_: nn.Module, args: tuple[Any, ...], logits: Tensor) -> None:
        seen["tokens"] = _tokens(module, logits)

    @torch.compiler.disable
    def forward(x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        whole, tokens = seen.pop("x").flatten(0, 1), seen.pop("tokens")
        text = f"{layer.name} chooses other tokens than diffusers {TESTED}'s does; pin 0.42.1"
        alike = torch.allclose(whole[tokens.flatten()], x, rtol=0, atol=0, equal_nan=True)
        require(alike, InputError, text)
        return session.every(layer, whole, tokens)

    undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    undo.callback(module.gate.register_forward_hook(gated).remove)
    _replaced(module.experts, "forward", forward, undo)


def _tokens(module: Any, logits: Tensor) -> Tensor:
    """Return the tokens [experts, B * capacity] that the experts choose, among all of the batch."""
    batch, length, experts = logits.shape
    scores = logits.float().sigmoid() if module.use_sigmoid else logits.float().softmax(-1)
    capacity = max(1, math.ceil(module.capacity_factor * length / experts))
    top = scores.to(logits.dtype).transpose(1, 2).topk(capacity, dim=-1).indices
    first = torch.arange(batch, device=logits.device).view(-1, 1, 1) * length
    return (first + top).transpose(0, 1).reshape(experts, -1)


def _replaced(module: nn.Module, name: str, function: Callable[..., Any], undo: ExitStack) -> None:
    text = f"{type(module).__name__}.{name} is replaced already; leave that first"
    require(name not in vars(module), InputError, text)
    setattr(module, name, function)
    undo.callback(delattr, module, name)
