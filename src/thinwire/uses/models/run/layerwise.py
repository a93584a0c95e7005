"""A model run and run back a layer at a time: what one layer takes is in memory, and no other's.

Going forward, each layer's inputs are kept, on the disk. Going back, a layer runs once more on them for all
windows of a text, with its gradients, before the layer below it does. That is what checkpoints of activations
do (arXiv 1604.06174), with the loops over layers and windows exchanged.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from thinwire.uses.models.run.scratch_files import FileRange, Scratch

PART = 64  # tokens whose logits are there at once: those of a window may take more than the model


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules in a model's outermost lists: its layers, in order."""
    found = list[nn.Module]()
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else layers_of(child)
    return found


def device_of(model: nn.Module) -> torch.device:
    """Return where a model is; the processor for one without parameters."""
    found = next(model.parameters(), None)
    return torch.device("cpu") if found is None else found.device


@contextmanager
def widened(module: nn.Module) -> Iterator[None]:
    """Let a module compute in float32, whatever type its parameters and buffers are kept in."""
    kept = _widen(module)
    try:
        yield
    finally:
        _narrow(kept)


def _widen(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    every = [*module.parameters(), *module.buffers()]
    kept = [(p, p.data) for p in every if p.is_floating_point() and p.dtype != torch.float32]
    for p, _ in kept:
        p.data = p.data.float()
    return kept


def _narrow(kept: Sequence[tuple[Tensor, Tensor]]) -> None:
    for p, data in kept:
        p.data = data


def compute_wide(model: nn.Module) -> None:
    """Let a model compute in float32: its layers at their turns, what is not in them from now on."""
    layers = layers_of(model)
    inside = {id(x) for layer in layers for x in (*layer.parameters(), *layer.buffers())}
    for x in (*model.parameters(), *model.buffers()):
        if id(x) not in inside and x.is_floating_point():
            x.data = x.data.float()
    for layer in layers:
        kept = list[tuple[Tensor, Tensor]]()
        layer.register_forward_pre_hook(partial(_before, kept))
        layer.register_forward_hook(partial(_after, kept))


def _before(kept: list[tuple[Tensor, Tensor]], layer: nn.Module, inputs: Any) -> None:
    kept += [] if isinstance(layer.forward, _Recalled) else _widen(layer)


def _after(kept: list[tuple[Tensor, Tensor]], layer: nn.Module, inputs: Any, output: Any) -> None:
    _narrow(kept)
    kept.clear()


@dataclass
class LayerCall:
    """A layer's turn for one window: what it got, and what came of it, to which gradients come back."""

    layer: nn.Module
    run: Callable[..., Any]
    inputs: list[Any]
    form: TreeSpec
    outputs: list[Any]
    shape: TreeSpec  # of the outputs
    places: dict[int, FileRange]  # of inputs that wait on the disk

    def back(self, scratch: Scratch) -> None:
        """Run it again, and back: gradients go on to what made its inputs."""
        given = list(self.inputs)
        for i, place in self.places.items():
            given[i] = scratch.get(place).to(given[i].device, given[i].dtype).requires_grad_()
        args, kwargs = tree_unflatten(given, self.form)
        with torch.enable_grad():
            made = tree_flatten(self.run(*args, **kwargs))[0]
        pairs = [(y, o.grad) for y, o in zip(made, self.outputs, strict=True) if _has_gradient(o)]
        known = [(y, g) for y, g in pairs if g is not None and y.requires_grad]
        self.outputs.clear()
        if known:
            torch.autograd.backward([y for y, _ in known], [g for _, g in known])
        for i in self.places:
            if given[i].grad is not None:
                torch.autograd.backward([self.inputs[i]], [given[i].grad], retain_graph=True)
        self.inputs.clear()


def rest(calls: Sequence[LayerCall], scratch: Scratch) -> None:
    """Put inputs that have gradients onto the disk; what is left of them here has a shape alone."""
    found = dict[int, tuple[Tensor, FileRange]]()
    for call in calls:
        for i, x in enumerate(call.inputs):
            if _has_gradient(x):
                if id(x) not in found:
                    found[id(x)] = x, scratch.put(x.float())
                call.places[i] = found[id(x)][1]
    for x, _ in found.values():
        x.data = x.data.new_zeros(1).expand(x.shape)


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def told(model: Any, window: Tensor, calls: list[LayerCall]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits [tokens, words] in float32 and what came, a part of a window [tokens] at a time.

    Layers run once, without gradients of their own, and leave their ``calls``. What is above them runs for
    each part alone where a model takes ``logits_to_keep``, else once for all tokens.
    """
    layers = layers_of(model)
    run, takes = recorded(layers, calls), _takes_parts(model, layers)
    for part in torch.arange(len(window) - 1, device=window.device).split(PART):
        asked = {"logits_to_keep": part} if takes else {}
        with run:
            logits = model(input_ids=window[None], use_cache=False, **asked).logits[0]
        if len(logits) > len(part):  # it gave those of all tokens
            yield logits[:-1].float(), window[1:]
            return
        yield logits.float(), window[part + 1]
        run = _run_as(dict.fromkeys((call.layer for call in calls), _Recalled(iter(calls))))


def _takes_parts(model: Any, layers: Sequence[nn.Module]) -> bool:
    named = "logits_to_keep" in inspect.signature(model.forward).parameters
    return named and bool(layers) and model.get_output_embeddings() not in layers


def recorded(layers: Sequence[nn.Module], calls: list[LayerCall]) -> AbstractContextManager[None]:
    """Let layers run without gradients of their own in the block, and note their calls."""
    return _run_as({layer: _recording(layer, layer.forward, calls) for layer in layers})


@contextmanager
def _run_as(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    for layer, forward in forwards.items():
        layer.forward = forward
    try:
        yield
    finally:
        for layer in forwards:
            del layer.forward


class _Recalled:
    """What layers give that gave it before: the next of their calls, in order."""

    def __init__(self, calls: Iterator[LayerCall]) -> None:
        self._calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = next(self._calls)
        return tree_unflatten(list(call.outputs), call.shape)


def _recording(layer: nn.Module, run: Callable[..., Any], calls: list[LayerCall]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs, form = tree_flatten((args, kwargs))
        with torch.no_grad():
            made, shape = tree_flatten(run(*args, **kwargs))
        outputs = [x.detach().requires_grad_() if _is_real(x) else x for x in made]
        calls.append(LayerCall(layer, run, inputs, form, outputs, shape, {}))
        return tree_unflatten(list(outputs), shape)

    return forward


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def losses(model: Any, ids: Tensor) -> Tensor:
    """Return the mean loss [windows] in nats of tokens [windows, tokens], each window by itself."""
    found = list[Tensor]()
    with torch.no_grad():
        for window in ids.to(device_of(model)):
            parts = told(model, window, [])
            own = [torch.nn.functional.cross_entropy(*part, reduction="sum") for part in parts]
            found.append(torch.stack(own).sum() / (len(window) - 1))
    return torch.stack(found)


def perplexity(model: Any, ids: Tensor) -> float:
    """Return the perplexity of tokens [windows, tokens].

    >>> class Even(torch.nn.Module):
    ...     def forward(self, input_ids, use_cache):
    ...         return type("Out", (), {"logits": torch.zeros(1, input_ids.shape[1], 8)})
    >>> round(perplexity(Even(), torch.zeros(2, 5, dtype=torch.long)), 6)
    8.0
    """
    return math.exp(min(float(losses(model, ids).mean()), 700.0))
