"""What optimisers step of a model: parameters by name, and this process's part of those that are sharded."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.types import InputError, require

WRAPPERS = ("_orig_mod.", "module.")  # of what torch.compile and DDP make of a model
_taken: weakref.WeakValueDictionary[int, SteppedModel] = weakref.WeakValueDictionary()  # by parameter


@dataclass(eq=False)
class SteppedModel:
    """The trained parameters of a model by name, each once, and the optimisers that step them.

    ``local``: what this process has of each, in the same memory.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    parameters: dict[str, nn.Parameter]
    ties: dict[str, str]  # another name of a parameter, and the one that it has here

    @property
    def local(self) -> dict[str, Tensor]:
        """This process's part of each parameter."""
        return {name: part_of(p) for name, p in self.parameters.items()}

    @property
    def held(self) -> list[Tensor]:
        """The same, in order."""
        return list(self.local.values())

    @property
    def device(self) -> torch.device:
        """The device of the first of them."""
        return self.held[0].device

    @property
    def groups(self) -> list[dict[str, Tensor]]:
        """The same, of parameters that lie alike over the processes of a site: each group is coded by itself.

        So processes that hold the same values, as of a replicated norm, come to the same bits.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for name, p in self.parameters.items():
            lies = str(p.placements) if isinstance(p, DTensor) else ""
            found.setdefault(lies, {})[name] = part_of(p)
        return list(found.values())

    @property
    def is_sharded(self) -> bool:
        """Whether processes of a site have different parts of a parameter."""
        return any(isinstance(p, DTensor) for p in self.parameters.values())

    @property
    def clock(self) -> Optimizer:
        """The optimiser that steps last, and so counts the steps."""
        return self.optimizers[-1]

    def check(self) -> None:
        """Raise ``InputError`` where something else is trained than at the start."""
        known, found = {id(p): name for name, p in self.parameters.items()}, _trained(self.optimizers)
        new = [p for p in found if id(p) not in known]
        text = f"{_names(self.model, new)} was added to the optimiser or unfrozen after local_steps"
        require(not new, InputError, f"{text}, and is not exchanged; call it once the model is complete")
        lost = sorted(known.keys() - {id(p) for p in found}, key=lambda i: known[i])
        text = f"{', '.join(known[i] for i in lost[:3])} was frozen, or left the optimiser, after local_steps"
        require(not lost, InputError, f"{text}; drain and close it, and call it again on all replicas")

    def free(self) -> None:
        """Let another ``local_steps`` have them."""
        for p in self.parameters.values():
            _taken.pop(id(p), None)


def _check_known(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ``InputError`` where an optimiser steps what is exchanged for another one."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            stepped = _taken.get(id(p))
            if stepped is not None and all(optimizer is not one for one in stepped.optimizers):
                text = (
                    f"this {type(optimizer).__name__} steps what local_steps exchanges for another optimiser"
                )
                raise InputError(f"{text}; drain and close that, and call local_steps with this one")


register_optimizer_step_pre_hook(_check_known)  # once: torch lets nobody add one while another thread steps


def stepped_by(model: nn.Module, optimizers: Sequence[Optimizer]) -> SteppedModel:
    """Return what the optimisers step of the model, and let nobody else exchange it.

    Errors: ``InputError`` where they step nothing, something else, or what is exchanged already.
    """
    require(len(optimizers) > 0, InputError, "no optimiser was given; pass the one that steps the model")
    names, ties = _named(model)
    trained = _trained(optimizers)
    require(len(trained) > 0, InputError, "the optimiser steps nothing that is trained; unfreeze something")
    foreign = sum(id(p) not in names for p in trained)
    text = f"the optimiser steps {foreign} parameters that the model does not have"
    require(not foreign, InputError, f"{text}; pass the model that they belong to, as the optimiser has it")
    twice = [names[id(p)] for p in trained if id(p) in _taken]
    text = f"{', '.join(twice[:3])} is exchanged by another local_steps already"
    require(not twice, InputError, f"{text}; close that one first")
    chosen = {id(p) for p in trained}
    parameters = {name: p for name, p in model.named_parameters() if id(p) in chosen}
    named = {bare(name): p for name, p in parameters.items()}
    stepped = SteppedModel(model, tuple(optimizers), named, {a: b for a, b in ties.items() if b in named})
    _taken.update((id(p), stepped) for p in trained)
    return stepped


def part_of(p: Tensor) -> Tensor:
    """Return what this process has of a parameter, in the same memory."""
    return p.to_local().detach() if isinstance(p, DTensor) else p.detach()


def bare(name: str) -> str:
    """Return a parameter's name without what wrappers put into it.

    >>> bare("module._orig_mod.head.weight")
    'head.weight'
    """
    for wrapper in WRAPPERS * 2:
        name = name.removeprefix(wrapper)
    return name


def _named(model: nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """Return the first name of each parameter, and all others with that."""
    names: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(p), bare(name))
        if first != bare(name):
            ties[bare(name)] = first
    return names, ties


def _trained(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    found = (p for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad)
    return list({id(p): p for p in found}.values())


def _names(model: nn.Module, parameters: Sequence[nn.Parameter]) -> str:
    names, _ = _named(model)
    return ", ".join(names.get(id(p), "a parameter outside the model") for p in parameters[:3])


def plain(optimizer: Any) -> Optimizer:
    """Return the torch optimiser within what a framework made of it."""
    inner = optimizer
    while not isinstance(inner, Optimizer) or hasattr(inner, "accelerator_state"):
        following = getattr(inner, "optimizer", None)
        if following is None or following is inner:
            text = f"{type(optimizer).__name__} is no torch optimiser, and its steps cannot be seen"
            raise InputError(f"{text}; use one of torch.optim, or one that derives from it")
        inner = following
    return inner
