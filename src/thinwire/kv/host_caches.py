"""Caches of transformers: what their layers keep, and caches made of that again.

Known are ``DynamicCache`` and its layers, those of sliding windows among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from thinwire.codecs.caches.components import LayerForm
from thinwire.kv.cache_stream import ArrivedLayer, Kept
from thinwire.types import InputError, MissingExtra, PayloadError, require

WHOLE, SLIDING = "DynamicLayer", "DynamicSlidingWindowLayer"


def layers_of(cache: Any) -> tuple[list[Kept], int]:
    """Return what the layers of a cache keep of its one text, and of how many tokens it has seen.

    Errors: ``InputError`` for a cache of another class, of several texts or of none.
    """
    layers: Any = getattr(cache, "layers", None)
    named = type(cache).__name__
    known = "DynamicCache" in {c.__name__ for c in type(cache).__mro__} and layers is not None
    require(known, InputError, f"past_key_values is a {named}; give a DynamicCache of transformers")
    require(bool(layers), InputError, "past_key_values holds no layers yet; run the model on a text first")
    waiting = getattr(cache, "arrived", len(layers)) < len(layers)
    require(not waiting, InputError, "layers of past_key_values are still to come; run the model on it first")
    found = [_kept(layer, i) for i, layer in enumerate(layers)]
    return found, max(int(layer.get_seq_length()) for layer in layers)


def _kept(layer: Any, number: int) -> Kept:
    named = type(layer).__name__
    told = f"layer {number} of past_key_values is a {named}, expected one of {WHOLE}, {SLIDING}"
    require(named in (WHOLE, SLIDING), InputError, told)
    full = layer.is_initialized and isinstance(layer.keys, torch.Tensor) and layer.keys.dim() == 4
    require(full, InputError, f"layer {number} of past_key_values is empty; run the model on a text first")
    texts = layer.keys.shape[0]
    require(texts == 1, InputError, f"past_key_values holds {texts} texts; pack each by itself")
    return Kept(layer.keys[0].detach().cpu(), layer.values[0].detach().cpu())


def cache_of(
    arrivals: Iterator[ArrivedLayer], seen: int, forms: Sequence[LayerForm], device: Any = "cpu"
) -> Any:
    """Return a ``DynamicCache`` of layers, as if the model had seen ``seen`` tokens."""
    cache = cache_classes().DynamicCache()
    cache.layers.extend(_layer(kept, seen, forms[number], device) for number, kept in arrivals)
    return cache


def arriving_cache(arrivals: Iterator[ArrivedLayer], about: Arriving) -> Any:
    """Return a ``DynamicCache`` whose layers come when the model asks for them, one behind the other.

    So a model computes its first layers while the bytes of the others are on their way. ``arrivals`` are
    read by whoever runs the model; what goes wrong with them is raised there. Until then a layer has the
    right shape and no content.
    """
    cache = _arriving_class()()
    cache.arrivals, cache.about = arrivals, about
    for kept, form in zip(about.kept, about.forms, strict=True):
        widths = form.key, form.value
        empty = [torch.zeros(()).to(about.dtype).expand(form.heads, kept, width) for width in widths]
        cache.layers.append(_layer(Kept(*empty), about.seen, form, about.device))
    return cache


class Arriving(NamedTuple):
    """What is known of a cache before its layers come."""

    seen: int
    kept: tuple[int, ...]
    dtype: torch.dtype
    forms: Sequence[LayerForm]
    device: Any = "cpu"


@lru_cache(maxsize=1)
def _arriving_class() -> Any:
    base: Any = cache_classes().DynamicCache

    class ArrivingCache(base):  # known when transformers is imported
        """A cache whose layers come while the model runs."""

        arrived = 0
        arrivals: Iterator[ArrivedLayer]
        about: Arriving

        def update(
            self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            while self.arrived <= layer_idx < len(self.about.forms):
                self._take()
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

        def _take(self) -> None:
            number, about = self.arrived, self.about
            layer, kept = next(self.arrivals, (-1, None))
            if kept is None or layer != number:
                raise PayloadError(f"a packed cache ended before layer {number} came: it was cut")
            self.layers[number] = _layer(kept, about.seen, about.forms[number], about.device)
            self.arrived += 1

    return ArrivingCache


def _layer(kept: Kept, seen: int, form: LayerForm, device: Any) -> Any:
    classes = cache_classes()
    layer = classes.DynamicSlidingWindowLayer(form.window) if form.window else classes.DynamicLayer()
    layer.update(*(x[None].to(device) for x in kept))
    if form.window:
        layer.cumulative_length = seen
    return layer


def cache_classes() -> Any:
    """Return the module of transformers with the classes of caches. Errors: ``MissingExtra``."""
    try:
        from transformers import cache_utils
    except ImportError as e:
        raise MissingExtra("caches of transformers need it; pip install 'thinwire[lm]'") from e
    return cache_utils
