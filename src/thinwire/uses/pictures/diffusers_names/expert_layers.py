"""Layers of experts of diffusers: what they are, and a session of ours in their place.

HiDream's layer calls its method ``moe_infer`` with tokens, their experts and weights; each instance gets one
of ours. NucleusMoE's layer calls its experts with rows in their order; which tokens those are follows from
what its gate said, by the layer's own rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.types import InputError, require
from thinwire.uses.pictures.diffusers_names.interfaces import ExpertForward, ExpertLayer
from thinwire.uses.pictures.diffusers_names.plans import has_plan
from thinwire.uses.pictures.diffusers_names.tested_version import (
    HIDREAM,
    NUCLEUS,
    NUCLEUS_PACKED,
    TESTED,
    check_experts,
    class_of,
)


def layers_of(model: nn.Module) -> list[tuple[nn.Module, ExpertLayer]]:
    """Return the layers of experts of a model, in order. Errors: ``InputError`` for one that has none."""
    check_experts()
    found: list[tuple[nn.Module, ExpertLayer]] = []
    for name, module in model.named_modules():
        if isinstance(module, class_of(HIDREAM)):
            each, chosen = module.experts, module.num_activated_experts
        elif isinstance(module, class_of(NUCLEUS)):
            loop = class_of(NUCLEUS_PACKED)._run_experts_for_loop
            each = [partial(_packed, loop, module.experts, i) for i in range(module.num_experts)]
            chosen = 0
        else:
            continue
        found.append((module, ExpertLayer(len(found), name, len(each), int(chosen), each)))
    text = f"{type(model).__name__} has no layers of experts that are known here (HiDream's, NucleusMoE's); "
    other = "use thinwire.parallel" if has_plan(model) else "give a transformer of diffusers that has some"
    require(bool(found), InputError, text + other)
    return found


def routed(found: Sequence[tuple[nn.Module, ExpertLayer]]) -> dict[str, tuple[nn.Module, int]]:
    """Return each expert of ``layers_of`` that is a module of its own, and its number, by name."""
    return {
        f"{layer.name}.experts.{i}": (expert, i)
        for module, layer in found
        if layer.chosen
        for i, expert in enumerate(module.experts)  # type: ignore[arg-type]
    }


def _packed(loop: Any, packed: Any, expert: int, x: Tensor) -> Tensor:
    own = slice(expert, expert + 1)
    alone = SimpleNamespace(gate_up_proj=packed.gate_up_proj[own], down_proj=packed.down_proj[own])
    made: Tensor = loop(alone, x, torch.tensor([len(x)]))
    return made


@contextmanager
def attached(layers: Sequence[tuple[nn.Module, ExpertLayer]], session: ExpertForward) -> Iterator[None]:
    """Let ``session`` stand in for the experts of these layers in the block; leave them as they were."""
    with ExitStack() as undo:
        for module, layer in layers:
            replace = _by_token if layer.chosen else _by_expert
            replace(module, layer, session, undo)
        yield


def _by_token(module: nn.Module, layer: ExpertLayer, session: ExpertForward, undo: ExitStack) -> None:
    @torch.compiler.disable
    def moe_infer(x: Tensor, flat_expert_indices: Tensor, flat_expert_weights: Tensor) -> Tensor:
        shape = (len(x), layer.chosen)
        return session.choose(layer, x, flat_expert_indices.view(shape), flat_expert_weights.view(shape))

    _replaced(module, "moe_infer", moe_infer, undo)


def _by_expert(module: Any, layer: ExpertLayer, session: ExpertForward, undo: ExitStack) -> None:
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
