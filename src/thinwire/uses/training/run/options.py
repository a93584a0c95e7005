"""The options of a training run: help and limits of each, what --resume may change, how they go together.

Options of the command line, TOML keys and records all follow from ``TrainConfig``. A refusal is one sentence:
option, value, remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.runs import options as shared
from thinwire.runs.options import COUNTED, flag, option
from thinwire.runs.ranks.run_config import JOB, MACHINES, OUTPUT, RunConfig
from thinwire.types import InputError
from thinwire.uses.training.run.learning_rates import SAFE_RATES, WARMUP, learning_rate, warmup_steps

if TYPE_CHECKING:
    from thinwire.uses.training.replicas.exchange_methods import Method
    from thinwire.uses.training.replicas.recipes import ReplicaRecipe

DEFAULT_STEPS = 100
REPLICAS = "Replicas"
PIPELINE = "Pipeline"
OPTIMISATION = "Optimisation"
EVALUATION = "Evaluation and checkpoints"
MAX_STAGES = 4
# Options that say something of texts and language models alone.
OF_TEXTS = ("cut", "init", "lora", "dropout", "text_field", "prompt_field")
MOST_MOMENTUM, LONG_DELAY = 0.5, 2  # more of both diverged; see docs/replicas.md
MEASURED = "measured"  # a cut by what each machine's layers take


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """Say everything a run needs; validated when made.

    Errors: ``InputError``, one sentence that names the option, the value and the remedy.

    >>> TrainConfig(recipe="fp32", steps=20).planned_steps
    20
    """

    recipe: str = option(
        "thinwire",
        JOB,
        "What crosses stage boundaries: a name from `thinwire recipes`, parameters as in aqsgd:fw=4,bw=8.",
        metavar="NAME[:K=V,...]",
    )
    model: str = option(
        "smollm2-135m",
        JOB,
        "smollm2-135m, gpt2-lab, gpt2, gpt2-medium, gpt2-xl, cnn-fashion, a local Hugging Face folder, or a "
        "hub name.",
        metavar="MODEL",
    )
    init: str | None = option(
        None,
        JOB,
        "'random' starts from random weights; never done silently.",
        metavar="random",
        choices=("random",),
    )
    data: str = option(
        "shakespeare",
        JOB,
        "shakespeare, wikitext-2, a UTF-8 text file, one of JSON lines (.jsonl), or a folder of them; "
        "fashion-mnist for cnn-fashion.",
        metavar="DATA",
    )
    text_field: str = option(
        "text", JOB, "Where in a JSON line its text is, a document of its own.", metavar="NAME"
    )
    prompt_field: str = option(
        "", JOB, "Where in a JSON line is what stands before its text and is not learnt.", metavar="NAME"
    )
    bos: bool = option(
        True, JOB, "Begin documents and prompts with what the tokenizer puts before a prompt, if anything."
    )
    seq: int = option(128, JOB, "Tokens in a sample.", metavar="TOKENS", least=2)
    out: str = option(
        "runs/train",
        JOB,
        "Folder of the run; a run there is replaced, with its model, unless this one resumes it.",
        metavar="DIR",
        free=True,
    )

    replicas: int = option(
        1,
        REPLICAS,
        "Copies of the model, or of its pipeline; each trains on its share of every batch.",
        metavar="N",
        least=1,
        most=8,
    )
    replica_recipe: str = option(
        "auto",
        REPLICAS,
        "What replicas exchange: a name from `thinwire recipes`, parameters as in topk:ratio=0.01.",
        metavar="NAME[:K=V,...]",
    )

    stages: int = option(
        None,
        PIPELINE,
        "Pipeline stages the model is cut into, 1 to 4 (default 2; 1 with --replicas).",
        metavar="N",
    )
    cut: str | None = option(
        None,
        PIPELINE,
        "Layers of each stage, as in 19,11; 'measured' times every machine (default: balanced by cost).",
        metavar="N,N,...",
    )
    schedule: str = option(
        "eager1f1b",
        PIPELINE,
        "eager1f1b (hides round trips), 1f1b (least memory), gpipe, interleaved1f1b (4 stages, 2 processes).",
        metavar="NAME",
        choices=("eager1f1b", "1f1b", "gpipe", "interleaved1f1b"),
    )
    microbatches: int = option(
        None,
        PIPELINE,
        "Micro-batches that a batch, or a replica's share of it, is cut into (default 4; 1 with one stage).",
        metavar="N",
        least=1,
        most=2**16 - 1,
    )
    overlap: bool = option(
        True,
        PIPELINE,
        "Encode and decode on threads beside the compute; the results are the same bits.",
        free=True,
    )
    references: str = option(
        "memory",
        PIPELINE,
        "Where references live: memory, or disk[:FOLDER][,memory=SIZE] for more than memory holds.",
        metavar="PLACE",
        free=True,
    )

    steps: int | None = option(
        None,
        OPTIMISATION,
        f"Optimiser steps (default {DEFAULT_STEPS}, unless --epochs is given).",
        metavar="N",
        least=1,
        most=COUNTED,
    )
    epochs: int | None = option(
        None,
        OPTIMISATION,
        "Passes over the samples; with --steps N: E passes of N/E steps each.",
        metavar="E",
        least=1,
        most=COUNTED,
    )
    batch: int = option(8, OPTIMISATION, "Samples in an optimiser step.", metavar="SAMPLES", least=1)
    optimizer: str = option(
        "adamw",
        OPTIMISATION,
        "adamw, or sgd, with momentum as in sgd:momentum=0.9.",
        metavar="NAME[:momentum=M]",
    )
    lr: float | None = option(
        None,
        OPTIMISATION,
        "Peak learning rate (default 2e-5; with --lora 2e-4; from random weights 1e-3; with sgd 0.05).",
        metavar="RATE",
        above=0,
    )
    lr_schedule: str = option(
        "constant",
        OPTIMISATION,
        "constant, linear (to zero) or cosine (to zero).",
        metavar="NAME",
        choices=("constant", "linear", "cosine"),
    )
    warmup: int | None = option(
        None,
        OPTIMISATION,
        f"Steps of linear warm-up (default 0; {WARMUP} for replicas with adamw from random weights).",
        metavar="STEPS",
        least=0,
        most=COUNTED,
    )
    weight_decay: float = option(
        0.0,
        OPTIMISATION,
        "Weight decay: AdamW's decoupled one; with sgd a part of the gradient.",
        metavar="X",
        least=0,
    )
    lora: int = option(
        0,
        OPTIMISATION,
        "Train low-rank adapters of this rank on every linear layer instead of all weights; 0 is off.",
        metavar="RANK",
        least=0,
    )
    grad_clip: float = option(
        1.0, OPTIMISATION, "Largest gradient norm over all stages; 0 is off.", metavar="NORM", least=0
    )
    dropout: float = option(
        0.0,
        OPTIMISATION,
        "Dropout of the model and of adapters' inputs, each sample's masks the same at each visit.",
        metavar="P",
        least=0,
        below=1,
    )
    dtype: str = shared.compute_dtype(OPTIMISATION)
    device: str = shared.device(MACHINES)

    eval_samples: int = option(
        16,
        EVALUATION,
        "Samples in each uncompressed evaluation, held-out and training slice; 0 is off.",
        metavar="N",
        least=0,
        most=COUNTED,
        free=True,
        alike=True,
    )
    eval_every: int = option(
        0,
        EVALUATION,
        "Also evaluate every so many steps; 0 is off.",
        metavar="STEPS",
        least=0,
        most=COUNTED,
        free=True,
        alike=True,
    )
    until_loss: float | None = option(
        None,
        EVALUATION,
        "End at the first evaluation with a loss at or under this that all held-out samples confirm.",
        metavar="NATS",
        free=True,
        alike=True,
    )
    until_sample: bool = option(
        False,
        EVALUATION,
        "For --until-loss the --eval-samples are enough, as where other runs are measured on these.",
        free=True,
        alike=True,
    )
    checkpoint_every: int = option(
        0,
        EVALUATION,
        "Write a checkpoint every so many steps; 0 is off.",
        metavar="STEPS",
        least=0,
        most=COUNTED,
        free=True,
        alike=True,
    )
    resume: bool = option(
        False, EVALUATION, "Go on from the last checkpoint in --out.", free=True, alike=True
    )
    auto_resume: bool = option(
        False,
        EVALUATION,
        "Go on as --resume does where there is a checkpoint; else start anew.",
        free=True,
        alike=True,
    )
    save_model: bool = option(
        True,
        EVALUATION,
        "Write OUT/model/, which from_pretrained loads. With --lora, OUT/adapter/ is written in any case.",
        free=True,
        alike=True,
    )
    save_every: int = option(
        0,
        EVALUATION,
        "Also write what is saved every so many steps, each time in the place of the last; 0 is off.",
        metavar="STEPS",
        least=0,
        most=COUNTED,
        free=True,
        alike=True,
    )
    save_dtype: str = option(
        "fp32",
        EVALUATION,
        "Numbers of what is saved: fp32, or bf16 with half the bytes, also of those that cross links for it.",
        metavar="NAME",
        choices=("fp32", "bf16"),
        free=True,
        alike=True,
    )

    tensorboard: bool = option(True, OUTPUT, "Write TensorBoard event files beside the records.", free=True)

    def __post_init__(self) -> None:
        one = isinstance(self.replicas, int) and self.replicas > 1
        if self.stages is None:  # as the declared type has it from here on
            object.__setattr__(self, "stages", 1 if one else 2)
        if self.microbatches is None:
            object.__setattr__(self, "microbatches", 1 if self.stages == 1 else 4)
        super().__post_init__()

    @property
    def processes(self) -> int:
        """Processes of a replica: one a stage, or one for two stages when they are interleaved."""
        return self.stages // 2 if self.schedule == "interleaved1f1b" else self.stages

    @property
    def ranks(self) -> int:
        """Processes the run needs."""
        return self.replicas * self.processes

    @property
    def samples(self) -> int:
        """Samples of a step that one replica trains on."""
        return self.batch // self.replicas

    @property
    def rows(self) -> int:
        """Samples in a micro-batch."""
        return self.samples // self.microbatches

    @property
    def recipes(self) -> str:
        """What crosses links, as the user wrote it: between stages, between replicas, or both as ``Q/R``."""
        both = [self.recipe] if self.stages > 1 else []
        return "/".join([*both, self.replica_recipe] if self.replicas > 1 else both)

    @property
    def layout(self) -> str:
        """Replicas and stages, in words."""
        stages = f"{self.stages} stages with schedule {self.schedule}"
        if self.replicas == 1:
            return stages
        return f"{self.replicas} replicas" + (f" of {stages}" if self.stages > 1 else "")

    @property
    def planned_steps(self) -> int | None:
        """Optimiser steps, or ``None`` where the epochs and the data decide."""
        return DEFAULT_STEPS if self.steps is None and self.epochs is None else self.steps

    def validate(self) -> None:
        """Raise ``InputError`` for the first option that does not go with the others."""
        _check(self)
        super().validate()

    @property
    def learning_rate(self) -> float:
        """Peak learning rate, the default resolved."""
        return learning_rate(self.to_dict())

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, the default resolved."""
        return warmup_steps(self.to_dict())

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


def sgd_momentum(optimizer: str) -> float | None:
    """Return the momentum of ``sgd[:momentum=M]``, and None for ``adamw``; ``InputError`` for anything else.

    >>> sgd_momentum("sgd"), sgd_momentum("sgd:momentum=0.9"), sgd_momentum("adamw")
    (0.0, 0.9, None)
    """
    if optimizer == "adamw":
        return None
    if optimizer == "sgd":
        return 0.0
    if optimizer.startswith("sgd:momentum="):
        with suppress(ValueError):
            if 0 <= (momentum := float(optimizer.partition("=")[2])) < 1:
                return momentum
    raise InputError(
        f"--optimizer {optimizer!r} is unknown; "
        "it can be adamw, sgd, or sgd:momentum=M with M from 0 to below 1"
    )


def _check(config: TrainConfig) -> None:
    """Raise ``InputError`` for the first option that cannot work."""
    _images(config)
    _pipeline(config)
    _counts(config)
    _specs(config)


def _images(config: TrainConfig) -> None:
    from thinwire.runs.data.fashion import FASHION  # here, as below
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


def _pipeline(config: TrainConfig) -> None:
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


def _counts(config: TrainConfig) -> None:
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
    if config.planned_steps is not None and (config.warmup or 0) > config.planned_steps:
        raise InputError(
            f"--warmup is {config.warmup} steps, more than the run's {config.planned_steps}; "
            "lower it or raise --steps"
        )
    if config.until_loss is not None and not (config.eval_every and config.eval_samples):
        raise InputError(
            f"--until-loss {config.until_loss:g} looks at evaluations on the way; give --eval-every and "
            "--eval-samples"
        )
    if config.save_every and not (config.save_model or config.lora):
        raise InputError(
            f"--save-every is {config.save_every}, but --no-save-model leaves nothing to save; drop one"
        )


def _specs(config: TrainConfig) -> None:
    # Imported here, because a reader of records needs neither.
    from thinwire.channels.disk import open_store
    from thinwire.uses.training.pipeline.recipes import parse_recipe

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


def _used(config: TrainConfig) -> None:
    """Raise ``InputError`` for a recipe of what this run does not have."""
    if config.replicas == 1 and config.replica_recipe != TrainConfig.replica_recipe:
        raise InputError(
            f"--replica-recipe {config.replica_recipe} is for replicas; give --replicas 2 or more"
        )
    if config.stages == 1 and config.recipe != TrainConfig.recipe:
        raise InputError(
            f"--recipe {config.recipe} is for the boundaries of stages, and there is one stage; "
            "give --replica-recipe, or --stages 2"
        )
    if config.replica_recipe.partition(":")[0] == "powersgd":
        raise InputError(
            "powersgd is for thinwire.replicate in a script alone; take another --replica-recipe"
        )


def _replicas(config: TrainConfig) -> None:
    """Raise ``InputError`` for a recipe whose delays do not fit the run or its optimiser."""
    recipe, method, late = _exchanged(config)
    every, steps = getattr(method, "every", 0), config.planned_steps
    waits = max(every, late or 0)
    if steps is not None and waits > steps and recipe.policy is None:
        raise InputError(
            f"--replica-recipe {config.replica_recipe} waits for {waits} steps, and the run has {steps}; "
            f"give a smaller {'every' if every else 'staleness'}"
        )
    momentum = sgd_momentum(config.optimizer) or 0.0
    moves = late is not None and recipe.policy is not None
    if momentum > MOST_MOMENTUM and ((late or 0) >= LONG_DELAY or moves):
        raise InputError(
            f"--optimizer {config.optimizer} diverges where gradients are applied {LONG_DELAY} steps late or "
            f"more, as --replica-recipe {config.replica_recipe} does; take sgd, or a recipe of differences"
        )


def _exchanged(config: TrainConfig) -> tuple[ReplicaRecipe, Method, int | None]:
    """Return recipe and method of replicas, and how many steps late gradients are, where these travel."""
    from thinwire.uses.training.replicas.exchange_methods import Gradients
    from thinwire.uses.training.replicas.recipes import EXCHANGE, parse_replica_recipe

    recipe = parse_replica_recipe(config.replica_recipe)
    method = recipe.schemes[EXCHANGE]
    return recipe, method, method.staleness if isinstance(method, Gradients) else None


def _of_delays(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence where late gradients meet an optimiser or a rate that suffers from them."""
    if config.replicas == 1:
        return
    recipe, _, late = _exchanged(config)
    if late is None:
        return
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
