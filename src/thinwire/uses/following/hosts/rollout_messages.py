"""What a trainer and its rollout workers say to each other: prompts out, samples and ages back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from thinwire.heads import F64, U32, U64, Head, Rest
from thinwire.types import WRONG_VALUES, PayloadError, require

PROTOCOL = 1
ANY_AGE = 0xFFFFFFFF  # versions
MOST = 1 << 16  # sequences of a message
Tokens = Sequence[int]


class Sample(NamedTuple):
    """A completion: its tokens, and the log probability of each under the weights that made it."""

    tokens: list[int]
    logprobs: list[float]


class Join(Head, kind=1):
    """A worker is ready for prompts, in this protocol."""

    protocol: U32


class Prompts(Head, kind=2):
    """Generate from these, with a version at most ``max_age`` behind ``newest``."""

    part: U64
    newest: U64
    max_age: U32
    body: Rest


class Completions(Head, kind=3):
    """What was generated: by which version, how old that was in seconds, and how long the worker waited."""

    part: U64
    version: U64
    age: F64
    waited: F64
    body: Rest


class Failed(Head, kind=4):
    """A part was not generated, and why."""

    part: U64
    why: Rest


class WaitsForWeights(Head, kind=5):
    """The weights here, of this version, are too old for a part: the worker waits for newer ones."""

    part: U64
    version: U64


SAID = (Join, Prompts, Completions, Failed, WaitsForWeights)
WORDS: Mapping[int, type[Head]] = {word.KIND: word for word in SAID}


def unpack(data: bytes) -> Head:
    """Return a message. Errors: ``PayloadError``."""
    found = WORDS.get(data[0]) if data else None
    if found is None:
        raise PayloadError("a message of another protocol between a trainer and its rollout workers")
    return found.unpack(data)


def pack_prompts(prompts: Sequence[Tokens], settings: Mapping[str, Any]) -> bytes:
    """Return prompts and how to generate from them as bytes."""
    return _joined(json.dumps(settings).encode(), prompts, [])


def unpack_prompts(body: bytes | memoryview) -> tuple[list[list[int]], dict[str, Any]]:
    """Return prompts, and how to generate from them. Errors: ``PayloadError``."""
    text, tokens, _ = _parted(body, 0)
    try:
        settings = json.loads(text)
    except WRONG_VALUES as e:
        raise PayloadError(f"settings that are no JSON: {e}") from e
    require(isinstance(settings, dict), PayloadError, "settings that are no mapping")
    return tokens, settings


def pack_samples(samples: Sequence[Sample]) -> bytes:
    """Return samples as bytes: 8 a token."""
    return _joined(b"", [s.tokens for s in samples], [s.logprobs for s in samples])


def unpack_samples(body: bytes | memoryview) -> list[Sample]:
    """Return samples. Errors: ``PayloadError``."""
    _, tokens, logprobs = _parted(body, 1)
    return [Sample(*both) for both in zip(tokens, logprobs, strict=True)]


def _joined(text: bytes, tokens: Sequence[Tokens], values: Sequence[Sequence[float]]) -> bytes:
    sizes = np.array([len(text), len(tokens), *map(len, tokens)], "<u4").tobytes()
    flat = np.array([t for own in tokens for t in own], "<i4").tobytes()
    return sizes + text + flat + np.array([x for own in values for x in own], "<f4").tobytes()


def _parted(body: bytes | memoryview, valued: int) -> tuple[bytes, list[list[int]], list[list[float]]]:
    data = bytes(body)
    require(len(data) >= 8, PayloadError, f"{len(data)} bytes of sequences are cut short")
    n_text, many = (int(x) for x in np.frombuffer(data, "<u4", 2))
    start = 8 + 4 * many
    require(many <= MOST and len(data) >= start, PayloadError, f"{many} sequences in {len(data)} bytes")
    sizes = np.frombuffer(data, "<u4", many, 8).astype(np.int64)
    total, at = int(sizes.sum()), start + n_text
    right = len(data) == at + 4 * total * (1 + valued)
    require(right, PayloadError, f"{len(data)} bytes are not {total} tokens of {many} sequences")
    cuts = np.cumsum(sizes)[:-1]
    tokens = np.split(np.frombuffer(data, "<i4", total, at), cuts)
    values = np.split(np.frombuffer(data, "<f4", total * valued, at + 4 * total), cuts) if valued else []
    return data[start:at], [x.tolist() for x in tokens][:many], [x.tolist() for x in values][:many]
