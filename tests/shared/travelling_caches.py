"""Small models with components, and caches of theirs: made once for all tests that need them."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from tiny_models import VOCAB, make_config, transformers
from torch import Tensor

from thinwire import kv

SEEN, FOLLOWING = 50, 6


class Known(NamedTuple):
    """A model, its components, and the cache of a text."""

    model: Any
    components: Any
    past: Any

    def scores(self, past: Any) -> Tensor:
        """Return what the model says of a text that follows."""
        with torch.no_grad():
            found: Tensor = self.model(ids(FOLLOWING, 9)[None], past_key_values=past).logits
        return found


def ids(n: int, seed: int) -> Tensor:
    """Return token ids [n]."""
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


@cache
def made(kind: str) -> tuple[Any, Any]:
    """Return a tiny model of a family, and its components."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make_config(kind)).eval()
    return model, kv.calibrate(model, [ids(SEEN + FOLLOWING, seed) for seed in range(4)], following=FOLLOWING)


def known(kind: str, seen: int = SEEN, dtype: torch.dtype = torch.float32) -> Known:
    """Return a model with a cache that its tests may change."""
    model, components = made(kind)
    past = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids(seen, 5)[None], past_key_values=past)
    for layer in past.layers:
        layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    return Known(model, components, past)
