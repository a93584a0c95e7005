"""What coded prompts do to the words that follow: divergence of the true ones, equal likeliest ones.

Two stages in this process, without a link: hidden states of a prompt pass the codec in chunks, as they do
between machines, and those of what follows are exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from thinwire.runs.data.corpus import load_corpus
from thinwire.runs.models.encoder import Encoder
from thinwire.runs.models.model_source import ModelSource, resolve_model
from thinwire.uses.serving.recipes import PROMPT, parse_serving
from thinwire.uses.serving.ring_messages import Portion
from thinwire.uses.serving.row_pool import TextRows, TextSegment
from thinwire.uses.serving.run.options import StagesConfig
from thinwire.uses.serving.run.serving_demo import equal_share
from thinwire.uses.serving.run.stage_program import work_of
from thinwire.uses.serving.stage_work import StageWork

BITS = (3, 4, 5)
PREFIX, FOLLOWING = 1024, 64  # tokens of a prompt, and of the text behind it that is compared
EXACT = "exact"
CPU = torch.device("cpu")


@cache
def source() -> ModelSource:
    """Return the model."""
    return resolve_model("smollm2-135m", None)


@cache
def stages() -> list[StageWork]:
    """Return both stages."""
    config = StagesConfig(stages=2, dtype="fp32", recipe=EXACT)
    return [work_of(config, source(), index, CPU) for index in range(config.stages)]


def texts(prefix: int, many: int) -> Iterator[Tensor]:
    """Yield token ids [prefix + FOLLOWING] of so many places all over the held-out text."""
    held = load_corpus("wikitext-2").heldout
    ids = Encoder(source().tokenizer, False).tokens(*held, limit=1 << 20)
    tokens = prefix + FOLLOWING
    whole = ids[: len(ids) // tokens * tokens].view(-1, tokens)
    yield from whole[torch.linspace(0, len(whole) - 1, many).long()]


class Blurred:
    """One text whose prompt has passed the two stages by a recipe."""

    def __init__(self, ids: Tensor, recipe: str, prefix: int) -> None:
        first, self._last = stages()
        scheme = parse_serving(recipe).schemes[PROMPT]
        self._first, self._rows = dataclasses.replace(first, prompt=scheme), TextRows(0, 2 * len(ids))
        self.nbytes = 0
        chunk = StagesConfig().chunk
        for at in range(0, prefix, chunk):
            many = min(chunk, prefix - at)
            portions = [self._portion(at, many, int(at + many == prefix))]
            sent = self._first.code(portions, self._first.extend(portions, ids[None, at : at + many]))
            self.nbytes += sum(len(p.packet) for p in sent)
            scores = self._last.extend(sent, self._last.decode(sent))
        self.begin = scores[0]  # [1, V]: what follows the prompt

    def scores(self, tokens: Tensor, at: int) -> Tensor:
        """Return the logits [n, V] behind tokens [n] that follow, whose hidden states are exact."""
        portions = [self._portion(at, len(tokens), len(tokens))]
        return self._last.extend(portions, self._first.extend(portions, tokens[None]))[0]

    def likeliest(self, at: int, many: int) -> list[int]:
        """Return the likeliest tokens from position ``at`` on."""
        found = [int(self.begin[-1].argmax())]
        while len(found) < many:
            new = self.scores(torch.tensor(found[-1:]), at + len(found) - 1)
            found.append(int(new[-1].argmax()))
        return found

    def _portion(self, at: int, many: int, wanted: int) -> Portion:
        return Portion(TextSegment(1, self._rows, at, many), wanted)


def told(ids: Tensor, recipe: str, prefix: int, tokens: int) -> tuple[Tensor, list[int], int]:
    """Return the log-probabilities [n, V] of the true words, the likeliest ones, and a prompt's bytes."""
    text = Blurred(ids, recipe, prefix)
    scores = torch.cat([text.begin, text.scores(ids[prefix:-1], prefix)]).double().log_softmax(-1)
    return scores, text.likeliest(prefix, tokens), text.nbytes


def measure(recipe: str, prefix: int, many: int, tokens: int) -> dict[str, Any]:
    """Return the divergence a token from exact prompts, losses, bytes, and which likeliest tokens agree."""
    torch.set_num_threads(1)
    rows: list[dict[str, float]] = []
    likely: tuple[list[list[int]], list[list[int]]] = [], []
    for ids in texts(prefix, many):
        (exact, expected, plain), (coded, found, nbytes) = (
            told(ids, name, prefix, tokens) for name in (EXACT, recipe)
        )
        likely[0].append(found)
        likely[1].append(expected)
        wanted = ids[prefix:, None]
        losses = {"loss": -float(coded.gather(1, wanted).mean()),
                  "exact_loss": -float(exact.gather(1, wanted).mean())}  # fmt: skip
        divergence = float((exact.exp() * (exact - coded)).sum(-1).mean())
        rows.append(losses | {"divergence": divergence, "nbytes": nbytes, "plain": plain})
    means = {
        name: fmean(row[name] for row in rows) for name in ("loss", "exact_loss", "divergence", "nbytes")
    }
    return means | {
        "fewer": fmean(row["plain"] / row["nbytes"] / 2 for row in rows),  # than bf16
        "equal_tokens": equal_share(*likely),
        "equal_texts": _equal(*likely),
        "texts": len(rows),
    }


def _equal(found: Sequence[list[int]], expected: Sequence[list[int]]) -> float:
    return fmean(float(a == b) for a, b in zip(found, expected, strict=True))
