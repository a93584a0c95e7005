"""The order of mods: what clips and adds noise works on whole arrays, before they are coded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flower_apps import RATE, REASON, STEPS, initial, local_grid, row
from torch import Tensor

from thinwire.codecs import Codec, Raw, TopK, Uniform
from thinwire.rounds.client_profile import Fixed
from thinwire.rounds.local_training import Decay
from thinwire.types import InputError
from thinwire.uses.federated.flower.mod import compression_mod
from thinwire.uses.federated.flower.strategy import Compressed

flwr = pytest.importorskip("flwr.app", reason=REASON)
mods = pytest.importorskip("flwr.clientapp.mod", reason=REASON)
strategies = pytest.importorskip("flwr.serverapp.strategy", reason=REASON)

CLIP = 0.05


class Seen(Compressed):
    """Note what each reply changed, as decoded."""

    def _decode(self, reply: Any, change: Tensor) -> None:
        self.changes = [*getattr(self, "changes", []), change]
        super()._decode(reply, change)


def private(codec: Codec, *given: Any) -> Seen:
    """Run a round with central privacy outside, and return what was decoded."""
    inner = strategies.FedAvg(fraction_evaluate=0.0, min_train_nodes=3)
    found = Seen(inner, Fixed(STEPS, codec), feedback=False, rates=Decay(RATE))
    outer = strategies.DifferentialPrivacyClientSideFixedClipping(found, 0.0, CLIP, 3)
    outer.start(local_grid(*given), initial(), num_rounds=1)
    return found


def test_updates_are_clipped_before_they_are_coded() -> None:
    found = private(Raw(), compression_mod, mods.fixedclipping_mod)
    norms = [float(change.norm()) for change in found.changes]
    assert norms == pytest.approx([CLIP] * 3, rel=1e-3)
    coded = private(TopK(0.1, Uniform(8, group=64)), compression_mod, mods.fixedclipping_mod)
    for whole, some in zip(found.changes, coded.changes, strict=True):
        kept = some != 0
        assert 0 < kept.sum() <= 0.11 * kept.numel()
        torch.testing.assert_close(some[kept], whole[kept], rtol=0, atol=float(whole.abs().max()) / 100)


def test_noise_is_added_before_they_are_coded() -> None:
    deviation = 0.01
    sensitivity = deviation / np.sqrt(2 * np.log(1.25 / 1e-5))
    noise = mods.LocalDpMod(CLIP, sensitivity, epsilon=1.0, delta=1e-5)
    quiet = private(Raw(), compression_mod, mods.fixedclipping_mod)
    noisy = private(Raw(), compression_mod, mods.fixedclipping_mod, noise)
    for a, b in zip(quiet.changes, noisy.changes, strict=True):
        # The clipping outside the noise clips it too, as in Flower without us.
        assert float(b.norm()) == pytest.approx(CLIP, rel=1e-3)
        assert not torch.allclose(a, b, atol=CLIP / 1000)
    alone = private(Raw(), compression_mod, noise)
    for a, b in zip(quiet.changes, alone.changes, strict=True):
        assert float((a - b).std()) == pytest.approx(deviation, rel=0.05)


def test_the_other_order_is_told_by_the_clipping_mod() -> None:
    strategy = Compressed(
        strategies.FedAvg(fraction_evaluate=0.0, min_train_nodes=3), Fixed(STEPS), feedback=False
    )
    config = flwr.ConfigRecord({"clipping_norm": CLIP})
    grid = local_grid(mods.fixedclipping_mod, compression_mod)
    strategy.start(grid, initial(), num_rounds=1, train_config=config)
    assert len(strategy.refused) == 3
    assert "expects the keys in the ArrayRecord of the reply" in strategy.refused[0].reason


def test_messages_without_a_plan_pass() -> None:
    plain = strategies.FedAvg(fraction_evaluate=0.0, min_train_nodes=3)
    found = plain.start(local_grid(), initial(), num_rounds=1)
    wanted = strategies.FedAvg(fraction_evaluate=0.0, min_train_nodes=3).start(
        local_grid(lambda message, context, call_next: call_next(message, context)), initial(), num_rounds=1
    )
    # Flower adds up in the order in which it drew the nodes.
    torch.testing.assert_close(row(found.arrays), row(wanted.arrays), rtol=0, atol=3e-7)


def test_what_is_sent_keeps_to_the_clipping_norm_or_feedback_is_refused() -> None:
    inner = strategies.FedAvg(fraction_evaluate=0.0, min_train_nodes=3)
    for codec in (Uniform(2, group=64), TopK(0.02, Uniform(2, group=64)), TopK(0.1)):
        strategy = Seen(inner, Fixed(STEPS, codec), feedback=False, rates=Decay(RATE))
        outer = strategies.DifferentialPrivacyClientSideFixedClipping(strategy, 0.0, CLIP, 3)
        outer.start(local_grid(compression_mod, mods.fixedclipping_mod), initial(), num_rounds=2)
        assert max(float(change.norm()) for change in strategy.changes) <= CLIP * (1 + 1e-6)
    kept = Compressed(inner, Fixed(STEPS, TopK(0.1)))
    outer = strategies.DifferentialPrivacyClientSideAdaptiveClipping(kept, 0.0, 3)
    with pytest.raises(InputError, match="beyond the clipping norm; give feedback=False"):
        outer.start(local_grid(compression_mod, mods.adaptiveclipping_mod), initial(), num_rounds=1)
