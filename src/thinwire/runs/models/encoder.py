"""Documents to token ids, as ``tokenizer(prompt)`` makes them, and as if whole however long they are."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.runs.data.documents import Document
from thinwire.types import InputError, require

PIECE = 8192  # characters; one huge string takes minutes, single lines lose the merges across line ends
GROUP = 64  # pieces encoded at once
NEAR = 100  # characters on each side of a cut that show whether the tokens there are those of the whole
CUT = re.compile(r"(?<=\n)(?!\n)|(?<=\S)(?= )")  # where a line or a word begins
PROBE = "a"  # a text before which a tokenizer puts what it puts before texts
UNPREFIXED: dict[str, dict[str, Any]] = {
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
}

Rule = Callable[[list[str]], list[list[int]]]


class _Piece(NamedTuple):
    text: str | None  # None: the end of a document
    learnt: bool = True
    begins: bool = False  # a document
    inner: bool = False  # goes on behind something: the tokenizer puts no space before it
    before: str = ""  # the end of the piece before, where the tokens depend on it


class Encoder:
    """The rules of a tokenizer, without the truncation, padding or dropout that a past call left in it.

    The tokenizer itself stays as it is. ``bos``: documents begin with what it puts before a prompt, unless
    their text has that already. ``digest`` is of all that decides which tokens a text has.
    """

    def __init__(self, tokenizer: Any, bos: bool = True) -> None:
        self._tokenizer, self._end = tokenizer, tokenizer.eos_token_id
        self._literal = bool(getattr(tokenizer, "split_special_tokens", False))
        self._bos = bos
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._rules = None if backend is None else _stateless(backend.to_str())
        told = self._rules or repr(sorted(tokenizer.get_vocab().items()))
        self.digest = hashlib.blake2b(f"{self._literal} {bos} {self._end} {told}".encode()).hexdigest()

    def tokens(self, *documents: Document, limit: int | None = None) -> Tensor:
        """Return the token ids of the documents as a LongTensor [T], at most ``limit`` of them if given.

        A token of a prompt is there as its complement, below zero (see ``packing.pack``). After each document
        but the last is the tokenizer's end-of-text token, or a blank line where it has none. A prompt is
        encoded apart from its text, as it is when a model is asked. ``InputError`` if nothing comes out.
        """
        ids: list[Tensor] = []
        total = 0
        for group in _groups(self._pieces(documents)):
            ids.append(torch.tensor([i for row in self._encode(group) for i in row], dtype=torch.int64))
            total += len(ids[-1])
            if limit is not None and total >= limit:
                break
        size = sum(map(len, documents))
        made = f"the tokenizer made no token of {size} characters; use another text or model"
        require(total > 0, InputError, made)
        return torch.cat(ids)[:limit]

    def _encode(self, group: list[_Piece]) -> Iterator[list[int]]:
        rows = {inner: self._rows([p for p in group if p.inner == inner]) for inner in (False, True)}
        for piece in group:
            row = next(rows[piece.inner])
            if piece.begins and row[: len(self._begin)] != self._begin:
                row = self._begin + row
            yield row if piece.learnt else [~i for i in row]

    def _rows(self, pieces: list[_Piece]) -> Iterator[list[int]]:
        """Yield the ids of pieces that are all inner ones, or none of them."""
        rule = self._inner if pieces and pieces[0].inner else self._first
        texts = [p.before + p.text for p in pieces if p.text is not None]
        rows = iter(rule(texts + [p.before for p in pieces if p.before]))
        ids = [[self._end] if p.text is None else next(rows) for p in pieces]
        for piece, row in zip(pieces, ids, strict=True):
            head = next(rows) if piece.before else []
            fits = row[: len(head)] == head
            yield row[len(head) :] if fits else self._inner([piece.text or ""])[0]

    def _pieces(self, documents: Iterable[Document]) -> Iterator[_Piece]:
        for number, document in enumerate(documents):
            if number:
                yield _Piece("\n\n", inner=True) if self._end is None else _Piece(None)
            prompt, text = document.prompt, document.text
            yield from self._cut(prompt, _Piece(None, learnt=False))
            yield from self._cut(text, _Piece(None, inner=bool(prompt)))

    def _cut(self, text: str, kind: _Piece) -> Iterator[_Piece]:
        start = 0
        for stop in lines(text) if self._by_lines else self._cuts(text, kind.inner):
            before = "" if self._by_lines else _end_of(text, start)
            yield kind._replace(text=text[start:stop], begins=not (start or kind.inner), before=before)
            start = stop

    def _cuts(self, text: str, inner: bool) -> Iterator[int]:
        """Yield the ends of pieces, with which the text has the tokens that it has whole."""
        rule = self._inner if inner else self._first
        start = 0
        while start < len(text):
            for cut in (m.start() for m in CUT.finditer(text, start + PIECE)):
                before = _end_of(text, cut)
                if _behind(rule, before, text[cut : cut + NEAR]) is not None:
                    start = cut
                    break
            else:
                start = len(text)
            yield start

    @cached_property
    def _begin(self) -> list[int]:
        """What the tokenizer puts before a prompt."""
        if not self._bos:
            return []
        plain = self._first([PROBE])[0]
        whole = self._tokenizer.encode(PROBE) if self._raw is None else self._raw.encode(PROBE).ids
        places = range(len(whole) - len(plain) + 1)
        return list(whole[: next((k for k in places if whole[k : k + len(plain)] == plain), 0)])

    @cached_property
    def _raw(self) -> Any | None:
        return None if self._rules is None else self._made(self._rules)

    def _made(self, rules: str) -> Any:
        from tokenizers import Tokenizer

        raw = Tokenizer.from_str(rules)
        raw.encode_special_tokens = self._literal
        return raw

    @cached_property
    def _first(self) -> Rule:
        """How texts are encoded before which there is nothing."""
        if self._raw is None:
            return lambda texts: [self._tokenizer.encode(t, add_special_tokens=False) for t in texts]
        return _batches(self._raw)

    @cached_property
    def _inner(self) -> Rule:
        """How texts are encoded that go on behind others: without the space put before a first one."""
        first = self._first
        if self._rules is None:  # nothing says what it puts before texts, but behind a line end it does not
            return lambda texts: [_behind(first, "\n", t) or first([t])[0] for t in texts]
        rules = _unprefixed(self._rules)
        return first if rules == self._rules else _batches(self._made(rules))

    @cached_property
    def _by_lines(self) -> bool:
        """Whether pieces of whole lines have the tokens that they have in the text."""
        if self._rules is None or self._inner is not self._first:
            return False
        return '"ByteLevel"' in json.dumps(json.loads(self._rules)["pre_tokenizer"])


def lines(text: str) -> Iterator[int]:
    """Yield the ends of pieces of about ``PIECE`` characters that end where a line does, after blank ones."""
    start = 0
    while start < len(text):
        start = text.find("\n", start + PIECE)
        if start < 0:
            start = len(text)
        while start < len(text) and text[start] == "\n":
            start += 1
        yield start


def _groups(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    while group := list(islice(pieces, GROUP)):
        yield group


def _end_of(text: str, stop: int) -> str:
    return text[max(stop - NEAR, 0) : stop]


def _behind(rule: Rule, before: str, text: str) -> list[int] | None:
    """Return the ids of a text behind another; None where the two meet within a token."""
    head, both = rule([before, before + text])
    return both[len(head) :] if both[: len(head)] == head else None


def _batches(raw: Any) -> Rule:
    # Straight to the backend: the wrapper warns about pieces longer than the model, cut by packing anyway.
    return lambda texts: [e.ids for e in raw.encode_batch(texts, add_special_tokens=False)]


def _stateless(said: str) -> str:
    rules = json.loads(said)
    state: dict[str, Any] = {"truncation": None, "padding": None}
    if "dropout" in rules["model"]:  # with which a text has other tokens each time
        state["model"] = rules["model"] | {"dropout": None}
    return said if rules | state == rules else json.dumps(rules | state)


def _unprefixed(said: str) -> str:
    rules = json.loads(said)
    parts = {name: _without_prefix(rules[name]) for name in ("normalizer", "pre_tokenizer")}
    return said if rules | parts == rules else json.dumps(rules | parts)


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normaliser or pre-tokenizer that puts nothing before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    for name in {"normalizers", "pretokenizers"} & part.keys():
        part = part | {name: [p for p in map(_without_prefix, part[name]) if p]}
    return part | UNPREFIXED.get(part["type"], {})
