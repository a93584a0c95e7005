"""Prompts: what is read and not learnt, from the file to the loss."""

import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from thinwire.runs.data.corpus import Corpus, load_corpus
from thinwire.runs.data.documents import Document
from thinwire.runs.data.task import UNLEARNT, BatchLoss, inputs, next_token_loss, pack, targets
from thinwire.runs.models.tokenizer import END, tokenise, trained_bpe
from thinwire.types import InputError
from thinwire.uses.training.run import training_job
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.training_job import prepare


def write(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def asked(k):
    return {"ask": f"What is {k}?", "say": f" It is {k}." * 3}


def test_a_line_is_a_prompt_and_a_text_and_is_never_cut(tmp_path):
    """Not even where the last tenth begins in the middle of a long one."""
    long = {"ask": "Tell all!", "say": "One thing\n" * 200}
    corpus = load_corpus(write(tmp_path / "a.jsonl", asked(0), asked(1), long), "say", "ask")
    assert corpus.train == tuple(Document(r["say"], r["ask"]) for r in (asked(0), asked(1)))
    assert corpus.heldout == (Document(long["say"], long["ask"]),)


def test_texts_without_prompts_may_lie_beside_them(tmp_path):
    write(tmp_path / "a.jsonl", *map(asked, range(5)))
    (tmp_path / "b.txt").write_text("plain")
    corpus = load_corpus(str(tmp_path), "say", "ask")
    assert [bool(d.prompt) for d in corpus.train + corpus.heldout] == [True] * 5 + [False]


@pytest.mark.parametrize(
    ("records", "fields", "words"),
    [
        ([asked(0)], ("say", "ask"), "one text with a prompt; give two or more"),
        ([asked(0), {"say": "b"}], ("say", "ask"), "line 2 .* 'ask', but say; .*--prompt-field"),
        ([asked(0), {"ask": "b"}], ("say", "ask"), "line 2 .* 'say', but ask; .*--text-field"),
        ([asked(0), asked(1)], ("say", "say"), "--prompt-field 'say' is the field of the text too"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path, records, fields, words):
    with pytest.raises(InputError, match=words) as error:
        load_corpus(write(tmp_path / "a.jsonl", *records), *fields)
    assert "\n" not in str(error.value)


def test_a_prompt_field_where_nothing_has_one_is_refused():
    with pytest.raises(
        InputError, match=r"--prompt-field 'ask' is for \.jsonl files, and data 'shakespeare'"
    ):
        load_corpus("shakespeare", prompt="ask")


def test_tokens_of_prompts_are_told_apart_and_are_the_same_tokens():
    documents = (Document("four five", "one two"), Document("three"))
    tokenizer = trained_bpe(Corpus("t", documents * 9, (), "test"), vocab=300)
    ids = tokenise(tokenizer, *documents)
    whole = torch.where(ids < 0, ~ids, ids).tolist()
    assert tokenizer.decode(whole) == f"one twofour five{END}three"
    assert tokenizer.decode((~ids[ids < 0]).tolist()) == "one two"


def test_blocks_keep_what_stands_before_a_text_and_drop_what_has_nothing_to_learn():
    blocks = pack(torch.tensor([~1, ~2, 3, ~4, ~5, ~6, ~7, 8, 9]), 2)
    assert inputs(blocks).tolist() == [[1, 2], [7, 8]]
    assert targets(blocks).tolist() == [[UNLEARNT, 3], [8, 9]]
    with pytest.raises(InputError, match="no block of 2 tokens has one to learn"):
        pack(torch.tensor([1, ~2, ~3, 4]), 2)


def test_losses_of_unequal_micro_batches_come_to_that_of_the_batch():
    torch.manual_seed(0)
    logits = torch.randn(6, 5, 7, requires_grad=True)
    wanted = torch.randint(0, 7, (6, 5))
    wanted[torch.rand(6, 5) < 0.5] = UNLEARNT
    wanted[:, 0] = 1
    wanted[0, 1:] = UNLEARNT
    whole = next_token_loss(logits, wanted)
    (slope,) = torch.autograd.grad(whole, logits)
    share = BatchLoss()
    share.begin(wanted, 3)
    parts = [share(a, b) for a, b in zip(logits.split(2), wanted.split(2), strict=True)]
    (sloped,) = torch.autograd.grad(sum(parts) / 3, logits)
    assert torch.allclose(sum(parts) / 3, whole) and torch.allclose(sloped, slope, atol=1e-7)
    means = sum(next_token_loss(a, b) for a, b in zip(logits.split(2), wanted.split(2), strict=True)) / 3
    assert not torch.allclose(means, whole)


def test_a_run_says_how_much_it_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    name = write(tmp_path / "a.jsonl", *map(asked, range(300)))
    fixed = {"model": "gpt2-lab", "seq": 16, "eval_samples": 0, "data": name, "text_field": "say"}
    job = prepare(TrainConfig(**fixed, prompt_field="ask"))
    share = float((targets(job.train) >= 0).double().mean())
    assert 0.3 < share < 0.9
    assert f"losses are over {share:.0%} of the tokens" in " ".join(job.notes)
    assert not any("prompts" in note for note in prepare(TrainConfig(**fixed)).notes)


def test_a_run_begins_texts_as_its_tokenizer_does_or_not_as_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    resolve = training_job.resolve_model

    def with_begin(*args):
        source = resolve(*args)
        end = source.tokenizer.eos_token_id
        begin = TemplateProcessing(f"{END} $A", special_tokens=[(END, end)])
        source.tokenizer.backend_tokenizer.post_processor = begin
        return source

    monkeypatch.setattr(training_job, "resolve_model", with_begin)
    name = write(tmp_path / "a.jsonl", *map(asked, range(300)))
    fixed = {"model": "gpt2-lab", "seq": 16, "eval_samples": 0, "data": name}
    fields = {"text_field": "say", "prompt_field": "ask"}
    counts = [
        int((inputs(prepare(TrainConfig(**fixed, **fields, bos=b)).train) == 0).sum()) for b in (True, False)
    ]
    assert 1.9 < counts[0] / counts[1] < 2.1  # END closes each text, and begins the next one where it is to
