"""The first stage with prompts of a text: what it continues them by, and how soon."""

from __future__ import annotations

from dataclasses import asdict

from thinwire.runs.data.corpus import load_corpus
from thinwire.runs.machine import devices
from thinwire.runs.machine.processor import peak_rss_bytes
from thinwire.runs.models.encoder import Encoder
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.ranks.rank_main import say
from thinwire.types import InputError, require
from thinwire.uses.serving.run.options import MeasuredConfig
from thinwire.uses.serving.run.stage_program import FirstStage, run_stage
from thinwire.uses.serving.run.text_recorder import line_of
from thinwire.uses.serving.text_requests import Text, TextRequest
from thinwire.uses.serving.token_picking import Picking

WARM = 8  # tokens of a text that is not timed


def run_rank(config: MeasuredConfig) -> None:
    """Run this process's stage; the first one continues the prompts."""
    run_stage(config, lambda first: measure(config, first))
    say("memory", nbytes=peak_rss_bytes())


def prompts_of(config: MeasuredConfig, source: ModelSource) -> list[tuple[int, ...]]:
    """Return prompts from the held-out part of a text. Errors: ``InputError`` where that is too short."""
    need = config.texts * config.prompt_tokens
    tokens = Encoder(source.tokenizer, False).tokens(*load_corpus(config.data).heldout, limit=need).tolist()
    short = f"--data {config.data} has {len(tokens)} tokens held out, {need} are needed; ask for fewer"
    require(len(tokens) >= need, InputError, short)
    n = config.prompt_tokens
    return [tuple(tokens[k * n : (k + 1) * n]) for k in range(config.texts)]


def measure(config: MeasuredConfig, first: FirstStage) -> None:
    """Continue all prompts twice: by the likeliest tokens, to be compared, and drawn, to be timed."""
    engine, prompts = first.engine, prompts_of(config, first.source)
    engine.submit(TextRequest(prompts[0][:WARM], WARM)).wait()
    likely = [engine.submit(TextRequest(p, config.tokens)).wait() for p in prompts]
    shown = [first.source.tokenizer.decode(tokens) for tokens in likely]
    before, spent = first.sent(), engine.work.spent.tokens
    texts = list[Text]()
    for start in range(0, len(prompts), config.at_once):
        group = prompts[start : start + config.at_once]
        drawn = [Picking(config.temperature, seed=config.seed + start + k) for k in range(len(group))]
        now = [engine.submit(TextRequest(p, config.tokens, d)) for p, d in zip(group, drawn, strict=True)]
        for text in now:
            text.wait()
        texts += now
    lines = [asdict(line_of(k, text)) for k, text in enumerate(texts, 1)]
    values = (engine.work.spent.tokens - spent) * engine.work.width
    facts = devices.facts(engine.work.device)
    say(
        "measured",
        likely=likely,
        shown=shown,
        texts=lines,
        nbytes=first.sent() - before,
        values=values,
        facts=facts,
    )
