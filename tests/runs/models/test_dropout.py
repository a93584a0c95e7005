"""Dropout by sample: the same masks at each visit, whatever the batch, and what that does to deltas."""

import pytest
import torch
from torch import nn

from thinwire.runs.models.dropout import SampleDropout, SampleIds, seed_dropout
from thinwire.runs.models.lora import add_adapters
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.models.split import build_stage
from thinwire.types import InputError, ThinwireError

transformers = pytest.importorskip("transformers")

P = 0.1


@pytest.fixture
def ids():
    return SampleIds()


def kept(drop, ids, samples, width=4096):
    ids.set(samples)
    return drop(torch.ones(len(samples), width)) > 0


def test_a_sample_has_the_same_mask_in_any_batch(ids):
    drop = SampleDropout(P, "layer", ids)
    first = kept(drop, ids, [3, 1, 2])
    assert torch.equal(kept(drop, ids, [2, 3]), first[[2, 0]])
    assert torch.equal(kept(drop, ids, [1]), first[[1]])


def test_samples_layers_and_seeds_have_masks_of_their_own(ids):
    first, second = kept(SampleDropout(P, "layer", ids), ids, [1, 2])
    other = kept(SampleDropout(P, "another layer", ids), ids, [1])[0]
    for a, b in ((first, second), (first, other)):
        both = (~a & ~b).float().mean().item()
        assert both == pytest.approx(P * P, abs=0.006)  # independent: 4096 values, 3.9 standard deviations


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_is_right_and_the_mean_is_kept(ids, p):
    ids.set(range(8))
    x = torch.ones(8, 20_000)
    y = SampleDropout(p, "layer", ids)(x)
    assert (y == 0).float().mean().item() == pytest.approx(p, abs=0.005)
    assert y[y > 0].unique().tolist() == pytest.approx([1 / (1 - p)])


def test_gradients_pass_where_values_do(ids):
    x = torch.randn(2, 64, requires_grad=True)
    ids.set([0, 1])
    y = SampleDropout(0.5, "layer", ids)(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.where(y == 0, 0.0, 2.0))


def test_evaluation_drops_nothing_and_draws_nothing(ids):
    x = torch.randn(5, 7)
    assert SampleDropout(P, "layer", ids).eval()(x) is x
    before = torch.get_rng_state()
    kept(SampleDropout(P, "layer", ids), ids, [1])
    assert torch.equal(before, torch.get_rng_state())


def test_rows_without_a_name_are_refused(ids):
    drop = SampleDropout(P, "layer", ids)
    with pytest.raises(ThinwireError, match="0 sample ids for 2 rows"):
        drop(torch.ones(2, 4))
    ids.set([1, 2, 3])
    with pytest.raises(ThinwireError, match="3 sample ids for 2 rows"):
        drop(torch.ones(2, 4))


# On stages


def source(dropout=P):
    config = transformers.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = dropout
    config.attn_pdrop = 0.0
    return ModelSource("tiny", "gpt2", config, None, None)


TOKENS = torch.arange(4 * 16).reshape(4, 16) * 7 % 300


def through(sizes, samples, rank=0):
    """Return the last hidden state but the head of a model cut into parts of ``sizes`` layers."""
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    cut = [range(s, s + size) for s, size in zip(starts, sizes, strict=True)]
    x = TOKENS[samples]
    for k in range(len(sizes)):
        stage = build_stage(source(), cut, k, seed=1)
        if rank:
            add_adapters(stage, rank, seed=1, dropout=P)
        seed_dropout(stage, 1).set(samples)
        x = stage(x)
    return x.detach()


def test_masks_do_not_depend_on_the_cut_or_the_batch():
    whole = through([4], [0, 1, 2, 3])
    assert torch.equal(through([4], [2, 0]), through([4], [2, 0]))
    torch.testing.assert_close(through([1, 3], [0, 1, 2, 3]), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(through([2, 1, 1], [3, 1]), whole[[3, 1]], rtol=0, atol=1e-5)


def test_inputs_of_adapters_are_dropped_by_sample_too():
    pytest.importorskip("peft")
    torch.testing.assert_close(through([4], [1, 3], rank=2), through([3, 1], [3, 1], rank=2).flip(0))
    stage = build_stage(source(0.0), [range(4)], 0)
    add_adapters(stage, 2, seed=0, dropout=P)
    seed_dropout(stage, 0)
    rates = [m.p for m in stage.modules() if isinstance(m, (nn.Dropout, SampleDropout)) and m.p]
    assert rates == [P] * 16 and not any(isinstance(m, nn.Dropout) and m.p for m in stage.modules())


def test_a_module_of_one_s_own_needs_a_place():
    def through(place):
        own = nn.Sequential(nn.Identity(), nn.Dropout(P))
        seed_dropout(own, 1, place).set([0, 1])
        return own(torch.ones(2, 4096))

    assert torch.equal(through("stage 0"), through("stage 0"))
    assert not torch.equal(through("stage 0"), through("stage 1"))
    with pytest.raises(InputError, match="its own place"):
        through("")


def test_no_dropout_leaves_a_stage_as_it_is():
    stage = build_stage(source(0.0), [range(4)], 0)
    seed_dropout(stage, 0)
    assert not any(isinstance(m, SampleDropout) for m in stage.modules())


def movement(by_sample):
    """Train half a model for two epochs; return the energy of a delta, of that of the activation."""
    torch.manual_seed(0)
    stage = build_stage(source(), [range(2), range(2, 4)], 0)
    ids = seed_dropout(stage, 0) if by_sample else SampleIds()
    optimiser = torch.optim.AdamW(stage.parameters(), 1e-4)
    seen, delta, whole = {}, 0.0, 0.0
    for order in ([0, 1], [2, 3], [3, 0], [1, 2]):
        ids.set(order)
        hidden = stage(TOKENS[order])
        hidden.square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        for sample, row in zip(order, hidden.detach(), strict=True):
            if sample in seen:
                delta += (row - seen[sample]).square().sum().item()
                whole += row.square().sum().item()
            seen[sample] = row
    return delta / whole


def test_masks_by_sample_keep_deltas_small():
    fresh, same = movement(False), movement(True)
    assert fresh > 0.1
    assert same < fresh / 20
