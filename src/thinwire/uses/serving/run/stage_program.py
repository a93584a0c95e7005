"""The program of one stage: it loads its part of the model and works in the ring; the first one is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.runs.machine import devices
from thinwire.runs.machine.compute import Compute
from thinwire.runs.machine.processor import keep_freed, pick_threads
from thinwire.runs.models.cuts import counted_costs, cut_layers
from thinwire.runs.models.families import windows_of
from thinwire.runs.models.model_source import ModelSource, resolve_model
from thinwire.runs.models.split import build_stage, tie
from thinwire.runs.models.stage import ModelStage
from thinwire.runs.ranks.joining import joined
from thinwire.types import InputError, LinkError, require
from thinwire.uses.serving.drafting.draft_head import DraftHead
from thinwire.uses.serving.drafts import Drafter, ModelDrafts, PhraseDrafts
from thinwire.uses.serving.later_stage import LaterStage
from thinwire.uses.serving.recipes import PROMPT, TOKEN, parse_serving
from thinwire.uses.serving.row_pool import StageCache
from thinwire.uses.serving.run import drafts
from thinwire.uses.serving.run.drafts.head_file import is_head, load_head
from thinwire.uses.serving.run.options import AUTO, NONE, PHRASES, StagesConfig
from thinwire.uses.serving.run.serving_trial import check_serving
from thinwire.uses.serving.run.stage_ring import StageRing
from thinwire.uses.serving.stage_work import StageWork
from thinwire.uses.serving.stored_blocks import StoredBlocks
from thinwire.uses.serving.text_engine import RingEnds, TextEngine

HEADS = Path(drafts.__file__).parent  # heads that come with a model of their name
OTHER_DRAFTS = "--drafts {} has {} tokens, the model {}; give a model of the same tokens"


@dataclass(frozen=True)
class FirstStage:
    """What the first stage has: an engine that continues texts, and what its model comes from."""

    config: StagesConfig
    engine: TextEngine
    source: ModelSource
    ends: frozenset[int]
    ring: StageRing

    def sent(self) -> int:
        """Return the bytes that this stage has sent and received, headers included: of two stages, all."""
        return self.ring.sent()


def prepared(config: StagesConfig, trial: bool = True) -> ModelSource:
    """Return the source of the model. Errors: ``InputError`` for one that cannot be served, or be cut so."""
    source = resolve_model(config.model, config.init, trial=trial and config.stages > 1)
    require(source.family != "cnn", InputError, f"--model {config.model} has no text; give a language model")
    if trial:
        check_serving(source.config)
    cut_layers(counted_costs(source.config), config.stages, config.cut)
    if trial:
        head_of(config, source)
    return source


def run_stage(config: StagesConfig, first: Callable[[FirstStage], None], resume: bool = False) -> None:
    """Run this process's stage; ``first`` is what the first one does with its engine, until it returns.

    ``resume``: wait for a stage that is lost, and go on with it.
    """
    keep_freed()
    torch.set_num_threads(pick_threads(config))
    device = devices.own(config.device)
    source = prepared(config, trial=False)
    with joined(config, "these stages", "--stages") as world:
        ring = StageRing(config, world, source.digest)
        ring.check()
        work = work_of(config, source, world.rank, device)
        ring.await_loaded()
        run_ring(config, source, work, ring, first, resume)


def run_ring(
    config: StagesConfig,
    source: ModelSource,
    work: StageWork,
    ring: StageRing,
    first: Callable[[FirstStage], None],
    resume: bool = False,
) -> None:
    """Work in the ring until the first stage's ``first`` has returned; another ring may follow."""
    head, stored = head_of(config, source), stored_by(config, source, work, ring.index)
    with closing(stored) if stored is not None else nullcontext():
        if ring.index:
            _run_later(work, ring, head, stored, resume)
            return
        with _engine(config, source, work, ring, head, stored, resume) as engine:
            first(FirstStage(config, engine, source, ends_of(source), ring))


def stored_by(config: StagesConfig, source: ModelSource, work: StageWork, index: int) -> StoredBlocks | None:
    """Return what a stage has stored of prompts, if it is to. Errors: ``InputError`` for no such folder."""
    if config.prefixes is None:
        return None
    cut = cut_layers(counted_costs(source.config), config.stages, config.cut)[index]
    made = source.digest, config.init, config.seed, config.recipe, cut, work.dtype
    return StoredBlocks(config.prefixes, str(made))


def work_of(config: StagesConfig, source: ModelSource, index: int, device: torch.device) -> StageWork:
    """Return what stage ``index`` works with: its layers on ``device``, in the dtype of matrix products."""
    cut = cut_layers(counted_costs(source.config), config.stages, config.cut)
    return with_cache(loaded(source, cut, index, config.seed), config, device)


def with_cache(stage: ModelStage, config: StagesConfig, device: torch.device) -> StageWork:
    """Return a stage as it works: on a device, in the dtype of matrix products, with a cache and schemes."""
    compute = Compute.of(device, config.dtype)
    stage = ready(stage, device, compute.dtype)
    cache = StageCache(config.cache, windows_of(stage.base.config), device)
    schemes = parse_serving(config.recipe).schemes
    width = stage.base.config.hidden_size
    return StageWork(stage, cache, width, schemes[PROMPT], schemes[TOKEN], device, compute.dtype)


def ready(stage: ModelStage, device: torch.device, dtype: torch.dtype) -> ModelStage:
    """Return a stage to be asked: its parameters, and no buffers, in ``dtype``; angles are float32 always."""
    for p in stage.parameters():
        p.data = p.data.to(device, dtype)
    return stage.to(device).eval()


def loaded(source: ModelSource, cut: list[range], index: int, seed: int = 0) -> ModelStage:
    """Return a stage; one that is the whole model has its head tied where the model has."""
    stage = build_stage(source, cut, index, seed)
    if source.config.tie_word_embeddings and stage.first and stage.last:
        tie(stage)
    return stage


def _run_later(
    work: StageWork, ring: StageRing, head: DraftHead | None, stored: StoredBlocks | None, resume: bool
) -> None:
    """Work until the first stage ends. Errors: ``LinkError`` naming a stage that is lost, and stays so."""
    while True:
        boxes = ring.boxes
        after = boxes.get(ring.index + 1)
        own = None if after is not None or head is None else work.drafts_by(head)
        ends = boxes[ring.index - 1], boxes[0], after
        stage = LaterStage(ring.index, work, *ends, head=own, stored=stored)
        try:
            stage.run()
            return
        except LinkError as e:
            if not resume:
                raise
            ring.meet_again(e)


def _engine(
    config: StagesConfig,
    source: ModelSource,
    work: StageWork,
    ring: StageRing,
    head: DraftHead | None,
    stored: StoredBlocks | None,
    resume: bool,
) -> TextEngine:
    def again(error: LinkError) -> RingEnds:
        ring.meet_again(error)
        return ring.ends

    after, last, between = ring.ends
    own = work.drafts_by(head) if head is not None and last is None else None
    drafter = None if head is not None else drafter_of(config, source)
    tail = 0 if head is None else head.shape.window
    more: dict[str, Any] = {"chunk": config.chunk, "reuse": config.reuse, "stored": stored}
    more |= {"between": between, "again": again if resume else None}
    return TextEngine(work, after, last, drafter, own, tail, **more)


def head_of(config: StagesConfig, source: ModelSource) -> DraftHead | None:
    """Return the draft head that is asked for, if one is. Errors: ``InputError`` for a damaged file."""
    if config.drafts == AUTO and config.stages > 1 and source.weights is not None:
        own = HEADS / f"{source.name}.safetensors"
        return load_head(own) if own.is_file() else None
    if not is_head(config.drafts) and Path(config.drafts).suffix != ".safetensors":
        return None
    found, width = load_head(config.drafts), source.config.hidden_size
    sizes = f"is for hidden states of {found.shape.width} values, the model has {width}"
    wrong = f"--drafts {config.drafts} {sizes}"
    require(found.shape.width == width, InputError, f"{wrong}; train one for it by thinwire train-drafts")
    return found


def drafter_of(config: StagesConfig, source: ModelSource) -> Drafter | None:
    """Return who proposes tokens on the first stage. Errors: ``InputError`` for a model of other tokens."""
    by_phrases = config.drafts in (AUTO, PHRASES)
    if config.drafts == NONE or (config.stages == 1 and by_phrases):
        return None
    if by_phrases:
        return PhraseDrafts()
    small = resolve_model(config.drafts, None)
    own, theirs = source.config.vocab_size, small.config.vocab_size
    require(own == theirs, InputError, OTHER_DRAFTS.format(config.drafts, theirs, own))
    return ModelDrafts(loaded(small, [range(small.config.num_hidden_layers)], 0).eval().model)


def ends_of(source: ModelSource) -> frozenset[int]:
    """Return the tokens that end a text: the tokenizer's, and those of the model's own settings."""
    found: list[Any] = [getattr(source.tokenizer, "eos_token_id", None), source.config.eos_token_id]
    if source.weights is not None and (source.weights / "generation_config.json").is_file():
        said = json.loads((source.weights / "generation_config.json").read_text("utf-8"))
        found.append(said.get("eos_token_id"))
    flat = {t for ends in found for t in (ends if isinstance(ends, (list, tuple)) else [ends])}
    return frozenset(t for t in flat if isinstance(t, int))
