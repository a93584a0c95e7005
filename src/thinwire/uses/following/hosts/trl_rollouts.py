"""TRL's end: a ``rollout_func`` whose completions come from workers elsewhere, as tested with TRL 1.16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.types import InputError, require
from thinwire.uses.following.hosts.rollout_pool import RolloutPool
from thinwire.uses.following.push.publisher import Publisher

TESTED = "1.16"
# TRL's names of how to sample, and those of transformers' ``generate``.
SETTINGS = {
    "max_completion_length": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}


class TrlRollouts:
    """Give this to ``GRPOTrainer`` as ``rollout_func``: it publishes each step's weights, and asks the pool.

    ``publisher`` has the model that is trained; ``dtype="bf16"`` of it where workers generate in that.
    Workers may generate with versions up to ``pool.max_age`` behind; ``pool.ages`` says which ones they were.
    ``settings`` are further ones of the workers' generating function. Errors: ``InputError`` for a trainer of
    several processes, whose prompts one pool would not see; the pool's.

    Use: ``GRPOTrainer(..., rollout_func=TrlRollouts(pool, publisher))``.
    """

    def __init__(self, pool: RolloutPool, publisher: Publisher, **settings: Any) -> None:
        self._pool, self._publisher, self._settings = pool, publisher, settings
        self._published: tuple[int, int] | None = None  # the trainer's step, and that version's number

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return ``prompt_ids``, ``completion_ids`` and ``logprobs`` of a completion for each prompt."""
        many = trainer.accelerator.num_processes
        require(
            many == 1, InputError, f"{many} processes train; one pool serves one, so train in one process"
        )
        tokenizer = trainer.processing_class
        asked = [_tokens(tokenizer, prompt) for prompt in prompts]
        step = trainer.state.global_step
        samples = self._pool.generate(asked, self._version(step), self._told(trainer.args), step)
        return {
            "prompt_ids": asked,
            "completion_ids": [s.tokens for s in samples],
            "logprobs": [s.logprobs for s in samples],
        }

    def _version(self, step: int) -> int:
        """Publish the weights of a step, once, and return the version's number."""
        if self._published is None or self._published[0] != step:
            self._published = step, self._publisher.publish(step).number
        return self._published[1]

    def _told(self, args: Any) -> dict[str, Any]:
        found = {name: getattr(args, own, None) for own, name in SETTINGS.items()}
        given = {name: value for name, value in found.items() if value not in (None, 0)}
        return {"do_sample": True, "top_k": 0} | given | self._settings


def _tokens(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    return list(
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    )
