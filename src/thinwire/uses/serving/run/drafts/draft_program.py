"""Train a draft head for a model: states of texts, lessons over them, and what is right on others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.runs.data.corpus import load_corpus
from thinwire.runs.machine import devices
from thinwire.runs.machine.compute import Compute
from thinwire.runs.machine.processor import keep_freed
from thinwire.runs.models.encoder import Encoder
from thinwire.runs.models.model_source import ModelSource
from thinwire.seeding import seeded
from thinwire.types import InputError, require
from thinwire.uses.serving.drafting.draft_head import DraftHead, DraftShape
from thinwire.uses.serving.drafting.draft_lessons import DraftLesson, agreement
from thinwire.uses.serving.drafting.draft_training import begin, common_tokens, train_head
from thinwire.uses.serving.run.drafts.draft_options import DraftsConfig
from thinwire.uses.serving.run.drafts.head_file import save_head
from thinwire.uses.serving.run.options import MeasuredConfig
from thinwire.uses.serving.run.stage_program import loaded, prepared, ready

PIECE = 256  # tokens
BATCH = 8  # pieces of a lesson
HELD_OUT = 32  # pieces that it is tried on
EVERY = 20  # steps between two words about it
WIDE = 2  # of the feed-forward part, in widths of hidden states


@dataclass(frozen=True)
class Trained:
    """What came of it: by the length of the way, the share of tokens where head and model agree.

    ``expected``: drafts of a trip that are right, if as many are sent.
    """

    right: list[float]
    expected: float
    seconds: float
    nbytes: int

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


class Pieces:
    """Pieces of text [N, L], and the model's states of them, made when they are first asked for."""

    def __init__(self, tokens: Tensor, states: Callable[[Tensor], Tensor], seed: int) -> None:
        self.tokens, self._states = tokens, states
        self._made: dict[int, Tensor] = {}
        self._draw = torch.Generator().manual_seed(seed)
        self._order: list[int] = []

    def lesson(self) -> DraftLesson:
        """Return the next lesson: all pieces once, in an order that is drawn, then again."""
        if not self._order:
            starts = range(0, len(self.tokens), BATCH)
            self._order = [starts[i] for i in torch.randperm(len(starts), generator=self._draw).tolist()]
        return self.at(self._order.pop())

    def at(self, start: int) -> DraftLesson:
        """Return the lesson of the pieces from ``start`` on."""
        tokens = self.tokens[start : start + BATCH]
        if start not in self._made:
            self._made[start] = self._states(tokens)
        return DraftLesson(tokens, self._made[start])


def train(config: DraftsConfig, tell: Callable[[str], object]) -> Trained:
    """Train a head as the options say, and write its file."""
    keep_freed()
    began = time.monotonic()
    source = prepared(MeasuredConfig(model=config.model), trial=True)
    device = devices.own(config.device)
    taught, held = pieces_of(config, source)
    states = states_by(config, source, device)
    rows, told = states.rows, Pieces(taught, states, config.seed)
    common = common_tokens([taught], len(rows), config.common)
    with seeded(config.seed):
        head = DraftHead(shape_of(config, source), common).to(device)
    head.bind(rows.float())
    begin(head, told.at(0).states)
    tried = Pieces(held, states, 0)

    def taught_one(step: int) -> None:
        if step % EVERY == 0:
            said = " ".join(f"{share:.2f}" for share in agreement(head, tried.at(0)))
            tell(f"lesson {step} of {config.steps}: as the model says 1, 2, ... tokens ahead: {said}")

    train_head(head, told.lesson, config.steps, told=taught_one)
    right = shares(head, tried)
    save_head(head, config.out)
    expected, all_right = 0.0, 1.0
    for share in right:
        all_right *= share
        expected += all_right
    return Trained(right, expected, time.monotonic() - began, Path(config.out).stat().st_size)


def shape_of(config: DraftsConfig, source: ModelSource) -> DraftShape:
    """Return how large the head is."""
    width = source.config.hidden_size
    heads = next(n for n in (source.config.num_attention_heads, 8, 4, 2, 1) if width % (2 * n) == 0)
    return DraftShape(source.name, width, heads, config.inner or WIDE * width, config.window)


def pieces_of(config: DraftsConfig, source: ModelSource) -> tuple[Tensor, Tensor]:
    """Return pieces of text to learn from and to be tried on. Errors: ``InputError`` for too few."""
    encoder, corpus = Encoder(source.tokenizer, False), load_corpus(config.data)
    parts = (corpus.train, config.tokens), (corpus.heldout, HELD_OUT * PIECE)
    found = [encoder.tokens(*documents, limit=limit) for documents, limit in parts]
    few = min(len(tokens) for tokens in found)
    wrong = f"--data {config.data} has {few} tokens to learn from or to be tried on"
    require(few >= BATCH * PIECE, InputError, f"{wrong}; give a text of {BATCH * PIECE} or more in each part")
    taught, held = (t[: len(t) // PIECE * PIECE].view(-1, PIECE) for t in found)
    return taught[: len(taught) // BATCH * BATCH], held[: len(held) // BATCH * BATCH]


@dataclass(eq=False)
class _States:
    """A whole model that gives its last hidden states of texts [N, L], [N, L, D] in two bytes a value."""

    base: Any
    rows: Tensor
    device: torch.device

    def __call__(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.base(input_ids=tokens.to(self.device), use_cache=False).last_hidden_state
        return found.to(torch.bfloat16)


def states_by(config: DraftsConfig, source: ModelSource, device: torch.device) -> _States:
    """Return what makes hidden states, on this one machine."""
    whole = loaded(source, [range(source.config.num_hidden_layers)], 0)
    stage = ready(whole, device, Compute.of(device, config.dtype).dtype)
    return _States(stage.base, stage.head_rows.data, device)


def shares(head: DraftHead, held: Pieces) -> list[float]:
    """Return the share of tokens where a head's likeliest is the model's, by the steps it takes alone."""
    found = [agreement(head, held.at(start)) for start in range(0, len(held.tokens), BATCH)]
    return [sum(column) / len(column) for column in zip(*found, strict=True)]
