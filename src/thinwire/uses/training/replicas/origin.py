"""Where a saved state comes from, beside it: it is loaded nowhere else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from thinwire.types import WRONG_VALUES, InputError, require

ORIGIN = "origin"  # the name beside residuals and means


@dataclass(frozen=True)
class Origin:
    """The rank that saved, of how many, its recipe, and shape and dtype of its parameters by name."""

    rank: int
    ranks: int
    recipe: str
    parameters: dict[str, str]

    def state_dict(self) -> dict[str, Tensor]:
        """Return it as a tensor of bytes."""
        return {ORIGIN: torch.frombuffer(bytearray(json.dumps(asdict(self)).encode()), dtype=torch.uint8)}

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise ``InputError`` unless ``state`` was saved here: by this rank, recipe and model."""
        text = "this is no state that replicate saved, or one of an older thinwire; begin without it"
        require(ORIGIN in state, InputError, text)
        try:
            saved = Origin(**json.loads(bytes(state[ORIGIN].tolist())))
            differs = {n for n, _ in set(saved.parameters.items()) ^ set(self.parameters.items())}
        except (*WRONG_VALUES, AttributeError) as e:
            raise InputError("the origin of this state cannot be read; begin without it") from e
        theirs, own = (f"rank {x.rank} of {x.ranks}" for x in (saved, self))
        text = f"this state was saved by {theirs}, and this is {own}; load what this one saved"
        require(theirs == own, InputError, text)
        text = f"this state was saved with the recipe {saved.recipe}, not {self.recipe}; give the same"
        require(saved.recipe == self.recipe, InputError, text)
        if differs:
            name = min(differs)
            was, is_now = saved.parameters.get(name, "missing"), self.parameters.get(name, "missing")
            text = f"this state is of another model: {name} was {was} and is {is_now}"
            raise InputError(f"{text}; load it into the same")
