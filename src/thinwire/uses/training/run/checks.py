"""How the options of a training run must go together. Each refusal is one sentence: option, value, remedy."""

from __future__ import annotations

from thinwire.runs.options import flag
from thinwire.types import InputError
from thinwire.uses.training.run.fields import TrainFields

MAX_STAGES = 4
# Options that say something of texts and language models alone.
OF_TEXTS = ("cut", "init", "lora", "dropout", "text_field", "prompt_field")
MOST_MOMENTUM, LONG_DELAY = 0.5, 2  # more of both diverged; see docs/replicas.md
MEASURED = "measured"  # a cut by what each machine's layers take


def check(config: TrainFields) -> None:
    """Raise ``InputError`` for the first option that cannot work."""
    _images(config)
    _pipeline(config)
    _counts(config)
    _kept(config)
    _specs(config)


def _images(config: TrainFields) -> None:
    from thinwire.runs.data.images import FASHION  # here, as below
    from thinwire.runs.models.cnn import CNN

    if (config.model == CNN) != (config.data == FASHION):
        raise InputError(
            f"--model {config.model} cannot learn --data {config.data}; "
            f"--model {CNN} and --data {FASHION} go with each other alone"
        )
    if config.model != CNN:
        return
    if config.stages > 1:
        raise InputError(
            f"--stages is {config.stages}, but --model {CNN} is never cut; take --stages 1 and --replicas 2"
        )
    for name in OF_TEXTS:
        if (value := getattr(config, name)) != getattr(type(config), name):
            raise InputError(f"{flag(name)} {value} is for language models, not for {CNN}; leave it out")


def _pipeline(config: TrainFields) -> None:
    if not 1 <= config.stages <= MAX_STAGES:
        raise InputError(f"--stages is {config.stages}; a pipeline here has 1 to {MAX_STAGES} stages")
    if config.stages == config.replicas == 1:
        raise InputError("--stages 1 with one replica sends nothing; add --replicas 2, or take 2 stages")
    if config.schedule == "interleaved1f1b" and config.stages != 4:
        raise InputError(
            f"--schedule interleaved1f1b puts two stages on each of two processes; "
            f"set --stages 4 instead of {config.stages}"
        )
    if config.schedule != "gpipe" and config.microbatches < config.stages:
        raise InputError(
            f"--schedule {config.schedule} needs at least as many micro-batches as stages; "
            f"raise --microbatches from {config.microbatches} to {config.stages} or take --schedule gpipe"
        )
    if config.schedule == "interleaved1f1b" and config.microbatches % config.processes:
        raise InputError(
            f"--microbatches is {config.microbatches}; "
            f"--schedule interleaved1f1b needs a multiple of {config.processes}"
        )
    if config.cut is not None:
        _cut(config.cut, config.stages)


def _cut(cut: str, stages: int) -> None:
    if cut == MEASURED:
        return
    parts = [p.strip() for p in cut.split(",")]
    if not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise InputError(
            f"--cut {cut!r} is no list of layer counts; write one positive number a stage, as in 19,11"
        )
    if len(parts) != stages:
        raise InputError(f"--cut {cut} names {len(parts)} stages, but --stages is {stages}; make them agree")


def _counts(config: TrainFields) -> None:
    parts = config.replicas * config.microbatches
    if config.batch % parts:
        fits = -(-config.batch // parts) * parts
        of_each = f" on each of {config.replicas} replicas" if config.replicas > 1 else ""
        raise InputError(
            f"--batch {config.batch} does not split into {config.microbatches} equal micro-batches{of_each}; "
            f"take --batch {fits} or change --microbatches"
        )
    if config.steps is not None and config.epochs is not None and config.steps % config.epochs:
        below = max(1, config.steps // config.epochs) * config.epochs
        raise InputError(
            f"--steps {config.steps} does not split into {config.epochs} equal epochs; take --steps {below}"
        )
    if config.planned_steps is not None and config.warmup > config.planned_steps:
        raise InputError(
            f"--warmup is {config.warmup} steps, more than the run's {config.planned_steps}; "
            "lower it or raise --steps"
        )


def _kept(config: TrainFields) -> None:
    if config.until_loss is not None and not (config.eval_every and config.eval_samples):
        raise InputError(
            f"--until-loss {config.until_loss:g} looks at evaluations on the way; give --eval-every and "
            "--eval-samples"
        )
    if config.save_every and not (config.save_model or config.lora):
        raise InputError(
            f"--save-every is {config.save_every}, but --no-save-model leaves nothing to save; drop one"
        )


def _specs(config: TrainFields) -> None:
    # Imported here, because a reader of records needs neither.
    from thinwire.channels.disk import open_store
    from thinwire.uses.training.pipeline.recipes import parse_recipe
    from thinwire.uses.training.run.optimiser import sgd_momentum

    sgd_momentum(config.optimizer)
    _used(config)
    policy = parse_recipe(config.recipe).policy
    if config.replicas > 1:
        _replicas(config)
        if policy is not None and config.stages > 1:
            raise InputError(
                f"--recipe {config.recipe} plans for one pipeline; with --replicas take one that is fixed, "
                "such as thinwire"
            )
    open_store(config.references)


def _used(config: TrainFields) -> None:
    """Raise ``InputError`` for a recipe of what this run does not have."""
    if config.replicas == 1 and config.replica_recipe != TrainFields.replica_recipe:
        raise InputError(
            f"--replica-recipe {config.replica_recipe} is for replicas; give --replicas 2 or more"
        )
    if config.stages == 1 and config.recipe != TrainFields.recipe:
        raise InputError(
            f"--recipe {config.recipe} is for the boundaries of stages, and there is one stage; "
            "give --replica-recipe, or --stages 2"
        )
    if config.replica_recipe.partition(":")[0] == "powersgd":
        raise InputError(
            "powersgd is for thinwire.replicate in a script alone; take another --replica-recipe"
        )


def _replicas(config: TrainFields) -> None:
    """Raise ``InputError`` for a recipe whose delays do not fit the run or its optimiser."""
    from thinwire.uses.training.replicas.exchange_methods import Differences, Gradients
    from thinwire.uses.training.replicas.recipes import EXCHANGE, parse_replica_recipe
    from thinwire.uses.training.run.optimiser import sgd_momentum

    recipe = parse_replica_recipe(config.replica_recipe)
    method, steps = recipe.schemes[EXCHANGE], config.planned_steps
    every = method.every if isinstance(method, Differences) else 0
    late = method.staleness if isinstance(method, Gradients) else 0
    if steps is not None and max(every, late) > steps and recipe.policy is None:
        raise InputError(
            f"--replica-recipe {config.replica_recipe} waits for {max(every, late)} steps, and the run has "
            f"{steps}; give a smaller {'every' if every else 'staleness'}"
        )
    momentum = sgd_momentum(config.optimizer) or 0.0
    moves = isinstance(method, Gradients) and recipe.policy is not None
    if momentum > MOST_MOMENTUM and (late >= LONG_DELAY or moves):
        raise InputError(
            f"--optimizer {config.optimizer} diverges where gradients are applied {LONG_DELAY} steps late or "
            f"more, as --replica-recipe {config.replica_recipe} does; take sgd, or a recipe of differences"
        )
