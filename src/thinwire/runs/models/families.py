"""What transformers says of a model: its parts in a row, and the names of its tensors in files.

What transformers does not promise to keep (the version is pinned for it) is named in this file alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.types import InputError, MissingExtra


@dataclass(frozen=True)
class Family:
    """Where a causal LM has its parts: ``<base>.<layers>`` and, in ``<base>`` too, what is before and after.

    ``before`` begins with the embedding of tokens. A part that a model does not have is None there.
    """

    name: str
    base: str
    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]

    def base_of(self, model: Any) -> Any:
        """Return the module in ``model`` that has the parts."""
        return model.get_submodule(self.base)

    def layers_of(self, model: Any) -> Any:
        """Return the layers of ``model``."""
        return getattr(self.base_of(model), self.layers)

    def parts(self, base: Any, names: Sequence[str]) -> dict[str, nn.Module]:
        """Return those of the parts ``names`` that ``base`` has."""
        return {name: part for name in names if (part := getattr(base, name, None)) is not None}

    def heads(self, model: Any) -> list[str]:
        """Return the names of what ``model`` has behind its base."""
        return [name for name, _ in model.named_children() if name != self.base.split(".", maxsplit=1)[0]]

    @property
    def embedding(self) -> str:
        """The name of the embedding's matrix."""
        return f"{self.base}.{self.before[0]}.weight"


# The families for which transformers has no plan.
TABLE = {
    "bloom": ("transformer", ("word_embeddings", "word_embeddings_layernorm"), "h", ("ln_f",)),
    "falcon": ("transformer", ("word_embeddings",), "h", ("ln_f",)),
    "gpt2": ("transformer", ("wte", "wpe", "drop"), "h", ("ln_f",)),
    "opt": (
        "model.decoder",
        ("embed_tokens", "embed_positions", "project_in"),
        "layers",
        ("final_layer_norm", "project_out"),
    ),
}


def family_of(config: Any) -> Family:
    """Return the family of a Hugging Face config by transformers' own plan for pipelines, else by ``TABLE``.

    ``InputError`` where neither has it. Whether stages of it are right ``trial.check_split`` says.
    """
    name = config.model_type
    if name in TABLE:
        return Family(name, *TABLE[name])
    plan = list(getattr(config, "base_model_pp_plan", None) or ())
    model = import_transformers().MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None or "layers" not in plan[1:]:
        raise InputError(
            f"models of type {name!r} cannot be split: transformers has no plan of their layers; "
            "use another causal language model"
        )
    at = plan.index("layers")
    return Family(name, model.base_model_prefix, tuple(plan[:at]), "layers", tuple(plan[at + 1 :]))


FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers


def windows_of(config: Any) -> dict[str, int | None]:
    """Return how many tokens each kind of layer looks back over, itself included; None: all of them.

    ``InputError`` for a kind of layer that keeps something else than keys and values of tokens.
    """
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = sorted(set(getattr(config, "layer_types", None) or [FULL if window is None else SLIDING]))
    other = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if other:
        raise InputError(
            f"models of type {config.model_type!r} cannot be served by stages: their layers of kind "
            f"{other[0]!r} keep more than keys and values; use another causal language model"
        )
    return {kind: window if kind == SLIDING else None for kind in kinds}


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
    with torch.device("meta"):
        return whole_model(config)


def whole_model(config: Any) -> Any:
    """Return the causal LM of ``config`` in float32, untied, with random weights."""
    untied = copy.deepcopy(config)
    untied.tie_word_embeddings = False
    if getattr(untied, "output_router_logits", False):
        untied.output_router_logits = False  # for a loss that stages do not have
    return import_transformers().AutoModelForCausalLM.from_config(untied, dtype=torch.float32)


def initialise_buffers(model: Any, module: nn.Module) -> None:
    """Give the buffers of ``module`` that no file has their values by the model's rule, in place."""
    parameters = list(module.parameters(recurse=False))
    for p in parameters:
        p._is_hf_initialized = True  # type: ignore[attr-defined]
    with torch.no_grad():
        model._init_weights(module)
    for p in parameters:
        del p._is_hf_initialized  # type: ignore[attr-defined]


class Conversion:
    """How the tensors in a model's files become its own, as ``from_pretrained`` does it.

    Some have other names there, and some are put together of several: the experts of a layer.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        found = get_model_conversion_mapping(model)
        self.model = model
        self.names: dict[str, Tensor] = model.state_dict()
        head = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
        self.twins = (family_of(model.config).embedding, f"{head}.weight")  # one matrix, where these are tied
        self._renamings = [t for t in found if isinstance(t, WeightRenaming)]
        self._converters = [t for t in found if isinstance(t, WeightConverter)]
        ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"}
        self._ignored = re.compile("|".join(f"({pattern})" for pattern in sorted(ignored)))

    def targets(self, name: str) -> tuple[list[str], str | None]:
        """Return the names in the model of what is made of one tensor in the files.

        And the pattern of what makes them, with others it may need; None where it stays as it is.
        """
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        new, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self.names)
        if pattern is None or (new not in self.names and name in self.names):
            return [new if new in self.names else name], None
        made = self._converter(pattern).target_patterns
        return [new.replace(made[0], other) for other in made], pattern

    def ignored(self, name: str) -> bool:
        """Return whether ``from_pretrained`` is silent about a tensor that the model has no place for."""
        return self._ignored.search(name) is not None

    def convert(self, target: str, parts: Sequence[tuple[str, str, Tensor]]) -> dict[str, Tensor]:
        """Return the model's tensors made of ``parts``: name in the files, pattern, tensor, in order."""
        converter = copy.deepcopy(self._converter(parts[0][1]))
        for name, pattern, tensor in parts:
            converter.add_tensor(target, name, pattern, tensor)
        made = converter.convert(target, model=self.model, config=self.model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}

    def _converter(self, pattern: str) -> Any:
        return next(c for c in self._converters if pattern in c.source_patterns)


def as_saved(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of ``model`` in the names and forms that its files have."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return found
