"""What a text says of the weights of a model: one pass forward, one back by layers, sums over its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.runs.machine.processor import hand_back
from thinwire.types import InputError, require
from thinwire.uses.models.moments import Moments
from thinwire.uses.models.run.layerwise import LayerCall, device_of, rest, told, widened
from thinwire.uses.models.run.scratch_files import KeptMoments, Scratch, Waiting
from thinwire.uses.models.tensors import power_of

WINDOW = 512  # tokens that are read at a time


class Sums:
    """Sums over tokens for one use of a matrix: squared gradients a row, second moments of columns.

    Of the matrix over 2 ** ``power``, as it is coded: squares of what a very large one gets are no numbers.
    """

    def __init__(self, rows: int, columns: int, power: int, device: torch.device) -> None:
        self.rows, self._power = torch.zeros(rows, device=device), power
        self.columns = torch.zeros(columns, columns, device=device)

    def add_linear(self, x: Tensor, g: Tensor) -> None:
        """Add inputs [tokens, columns] and gradients of the outputs [tokens, rows]."""
        squares = self._scaled(g).square()
        self.rows += squares.sum(0)
        self.columns.addmm_(x.t() * squares.sum(1), x)

    def add_lookup(self, ids: Tensor, g: Tensor) -> None:
        """Add rows looked up [tokens], and gradients of what was found [tokens, columns]."""
        self.rows.index_add_(0, ids, self.rows.new_ones(len(ids)))
        g = self._scaled(g)
        self.columns.addmm_(g.t(), g)

    def _scaled(self, g: Tensor) -> Tensor:
        return g * 2.0**self._power if self._power else g

    def moments(self, tokens: int) -> Moments:
        """Return the means over ``tokens``, which takes the place of the sums."""
        return Moments(self.rows / self.rows.sum().clamp(min=1e-30), self.columns.div_(tokens))


def longest_of(model: Any) -> int:
    """Return how many tokens a model has positions for, as far as it says."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or WINDOW)


def is_linear(module: nn.Module) -> bool:
    """Say whether a module multiplies its input by its one matrix: torch's, or GPT-2's with axes swapped."""
    return isinstance(module, nn.Linear) or swaps(module)


def swaps(module: nn.Module) -> bool:
    """Say whether the matrix of a linear module is [inputs, outputs], as in GPT-2."""
    return type(module).__name__ == "Conv1D" and getattr(module, "weight", torch.empty(0)).ndim == 2


def _together(kept: Sequence[KeptMoments]) -> Moments:
    """Return the sum of the moments of one matrix."""
    return reduce(Moments.plus, (own.moments() for own in kept))


class Calibration:
    """Moments of all matrices of a model, by the name of the parameter; tied ones under their first name."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._sums: dict[tuple[str, str], Sums] = {}
        self._looked: list[tuple[Sums, Tensor, Tensor]] = []
        self._again: Iterator[Tensor] | None = None  # what was looked up in a window that runs once more
        self._scratch = Scratch()
        self._kept: dict[str, list[KeptMoments]] = {}
        self._tokens = 0

    def read(self, ids: Tensor) -> None:
        """Add what tokens [windows, tokens] say, a window at a time."""
        longest = longest_of(self._model)
        require(
            ids.shape[1] <= longest, InputError, f"windows of {ids.shape[1]} tokens, at most {longest} fit"
        )
        self._tokens += ids.shape[0] * (ids.shape[1] - 1)
        with self._hooked():
            turns = [self._forward(window) for window in ids.to(device_of(self._model))]
            for calls in zip(*map(reversed, turns), strict=True):
                with widened(calls[0].layer):
                    for call in calls:
                        call.back(self._scratch)
                self._keep({id(p) for p in calls[0].layer.parameters()})
                hand_back()
            for sums, tokens, made in self._looked:
                if made.grad is not None:
                    sums.add_lookup(tokens, made.grad.reshape(len(tokens), -1).float())
            self._looked.clear()

    def _forward(self, window: Tensor) -> list[LayerCall]:
        """Run one window [tokens] and what is above the layers back; return the turns of the layers."""
        calls, known = list[LayerCall](), len(self._looked)
        for logits, tokens in told(self._model, window, calls):
            nn.functional.cross_entropy(logits, tokens, reduction="sum").backward()
            self._again = cycle([made for _, _, made in self._looked[known:]])
        self._again = None
        rest(calls, self._scratch)
        return calls

    def moments(self) -> Waiting:
        """Return the moments so far, and forget them; of a matrix used in two ways, their sum."""
        self._keep({id(p) for p in self._model.parameters()})
        kept, self._kept = self._kept, {}
        return Waiting({name: partial(_together, own) for name, own in kept.items()})

    def _keep(self, parameters: set[int]) -> None:
        """Put the sums of some parameters onto the disk."""
        own = {name for i, name in self._names.items() if i in parameters}
        for key in [key for key in self._sums if key[0] in own]:
            found = self._sums.pop(key).moments(max(self._tokens, 1))
            self._kept.setdefault(key[0], []).append(self._scratch.put_moments(found))

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles: list[Any] = []
        wanted = {name: p.requires_grad for name, p in self._model.named_parameters()}
        self._model.requires_grad_(False)
        try:
            for module in self._model.modules():
                if isinstance(module, nn.Embedding):
                    handles.append(module.register_forward_hook(self._looked_up))
                elif is_linear(module):
                    handles.append(module.register_forward_hook(self._multiplied))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name, p in self._model.named_parameters():
                p.requires_grad_(wanted[name])

    def _looked_up(self, module: Any, inputs: Any, output: Tensor) -> Tensor | None:
        asked = inputs[0] if inputs else None
        if not isinstance(asked, Tensor) or asked.is_floating_point() or asked.shape != output.shape[:-1]:
            return None  # OPT's positions are asked by a mask
        if self._again is not None:
            return next(self._again)
        ids, made = asked.detach().reshape(-1), output.detach().requires_grad_()
        if torch.is_grad_enabled():
            self._looked.append((self._of(module.weight, "lookup", swapped=False), ids, made))
        return made

    def _multiplied(self, module: Any, inputs: Any, output: Tensor) -> None:
        x = inputs[0].detach()
        if output.requires_grad:
            sums = self._of(module.weight, "linear", swaps(module))
            output.register_hook(
                lambda g: sums.add_linear(
                    x.reshape(-1, x.shape[-1]).float(), g.reshape(-1, g.shape[-1]).float()
                )
            )

    def _of(self, weight: Tensor, use: str, swapped: bool) -> Sums:
        key = self._names[id(weight)], use
        if key not in self._sums:
            rows, columns = reversed(weight.shape) if swapped else weight.shape
            self._sums[key] = Sums(rows, columns, power_of(weight.detach()), weight.device)
        return self._sums[key]
