"""What a run needs before its first process starts: recipe, link, model, cut, samples, all checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from thinwire.files.base import at_home
from thinwire.links.shape import LinkShape
from thinwire.replacing import replacing
from thinwire.runs.data.batches import Batches
from thinwire.runs.data.corpus import Corpus, load_corpus
from thinwire.runs.data.fashion import IMAGES, load_fashion
from thinwire.runs.data.task import Task, language, pack
from thinwire.runs.machine.cache import cache_folder, writing
from thinwire.runs.machine.compute import HOST, Compute
from thinwire.runs.models.cnn import CNN
from thinwire.runs.models.cuts import counted_costs, cut_layers
from thinwire.runs.models.encoder import Encoder
from thinwire.runs.models.folder import check_unread
from thinwire.runs.models.lora import require_peft
from thinwire.runs.models.model_source import ModelSource, resolve_model
from thinwire.runs.ranks.joining import in_process_shape
from thinwire.types import InputError, require
from thinwire.uses.training.pipeline.recipes import PipelineRecipe, parse_recipe
from thinwire.uses.training.replicas.recipes import ReplicaRecipe, parse_replica_recipe
from thinwire.uses.training.run.options import MEASURED, TrainConfig


@dataclass(frozen=True)
class Job:
    """A run, resolved. ``train`` and ``heldout`` are blocks of samples for ``task``; a row is its id.

    ``shape`` is for the in-process shaper: none where the network itself is emulated. ``compute``: the
    processor, until a rank says what its own is.
    """

    config: TrainConfig
    recipe: PipelineRecipe
    replica_recipe: ReplicaRecipe
    shape: LinkShape
    source: ModelSource
    cut: list[range]
    task: Task
    train: Tensor
    heldout: Tensor
    batches: Batches
    compute: Compute
    notes: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return len(self.batches)

    @property
    def spec(self) -> str:
        """What crosses links, printed so that it can be read back: between stages, and between replicas."""
        both = [self.recipe.spec] if self.config.stages > 1 else []
        return ", ".join([*both, self.replica_recipe.spec] if self.config.replicas > 1 else both)

    @cached_property
    def digest(self) -> str:
        """Digest of the samples, training and held-out."""
        found = hashlib.blake2b(digest_size=16)
        for blocks in (self.train, self.heldout):
            found.update(blocks.contiguous().numpy().data)
        return found.hexdigest()

    def heldout_blocks(self) -> Tensor:
        """Return all held-out blocks, but for what makes no whole batch."""
        return self.heldout[: len(self.heldout) // self.config.batch * self.config.batch]

    def eval_blocks(self) -> tuple[Tensor, Tensor]:
        """Return the held-out blocks and the slice of the visited training blocks that are evaluated.

        Whole batches, at most ``eval_samples`` rounded up: the schedule's buffers have one size.
        """
        batch = self.config.batch
        wanted = -(-self.config.eval_samples // batch) * batch
        seen = self.train[self.batches.samples()[:wanted]]
        return tuple(b[: min(wanted, len(b) // batch * batch)] for b in (self.heldout, seen))  # type: ignore[return-value]


def prepare(config: TrainConfig, trial: bool = True) -> Job:
    """Resolve a configuration; ``InputError`` for whatever does not fit, before anything is started.

    ``trial``: try first whether the model can be split, which whoever starts the ranks did for them.
    """
    recipe, replica_recipe = parse_recipe(config.recipe), parse_replica_recipe(config.replica_recipe)
    shape = in_process_shape(config)
    _check_saved(config)
    lesson = _images(config) if config.model == CNN else read_texts(config, trial)
    seq = None if config.model == CNN else config.seq
    batches = Batches(len(lesson.train), config.batch, config.planned_steps, config.epochs, config.seed, seq)
    require(
        (config.warmup or 0) <= len(batches),
        InputError,
        f"--warmup is {config.warmup} steps, more than the run's {len(batches)}; lower it",
    )
    compute = Compute.of(HOST, config.dtype)
    return Job(config, recipe, replica_recipe, shape, batches=batches, compute=compute, **vars(lesson))


class TextOptions(Protocol):
    """What is said of a language model and of its texts, as options are called."""

    @property
    def model(self) -> str: ...
    @property
    def init(self) -> str | None: ...
    @property
    def data(self) -> str: ...
    @property
    def text_field(self) -> str: ...
    @property
    def prompt_field(self) -> str: ...
    @property
    def bos(self) -> bool: ...
    @property
    def seq(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def eval_samples(self) -> int: ...
    @property
    def lora(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def stages(self) -> int: ...
    @property
    def cut(self) -> str | None: ...
    @property
    def processes(self) -> int: ...
    def warnings(self) -> Iterable[str]:
        """Return what the user should know of these options."""
        ...


@dataclass(frozen=True)
class Lesson:
    """A model and the samples for it, as ``Job`` has them."""

    source: ModelSource
    cut: list[range]
    task: Task
    train: Tensor
    heldout: Tensor
    notes: tuple[str, ...]


def _images(config: TrainConfig) -> Lesson:
    train, heldout = load_fashion()
    require(
        config.batch <= len(heldout) or not config.eval_samples,
        InputError,
        f"--batch {config.batch} is more than the {len(heldout)} images held out; "
        "use a smaller one, or --eval-samples 0",
    )
    source = resolve_model(config.model, None)
    return Lesson(source, [range(1)], IMAGES, train, heldout, tuple(config.warnings()))


def read_texts(config: TextOptions, trial: bool) -> Lesson:
    """Resolve a language model and its texts; ``InputError`` for whatever does not fit."""
    corpus = _corpus(config.data, config.text_field, config.prompt_field)
    source = resolve_model(config.model, config.init, corpus, config.dropout, trial)
    require(
        config.seq <= source.max_seq,
        InputError,
        f"--seq {config.seq} is more than the {source.max_seq} positions of {config.model}; use fewer",
    )
    _check_trained(config, source)
    cut = cut_layers(
        counted_costs(source.config),
        config.stages,
        None if config.cut == MEASURED else config.cut,
        config.processes,
    )
    encoder = Encoder(source.tokenizer, config.bos)
    train = pack(_tokens(encoder, corpus, "train"), config.seq)
    heldout = pack(_tokens(encoder, corpus, "heldout"), config.seq)
    source.check_tokens(torch.cat((train.flatten(), heldout.flatten())))
    require(
        len(heldout) >= config.batch or not config.eval_samples,
        InputError,
        f"the held-out text has {len(heldout)} blocks of {config.seq} tokens, a batch is {config.batch}; "
        "use a longer text, a smaller --batch or --seq, or --eval-samples 0",
    )
    task = language(config.seq, source.config.hidden_size, source.config.vocab_size)
    notes = (*config.warnings(), *corpus.notes, *source.notes, *_of_prompts(train))
    return Lesson(source, cut, task, train, heldout, notes)


def _check_saved(config: TrainConfig) -> None:
    """Raise ``InputError`` where the model that a run saves would not be what is read there later."""
    if not config.save_model:
        return
    folder = Path(config.out) / "model"
    check_unread(folder)
    own = at_home(config.model).resolve() == folder.resolve()
    require(
        not (own and config.save_every),
        InputError,
        f"--model {config.model} is where --save-every would replace it, and --resume would miss it; "
        "take another --out",
    )
    require(
        not (own and config.lora),
        InputError,
        f"--model {config.model} is where the model with its adapters merged in is saved, but the adapters "
        "are for the model as it was; take another --out, or --no-save-model",
    )


def _check_trained(config: TextOptions, source: ModelSource) -> None:
    """Raise ``InputError`` for adapters or dropout that this model cannot have."""
    if config.lora:
        require_peft()
        width = source.config.hidden_size
        require(
            config.lora <= width,
            InputError,
            f"--lora {config.lora} is more than the {width} channels of {config.model}; 4 to 64 are usual",
        )
    require(
        not config.dropout or config.lora > 0 or source.dropout > 0.0,
        InputError,
        f"--dropout {config.dropout} has nothing to drop: models of type {source.config.model_type} have "
        "dropout of attention probabilities alone, which cannot be drawn by sample; use 0, or --lora",
    )


def _of_prompts(blocks: Tensor) -> list[str]:
    wanted = blocks[:, 1:]
    share = int((wanted >= 0).sum()) / wanted.numel()
    return (
        [f"prompts are read but not learnt: losses are over {share:.0%} of the tokens"] if share < 1 else []
    )


@lru_cache(maxsize=4)
def _corpus(name: str, field: str, prompt: str) -> Corpus:
    return load_corpus(name, field, prompt)


def _tokens(encoder: Encoder, corpus: Corpus, part: str) -> Tensor:
    """Return the token ids of one part of a corpus, kept in the cache folder: tokenising costs seconds."""
    documents = getattr(corpus, part)
    name = hashlib.blake2b(f"{corpus.digest(part)}:{encoder.digest}".encode()).hexdigest()[:32]
    file = cache_folder() / "tokens" / f"{name}.safetensors"
    from safetensors.torch import load_file, save_file

    if file.is_file():
        return load_file(file)["tokens"].to(torch.int64)
    tokens = encoder.tokens(*documents)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            save_file({"tokens": tokens.to(torch.int32)}, temporary)
    return tokens
