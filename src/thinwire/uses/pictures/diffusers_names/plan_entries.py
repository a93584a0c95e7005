"""What a plan of ours says of a module: inputs that are split, an output that is joined, what stays whole.

A plan is as diffusers writes one in ``_cp_plan``: by the path of a module, which of its inputs (by name) and
outputs (by number) are split, or how its output is joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

SplitPlan = Mapping[str, Any]
MadePlan = Callable[[nn.Module, SplitPlan], SplitPlan]  # of a model, and diffusers' own for it


@dataclass(frozen=True)
class SplitInput:
    """An input, or output, of which each rank has a share along ``split_dim``.

    ``of``: inputs that were split before it. Where the length is theirs together, each one's part is split by
    itself, and where it is another the input stays whole.
    """

    split_dim: int
    expected_dims: int | None = None
    of: tuple[str, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class JoinOutput:
    """An output that is put together from the shares of all ranks."""

    gather_dim: int = 1


@dataclass(frozen=True)
class SharedOutput:
    """An output of what goes whole with each patch: in mode pipe the last rank alone has it."""


@dataclass(frozen=True)
class Whole:
    """A module whose attention is over keys that every rank has, such as a text's that is not split."""


@dataclass(frozen=True)
class Never:
    """An input that may not be given, or only some of which may, and why."""

    cause: str
    when: Callable[[Any], bool] = lambda given: isinstance(given, Tensor) or bool(given)


TOKENS = SplitInput(1, 3)
IDS = SplitInput(-2)  # with a batch's dimension or without
ADDED = SplitInput(1, 3)  # a control network's, for each block
PICTURE, TEXT = ("hidden_states",), ("encoder_hidden_states",)
JOINED = {"proj_out": JoinOutput()}
ROTARY = {0: SplitInput(1, 4), 1: SplitInput(1, 4)}
CONTROL = {"controlnet_block_samples": ADDED, "controlnet_single_block_samples": ADDED}


def only(plan: SplitPlan) -> MadePlan:
    """Return what makes this plan of any model."""
    return lambda model, _: plan


Said = TypeVar("Said")


def entry_of(table: Mapping[Any, Said], model: object) -> Said | None:
    """Return what a table says of a model's class or of one above it, by itself or by its name."""
    keys = (key for kind in type(model).__mro__ for key in (kind, kind.__name__))
    return next((table[key] for key in keys if key in table), None)
