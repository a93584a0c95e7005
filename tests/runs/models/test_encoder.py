"""Texts to tokens: those of the whole text, whatever state the tokenizer carries and what it puts before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from thinwire.runs.data.corpus import Corpus
from thinwire.runs.data.documents import Document
from thinwire.runs.models.encoder import NEAR, PIECE, Encoder
from thinwire.runs.models.tokenizer import tokenise, trained_bpe
from thinwire.uses.training.run import training_job

pytestmark = pytest.mark.usefixtures("own_cache")

LINES = [f"Question {i}:\nParis is a city, Is  Rome another? Yes.\n\n" for i in range(700)]
TEXT = "".join(LINES)
LONG = TEXT[: 3 * PIECE + 500]
MARKED = "".join(f"<s>[INST]Paris or Rome {i}?[/INST]Rome it is</s>\n" for i in range(700))
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]


def metaspace(scheme: str) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    raw.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return raw


def prepend() -> Tokenizer:
    """Return what Llama 2's tokenizer.json describes: no words, a mark before each text and each blank."""
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for its training alone
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return raw


def unigram() -> Tokenizer:
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always")])
    raw.decoder = decoders.Metaspace(prepend_scheme="always")
    return raw


def byte_level(prefix: bool) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    raw.decoder = decoders.ByteLevel()
    return raw


KINDS = {
    "always": lambda: metaspace("always"),
    "first": lambda: metaspace("first"),
    "never": lambda: metaspace("never"),
    "prepend": prepend,
    "unigram": unigram,
    "byte-level": lambda: byte_level(False),
    "byte-level with a space": lambda: byte_level(True),
}
PREFIXED = [kind for kind in KINDS if kind not in ("never", "byte-level")]
WHOLE = [kind for kind in KINDS if kind != "byte-level"]  # which is cut at lines, as it always was


def make(kind: str, folder: Path, bos: bool = False) -> Any:
    """Return a tokenizer of a kind, trained, saved and read as a model's is."""
    raw = KINDS[kind]()
    about = {"special_tokens": SPECIAL, "show_progress": False, "vocab_size": 400}
    if kind == "unigram":
        raw.train_from_iterator(LINES, trainers.UnigramTrainer(**about, unk_token="<unk>"))
    else:
        raw.train_from_iterator(LINES, trainers.BpeTrainer(**about))
    if kind == "prepend":
        rules = json.loads(raw.to_str())
        raw = Tokenizer.from_str(json.dumps(rules | {"pre_tokenizer": None}))
    if bos:
        raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def ids_of(tokenizer: Any, *documents: Document, **how: Any) -> list[int]:
    return [~i if i < 0 else i for i in tokenise(tokenizer, *documents, **how).tolist()]


def decoded(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    return text


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("text", [LONG, MARKED], ids=["plain", "marked"])
def test_a_long_text_has_the_tokens_that_it_has_whole(kind: str, text: str, tmp_path: Path):
    tokenizer = make(kind, tmp_path)
    assert len(text) > 3 * PIECE
    assert ids_of(tokenizer, Document(text)) == tokenizer(text).input_ids


@pytest.mark.parametrize("kind", ["first", "prepend"])
def test_a_text_is_encoded_in_pieces_however_tokens_lie_across_its_lines(kind: str, tmp_path: Path):
    tokenizer = make(kind, tmp_path)
    text = "Question:\nParis is a city. " * 1000
    assert any("\nP" in t for t in tokenizer.tokenize(text[:100]))
    pieces = list(Encoder(tokenizer)._pieces([Document(text)]))
    assert len(pieces) == len(text) // PIECE + 1 and max(len(p.text or "") for p in pieces) < PIECE + NEAR
    assert ids_of(tokenizer, Document(text)) == tokenizer(text).input_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Question:\n", "Paris"),
        ("Question:", " Paris."),
        ("Paris or Rome?[/INST]", "Rome"),
        ("Question 1: ", "Rome"),
        ("Question:\n", "\nRome\n"),
        ("Rome\n", TEXT[: 2 * PIECE]),
    ],
)
def test_prompt_and_answer_are_what_stands_in_the_file(kind: str, prompt: str, answer: str, tmp_path: Path):
    tokenizer = make(kind, tmp_path)
    ids = tokenise(tokenizer, Document(answer, prompt))
    asked, learnt = (~ids[ids < 0]).tolist(), ids[ids >= 0].tolist()
    assert asked == tokenizer(prompt).input_ids
    assert decoded(tokenizer, asked + learnt).removeprefix(" ") == prompt + answer
    assert not decoded(tokenizer, asked + learnt).startswith("  ")


@pytest.mark.parametrize("kind", PREFIXED)
def test_without_an_end_token_a_blank_line_has_no_space_before_it(kind: str, tmp_path: Path):
    tokenizer = make(kind, tmp_path)
    tokenizer.eos_token = None
    ids = ids_of(tokenizer, Document("Paris"), Document("Rome"))
    assert "Paris\n\n" in decoded(tokenizer, ids)


STATES = {
    "truncated": {"truncation": True, "max_length": 8},
    "padded": {"padding": "max_length", "max_length": 4096},
    "both": {"truncation": True, "padding": "max_length", "max_length": 64, "pad_to_multiple_of": 8},
}


@pytest.mark.parametrize("kind", ["byte-level", "prepend"])
@pytest.mark.parametrize("state", STATES)
def test_nothing_is_cut_or_added_by_the_state_of_a_past_call(kind: str, state: str, tmp_path: Path):
    plain = make(kind, tmp_path / "a")
    plain.pad_token = "<unk>"
    documents = [Document(TEXT), Document("Rome\n", "Paris")]
    wanted = tokenise(plain, *documents)
    plain(["Paris", "Rome is a city"], **STATES[state])
    plain.save_pretrained(tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "tokenizer.json").read_text())
    assert saved["truncation"] or saved["padding"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "b")
    before = tokenizer.backend_tokenizer.to_str()
    assert tokenise(tokenizer, *documents).equal(wanted) and tokenise(plain, *documents).equal(wanted)
    assert tokenizer.backend_tokenizer.to_str() == before  # what is the user's stays as it is


def test_dropout_of_merges_is_left_out_and_markers_are_read_as_set(tmp_path: Path):
    tokenizer = make("byte-level", tmp_path)
    wanted = tokenise(tokenizer, Document(TEXT))
    tokenizer("[INST]", split_special_tokens=True)
    tokenizer.backend_tokenizer.model.dropout = 0.9
    assert tokenise(tokenizer, Document(TEXT)).equal(wanted)
    assert ids_of(tokenizer, Document("[INST]")) == [SPECIAL.index("[INST]")]
    tokenizer.split_special_tokens = True
    assert SPECIAL.index("[INST]") not in ids_of(tokenizer, Document("[INST]"))


def test_the_cache_keeps_nothing_that_was_cut(tmp_path: Path):
    tokenizer = make("prepend", tmp_path)
    corpus = Corpus("t", (Document(TEXT),), (), "test")
    tokenizer(["Paris"], truncation=True, max_length=8)
    first = training_job._tokens(Encoder(tokenizer), corpus, "train")
    assert len(first) == len(tokenizer(TEXT).input_ids) > 8
    assert training_job._tokens(Encoder(tokenizer), corpus, "train").equal(first)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_prompts_begin_as_when_a_model_is_asked(kind: str, tmp_path: Path):
    tokenizer = make(kind, tmp_path, bos=True)
    last = "Question:\nRome is a city."
    documents = Document("Rome"), Document("Paris", "Question:\n"), Document(last)
    ids = tokenise(tokenizer, *documents)
    begin, end = 1, 2
    assert [k + 1 for k in range(len(ids)) if ids[k] == end] == [
        k for k in range(1, len(ids)) if ids[k] in (begin, ~begin)
    ]
    asked = (~ids[ids < 0]).tolist()
    assert asked == tokenizer("Question:\n").input_ids and asked[0] == begin
    assert ids.tolist()[: len(tokenizer("Rome").input_ids)] == tokenizer("Rome").input_ids
    assert ids.tolist()[-len(tokenizer(last).input_ids) :] == tokenizer(last).input_ids
    without = tokenise(tokenizer, *documents, bos=False)
    assert without.equal(ids[(ids != begin) & (ids != ~begin)])


def test_a_prompt_that_begins_with_the_token_already_gets_no_second_one(tmp_path: Path):
    tokenizer = make("byte-level", tmp_path, bos=True)
    assert ids_of(tokenizer, Document("Rome", "<s>[INST]Paris"))[:3] == [1, SPECIAL.index("[INST]"), *ids_of(
        tokenizer, Document("Paris"), bos=False)][:3]  # fmt: skip


def test_tokens_are_kept_apart_by_how_documents_begin_and_end(tmp_path: Path):
    tokenizer = make("byte-level", tmp_path, bos=True)
    digests = {Encoder(tokenizer, bos).digest for bos in (True, False)}
    tokenizer.eos_token = "<s>"
    assert len(digests | {Encoder(tokenizer).digest}) == 3


class Slow:
    """A tokenizer without the fast library behind it, as mistral-common's is."""

    def __init__(self, fast: Any) -> None:
        self._fast, self.eos_token_id = fast, fast.eos_token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._fast(text, add_special_tokens=add_special_tokens).input_ids
        return ids

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._fast.get_vocab()
        return vocabulary


@pytest.mark.parametrize("kind", WHOLE)
def test_a_tokenizer_of_another_library_gives_the_same(kind: str, tmp_path: Path):
    tokenizer = make(kind, tmp_path, bos=True)
    documents = Document("city", "Question:\n"), Document(LONG), Document(" Rome", "Question:")
    assert tokenise(Slow(tokenizer), *documents).equal(tokenise(tokenizer, *documents))


def test_a_tokenizer_that_puts_nothing_before_texts_is_asked_for_whole_lines(tmp_path: Path):
    """So the tokens of byte-level vocabularies stay what they were."""
    tokenizer = trained_bpe(Corpus("t", (Document(TEXT),), (), "test"), vocab=300)
    pieces = list(Encoder(tokenizer)._pieces([Document(LONG)]))
    assert all(p.text and p.text.endswith("\n") for p in pieces[:-1]) and not any(p.before for p in pieces)
    rows = [tokenizer(p.text, add_special_tokens=False).input_ids for p in pieces]
    assert ids_of(tokenizer, Document(LONG)) == [i for row in rows for i in row]
