"""Mode displaced: the peers' keys and values of the last step, and never a wait for those of this one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshes import Mesh
from picture_models import flux, flux_inputs, on_ranks, one_device, sample, wan, wan_inputs
from torch import Tensor, nn
from waiting import until

from thinwire.types import InputError
from thinwire.uses.pictures.agreement import Parallel

pytest.importorskip("diffusers")

Meshes = dict[int, list[Mesh]]


def test_at_rest_it_is_exact(ranks: Meshes) -> None:
    """Where inputs stay, the first layer is exact after one more step, the second after two."""
    model, calls = wan(), [wan_inputs(time=time) for time in (1.0, 0.5, 0.5, 0.5)]

    def use(own: nn.Module, found: Parallel) -> list[float]:
        with own.cache_context("cond"):
            made = one_device(own, calls)
        return [float((x - y).norm() / y.norm()) for x, y in zip(made, wanted, strict=True)]

    wanted = one_device(model, calls)
    for first, second, _, last in on_ranks(ranks[3], model, "raw", use, mode="displaced"):
        assert first <= 1e-6
        assert second > 1e-5
        assert last <= 1e-6


def test_more_warmup_is_nearer(ranks: Meshes) -> None:
    """And all ranks have the same bits; a second picture is as the first, and nothing stays unread."""
    model, errors = flux(), []
    wanted = sample(model, flux_inputs(63), 4)

    def use(own: nn.Module, found: Parallel) -> Tensor:
        made, again = (sample(own, flux_inputs(63), 4) for _ in range(2))
        assert torch.equal(made, again)
        return made

    for recipe in ("displaced:warmup=4", "displaced:warmup=2", "displaced"):
        made = on_ranks(ranks[2], model, recipe, use)
        assert torch.equal(*made)
        errors.append(float((made[0] - wanted).norm() / wanted.norm()))
    assert 2 * errors[0] < errors[1] < errors[2] < 0.1
    for mailbox in (peer.mailbox for peers in ranks[2] for peer in peers.values()):
        filed: Any = mailbox._filed
        assert not [tag for tag, bodies in filed.items() if len(bodies[0]) > 100]


def test_no_layer_waits_for_the_others(ranks: Meshes) -> None:
    """A rank is at the output of a step before the other has begun it."""
    found: dict[int, Any] = {}

    def use(own: nn.Module, parallel: Parallel) -> None:
        session: Any = parallel._session
        found[session._rank] = parallel.tally
        own(**flux_inputs(time=0.9))
        per_call = parallel.tally.exchanges
        if session._rank == 1:
            until(lambda: found[0].exchanges == 2 * per_call)
        own(**flux_inputs(time=0.8))

    on_ranks(ranks[2], flux(), "displaced", use)


def test_residuals_are_refused(ranks: Meshes) -> None:
    with pytest.raises(InputError, match="mode displaced sends no residuals; give it a recipe without"):
        on_ranks(ranks[2], flux(), "compact", lambda own, _: None, mode="displaced")
