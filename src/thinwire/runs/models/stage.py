"""One stage of a causal LM: some of its layers, cut out of the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.runs.models.families import Family, family_of, initialise_buffers
from thinwire.types import ThinwireError, require


class _Absent(nn.Module):
    """Stands where another stage has the embedding, a norm, a head: passes a hidden state on."""

    def forward(self, x: Tensor, *_args: Any, **_options: Any) -> Tensor:
        return x if x.dim() == 3 else torch.zeros((), device=x.device)


class ModelStage(nn.Module):
    """Consecutive layers of a Hugging Face causal LM, with the embedding if first and norm and head if last.

    It is the model's own class with the other parts taken out, so its masks, rotary angles and attention are
    the library's. What that does to the embedding before the first layer (a factor, a norm, dropout) is for
    the first stage: later ones give their first layer what they received. A model with tied embeddings is
    untied where it is cut: the last stage has a copy of the matrix of its own as head, equal at the start.
    Keeping the two equal would cost an exchange of the matrix in each step (over 100 MB for 49,152 x 576).
    """

    def __init__(self, model: Any, family: Family, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self.family = family
        self.layers = layers
        self.first = first
        self.last = last
        self._received: Tensor | None = None
        if not first:
            after = family.parts(self.base, family.after).values()
            entry = next(iter((*family.layers_of(model), *after)))
            entry.register_forward_pre_hook(self._enter, with_kwargs=True)

    @property
    def base(self) -> Any:
        """The model without its head."""
        return self.family.base_of(self.model)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden state [B, L, D] float32, or on the last stage the logits [B, L, V].

        ``x``: token ids [B, L] int64 on the first stage, else the hidden state [B, L, D] float32.
        """
        self._received = None if self.first else x
        given = {"input_ids" if self.first else "inputs_embeds": x}
        if self.last:
            logits: Tensor = self.model(**given, use_cache=False).logits
            return logits
        hidden: Tensor = self.base(**given, use_cache=False).last_hidden_state
        return hidden.float()

    def extend(
        self,
        x: Tensor,
        positions: Tensor,
        masks: Mapping[str, Tensor],
        cache: Any,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Return what follows for more tokens of sequences whose earlier keys and values ``cache`` has.

        ``x``, result: as of ``forward``, in the model's dtype; ``positions`` [B, L]; ``masks`` [B, 1, L, S],
        added to attention scores, by kind of layer as of ``families.windows_of``. ``keep`` [K]: on the last
        stage, the places of which logits are returned.
        """
        self._received = None if self.first else x
        mask = next(iter(masks.values())) if len(masks) == 1 else dict(masks)
        given: dict[str, Any] = {"input_ids" if self.first else "inputs_embeds": x, "position_ids": positions}
        given |= {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        if self.last:
            logits: Tensor = self.model(**given, **({} if keep is None else {"logits_to_keep": keep})).logits
            return logits
        hidden: Tensor = self.base(**given).last_hidden_state
        return hidden

    def tell_hidden(self, told: Callable[[Tensor], object]) -> None:
        """Tell of the hidden states [B, L, D] behind the last layer and its norm, in each pass."""
        self.base.register_forward_hook(lambda _module, _args, out: told(out.last_hidden_state) and None)

    @property
    def head_rows(self) -> Tensor:
        """The rows [V, D] of the head, on the last stage."""
        rows: Tensor = self.model.get_output_embeddings().weight
        return rows

    def _enter(self, _module: nn.Module, args: Any, options: Any) -> tuple[Any, Any]:
        """Give the first layer what this stage received, whatever the model made of it on the way there."""
        x, self._received = self._received, None
        if args:
            return (x, *args[1:]), options
        return args, {**options, "hidden_states": x}

    def tensors(self) -> dict[str, Tensor]:
        """Return what files have of this stage, by name here: its parameters, and buffers like a router's."""
        return self.state_dict(keep_vars=True)

    def original_names(self) -> dict[str, str]:
        """Return name here -> name in the unsplit model of what files have of this stage."""
        return {name: self.original_name(name) for name in self.tensors()}

    def original_name(self, name: str) -> str:
        """Return the name in the unsplit model of a parameter or module here."""
        name, prefix = name.removeprefix("model."), f"{self.family.base}.{self.family.layers}."
        if not name.startswith(prefix):
            return name
        index, _, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{int(index) + self.layers.start}.{rest}"


def cut_out(model: Any, layers: range, first: bool, last: bool) -> ModelStage:
    """Return this stage's parts of a whole model, which is on the meta device and costs no memory.

    Cutting the built model and not building a short one keeps what depends on a layer's index (kind of
    attention, scale of GPT-2's residual weights).
    """
    family = family_of(model.config)
    base = family.base_of(model)
    setattr(base, family.layers, nn.ModuleList(family.layers_of(model)[i] for i in layers))
    base.config = _part(model.config, layers)
    absent = [(base, name) for name in family.parts(base, family.before) if not first]
    if not last:
        absent += [(base, name) for name in family.parts(base, family.after)]
        absent += [(model, name) for name in family.heads(model)]
    for owner, name in absent:
        setattr(owner, name, _Absent())
    return ModelStage(model, family, layers, first, last)


def _part(config: Any, layers: range) -> Any:
    """Return the config the cut model walks its layers by: it numbers them from 0."""
    part = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        part.layer_types = [kinds[i] for i in layers]
    part.num_hidden_layers = len(layers)
    return part


def finished(stage: ModelStage) -> ModelStage:
    """Fill the buffers that no file holds (rotary angles) by the model's rule; check that none is left."""
    for module in stage.modules():
        empty = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
        for name, buffer in empty.items():
            module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
        if empty:
            initialise_buffers(stage.model, module)
    left = [n for n, t in (*stage.named_parameters(), *stage.named_buffers()) if t.is_meta]
    require(not left, ThinwireError, f"no values for {left[:3]} of a {stage.family.name} stage")
    return stage.train()
