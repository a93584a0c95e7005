"""The configuration of a training run, from which options, TOML keys and records all follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.uses.training.run import checks
from thinwire.uses.training.run.fields import SAFE_RATES, TrainFields, learning_rate


@dataclass(frozen=True)
class TrainConfig(TrainFields):
    """Say everything a run needs; validated when made.

    Errors: ``InputError``, one sentence that names the option, the value and the remedy.

    >>> TrainConfig(recipe="fp32", steps=20).planned_steps
    20
    """

    def validate(self) -> None:
        """Raise ``InputError`` for the first option that does not go with the others."""
        checks.check(self)
        super().validate()

    @property
    def learning_rate(self) -> float:
        """Peak learning rate, the default resolved."""
        return learning_rate(self.to_dict())

    def warnings(self) -> list[str]:
        """Return what the user should know before the run, one sentence each."""
        notes = list(_of_delays(self))
        if self.lora and (self.init == "random" or self.model == "gpt2-lab"):
            notes.append(
                "--lora trains adapters alone, and here what they adapt stays at its random weights."
            )
        if self.auto_resume and not self.checkpoint_every:
            notes.append(
                "--auto-resume without --checkpoint-every writes nothing that a next run could go on from."
            )
        elif self.resume and not self.checkpoint_every:
            notes.append("resumed without --checkpoint-every, so this part of the run writes no checkpoint.")
        return notes


def _of_delays(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence where late gradients meet an optimiser or a rate that suffers from them."""
    if config.replicas == 1:
        return
    from thinwire.uses.training.replicas.exchange_methods import Gradients
    from thinwire.uses.training.replicas.recipes import EXCHANGE, parse_replica_recipe

    recipe = parse_replica_recipe(config.replica_recipe)
    method = recipe.schemes[EXCHANGE]
    if not isinstance(method, Gradients):
        return
    late = method.staleness
    if config.optimizer.startswith("adamw") and (late or recipe.policy is not None):
        yield (
            f"--replica-recipe {config.replica_recipe} applies gradients late, which costs AdamW much; "
            "recipes of differences, such as auto, do not."
        )
    rates = SAFE_RATES.get((config.model, config.optimizer), {})
    safe = min((rate for steps, rate in rates.items() if steps <= late), default=None)
    if safe is not None and config.learning_rate > safe and recipe.policy is None:
        yield (
            f"--lr {config.learning_rate:g} is above {safe:g}, the largest that was safe here with gradients "
            f"{late} steps late; lower it, or watch the loss."
        )
