"""Small models of every family, whole and in stages."""

import pytest
import torch

from thinwire.lab.models import source as models
from thinwire.lab.models.cuts import LayerCosts, cut_layers
from thinwire.lab.models.source import ModelSource

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


def make_config(kind, tied=False):
    name, fields = CONFIGS[kind]
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if kind == "gpt2" else {}
    # Unequal weights everywhere: a wide spread makes a misplaced tensor visible in the logits.
    return getattr(transformers, name)(
        **fields, **no_dropout, tie_word_embeddings=tied, initializer_range=0.2
    )


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
