"""Rings of stages in the threads of one process, of a small model whose text is known."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import torch
from meshes import meshes

from thinwire.channels.channel import Scheme
from thinwire.runs.models.families import meta_model, whole_model, windows_of
from thinwire.runs.models.stage import cut_out, finished
from thinwire.runs.models.trial import randomised
from thinwire.seeding import seeded
from thinwire.types import ThinwireError
from thinwire.uses.serving.drafting.head_drafts import HeadDrafts
from thinwire.uses.serving.later_stage import LaterStage
from thinwire.uses.serving.row_pool import StageCache
from thinwire.uses.serving.stage_work import StageWork
from thinwire.uses.serving.stored_blocks import StoredBlocks
from thinwire.uses.serving.text_engine import TextEngine

CPU = torch.device("cpu")


def random_model(config: Any) -> Any:
    """Return a model whose weights all show, in evaluation mode."""
    with seeded(1):
        return randomised(whole_model(config)).eval()


def works(model: Any, stages: int, rows: int = 256, **schemes: Scheme) -> list[StageWork]:
    """Return the work of each of so many stages of a whole model."""
    config, state, found = model.config, model.state_dict(), []
    n = config.num_hidden_layers
    for start, stop in pairwise(k * n // stages for k in range(stages + 1)):
        stage = cut_out(meta_model(config), range(start, stop), start == 0, stop == n)
        own = {name: state[original] for name, original in stage.original_names().items()}
        stage.load_state_dict(own, strict=True, assign=True)
        cache = StageCache(rows, windows_of(stage.base.config), CPU)
        given = {"prompt": Scheme(), "token": Scheme(), **schemes}
        found.append(StageWork(finished(stage).eval(), cache, config.hidden_size, **given))
    return found


@contextmanager
def ring(
    made: Sequence[StageWork],
    links: dict[str, Any] | None = None,
    later_head: HeadDrafts | None = None,
    stored: Sequence[StoredBlocks] = (),
    **engine: Any,
) -> Iterator[TextEngine]:
    """Run stages, the later ones on threads, and yield the first one's engine; the last one has a head."""
    engine["stored"] = stored[0] if stored else None
    if len(made) == 1:
        with TextEngine(made[0], **engine) as only:
            yield only
        return
    last = len(made) - 1
    with meshes(len(made), **(links or {})) as ranks:
        boxes = [{r: peer.mailbox for r, peer in rank.items()} for rank in ranks]
        later = [
            LaterStage(k, made[k], boxes[k][k - 1], boxes[k][0], boxes[k].get(k + 1) if k < last else None)
            for k in range(1, last + 1)
        ]
        later[-1].answers.head = later_head
        for stage, blocks in zip(later, stored[1:], strict=bool(stored)):
            stage.stored = blocks
        threads = [threading.Thread(target=run_stage, args=(stage,), daemon=True) for stage in later]
        for thread in threads:
            thread.start()
        with TextEngine(made[0], boxes[0][1], boxes[0][last], **engine) as first:
            yield first
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def run_stage(stage: LaterStage) -> None:
    """Run a stage whose end the first one is told of."""
    with suppress(ThinwireError):  # the first stage is told
        stage.run()


def greedy(model: Any, prompt: Sequence[int], many: int) -> list[int]:
    """Return what the whole model says, one full pass a token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(many):
            tokens.append(
                int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
    return tokens[len(prompt) :]
