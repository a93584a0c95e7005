"""What was measured on a machine, as a file that another one reads: ``thinwire plan-serving --measure``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from thinwire.types import InputError, require
from thinwire.uses.serving.choosing.ring_forecast import CodingCosts, PassCosts, TokenCurve
from thinwire.uses.serving.planning.plan_options import OtherMachine, PlannedConfig, is_file, parse_machine

RECIPES = ("exact", "bf16", "thinwire")  # the most exact first
MOST = 1e15  # of any number: beyond it is no machine's
SAME = ("model", "chunk")  # as planned: what else passes and messages depend on


@dataclass(frozen=True)
class MachineTiming:
    """A machine: of which model and settings, its memory in bytes, what passes and messages take it.

    ``cached``: bytes of a token's keys and values in a layer.
    """

    model: str
    dtype: str
    device: str
    threads: int  # 0: one for each core
    chunk: int
    memory: float
    cached: float
    passes: PassCosts
    coding: dict[str, CodingCosts]

    def like(self, other: OtherMachine) -> MachineTiming:
        """Return a machine by its speed against this one."""
        slower = 1 / other.speed
        return replace(
            self,
            memory=self.memory if other.memory is None else other.memory,
            passes=self.passes.scaled(slower),
            coding={name: costs.scaled(slower) for name, costs in self.coding.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def read_others(config: PlannedConfig) -> list[MachineTiming | OtherMachine]:
    """Return the machines beside this one. Errors: ``InputError`` for a file that is no measurement."""
    texts = config.machine or ("speed=1",)
    return [read_timing(text, config) if is_file(text) else parse_machine(text) for text in texts]


def machines_of(here: MachineTiming, others: Sequence[MachineTiming | OtherMachine]) -> list[MachineTiming]:
    """Return all machines, this one first."""
    return [here, *(here.like(other) if isinstance(other, OtherMachine) else other for other in others)]


def read_timing(path: str, config: PlannedConfig) -> MachineTiming:
    """Read what ``--measure`` printed elsewhere. Errors: ``InputError`` that names the file and the fault."""
    try:
        values = json.loads(Path(path).read_text("utf-8"))
    except OSError as e:
        raise InputError(
            f"cannot read --machine {path}: {e.strerror or e}; give what --measure printed"
        ) from e
    except ValueError as e:
        raise InputError(f"--machine {path} is not JSON ({e}); give what --measure printed") from e
    try:
        found = MachineTiming(
            **{f.name: values[f.name] for f in fields(MachineTiming)}
            | {
                "passes": _passes(values["passes"]),
                "memory": _number(values["memory"]),
                "cached": _number(values["cached"]),
            }
            | {"coding": {name: _coding(values["coding"][name]) for name in RECIPES}}
        )
    except (KeyError, TypeError, ValueError) as e:
        wrong = f"--machine {path} lacks or mistakes {e}; give what thinwire plan-serving --measure printed"
        raise InputError(wrong) from e
    for name in SAME:
        own, theirs = getattr(config, name), getattr(found, name)
        wrong = (
            f"--machine {path} was measured with --{name} {theirs}, the plan is for {own}; measure it again"
        )
        require(own == theirs, InputError, wrong)
    return found


def _passes(values: Mapping[str, Any]) -> PassCosts:
    layer, rest, head = (_curve(values[name]) for name in ("layer", "rest", "head"))
    return PassCosts(layer, rest, head, _number(values["pair"]), _number(values["row"]))


def _coding(values: Mapping[str, Any]) -> CodingCosts:
    return CodingCosts(*(_curve(values[name]) for name in ("nbytes", "encode", "decode")))


def _curve(values: Mapping[str, Any]) -> TokenCurve:
    at, found = tuple(map(int, values["at"])), tuple(map(_number, values["values"]))
    if not at or len(at) != len(found) or list(at) != sorted({*at}):
        raise ValueError("a curve's counts")
    return TokenCurve(at, found)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < min(MOST, math.inf):
        raise ValueError(f"the number {value!r}")
    return float(value)
