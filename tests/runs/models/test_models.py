"""Language models cut into stages: same logits, same weights, own tensors only, and back to one model."""

import json

import pytest
import torch
from tiny_models import (
    CONFIGS,
    IDS,
    even,
    make_config,
    make_source,
    run,
    save_unsplit,
    transformers,
    whole_logits,
)

from thinwire.runs.data.task import next_token_loss
from thinwire.runs.models.folder import finish_model, save_stage, shard_name
from thinwire.runs.models.model_source import resolve_model
from thinwire.runs.models.split import build_stage
from thinwire.types import InputError

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_stages_in_sequence_give_the_logits_of_the_whole(kind, tied, tmp_path):
    config = make_config(kind, tied)
    expected = whole_logits(save_unsplit(config, tmp_path), IDS)
    source = make_source(config, tmp_path)
    for n in (1, 3) if tied else (2, 4):
        cut = even(4, n)
        stages = [build_stage(source, cut, k).eval() for k in range(n)]
        torch.testing.assert_close(run(stages, IDS), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hidden_states_are_float32_under_autocast(kind):
    cut = even(4, 2)
    first, last = (build_stage(make_source(make_config(kind), None), cut, k) for k in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = first(IDS)
        logits = last(hidden)
    assert hidden.dtype == torch.float32
    assert not torch.equal(hidden, hidden.bfloat16().float())  # the residual stream was never rounded
    assert next_token_loss(logits, IDS).dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_random_weights_do_not_depend_on_the_cut(kind, tied):
    source = make_source(make_config(kind, tied), None)
    states = []
    for n in (1, 2, 4):
        state = {}
        for k in range(n):
            stage = build_stage(source, even(4, n), k, seed=5)
            names = stage.original_names()
            state.update({names[name]: p.detach() for name, p in stage.named_parameters()})
        states.append(state)
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        assert all(torch.equal(other[k], states[0][k]) for k in other)
    embed = next(p for k, p in states[0].items() if "embed_tokens" in k or "wte" in k)
    assert torch.equal(embed, states[0]["lm_head.weight"]) == tied
    again = build_stage(source, even(4, 1), 0, seed=6).model.lm_head.weight
    assert not torch.equal(again, states[0]["lm_head.weight"])


def test_random_weights_follow_the_models_rules():
    config = make_config("gpt2")
    stage = build_stage(make_source(config, None), even(4, 4), 2)
    attention = stage.base.h[0].attn
    assert attention.c_attn.weight.std().item() == pytest.approx(0.2, rel=0.1)
    assert attention.c_proj.weight.std().item() == pytest.approx(
        0.2 / 8**0.5, rel=0.1
    )  # 2 x 4 layers, not 2 x 1
    assert attention.c_attn.bias.abs().max() == 0 and stage.base.h[0].ln_1.weight.min() == 1


def test_building_a_stage_leaves_the_random_state_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    build_stage(make_source(make_config("llama"), None), even(4, 2), 0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_stage_opens_only_its_own_shard(kind, tmp_path, tiny_tokenizer):
    config = make_config(kind)
    source = make_source(config, None, tiny_tokenizer)
    cut = even(4, 4)
    for k in range(4):
        save_stage(build_stage(source, cut, k), tmp_path, k, 4)
    finish_model(tmp_path, source, 4)
    for k in (0, 1, 3):
        (tmp_path / shard_name(k, 4)).unlink()
    stage = build_stage(make_source(config, tmp_path), cut, 2)
    own = build_stage(source, cut, 2)
    for name, p in stage.named_parameters():
        assert torch.equal(p, own.get_parameter(name))
    assert sum(p.numel() for p in stage.parameters()) == sum(p.numel() for p in own.base.parameters())
    with pytest.raises(InputError, match="fetch the model again"):
        build_stage(make_source(config, tmp_path), cut, 1)


def test_old_gpt2_files_without_the_base_prefix_load(tmp_path):
    config = make_config("gpt2", tied=True)
    model = save_unsplit(config, tmp_path)
    bare = {k: v.clone() for k, v in model.transformer.state_dict().items()}
    from safetensors.torch import save_file

    save_file(bare, tmp_path / "model.safetensors")
    source = make_source(config, tmp_path)
    stages = [build_stage(source, even(4, 2), k) for k in range(2)]
    torch.testing.assert_close(run(stages, IDS), whole_logits(model, IDS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("there", ["both", "head alone"])
def test_a_head_in_the_files_counts_as_from_pretrained_has_it(kind, there, tmp_path):
    """The config says tied; the files have a head of its own, or that one alone."""
    from safetensors.torch import load_file, save_file

    config = make_config(kind, tied=True)
    save_unsplit(config, tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    embed = next(name for name in held if "embed_tokens" in name or "wte" in name)
    shared = held[embed] if there == "both" else held.pop(embed)
    save_file(held | {"lm_head.weight": 0.5 * shared}, tmp_path / "model.safetensors", {"format": "pt"})
    expected = whole_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), IDS)
    stages = [build_stage(make_source(config, tmp_path), even(4, 2), k).eval() for k in range(2)]
    torch.testing.assert_close(run(stages, IDS), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_saved_stages_load_with_from_pretrained(kind, tied, tmp_path, tiny_tokenizer):
    source = make_source(make_config(kind, tied), None, tiny_tokenizer)
    cut = even(4, 2)
    stages = [build_stage(source, cut, k) for k in range(2)]
    with torch.no_grad():
        for stage in stages:
            for p in stage.parameters():  # a step of training: copies of a tied matrix are no longer equal
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.05)
        stages[1].model.lm_head.weight.mul_(1.5)
    for k, stage in enumerate(stages):
        save_stage(stage, tmp_path, k, 2)
    finish_model(tmp_path, source, 2)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(whole_logits(model, IDS), run(stages, IDS), rtol=0, atol=1e-6)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert model.generation_config.pad_token_id == 2  # the config's own, and no file of an earlier model
    assert (tmp_path / "generation_config.json").is_file()
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("some words") == tiny_tokenizer.encode("some words")


def test_a_model_is_not_finished_without_all_its_shards(tmp_path, tiny_tokenizer):
    source = make_source(make_config("llama"), None, tiny_tokenizer)
    save_stage(build_stage(source, even(4, 2), 0), tmp_path, 0, 2)
    with pytest.raises(InputError, match="model-00002-of-00002"):
        finish_model(tmp_path, source, 2)


def test_saving_where_nothing_can_be_written_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    stage = build_stage(make_source(make_config("llama"), None), even(4, 4), 1)
    with pytest.raises(InputError, match="--out"):
        save_stage(stage, tmp_path / "file" / "model", 1, 4)


def test_gradients_reach_both_ends():
    source = make_source(make_config("gpt2"), None)
    first, last = (build_stage(source, even(4, 2), k) for k in range(2))
    hidden = first(IDS[:, :-1])
    received = hidden.detach().requires_grad_()
    next_token_loss(last(received), IDS[:, 1:]).backward()
    hidden.backward(received.grad)
    for stage in (first, last):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in stage.parameters())


# Names


@pytest.mark.parametrize("init", [None, "random"])
def test_the_vocabulary_that_other_programs_read_stays_with_the_model(init, tmp_path, tiny_tokenizer):
    base, out = tmp_path / "base", tmp_path / "out"
    save_unsplit(make_config("llama"), base)
    tiny_tokenizer.save_pretrained(base)
    (base / "tokenizer.model").write_bytes(b"of sentencepiece")
    source = resolve_model(str(base), init)
    save_stage(build_stage(source, even(4, 1), 0), out, 0, 1)
    finish_model(out, source, 1)
    assert (out / "tokenizer.model").read_bytes() == b"of sentencepiece"


def test_no_vocabulary_is_taken_from_the_folder_one_works_in(tmp_path, tiny_tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"of another model")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    source = make_source(make_config("llama"), None, tokenizer)
    save_stage(build_stage(source, even(4, 1), 0), tmp_path / "out", 0, 1)
    finish_model(tmp_path / "out", source, 1)
    assert not (tmp_path / "out" / "tokenizer.model").exists()
