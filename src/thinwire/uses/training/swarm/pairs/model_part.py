"""Which values of a whole model's row a half of it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from thinwire.codecs.matrices.factors import Cut, matrices_of
from thinwire.rounds.parameters import Signature
from thinwire.types import InputError, require

Names = Callable[[str], str]  # from a parameter's name in a stage to that in the unsplit model


@dataclass(frozen=True, eq=False)
class ModelPart:
    """A half's values in the row of a whole model, which has ``values``.

    ``spans``: where the half's parameters begin there, and how many values each has, in the half's order.

    A matrix that is embedding and head at once is in both halves. The second has it at the end, and gives
    what it changed to the first, which sends it: ``twin`` is where it begins in the half's own row, and how
    many values it has. The second sends the rest of its row, ``sent`` values; their matrices are ``cut``.
    ``signature``: of the whole model, without its frozen values, which came with the server's kit.
    """

    values: int
    spans: tuple[tuple[int, int], ...]
    sent: int
    twin: tuple[int, int] | None
    cut: Cut
    signature: Signature

    def of(self, row: Tensor) -> Tensor:
        """Return the half's own values, of those of the whole model, [1, N].

        >>> ModelPart(4, ((0, 1), (2, 2)), 3, None, (), Signature(1)).of(torch.arange(4.0)[None])
        tensor([[0., 2., 3.]])
        """
        return torch.cat([row[:, start : start + many] for start, many in self.spans], 1)


def part_of(whole: nn.Module, names: Names, half: nn.Module, own: Names, first: bool) -> ModelPart:
    """Return what ``half`` has of ``whole``, whose parameters may be on the meta device.

    Errors: ``InputError`` where the two halves do not follow each other in the row.
    """
    begins, shared, total = _begins(whole, names)
    trained = [(own(name), p) for name, p in half.named_parameters() if p.requires_grad]
    missing = [name for name, _ in trained if name not in begins]
    require(bool(trained), InputError, "a half of this model has nothing to train; join without --stages 2")
    require(not missing, InputError, f"{missing[:1]} of a half is not in the whole model; leave --stages out")
    spans = tuple((begins[name], p.numel()) for name, p in trained)
    places = accumulate((many for _, many in spans), initial=0)
    twin = next(
        ((at, many) for at, (start, many) in zip(places, spans, strict=False) if start in shared), None
    )
    alone = spans if first or twin is None else spans[:-1]
    ends = list(accumulate((n for _, n in alone), initial=alone[0][0]))
    follow = [start for start, _ in alone] == ends[:-1] and (alone[0][0] == 0 if first else ends[-1] == total)
    require(follow, InputError, "the values of this model do not divide in two; join without --stages 2")
    sent = sum(n for _, n in alone)
    cut = matrices_of(p.shape for _, p in trained[: len(alone)])
    return ModelPart(total, spans, sent, twin, cut, Signature(Signature.of_kinds(whole)))


def _begins(whole: nn.Module, names: Names) -> tuple[dict[str, int], set[int], int]:
    """Return where each trained parameter begins in a model's row, those of two names, and its length."""
    begins, known, shared, total = dict[str, int](), dict[int, int](), set[int](), 0
    for name, p in whole.named_parameters(remove_duplicate=False):
        if not p.requires_grad:
            continue
        if id(p) in known:
            shared.add(known[id(p)])
        else:
            known[id(p)], total = total, total + p.numel()
        begins[names(name)] = known[id(p)]
    return begins, shared, total
