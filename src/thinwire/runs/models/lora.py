"""Low-rank adapters on the linear layers of a stage, by peft: what is trained instead of all weights."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import Tensor, nn

from thinwire.runs.models.stage import ModelStage
from thinwire.runs.models.weight_loading import seed_of
from thinwire.seeding import seeded
from thinwire.types import MissingExtra

ADAPTER = "default"  # peft's name for the only one
SCALE = 2  # alpha / rank: the factor of B A x beside the frozen layer
PREFIX = "base_model.model."  # of names in peft's files


def require_peft() -> None:
    """Raise ``MissingExtra`` unless peft is installed; it is not imported (that takes seconds)."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtra("--lora needs peft; run pip install 'thinwire[lora]'")


def adapter_config(
    layers: nn.Module, config: Any, rank: int, dropout: float = 0.0, base: str | None = None
) -> Any:
    """Return peft's configuration: adapters on every linear layer of attention and MLP, alpha twice the rank.

    LoRA: Hu et al. 2021, arXiv 2106.09685; on all linear layers as in QLoRA, arXiv 2305.14314 [second-hand].
    ``base`` names the model that the adapters belong to. In models with experts only attention gets some:
    peft takes the names of their MLPs for those of the experts, which are no linear layers.
    """
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layers, with weights stored as [in, out]

    linears = {n: m for n, m in layers.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    if getattr(config, "num_experts_per_tok", None):
        linears = {name: m for name, m in linears.items() if "att" in name}
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=rank,
        lora_alpha=SCALE * rank,
        lora_dropout=dropout,
        target_modules=list(dict.fromkeys(name.rpartition(".")[2] for name in linears)),
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in linears.values()),
    )


def add_adapters(stage: ModelStage, rank: int, seed: int, dropout: float = 0.0) -> None:
    """Give every linear layer of the stage an adapter and freeze all else.

    An adapter adds nothing at first. Its values depend on ``seed`` and its name in the unsplit model alone,
    so they are the same for every cut. ``dropout`` is of the adapters' inputs.
    """
    from peft import inject_adapter_in_model

    config = adapter_config(stage.family.layers_of(stage.model), stage.model.config, rank, dropout)
    with seeded():
        inject_adapter_in_model(config, stage.model)
    for name, layer in _adapted(stage).items():
        with seeded(seed_of(seed, f"adapter {stage.original_name(name)}")):
            layer.reset_lora_parameters(ADAPTER, init_lora_weights=True)


def merged(stage: ModelStage) -> dict[str, Tensor]:
    """Return the stage's tensors under their original names, what adapters add included.

    The stage stays as it is. Without adapters these are its own.
    """
    layers = _adapted(stage)
    whole = {}
    for name, parameter in stage.tensors().items():
        if ".lora_" in name:
            continue
        bare, value = name.replace(".base_layer.", "."), parameter.detach()
        layer = layers.get(bare.removesuffix(".weight"))
        if layer is not None and bare.endswith(".weight"):
            value = value + layer.get_delta_weight(ADAPTER).detach()
        whole[stage.original_name(bare)] = value
    return whole


def adapters(stage: ModelStage) -> dict[str, Tensor]:
    """Return the adapters' tensors alone, under the names that peft's files have."""
    return {
        PREFIX + stage.original_name(name).replace(f".{ADAPTER}.", "."): parameter.detach()
        for name, parameter in stage.named_parameters()
        if ".lora_" in name
    }


def _adapted(stage: ModelStage) -> dict[str, Any]:
    """Return the layers that carry an adapter, by name here."""
    return {name: module for name, module in stage.named_modules() if hasattr(module, "lora_A")}
