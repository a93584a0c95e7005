"""Components of a model, from texts: how its caches vary, and how much the text that follows needs of them.

Each text is read twice: its beginning as a prefix, whose keys and values are sampled, and its end, by whose
loss the gradient of each of them is taken, for tokens that the model itself draws (so that the mean square
is Fisher's information, and not that of a mistake).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.codecs.caches.components import (
    BOTH,
    Basis,
    Components,
    LayerForm,
    fitted,
    weight_of,
)
from thinwire.codecs.caches.rotations import HALVES, NONE, PAIRS, Rotation
from thinwire.kv.host_caches import cache_classes
from thinwire.types import InputError, require

FOLLOWING = 256  # tokens of a text's end
FIRST = 4  # tokens that are kept exactly, and are like no others
LAST = 64  # tokens before those that follow: they matter most, and are kept exactly too
LEAST = 1e-3  # of the largest deviation: components below it are not kept
WIDE = 1200  # numbers of a row of one basis, at most, but for a layer that is wider


class TextSample(NamedTuple):
    """Keys and values of a text's prefix and their gradients, by layer: [heads, tokens, width] each."""

    held: list[tuple[Tensor, Tensor]]
    gradients: list[tuple[Tensor, Tensor]]


def calibrate(
    model: Any, texts: Iterable[Tensor], *, following: int = FOLLOWING, wide: int = WIDE
) -> Components:
    """Return the components of a causal model of transformers, from token ids [tokens] of texts.

    Once a model, on texts like those that it will read: 12 of 1,280 tokens do for a small one. Of each, the
    last ``following`` say how much the rest matters; it takes two passes forward and one back. Layers share
    components as long as their rows have at most ``wide`` numbers: more save bits and take time.
    Errors: ``InputError`` for no or too short texts, or a model without a cache of keys and values.
    """
    found = CacheCalibration(model, wide)
    for ids in texts:
        found.add(sampled(model, ids, following))
    return found.components()


def sampled(model: Any, ids: Tensor, following: int = FOLLOWING) -> TextSample:
    """Return what a model keeps of a text's prefix, and how the loss of what follows changes with it."""
    n = ids.numel() - following
    told = f"a text of {ids.numel()} tokens, expected more than {following + FIRST}"
    require(n > FIRST and following > 0, InputError, told)
    row = ids.reshape(1, -1).to(model.device)
    cache = cache_classes().DynamicCache()
    with torch.no_grad():
        model(row[:, :n], past_key_values=cache, use_cache=True)
    good = all(getattr(layer, "keys", None) is not None for layer in cache.layers) and cache.layers
    require(bool(good), InputError, f"{type(model).__name__} keeps no keys and values in all of its layers")
    leaves = [
        x.detach().clone().requires_grad_() for layer in cache.layers for x in (layer.keys, layer.values)
    ]
    again = cache_classes().DynamicCache()
    for i in range(0, len(leaves), 2):
        again.update(leaves[i], leaves[i + 1], i // 2)
    with torch.enable_grad():
        scores = model(row[:, n:], past_key_values=again, use_cache=True).logits[0].float()
        drawn = torch.multinomial(scores.detach().softmax(-1), 1, generator=_seeded(scores.device))[:, 0]
        loss = torch.nn.functional.cross_entropy(scores, drawn, reduction="sum")
        found = torch.autograd.grad(loss, leaves)
    held, gradients = ([x[0].detach().float().cpu() for x in own] for own in (leaves, found))
    return TextSample(_paired(held), _paired(gradients))


def fingerprint(model: Any) -> str:
    """Return 32 hex digits that tell a model from others: by its config and some of each weight's numbers."""
    known = {k: v for k, v in model.config.to_dict().items() if k not in ("transformers_version", "dtype")}
    found = blake2b(json.dumps(known, sort_keys=True, default=str).encode(), digest_size=16)
    for name, p in model.named_parameters():
        some = p.detach().flatten()[:8].float().cpu()
        found.update(f"{name}{tuple(p.shape)}{some.tolist()}".encode())
    return found.hexdigest()


def _seeded(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _paired(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _forms(model: Any, held: Sequence[tuple[Tensor, Tensor]]) -> list[LayerForm]:
    """Return what each layer keeps, the turn of its keys found by what it leaves."""
    kinds = cache_classes().DynamicCache(config=model.config).layers
    windows = [int(k.sliding_window) if getattr(k, "is_sliding", False) else 0 for k in kinds]
    types = list(getattr(_text_config(model), "layer_types", None) or ["full_attention"] * len(held))
    style = None
    forms = []
    for i, (keys, values) in enumerate(held):
        frequencies = _frequencies(model, types[i] if i < len(types) else "")
        style = style or (_style(held, frequencies) if frequencies else None)
        fits = frequencies and 2 * len(frequencies) <= keys.shape[-1] and style not in (None, NONE)
        turn = Rotation(str(style), frequencies) if fits else Rotation()
        window = windows[i] if i < len(windows) else 0
        forms.append(LayerForm(keys.shape[0], keys.shape[-1], values.shape[-1], window, turn))
    return forms


def _frequencies(model: Any, kind: str) -> tuple[float, ...]:
    """Return the frequencies by which a model turns keys of such a layer; none where it says none."""
    for name in (f"{kind}_inv_freq", "inv_freq"):
        for module in model.modules():
            found = getattr(module, name, None)
            if isinstance(found, Tensor) and found.dim() == 1:
                return tuple(found.double().tolist())
    return ()


def _style(held: Sequence[tuple[Tensor, Tensor]], frequencies: tuple[float, ...]) -> str:
    """Return the way of turning back after which keys lie in the fewest directions."""
    keys = [k for k, _ in held if 2 * len(frequencies) <= k.shape[-1]]
    if not keys:
        return NONE
    spread = {}
    for style in (NONE, HALVES, PAIRS):
        turn = Rotation(style, frequencies if style != NONE else ())
        spread[style] = sum(_spread(turn.turned(k, 0, back=True)) for k in keys)
    return min(spread, key=lambda s: spread[s])


def _spread(keys: Tensor) -> float:
    """Return the log of the volume that keys [heads, tokens, width] fill."""
    centred = (keys - keys.mean(1, keepdim=True)).double()
    values = torch.linalg.eigvalsh(centred.transpose(1, 2) @ centred / keys.shape[1])
    return float((values.clamp(min=0) + 1e-6 * values.amax(-1, keepdim=True) + 1e-12).log().sum())


class CacheCalibration:
    """Sums over texts of rows, of their products, and of those of gradients: as large for many as for one.

    Layers share components as in ``calibrate``.
    """

    def __init__(self, model: Any, wide: int = WIDE) -> None:
        self.model, self.wide, self.n = model, wide, 0
        self.forms: list[LayerForm] = []

    def _begin(self, sample: TextSample) -> None:
        self.forms = _forms(self.model, sample.held)
        self.plans = _plans(self.forms, self.wide)
        shapes = [(f.heads, w, w) for f in self.forms for w in (f.key, f.value)]
        self.information = [torch.zeros(s, dtype=torch.float64) for s in shapes]
        widths = [sum(self.forms[i].width(BOTH) for i in layers) for layers in self.plans]
        self.sums = [torch.zeros(w, dtype=torch.float64) for w in widths]
        self.products = [torch.zeros(w, w, dtype=torch.float64) for w in widths]

    def add(self, sample: TextSample) -> None:
        """Take what ``sampled`` found in a text."""
        if not self.forms:
            self._begin(sample)
        fits = [k.shape[-1] for k, _ in sample.held] == [f.key for f in self.forms]
        require(fits, InputError, "texts whose caches have different shapes")
        plain = [self._plain(i, pair) for i, pair in enumerate(sample.held)]
        for i, pair in enumerate(sample.gradients):
            for k, own in enumerate(self._plain(i, pair)):
                n = own.shape[1]
                start = max(0, n - self.forms[i].window) if self.forms[i].window else 0
                g = own[:, start : n - min(LAST, (n - start) // 4)]
                self.information[2 * i + k] += (g.transpose(1, 2) @ g).double() / g.shape[1]
        self.n += plain[0][0].shape[1]
        for j, layers in enumerate(self.plans):
            rows = torch.cat([x.transpose(0, 1).flatten(1) for i in layers for x in plain[i]], 1)
            self.sums[j] += rows.sum(0, dtype=torch.float64)
            self.products[j] += (rows.T @ rows).double()

    def _plain(self, layer: int, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys, turned back, and values, without the first tokens; gradients turn as their keys."""
        keys = self.forms[layer].rotation.turned(pair[0], 0, back=True)
        return keys[:, FIRST:], pair[1][:, FIRST:]

    def components(self) -> Components:
        """Return the components of all texts so far. Errors: ``InputError`` for none."""
        require(bool(self.forms), InputError, "no texts to calibrate on; give token ids of some")
        most = int(getattr(_text_config(self.model), "max_position_embeddings", 0) or 1 << 20)
        return Components(fingerprint(self.model), most, tuple(self.forms), tuple(self._bases()))

    def _bases(self) -> Iterator[Basis]:
        weights = [weight_of(g) for g in self.information]
        for layers, total, products in zip(self.plans, self.sums, self.products, strict=True):
            mean = total / self.n
            covariance = products / self.n - mean[:, None] * mean
            own = [weights[2 * i + k] for i in layers for k in (0, 1)]
            yield fitted(layers, BOTH, mean, covariance, own, LEAST)


def _plans(forms: Sequence[LayerForm], wide: int) -> list[tuple[int, ...]]:
    """Return which layers share components: some in a row, of one window."""
    each = max(1, wide // max(f.width(BOTH) for f in forms))
    found = list[tuple[int, ...]]()
    for start in range(0, len(forms), each):
        near = range(start, min(start + each, len(forms)))
        windows = dict.fromkeys(forms[i].window for i in near)
        found += [tuple(i for i in near if forms[i].window == window) for window in windows]
    return found
