"""Whether stages that keep a cache say what the whole model says: tried on a small copy of it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from thinwire.runs.models.families import whole_model, windows_of
from thinwire.runs.models.trial import CLOSE, VOCAB, randomised, small, stages_of
from thinwire.runs.models.weight_loading import seed_of
from thinwire.seeding import seeded
from thinwire.types import InputError, require
from thinwire.uses.serving.row_pool import StageCache, TextRows, TextSegment

ROOM = 20  # rows of each of two texts
ONE, OTHER = 1, 2  # texts
# Passes of both: of whom, from which position on, how many tokens.
PASSES = (((ONE, 0, 5),), ((ONE, 5, 4), (OTHER, 0, 6)), ((ONE, 9, 1), (ONE, 10, 2), (OTHER, 6, 3)))


def check_serving(config: Any) -> None:
    """Raise ``InputError`` unless a small copy of the model says the same by stages, text by text."""
    wrong = f"models of type {config.model_type!r} cannot be served by stages"
    windows_of(config)
    try:
        with warnings.catch_warnings(), seeded(seed_of(0, "serving")), torch.inference_mode():
            warnings.simplefilter("ignore")
            good = _is_same(small(config))
    except InputError:
        raise
    except Exception as e:  # whatever the model's own code raises where its cache is another
        why = f"a small copy of it fails with {type(e).__name__} ({' '.join(str(e).split())[:120]})"
        raise InputError(f"{wrong}: {why}; use another model") from e
    require(good, InputError, f"{wrong}: a small copy of it says something else; use another model")


def _is_same(config: Any) -> bool:
    model = randomised(whole_model(config)).eval()
    texts = {ONE: torch.randint(VOCAB, (1, 12)), OTHER: torch.randint(VOCAB, (1, 9))}
    found = _by_stages(model, config, texts)
    for text, tokens in texts.items():
        expected = model(input_ids=tokens, use_cache=False).logits
        if not (found[text] - expected).abs().max() <= CLOSE * expected.abs().max():
            return False
    return True


def _by_stages(model: Any, config: Any, texts: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the logits of both texts, by stages that compute them in passes."""
    stages = [
        (s.eval(), StageCache(2 * ROOM, windows_of(s.base.config), torch.device("cpu")))
        for s in stages_of(model, config)
    ]
    found: dict[int, list[Tensor]] = {text: [] for text in texts}
    for said in PASSES:
        segments = [
            TextSegment(text, TextRows((text - ONE) * ROOM, ROOM), at, many) for text, at, many in said
        ]
        x = torch.cat([texts[s.request][:, s.at : s.at + s.many] for s in segments], 1)
        for stage, cache in stages:
            masks = cache.begin(segments, torch.float32)
            x = stage.extend(x, masks.pop("positions"), masks, cache)
        for s, own in zip(segments, x.split([s.many for s in segments], 1), strict=True):
            found[s.request].append(own)
    return {text: torch.cat(parts, 1) for text, parts in found.items()}
