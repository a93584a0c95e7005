"""Small models of every family, whole and in stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from texts import write_text

from thinwire.runs.models import model_source as models
from thinwire.runs.models.cuts import LayerCosts, cut_layers
from thinwire.runs.models.model_source import ModelSource

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
SLIDING = {**LLAMA, "head_dim": 8, "sliding_window": 5, "layer_types": KINDS}
EXPERTS = {**LLAMA, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
PLAIN = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}


def write_llama(folder: Path, tokenizer: Any, words: int, **config: Any) -> Path:
    """Write a tiny Llama with its tokenizer, ``model/``, and a text of so many words; return ``folder``."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | config))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_text(folder / "text.txt", words)
    return folder


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
    "gemma": ("GemmaConfig", {**LLAMA, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**SLIDING, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma3_text": ("Gemma3TextConfig", {**SLIDING, "final_logit_softcapping": 3.0}),
    "phi3": ("Phi3Config", {**LLAMA, "sliding_window": 5}),
    "phi": ("PhiConfig", PLAIN),
    "granite": (
        "GraniteConfig",
        {**LLAMA, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "olmo3": ("Olmo3Config", SLIDING),
    "cohere": ("CohereConfig", {**LLAMA, "logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": ("Cohere2Config", {**SLIDING, "logit_scale": 0.5}),
    "starcoder2": ("Starcoder2Config", {**LLAMA, "sliding_window": 5}),
    "gpt_neox": ("GPTNeoXConfig", {**PLAIN, "use_parallel_residual": False}),
    "glm4": ("Glm4Config", {**LLAMA, "head_dim": 8}),
    "exaone4": ("Exaone4Config", SLIDING),
    "apertus": ("ApertusConfig", LLAMA),
    "mixtral": ("MixtralConfig", {**LLAMA, "num_local_experts": 4, "sliding_window": 5}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4, "mlp_only_layers": [1]}),
    "deepseek_v3": ("DeepseekV3Config", EXPERTS | LATENT),
    "gpt_oss": ("GptOssConfig", {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "opt": (
        "OPTConfig",
        {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    ),
    "falcon": ("FalconConfig", {**PLAIN, "alibi": True, "new_decoder_architecture": False}),
    "bloom": ("BloomConfig", {**PLAIN, "n_head": 4}),
}


def make_config(kind, tied=False):
    name, fields = CONFIGS[kind]
    # Unequal weights everywhere: a wide spread makes a misplaced tensor visible in the logits.
    config = getattr(transformers, name)(**fields, tie_word_embeddings=tied, initializer_range=0.2)
    for field in (*models.DROPOUTS, *models.ATTENTION_DROPOUTS):
        if hasattr(config, field):
            setattr(config, field, 0.0)
    return config


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
