"""The model families that split by layer, and where each keeps its parts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.types import InputError, MissingExtra

LLAMA_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GPT2_LINEARS = ("c_attn", "c_proj", "c_fc")


@dataclass(frozen=True)
class Family:
    """Attribute names inside a causal LM: ``model.<base>.<layers>[i]``, ``model.<base>.<embed>``, ..."""

    name: str
    base: str
    layers: str
    embed: str
    norm: str
    position: str | None = None  # a learned position embedding, added on the first stage only
    drop: str | None = None  # dropout of the embeddings, on the first stage only
    linears: tuple[str, ...] = LLAMA_LINEARS  # those of attention and MLP, which adapters may adapt
    fan_in_fan_out: bool = False  # whether their weights are stored [in, out]


LLAMA = Family("llama", "model", "layers", "embed_tokens", "norm")
GPT2 = Family("gpt2", "transformer", "h", "wte", "ln_f", "wpe", "drop", GPT2_LINEARS, fan_in_fan_out=True)

# Only types whose forward pass does nothing between these parts: a scaled embedding (Gemma) or a multiplier
# inside the model (Granite) would be applied again at every stage.
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "olmo2": LLAMA,
    "smollm3": LLAMA,
    "gpt2": GPT2,
}


def family_of(config: Any) -> Family:
    """Return the family of a Hugging Face config; ``InputError`` if it cannot be split."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise InputError(
            f"models of type {config.model_type!r} cannot be split; use one of {', '.join(sorted(FAMILIES))}"
        )
    return family


def import_transformers() -> Any:
    """Return the transformers module, imported late because it takes seconds; ``MissingExtra`` without it."""
    try:
        import transformers
    except ImportError as e:
        raise MissingExtra("language models need transformers; run pip install 'thinwire[lm]'") from e
    return transformers


def meta_model(config: Any) -> Any:
    """Return the whole causal LM of ``config`` on the meta device: shapes and names, no memory for weights.

    The input embedding and the head are separate parameters here even where the config ties them.
    """
    transformers = import_transformers()
    untied = copy.deepcopy(config)
    untied.tie_word_embeddings = False
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            untied, dtype=torch.float32, attn_implementation="sdpa"
        )
