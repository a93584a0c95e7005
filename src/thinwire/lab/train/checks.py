"""How the options of a training run must go together. Each refusal is one sentence: option, value, remedy."""

from __future__ import annotations

from thinwire.lab.train.fields import TrainFields
from thinwire.types import InputError

MAX_STAGES = 4
MEASURED = "measured"  # a cut by what each machine's layers take


def check(config: TrainFields) -> None:
    """Raise ``InputError`` for the first option that cannot work."""
    _pipeline(config)
    _counts(config)
    _kept(config)
    _specs(config)


def _pipeline(config: TrainFields) -> None:
    if not 2 <= config.stages <= MAX_STAGES:
        raise InputError(f"--stages is {config.stages}; a pipeline here has 2 to {MAX_STAGES} stages")
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
    if config.schedule == "interleaved1f1b" and config.microbatches % config.ranks:
        raise InputError(
            f"--microbatches is {config.microbatches}; "
            f"--schedule interleaved1f1b needs a multiple of {config.ranks}"
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
    if config.batch % config.microbatches:
        fits = -(-config.batch // config.microbatches) * config.microbatches
        raise InputError(
            f"--batch {config.batch} does not split into {config.microbatches} equal micro-batches; "
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
    if config.save_every and not (config.save_model or config.lora):
        raise InputError(
            f"--save-every is {config.save_every}, but --no-save-model leaves nothing to save; drop one"
        )


def _specs(config: TrainFields) -> None:
    # Imported here, because a reader of records needs neither.
    from thinwire.channels.disk import open_store
    from thinwire.recipes.pipeline import parse_recipe

    parse_recipe(config.recipe)
    open_store(config.references)
