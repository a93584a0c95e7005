"""Whether a model tells the next token of a text by those before it alone: else it has no perplexity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.runs.models.families import import_transformers
from thinwire.types import InputError, require

FEW = 16  # tokens that are read
NEAR = 1e-5  # of the largest logit: rounding differs with the other tokens of a batch of experts
REMEDY = "--calibrate is for those alone: pack it without"


def check_causal(folder: Path, name: str) -> None:
    """Raise ``InputError`` where a config names a model of another kind: an encoder, a classifier, say.

    ``AutoModelForCausalLM`` would load many of them, with a head that they never learned or of another use.
    """
    transformers = import_transformers()
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    own = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    named = [str(said) for said in (config.architectures or ())]
    known = {c.__name__ for c in (own if isinstance(own, tuple) else (own,)) if c is not None}
    # Of what reads pictures or sounds too, a text says nothing of many weights.
    causal = bool(known) and not config.is_encoder_decoder and config.get_text_config() is config
    causal = causal and all(_is_one_of(said, known, transformers) for said in named)
    what = named[0] if named else "model"
    told = f"{name} is a {what} of type {config.model_type!r}, and no causal language model of text alone"
    require(causal, InputError, f"{told}; {REMEDY}")


def _is_one_of(said: str, known: set[str], transformers: Any) -> bool:
    """Say whether a class is one of those known, or an older name of one."""
    alike = said.casefold() in {one.casefold() for one in known}
    return alike or (said.endswith("ForCausalLM") and not hasattr(transformers, said))


@torch.no_grad()
def check_looks_back(net: Any, window: Tensor, name: str) -> None:
    """Raise ``InputError`` where what a model says of tokens [tokens] depends on later ones."""
    ids, other = window[:FEW], window[:FEW].clone()
    half = len(ids) // 2
    other[half:] = (ids[half:] + 1) % net.get_input_embeddings().num_embeddings
    said, again = (net(input_ids=x[None], use_cache=False).logits[0, :half].float() for x in (ids, other))
    off = (said - again).abs().max() if half else torch.zeros(())
    back = bool(off <= NEAR * said.abs().max()) if said.isfinite().all() else True
    told = f"{name} is no causal language model: what it says of a word depends on words behind it"
    require(back, InputError, f"{told}; {REMEDY}")
