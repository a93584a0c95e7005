"""Whether stages in a row are the model: tried on a small copy of it, before anything is started."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from thinwire.runs.models.families import family_of, meta_model, whole_model
from thinwire.runs.models.stage import ModelStage, cut_out, finished
from thinwire.runs.models.weight_loading import seed_of
from thinwire.seeding import seeded
from thinwire.types import InputError, require

LAYERS, HEADS, INNER, VOCAB, WINDOW = 8, 2, 16, 64, 4  # of the copy, at most
BATCH, SEQ = 2, 12
CLOSE = 1e-4  # of the largest logit; as a rule they are equal
INNERS = ("intermediate", "ffn_dim", "ffn_hidden", "n_inner")
WINDOWS = ("sliding_window", "attention_chunk_size")


def check_split(config: Any) -> None:
    """Raise ``InputError`` unless the stages of a small copy of the model give the logits of it whole.

    It has the kinds of layers of the first eight, narrow, with random weights.
    """
    family = family_of(config)
    wrong = f"models of type {family.name!r} cannot be split"
    try:
        with warnings.catch_warnings(), seeded(seed_of(0, "trial")):
            warnings.simplefilter("ignore")
            why = _difference(small(config))
    except InputError:
        raise
    except Exception as e:  # whatever the model's own code raises where a part of it is missing
        why = f"a small copy of it fails with {type(e).__name__} ({' '.join(str(e).split())[:120]})"
    require(why is None, InputError, f"{wrong}: {why}; use another model")


def _difference(config: Any) -> str | None:
    """Return how the stages of a model differ from it, None where they do not."""
    whole = randomised(whole_model(config))
    family = family_of(config)
    base = family.base_of(whole)
    parts = {*family.before, family.layers, *family.after}
    other = [
        n for n, part in base.named_children() if n not in parts and any(True for _ in part.parameters())
    ]
    if other:
        return f"its {other[0]} is beside the layers, and would be trained apart in each stage"
    n, shared = len(list(whole.parameters())), len(list(whole.named_parameters(remove_duplicate=False)))
    if n != shared:
        return "its layers share weights, which would be trained apart in each stage"
    ids = torch.randint(VOCAB, (BATCH, SEQ))
    with torch.no_grad():
        expected, found = whole(input_ids=ids, use_cache=False).logits, _in_stages(whole, config, ids)
    close = found.shape == expected.shape and bool(expected.isfinite().all())
    if not close or (found - expected).abs().max() > CLOSE * expected.abs().max():
        return "its stages in a row do not give the logits of the whole"
    return None


def _in_stages(whole: Any, config: Any, ids: Tensor) -> Tensor:
    """Return the logits of stages of 1, 2 and all other layers that have the weights of ``whole``."""
    x = ids
    for stage in stages_of(whole, config):
        x = stage(x)
        require(
            stage.last or x.shape == (*ids.shape, config.hidden_size),
            InputError,
            f"models of type {config.model_type!r} cannot be split: between layers is {list(x.shape)}; "
            "use another model",
        )
    return x


def stages_of(whole: Any, config: Any) -> Iterator[ModelStage]:
    """Yield stages of 1, 2 and all other layers that have the weights of ``whole``."""
    n, state = config.num_hidden_layers, whole.state_dict()
    for start, stop in pairwise(sorted({0, min(1, n), min(3, n), n})):
        stage = cut_out(meta_model(config), range(start, stop), start == 0, stop == n)
        own = {name: state[original] for name, original in stage.original_names().items()}
        stage.load_state_dict(own, strict=True, assign=True)
        yield finished(stage)


def randomised(model: Any) -> Any:
    """Give all weights values that show: norms and biases too, which start at 1 and 0."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * (0.3 if p.dim() < 2 else p.shape[-1] ** -0.5))
    return model.train()  # what is drawn at random in training would show


def small(config: Any) -> Any:
    """Return a config of the same kinds of layers, of which all that needs memory is small."""
    made = copy.deepcopy(config)
    n, heads = config.num_hidden_layers, config.num_attention_heads
    per = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    few = min(HEADS, heads)
    changed = {
        "num_attention_heads": few,
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), few if kv == heads else 1),
        **dict.fromkeys(("hidden_size", "word_embed_proj_dim"), per * few),
        "vocab_size": VOCAB,
        "pad_token_id": None,
    }
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == n:
            changed[name] = value[:LAYERS]
        elif isinstance(value, int) and any(part in name for part in INNERS):
            changed[name] = INNER
        elif isinstance(value, int) and name in WINDOWS:
            changed[name] = min(value, WINDOW)
    for name, value in (changed | {"num_hidden_layers": min(n, LAYERS)}).items():
        if hasattr(config, name):
            setattr(made, name, value)
    return made
