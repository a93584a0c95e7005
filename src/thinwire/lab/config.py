"""The configuration of a run: one frozen dataclass, from which options, TOML keys and records all follow.

Every field carries its help text, so the command line, ``--config FILE.toml`` and ``run.json`` cannot drift
apart.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.lab import config_checks
from thinwire.types import InputError

DEFAULT_STEPS = 100
LORA_RATE = 2e-4  # ten times that of full fine-tuning, as is usual for adapters

JOB = "Job"
PIPELINE = "Pipeline and link"
OPTIMISATION = "Optimisation"
EVALUATION = "Evaluation and checkpoints"
MACHINES = "Processes and machines"
OUTPUT = "Output"


def _option(default: Any, panel: str, text: str, *, metavar: str = "", choices: tuple[str, ...] = ()) -> Any:
    return field(
        default=default, metadata={"panel": panel, "help": text, "metavar": metavar, "choices": choices}
    )


@dataclass(frozen=True)
class TrainConfig:
    """Say everything a run needs; validated when made.

    Errors: ``InputError``, one sentence that names the option, the value and the remedy.

    >>> TrainConfig(recipe="fp32", steps=20).planned_steps
    20
    """

    recipe: str = _option(
        "thinwire",
        JOB,
        "What crosses stage boundaries: a name from `thinwire recipes`, parameters as in aqsgd:fw=4,bw=8.",
        metavar="NAME[:K=V,...]",
    )
    model: str = _option(
        "smollm2-135m",
        JOB,
        "smollm2-135m, gpt2-lab, gpt2, gpt2-medium, gpt2-xl, a local Hugging Face folder, or a hub name.",
        metavar="MODEL",
    )
    init: str | None = _option(
        None,
        JOB,
        "'random' starts from random weights; never done silently.",
        metavar="random",
        choices=("random",),
    )
    data: str = _option(
        "shakespeare",
        JOB,
        "shakespeare, wikitext-2, a UTF-8 text file, one of JSON lines (.jsonl), or a folder of them.",
        metavar="DATA",
    )
    text_field: str = _option(
        "text", JOB, "Where in a JSON line its text is, a document of its own.", metavar="NAME"
    )
    prompt_field: str = _option(
        "", JOB, "Where in a JSON line is what stands before its text and is not learnt.", metavar="NAME"
    )
    seq: int = _option(128, JOB, "Tokens in a sample.", metavar="TOKENS")
    out: str = _option(
        "runs/train",
        JOB,
        "Folder of the run; a run there is replaced, with its model, unless this one resumes it.",
        metavar="DIR",
    )

    stages: int = _option(2, PIPELINE, "Pipeline stages the model is cut into, 2 to 4.", metavar="N")
    cut: str | None = _option(
        None,
        PIPELINE,
        "Layers of each stage, as in 19,11; 'measured' times every machine (default: balanced by cost).",
        metavar="N,N,...",
    )
    schedule: str = _option(
        "eager1f1b",
        PIPELINE,
        "eager1f1b (hides round trips), 1f1b (least memory), gpipe, interleaved1f1b (4 stages, 2 processes).",
        metavar="NAME",
        choices=("eager1f1b", "1f1b", "gpipe", "interleaved1f1b"),
    )
    microbatches: int = _option(4, PIPELINE, "Micro-batches a batch is cut into.", metavar="N")
    link: str = _option(
        "none",
        PIPELINE,
        "Shape the link: rate per direction and one-way delay, as in 10mbit,30ms[,jitter=2ms][,loss=0.1%]; "
        "with --emulate also trace:FILE, up=, down=, queue=, and 0=...;1=... for each rank.",
        metavar="SHAPE",
    )
    emulate: bool = _option(
        False,
        PIPELINE,
        "Shape the link below the kernel's TCP, each process in a network namespace of its own (Linux).",
    )
    congestion: str = _option(
        "auto",
        PIPELINE,
        "TCP congestion control; auto: bbr where programs may choose it, and cubic over emulated links.",
        metavar="NAME",
        choices=("auto", "system", "cubic", "bbr"),
    )
    overlap: bool = _option(
        True,
        PIPELINE,
        "Encode and decode on threads beside the compute; the results are the same bits.",
    )
    references: str = _option(
        "memory",
        PIPELINE,
        "Where references live: memory, or disk[:FOLDER][,memory=SIZE] for more than memory holds.",
        metavar="PLACE",
    )

    steps: int | None = _option(
        None,
        OPTIMISATION,
        f"Optimiser steps (default {DEFAULT_STEPS}, unless --epochs is given).",
        metavar="N",
    )
    epochs: int | None = _option(
        None,
        OPTIMISATION,
        "Passes over the samples; with --steps N: E passes of N/E steps each.",
        metavar="E",
    )
    batch: int = _option(8, OPTIMISATION, "Samples in an optimiser step.", metavar="SAMPLES")
    lr: float | None = _option(
        None,
        OPTIMISATION,
        "Peak learning rate (default 2e-5; with --lora 2e-4; from random weights 1e-3).",
        metavar="RATE",
    )
    lr_schedule: str = _option(
        "constant",
        OPTIMISATION,
        "constant, linear (to zero) or cosine (to zero).",
        metavar="NAME",
        choices=("constant", "linear", "cosine"),
    )
    warmup: int = _option(0, OPTIMISATION, "Steps of linear warm-up from zero.", metavar="STEPS")
    weight_decay: float = _option(0.0, OPTIMISATION, "AdamW's decoupled weight decay.", metavar="X")
    lora: int = _option(
        0,
        OPTIMISATION,
        "Train low-rank adapters of this rank on every linear layer instead of all weights; 0 is off.",
        metavar="RANK",
    )
    grad_clip: float = _option(
        1.0, OPTIMISATION, "Largest gradient norm over all stages; 0 is off.", metavar="NORM"
    )
    dropout: float = _option(
        0.0,
        OPTIMISATION,
        "Dropout of the model and of adapters' inputs, each sample's masks the same at each visit.",
        metavar="P",
    )
    dtype: str = _option(
        "auto",
        OPTIMISATION,
        "auto (bf16 autocast where the processor has it), fp32 or bf16.",
        metavar="NAME",
        choices=("auto", "fp32", "bf16"),
    )
    seed: int = _option(0, OPTIMISATION, "Seed of weights, data order and random rounding.", metavar="N")

    eval_samples: int = _option(
        16,
        EVALUATION,
        "Samples in each uncompressed evaluation, held-out and training slice; 0 is off.",
        metavar="N",
    )
    eval_every: int = _option(0, EVALUATION, "Also evaluate every so many steps; 0 is off.", metavar="STEPS")
    checkpoint_every: int = _option(
        0, EVALUATION, "Write a checkpoint every so many steps; 0 is off.", metavar="STEPS"
    )
    resume: bool = _option(False, EVALUATION, "Go on from the last checkpoint in --out.")
    auto_resume: bool = _option(
        False, EVALUATION, "Go on as --resume does where there is a checkpoint; else start anew."
    )
    save_model: bool = _option(
        True,
        EVALUATION,
        "Write OUT/model/, which from_pretrained loads. With --lora, OUT/adapter/ is written in any case.",
    )
    save_every: int = _option(
        0,
        EVALUATION,
        "Also write what is saved every so many steps, each time in the place of the last; 0 is off.",
        metavar="STEPS",
    )
    save_dtype: str = _option(
        "fp32",
        EVALUATION,
        "Numbers of what is saved: fp32, or bf16 with half the bytes, also of those that cross links for it.",
        metavar="NAME",
        choices=("fp32", "bf16"),
    )

    host: str = _option(
        "127.0.0.1",
        MACHINES,
        "Address this machine listens on (ranks may set THINWIRE_HOST); off loopback it needs a token.",
        metavar="ADDRESS",
    )
    port: int = _option(
        0,
        MACHINES,
        "First port to listen on; each further pair of processes takes the next. 0 takes free ones.",
        metavar="PORT",
    )
    advertise: str | None = _option(
        None,
        MACHINES,
        "Address by which the others reach this machine (default: --host); PORT if a router maps it.",
        metavar="HOST[:PORT]",
    )
    relay: str | None = _option(
        None,
        MACHINES,
        "A running `thinwire relay`, for ranks that can only dial out; all ranks give the same.",
        metavar="HOST:PORT",
    )
    token_file: str | None = _option(
        None, MACHINES, "File with the shared token of all machines (or set THINWIRE_TOKEN).", metavar="FILE"
    )
    deadline: float = _option(
        180.0,
        MACHINES,
        "Seconds without data after which a wait for a living process fails; a dead one is noticed in 20.",
        metavar="SECONDS",
    )
    threads: int = _option(0, MACHINES, "Compute threads of a process; 0 shares the cores out.", metavar="N")

    tensorboard: bool = _option(True, OUTPUT, "Write TensorBoard event files beside the records.")
    quiet: bool = _option(False, OUTPUT, "No progress display.")
    json: bool = _option(False, OUTPUT, "Print the run record, and nothing else, on stdout.")

    def __post_init__(self) -> None:
        for name, value in config_checks.typed(self).items():
            object.__setattr__(self, name, value)
        config_checks.check(self)

    @property
    def ranks(self) -> int:
        """Processes the run needs: one a stage, or one for two stages when they are interleaved."""
        return self.stages // 2 if self.schedule == "interleaved1f1b" else self.stages

    @property
    def planned_steps(self) -> int | None:
        """Optimiser steps, or ``None`` where the epochs and the data decide."""
        return DEFAULT_STEPS if self.steps is None and self.epochs is None else self.steps

    @property
    def learning_rate(self) -> float:
        """Peak learning rate, the default resolved."""
        return learning_rate(self.to_dict())

    def warnings(self) -> list[str]:
        """Return what the user should know before the run, one sentence each."""
        notes = []
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

    def replace(self, **changes: Any) -> TrainConfig:
        """Return a validated copy with ``changes``."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, every option by name."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "the configuration") -> TrainConfig:
        """Build from plain values; an unknown key is an ``InputError`` that names the nearest option."""
        for key in values:
            config_checks.known(key, [f.name for f in dataclasses.fields(cls)], where)
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Read back what ``to_json`` wrote."""
        try:
            values = json.loads(text)
        except ValueError as e:
            raise InputError(
                f"the configuration is not JSON ({e}); pass what TrainConfig.to_json wrote"
            ) from e
        if not isinstance(values, dict):
            raise InputError(f"the configuration is {type(values).__name__}, not an object of options")
        return cls.from_dict(values)


def learning_rate(options: Mapping[str, Any]) -> float:
    """Return the peak learning rate of ``options``, a configuration as plain values, the default resolved."""
    given: float | None = options.get("lr")
    if given is not None:
        return given
    if options.get("lora"):
        return LORA_RATE
    return 1e-3 if options.get("init") == "random" or options.get("model") == "gpt2-lab" else 2e-5


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the options in a TOML file, keys with ``-`` or ``_``, checked to be known ones.

    Errors: ``InputError`` for a missing or broken file and for unknown keys.
    """
    try:
        values = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as e:
        raise InputError(f"cannot read --config {path}: {e.strerror or e}; give a readable TOML file") from e
    except ValueError as e:
        raise InputError(
            f"--config {path} is not valid TOML: {e}; see docs/run-record.md for an example"
        ) from e
    options = {key.replace("-", "_"): value for key, value in values.items()}
    for key in options:
        config_checks.known(key, [f.name for f in dataclasses.fields(TrainConfig)], f"--config {path}")
    return options
