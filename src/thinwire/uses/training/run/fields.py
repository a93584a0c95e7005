"""The options of a training run, each with its help, its limits, and what a resumed run may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.runs.options import COUNTED, option
from thinwire.runs.ranks.config import JOB, OUTPUT, RunConfig

DEFAULT_STEPS = 100
LORA_RATE = 2e-4  # ten times that of full fine-tuning, as is usual for adapters
REPLICAS = "Replicas"
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
PIPELINE = "Pipeline"
OPTIMISATION = "Optimisation"
EVALUATION = "Evaluation and checkpoints"


@dataclass(frozen=True)
class TrainFields(RunConfig):
    """The fields of ``TrainConfig``."""

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
    warmup: int = option(
        0, OPTIMISATION, "Steps of linear warm-up from zero.", metavar="STEPS", least=0, most=COUNTED
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
    dtype: str = option(
        "auto",
        OPTIMISATION,
        "auto (bf16 autocast where the processor has it), fp32 or bf16.",
        metavar="NAME",
        choices=("auto", "fp32", "bf16"),
    )

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
