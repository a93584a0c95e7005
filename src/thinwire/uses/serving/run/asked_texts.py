"""What an endpoint is asked, read from JSON as OpenAI's API has it, each field in its bounds."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from thinwire.types import InputError, require
from thinwire.uses.serving.text_requests import TextRequest
from thinwire.uses.serving.token_picking import Picking

MOST_TEXTS, MOST_STOPS = 8, 4
LARGEST = 1 << 63  # numbers are below it
USUAL = 16  # tokens of a completion, where nothing is said, as in OpenAI's API
# Fields that would change the text, and what they are where they change nothing.
OTHERS: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None,),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}


@dataclass(frozen=True)
class AskedTexts:
    """One call: ``many`` answers to each of ``prompts``, in tokens."""

    prompts: tuple[tuple[int, ...], ...]
    most: int
    picking: Picking
    stops: tuple[str, ...]
    many: int
    stream: bool
    usage: bool  # in a stream, at its end
    drafts: bool

    def requests(self, ends: frozenset[int]) -> list[TextRequest]:
        """Return a request for each answer; those to one prompt are drawn with seeds of their own."""
        found = list[TextRequest]()
        for prompt in self.prompts:
            for k in range(self.many):
                picking = self.picking.with_seed(self.picking.seed + k)
                found.append(TextRequest(prompt, self.most, picking, ends, self.drafts))
        return found


class AskedReader:
    """Read calls for one model: ``room`` tokens of prompt and answer at most."""

    def __init__(self, tokenizer: Any, vocabulary: int, room: int) -> None:
        self._tokenizer, self._vocabulary, self._room = tokenizer, vocabulary, room

    def completion(self, values: Mapping[str, Any]) -> AskedTexts:
        """Read a call of ``/v1/completions``. Errors: ``InputError`` naming the field."""
        given = values.get("prompt", "")
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        given = given if several else [given]
        self._many(values, len(given))  # before any of them is read
        prompts = tuple(self._tokens(one) for one in given)
        return self._asked(values, prompts, _number(values, "max_tokens", int) or USUAL)

    def chat(self, values: Mapping[str, Any]) -> AskedTexts:
        """Read a call of ``/v1/chat/completions``. Errors: ``InputError`` naming the field."""
        prompt = self.conversation(values.get("messages"))
        most = _number(values, "max_completion_tokens", int) or _number(values, "max_tokens", int)
        return self._asked(values, (prompt,), most or max(1, self._room - len(prompt)))

    def conversation(self, messages: Any) -> tuple[int, ...]:
        """Return a conversation in the model's own form, as tokens. Errors: ``InputError``."""
        wrong = "messages is not a list of objects with role and content; send what the user and others said"
        require(isinstance(messages, list) and bool(messages), InputError, wrong)
        said = []
        for message in messages:
            require(isinstance(message, dict) and isinstance(message.get("role"), str), InputError, wrong)
            said.append({"role": message["role"], "content": _content(message.get("content"), wrong)})
        self._check_size(sum(len(one["content"]) for one in said))
        form = getattr(self._tokenizer, "chat_template", None)
        require(bool(form), InputError, "this model has no form of a chat; use /v1/completions")
        try:
            found = self._tokenizer.apply_chat_template(
                said, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as e:  # whatever the model's own template raises
            raise InputError(f"messages do not fit the model's form of a chat: {e}") from e
        return tuple(map(int, found))

    def _tokens(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._check_size(len(prompt))
            found = [int(t) for t in self._tokenizer(prompt).input_ids]
            return tuple(found or [self._begin()])
        good = isinstance(prompt, list) and all(
            isinstance(t, int) and not isinstance(t, bool) and 0 <= t < self._vocabulary for t in prompt
        )
        wrong = f"prompt is neither text nor tokens below {self._vocabulary}; send one of these, or a list"
        require(good and bool(prompt), InputError, wrong)
        return tuple(prompt)

    @cached_property
    def _longest(self) -> int:
        """Characters that all tokens that fit may stand for, with a margin for what a tokenizer takes out."""
        return 4 * self._room * max((len(word) for word in self._tokenizer.get_vocab()), default=1)

    def _check_size(self, characters: int) -> None:
        """Refuse a text before it is read whose tokens cannot fit: that would take seconds."""
        wrong = f"{characters} characters are more than the {self._room} tokens that fit; send less"
        require(characters <= self._longest, InputError, wrong)

    def _many(self, values: Mapping[str, Any], prompts: int) -> int:
        """Return how many answers each of so many prompts is to have."""
        many = _number(values, "n", int)
        many = 1 if many is None else many
        wrong = f"n={many} answers to {prompts} prompts; ask for one at least, {MOST_TEXTS} at most in a call"
        require(many >= 1 and many * prompts <= MOST_TEXTS, InputError, wrong)
        return int(many)

    def _begin(self) -> int:
        found = self._tokenizer.bos_token_id
        found = self._tokenizer.eos_token_id if found is None else found
        require(found is not None, InputError, "prompt is empty; send at least a word")
        return int(found)

    def _asked(
        self, values: Mapping[str, Any], prompts: tuple[tuple[int, ...], ...], most: int
    ) -> AskedTexts:
        for name, nothing in OTHERS.items():
            wrong = f"{name} is not supported here; leave it out"
            require(any(values.get(name) == none for none in nothing), InputError, wrong)
        many = self._many(values, len(prompts))
        require(most > 0, InputError, f"max_tokens={most} is below 1; ask for one at least")
        longest = max(map(len, prompts))
        wrong = f"{longest} tokens of prompt and {most} of answer are more than the {self._room} that fit"
        require(longest + most <= self._room, InputError, f"{wrong}; send less, or lower max_tokens")
        options = values.get("stream_options") or {}
        return AskedTexts(
            prompts,
            most,
            self._picking(values),
            _stops(values.get("stop")),
            many,
            values.get("stream") is True,
            isinstance(options, dict) and options.get("include_usage") is True,
            values.get("drafts") is not False,
        )

    def _picking(self, values: Mapping[str, Any]) -> Picking:
        temperature, top_p = _number(values, "temperature", float), _number(values, "top_p", float)
        seed, top_k = _number(values, "seed", int), _number(values, "top_k", int)
        return Picking(
            1.0 if temperature is None else temperature,
            1.0 if top_p is None else top_p,
            top_k or 0,
            secrets.randbits(62) if seed is None else abs(seed) % (1 << 62),
        )


def _number(values: Mapping[str, Any], name: str, kind: type) -> Any:
    value = values.get(name)
    good = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
    good = good and (value is None or (abs(value) < LARGEST and (kind is float or int(value) == value)))
    what = f"{'number' if kind is float else 'whole number'} below 2**63"
    require(good, InputError, f"{name}={str(value)[:40]} is no {what}; send one, or leave it out")
    return None if value is None else kind(value)


def _content(content: Any, wrong: str) -> str:
    """Return the text of a message, which may come in parts."""
    if isinstance(content, list):
        parts = [p.get("text") for p in content if isinstance(p, dict) and p.get("type") == "text"]
        require(
            len(parts) == len(content), InputError, "a message has parts that are no text; send text alone"
        )
        content = "".join(str(p) for p in parts)
    require(content is None or isinstance(content, str), InputError, wrong)
    return content or ""


def _stops(given: Any) -> tuple[str, ...]:
    words = [given] if isinstance(given, str) else ([] if given is None else given)
    good = isinstance(words, list) and len(words) <= MOST_STOPS and all(isinstance(w, str) for w in words)
    require(good, InputError, f"stop is no text, nor a list of {MOST_STOPS} at most; send one of these")
    return tuple(words)
