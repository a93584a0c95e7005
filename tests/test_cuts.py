"""Where a model is cut into stages."""

import pytest

from thinwire.lab.cuts import LayerCosts, counted_costs, cut_layers, measured_costs, stage_costs
from thinwire.lab.models import ModelSource
from thinwire.lab.split import build_stage
from thinwire.types import InputError

transformers = pytest.importorskip("transformers")


def tiny():
    return transformers.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )


def test_default_cut_of_smollm2_gives_the_head_its_due():
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    assert [len(part) for part in cut_layers(counted_costs(config), 2)] == [19, 11]


def test_cut_is_the_best_of_all_cuts():
    costs = LayerCosts((3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0), head=6.0)
    best = max(stage_costs(costs, cut_layers(costs, 3)))
    every = [[range(a), range(a, b), range(b, 7)] for a in range(1, 6) for b in range(a + 1, 7)]
    assert best == min(max(stage_costs(costs, cut)) for cut in every)


def test_explicit_cut():
    costs = LayerCosts((1.0,) * 6)
    assert cut_layers(costs, 3, "1,2,3") == [range(1), range(1, 3), range(3, 6)]


@pytest.mark.parametrize(
    ("stages", "cuts", "words"),
    [
        (2, "4,3", "2 parts with 7 layers.*2 stages share 6"),
        (3, "3,3", "2 parts.*3 stages"),
        (2, "6,0", "at least one"),
        (2, "half", "19,11"),
        (7, None, "7 stages need 7 layers or more, the model has 6"),
        (0, None, "0 stages"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(stages, cuts, words):
    with pytest.raises(InputError, match=words):
        cut_layers(LayerCosts((1.0,) * 6), stages, cuts)


def test_a_cut_for_another_model_is_refused():
    source = ModelSource("tiny", "gpt2", tiny(), None, None)
    with pytest.raises(InputError, match="model of 4 layers"):
        build_stage(source, [range(3), range(3, 6)], 0)


def test_measured_costs_are_times_of_every_layer_and_the_head():
    costs = measured_costs(tiny(), batch=2, seq=16, repeats=1)
    assert len(costs.layers) == 4 and min(*costs.layers, costs.head) > 0
