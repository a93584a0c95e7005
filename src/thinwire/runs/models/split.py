"""Build one stage of a causal LM: its layers alone, loaded from files or random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from thinwire.runs.models.families import Conversion, meta_model
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.models.stage import ModelStage, cut_out, finished
from thinwire.runs.models.weight_loading import ConvertedWeights, WeightFolder, initialise
from thinwire.types import InputError, require


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
    model = meta_model(source.config)
    conversion = Conversion(model) if source.weights else None  # of the whole model, before it is cut
    stage = cut_out(model, cut[index], first=index == 0, last=index == len(cut) - 1)
    if conversion is None or source.weights is None:
        _randomise(stage, source.config, seed)
    else:
        _load(stage, ConvertedWeights(WeightFolder(source.weights), conversion, source.config))
    return finished(stage)


def tie(stage: ModelStage) -> None:
    """Make head and embedding one matrix again, in a stage that has both, as the whole model had them."""
    stage.model.get_output_embeddings().weight = stage.model.get_input_embeddings().weight


def probe(config: Any, layers: range, last: bool, first: bool = False) -> ModelStage:
    """Return a stage of these layers with random weights, to measure it; only the first has the embedding."""
    stage = cut_out(meta_model(config), layers, first, last)
    _randomise(stage, config, seed=0)
    return finished(stage)


def _load(stage: ModelStage, stored: ConvertedWeights) -> None:
    shapes, state = stage.tensors(), {}
    for name, original in stage.original_names().items():
        tensor = state[name] = stored.read(original)
        require(
            tensor.shape == shapes[name].shape,
            InputError,
            f"tensor {original!r} in {stored.weights.folder} is {list(tensor.shape)}, the config says "
            f"{list(shapes[name].shape)}; fetch the model again",
        )
    stage.load_state_dict(state, strict=True, assign=True)
    stage.requires_grad_(True)


def _randomise(stage: ModelStage, config: Any, seed: int) -> None:
    model, base, family = stage.model, stage.base, stage.family
    before, after = family.parts(base, family.before), family.parts(base, family.after)
    if stage.first:
        for part, label in zip(before.values(), ("embed", "position", *family.before[2:]), strict=False):
            initialise(model, part, seed, label)
    for i, layer in zip(stage.layers, family.layers_of(model), strict=True):
        initialise(model, layer, seed, f"layer {i}")
    if stage.last:
        for part, label in zip(after.values(), ("norm", *family.after[1:]), strict=False):
            initialise(model, part, seed, label)
        for name in family.heads(model):
            initialise(model, getattr(model, name), seed, "head")
        if config.tie_word_embeddings:
            twin = getattr(family.base_of(meta_model(config)), family.before[0])
            initialise(model, twin, seed, "embed")
            model.get_output_embeddings().weight = nn.Parameter(twin.weight.detach())
