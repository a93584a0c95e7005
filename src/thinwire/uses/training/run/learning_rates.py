"""Peak learning rates by model, optimiser and recipe: what studies found to be best, and to be safe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LORA_RATE = 2e-4  # ten times that of full fine-tuning, as is usual for adapters
SGD_RATE = 0.05
UNTRAINED = ("gpt2-lab", "cnn-fashion")  # models that always begin with random weights
# By model and optimiser, then by recipe: the best of the rates that `make bench-rates` tried.
REPLICA_RATES: dict[tuple[Any, str], dict[str, float]] = {
    ("gpt2-lab", "adamw"): {"deco": 5e-4},  # the others' is the model's own
    ("cnn-fashion", "sgd"): {
        **dict.fromkeys(("allreduce", "topk", "diloco", "sparseloco", "thinwire", "auto"), 0.4),
        **dict.fromkeys(("allreduce-bf16", "streaming"), 0.4),  # not searched: as allreduce, as diloco
        "cocktail": 0.8,
        "deco": 0.2,
        "dd-ef-sgd": 0.2,
    },
}
# By model and optimiser, then by steps late: the largest rate that `make bench-safe-rates` found to be safe.
SAFE_RATES: dict[tuple[str, str], dict[int, float]] = {
    ("cnn-fashion", "sgd"): {0: 0.8, 1: 0.4, 2: 0.2, 4: 0.1},
    ("cnn-fashion", "sgd:momentum=0.9"): {0: 0.05, 1: 0.05},
    ("gpt2-lab", "adamw"): {0: 2e-3, 1: 2e-3, 2: 2e-3, 4: 2e-3},
}


def learning_rate(options: Mapping[str, Any]) -> float:
    """Return the peak learning rate of ``options``, a configuration as plain values, the default resolved."""
    given: float | None = options.get("lr")
    if given is not None:
        return given
    if (options.get("replicas") or 1) > 1 and (rate := _replica_rate(options)) is not None:
        return rate
    if str(options.get("optimizer")).startswith("sgd"):
        return SGD_RATE
    if options.get("lora"):
        return LORA_RATE
    return 1e-3 if options.get("init") == "random" or options.get("model") in UNTRAINED else 2e-5


def _replica_rate(options: Mapping[str, Any]) -> float | None:
    """Return the rate that was best for a model, an optimiser and a recipe, if it was searched."""
    model, optimizer = options.get("model"), str(options.get("optimizer")).partition(":")[0]
    recipe = str(options.get("replica_recipe")).partition(":")[0]
    return REPLICA_RATES.get((model, optimizer), {}).get(recipe)
