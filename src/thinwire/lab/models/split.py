"""One stage of a causal LM: some of its layers, loaded alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.lab.models.families import Family, family_of, meta_model
from thinwire.lab.models.source import ModelSource
from thinwire.lab.models.weights import Weights, initialise
from thinwire.types import InputError, ThinwireError, require

HEAD = "lm_head.weight"


class _NoPosition(nn.Module):
    """Stands where a later stage would add the position embedding again: adds nothing."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


class ModelStage(nn.Module):
    """Consecutive layers of a Hugging Face causal LM, with the embedding if first and norm and head if last.

    Built on the model's own class, so its masks, rotary angles and attention are the library's. A model with
    tied embeddings is untied: the last stage has a copy of the matrix of its own as head, equal at the start.
    Keeping the two equal would cost an exchange of the matrix in each step (over 100 MB for 49,152 x 576).
    """

    def __init__(self, model: Any, family: Family, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self.family = family
        self.layers = layers
        self.first = first
        self.last = last

    @property
    def base(self) -> Any:
        """The model without its head."""
        return getattr(self.model, self.family.base)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden state [B, L, D] float32, or on the last stage the logits [B, L, V].

        ``x``: token ids [B, L] int64 on the first stage, else the hidden state [B, L, D] float32.
        """
        if self.first:
            x = getattr(self.base, self.family.embed)(x)
        if self.last:
            logits: Tensor = self.model(inputs_embeds=x, use_cache=False).logits
            return logits
        hidden: Tensor = self.base(inputs_embeds=x, use_cache=False).last_hidden_state
        return hidden.float()

    def original_names(self) -> dict[str, str]:
        """Return parameter name here -> name in the unsplit model."""
        return {name: self.original_name(name) for name, _ in self.named_parameters()}

    def original_name(self, name: str) -> str:
        """Return the name in the unsplit model of a parameter or module here."""
        name, prefix = name.removeprefix("model."), f"{self.family.base}.{self.family.layers}."
        if not name.startswith(prefix):
            return name
        index, _, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{int(index) + self.layers.start}.{rest}"


def build_stage(source: ModelSource, cut: Sequence[range], index: int, seed: int = 0) -> ModelStage:
    """Return stage ``index`` of ``cut`` with weights from ``source.weights``, or random ones from ``seed``.

    Only this stage's tensors are ever in memory. Random weights are the same for every cut. The stage is in
    training mode. ``InputError`` if the cut does not fit the model or the weights lack a tensor.
    """
    n = source.config.num_hidden_layers
    require(
        0 <= index < len(cut) and [i for part in cut for i in part] == list(range(n)),
        InputError,
        f"stage {index} of cut {[len(part) for part in cut]} does not fit a model of {n} layers",
    )
    stage = _skeleton(source.config, cut[index], first=index == 0, last=index == len(cut) - 1)
    if source.weights is None:
        _randomise(stage, source.config, seed)
    else:
        _load(stage, Weights(source.weights), bool(source.config.tie_word_embeddings))
    return _finished(stage)


def probe(config: Any, layers: range, last: bool, first: bool = False) -> ModelStage:
    """Return a stage of these layers with random weights, to measure it; only the first has the embedding."""
    stage = _skeleton(config, layers, first, last)
    _randomise(stage, config, seed=0)
    return _finished(stage)


def _skeleton(config: Any, layers: range, first: bool, last: bool) -> ModelStage:
    """Build the whole model on the meta device, which costs no memory, and keep this stage's parts.

    Cutting the built model and not building a short one keeps what depends on a layer's index (kind of
    attention, scale of GPT-2's residual weights).
    """
    family = family_of(config)
    model = meta_model(config)
    base = getattr(model, family.base)
    setattr(base, family.layers, nn.ModuleList(getattr(base, family.layers)[i] for i in layers))
    base.config = _part(model.config, layers)
    if not first:
        setattr(base, family.embed, nn.Identity())
        if family.position:
            setattr(base, family.position, _NoPosition())
        if family.drop:
            setattr(base, family.drop, nn.Identity())
    if not last:
        setattr(base, family.norm, nn.Identity())
        model.lm_head = nn.Identity()
    return ModelStage(model, family, layers, first, last)


def _part(config: Any, layers: range) -> Any:
    """Return the config the cut model walks its layers by: it numbers them from 0."""
    part = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        part.layer_types = [kinds[i] for i in layers]
    part.num_hidden_layers = len(layers)
    return part


def _load(stage: ModelStage, weights: Weights, tied: bool) -> None:
    family = stage.family
    state: dict[str, Tensor] = {}
    shapes = dict(stage.named_parameters())
    for name, original in stage.original_names().items():
        stored = _stored_name(original, family, weights, tied)
        tensor = weights.read(stored)
        require(
            tensor.shape == shapes[name].shape,
            InputError,
            f"tensor {stored!r} in {weights.folder} is {list(tensor.shape)}, the config says "
            f"{list(shapes[name].shape)}; fetch the model again",
        )
        state[name] = tensor
    stage.load_state_dict(state, strict=True, assign=True)
    stage.requires_grad_(True)


def _stored_name(name: str, family: Family, weights: Weights, tied: bool) -> str:
    """Return the name in the files: a tied head is the embedding, and old GPT-2 files lack the base.

    Where the files have both, whatever the config says, each is its own, as for ``from_pretrained``.
    """
    embed = f"{family.base}.{family.embed}.weight"
    both = {embed, HEAD}
    known = [name, *(both - {name} if tied and name in both else ())]
    found = (n for k in known for n in (k, k.removeprefix(f"{family.base}.")) if n in weights)
    return next(found, name)


def _randomise(stage: ModelStage, config: Any, seed: int) -> None:
    model, base, family = stage.model, stage.base, stage.family
    if stage.first:
        initialise(model, getattr(base, family.embed), seed, "embed")
        if family.position:
            initialise(model, getattr(base, family.position), seed, "position")
    for i, layer in zip(stage.layers, getattr(base, family.layers), strict=True):
        initialise(model, layer, seed, f"layer {i}")
    if stage.last:
        initialise(model, getattr(base, family.norm), seed, "norm")
        if config.tie_word_embeddings:
            twin = getattr(getattr(meta_model(config), family.base), family.embed)
            initialise(model, twin, seed, "embed")
            model.lm_head.weight = nn.Parameter(twin.weight.detach())
        else:
            initialise(model, model.lm_head, seed, "head")


def _finished(stage: ModelStage) -> ModelStage:
    """Fill the buffers that no file holds (rotary angles) by the model's rule; check that none is left."""
    for module in stage.modules():
        empty = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
        for name, buffer in empty.items():
            module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
        if empty:
            with torch.no_grad():
                stage.model._init_weights(module)
    left = [n for n, t in (*stage.named_parameters(), *stage.named_buffers()) if t.is_meta]
    require(not left, ThinwireError, f"no values for {left[:3]} of a {stage.family.name} stage")
    return stage.train()
