"""The first stage with one prompt: it says how the text goes on, and what that took."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from thinwire.runs.ranks.rank_main import say
from thinwire.uses.serving.run.asked_texts import AskedReader
from thinwire.uses.serving.run.options import ContinueConfig
from thinwire.uses.serving.run.stage_program import FirstStage, run_stage
from thinwire.uses.serving.run.text_pieces import TextPieces
from thinwire.uses.serving.run.text_recorder import TextRecorder, line_of

SAID = (
    *("reason", "prompt", "tokens", "first_token_s", "tokens_per_second"),
    *("rounds", "drafted", "accepted", "seconds", "sent"),
)


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
    recorder = TextRecorder(first)
    first.engine.ended = recorder.ended
    (request,) = asked.requests(first.ends)
    text, pieces = first.engine.submit(request), TextPieces(source.tokenizer)
    for tokens in text:
        say("text", text=pieces.add(tokens))
    say("text", text=pieces.end())
    line = line_of(1, text)
    said: dict[str, Any] = asdict(line) | {"reason": text.reason, "sent": first.sent()}
    recorder.close("done")
    say("end", **{name: said[name] for name in SAID})
