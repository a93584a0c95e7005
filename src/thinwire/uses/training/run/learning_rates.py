"""Peak learning rates and warm-up by model, optimiser and recipe: what studies found best, and safe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LORA_RATE = 2e-4  # ten times that of full fine-tuning, as is usual for adapters
SGD_RATE = 0.05
UNTRAINED = ("gpt2-lab", "cnn-fashion")  # models that always begin with random weights
# Steps, where replicas begin with random weights under AdamW. Without, the held-out loss of `gpt2-lab` with
# `allreduce` rises by 0.6 to 2.4 from one second step to the next, and with 5 by 0.03 at most; with 10 one of
# three seeds rises by 0.2.
WARMUP = 5
# By model and optimiser, then by recipe: the best of the rates that `make bench-rates` tried.
REPLICA_RATES: dict[tuple[Any, str], dict[str, float]] = {
    ("gpt2-lab", "adamw"): {"sparseloco": 2e-3, "streaming": 2e-3},  # the others' is the model's own
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
    return 1e-3 if _is_untrained(options) else 2e-5


def warmup_steps(options: Mapping[str, Any]) -> int:
    """Return the steps of warm-up of ``options``, as above: the same for every recipe.

    >>> warmup_steps({"model": "gpt2-lab", "optimizer": "adamw", "replicas": 2})
    5
    """
    given: int | None = options.get("warmup")
    if given is not None:
        return given
    begins = (options.get("replicas") or 1) > 1 and options.get("optimizer") == "adamw"
    return WARMUP if begins and not options.get("lora") and _is_untrained(options) else 0


def _is_untrained(options: Mapping[str, Any]) -> bool:
    return options.get("init") == "random" or options.get("model") in UNTRAINED


def _replica_rate(options: Mapping[str, Any]) -> float | None:
    """Return the rate that was best for a model, an optimiser and a recipe, if it was searched."""
    model, optimizer = options.get("model"), str(options.get("optimizer")).partition(":")[0]
    recipe = str(options.get("replica_recipe")).partition(":")[0]
    return REPLICA_RATES.get((model, optimizer), {}).get(recipe)
