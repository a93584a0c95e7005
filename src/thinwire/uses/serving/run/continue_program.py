"""The first stage with one prompt: it says how the text goes on, and what that took."""

from __future__ import annotations

import time
from typing import Any

from thinwire.runs.ranks.rank_main import say
from thinwire.uses.serving.run.asked_texts import AskedReader
from thinwire.uses.serving.run.options import ContinueConfig
from thinwire.uses.serving.run.stage_program import FirstStage, run_stage
from thinwire.uses.serving.run.text_pieces import TextPieces


def run_rank(config: ContinueConfig) -> None:
    """Run this process's stage; the first one continues the prompt, and says each piece as it comes."""
    run_stage(config, lambda first: go_on(config, first))


def go_on(config: ContinueConfig, first: FirstStage) -> None:
    """Continue the prompt. Errors: ``InputError`` for one that is too long."""
    source = first.source
    reader = AskedReader(source.tokenizer, source.config.vocab_size, config.cache)
    settings: dict[str, Any] = {"max_tokens": config.tokens, "temperature": config.temperature}
    settings |= {"top_p": config.top_p, "seed": config.seed}
    if config.chat:
        asked = reader.chat({"messages": [{"role": "user", "content": config.prompt}], **settings})
    else:
        asked = reader.completion({"prompt": config.prompt, **settings})
    (request,) = asked.requests(first.ends)
    text, pieces = first.engine.submit(request), TextPieces(source.tokenizer)
    for tokens in text:
        say("text", text=pieces.add(tokens))
    say("text", text=pieces.end())
    times, made = text.times, len(text.made)
    say(
        "end",
        reason=text.reason,
        prompt=len(request.prompt),
        tokens=made,
        first_token_s=times.first - times.came,
        tokens_per_second=(made - 1) / max(1e-9, times.last - times.first) if made > 1 else 0.0,
        rounds=text.rounds,
        drafted=text.drafted,
        accepted=text.accepted,
        seconds=time.monotonic() - times.came,
        bytes=first.engine.work.spent.packets,
    )
