"""Folders of models of all kinds: what goes along or is refused, and what a strange package writes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import peft
import pytest
import torch
import transformers
from packed_models import CONFIGS, TEXT
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.files.checkpoint import read_checkpoint, write_checkpoint
from thinwire.runs.data.corpus import Corpus
from thinwire.runs.data.documents import Document
from thinwire.runs.models.tokenizer import trained_bpe
from thinwire.types import InputError, PayloadError
from thinwire.uses.models.codes import code_tensors
from thinwire.uses.models.companions import check_names
from thinwire.uses.models.entry import pack_entry
from thinwire.uses.models.packed_model import PackedModel, read_model, write_model
from thinwire.uses.models.run.calibrated_source import check_causal
from thinwire.uses.models.tensors import Plain

pytest.importorskip("zstandard")
pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0}
LLAMA = {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True, "eos_token_id": 0}
VISION = {
    k: v for k, v in SMALL.items() if "token" not in k and k not in ("vocab_size", "max_position_embeddings")
}
OTHERS = {
    "BertForMaskedLM": lambda t: t.BertForMaskedLM(t.BertConfig(**SMALL)),
    "BertLMHeadModel": lambda t: t.BertLMHeadModel(t.BertConfig(**SMALL)),
    "LlamaForSequenceClassification": lambda t: t.LlamaForSequenceClassification(t.LlamaConfig(**LLAMA)),
    "ViTForImageClassification": lambda t: t.ViTForImageClassification(t.ViTConfig(**VISION, image_size=32)),
}


def invoke(*arguments: object):
    return CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"}).invoke(app, [str(a) for a in arguments])


def done(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout + result.stderr)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
    """Return a folder with a small model, its tokenizer and a text."""
    patch = pytest.MonkeyPatch()
    patch.setenv("THINWIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(CONFIGS["llama"]).save_pretrained(folder)
    trained_bpe(Corpus("t", (Document(TEXT),), (), "test"), vocab=300).save_pretrained(folder)
    (folder / "text.md").write_text(TEXT)
    yield folder
    patch.undo()


@pytest.mark.parametrize("kind", OTHERS)
def test_what_predicts_no_next_token_gets_no_perplexity(kind: str, llama: Path, tmp_path: Path) -> None:
    OTHERS[kind](transformers).save_pretrained(tmp_path / kind)
    trained_bpe(Corpus("t", (Document(TEXT),), (), "test"), vocab=300).save_pretrained(tmp_path / kind)
    asked = ["pack", tmp_path / kind, "-o", tmp_path / "m.tw", "--target", "200kB"]
    result = invoke(*asked, "--calibration-data", llama / "text.md")
    assert result.exit_code == 2 and result.stderr.strip().count("\n") == 0
    assert "pack it without" in result.stderr and "causal" in result.stderr, result.stderr
    assert "perplexity" not in done(*asked)
    assert f"which transformers loads as {kind}" in done("unpack", tmp_path / "m.tw", "-o", tmp_path / "back")
    getattr(transformers, kind).from_pretrained(tmp_path / "back")


KINDS = (
    ("gpt2", "GPT2LMHeadModel", True), ("llama", "LLaMAForCausalLM", True),
    ("mamba", "MambaForCausalLM", True), ("llama", "LlamaModel", False),
    ("gemma", "GemmaForTokenClassification", False),
    ("bert", "BertModel", False), ("roberta", "RobertaForSequenceClassification", False),
    ("electra", "ElectraForPreTraining", False), ("t5", "T5ForConditionalGeneration", False),
    ("bart", "BartForConditionalGeneration", False), ("whisper", "WhisperForConditionalGeneration", False),
    ("wav2vec2", "Wav2Vec2ForCTC", False), ("clip", "CLIPModel", False),
    ("gemma3", "Gemma3ForConditionalGeneration", False), ("llava", "LlavaForConditionalGeneration", False),
)  # fmt: skip


def test_a_config_says_whether_its_model_is_causal(tmp_path: Path) -> None:
    for kind, name, causal in KINDS:
        config = transformers.AutoConfig.for_model(kind)
        config.architectures = [name]
        config.save_pretrained(tmp_path / name)
        with (
            nullcontext() if causal else pytest.raises(InputError, match=rf"{name} of type '{kind}', and no")
        ):
            check_causal(tmp_path / name, "mine")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_an_adapter_comes_back_as_one_that_peft_loads(llama: Path, tmp_path: Path) -> None:
    base = transformers.LlamaForCausalLM.from_pretrained(llama)
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=16, target_modules=["q_proj", "down_proj"]))
    for name, p in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    tuned.save_pretrained(tmp_path / "adapter")
    write_checkpoint(tmp_path / "adapter" / "model.safetensors", {"other": torch.ones(2)}, {})
    told = done("pack", tmp_path / "adapter", "-o", tmp_path / "a.tw", "--bits", 8)
    assert "not taken along: model.safetensors" in told
    assert f"an adapter that peft loads onto {llama}" in done(
        "unpack", tmp_path / "a.tw", "-o", tmp_path / "back"
    )
    again = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(llama), tmp_path / "back"
    )
    ids = torch.arange(20)[None]
    with torch.no_grad():
        said, was = again(ids).logits, tuned(ids).logits
        plain = transformers.LlamaForCausalLM.from_pretrained(llama)(ids).logits
    assert (said - was).norm() < 0.1 * (plain - was).norm()
    asked = [
        "pack",
        tmp_path / "adapter",
        "-o",
        tmp_path / "b.tw",
        "--bits",
        8,
        "--calibration-data",
        llama / "text.md",
    ]
    assert "is an adapter, not a model" in invoke(*asked).stderr


CARRIED = {
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
    "source.spm": b"\x0a\x01",
    "sentencepiece.bpe.model": b"\x0a\x02",
    "preprocessor_config.json": b"{}",
    "generation_config.json": b"{}",
    "modules.json": b'[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]',
    "1_Pooling/config.json": b'{"pooling": "mean"}',
    "2_Dense/model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "LICENSE": b"MIT",
}
STAYING = (
    "pytorch_model.bin",
    "training_args.bin",
    "onnx/model.onnx",
    "trainer_state.json",
    "own.py",
    "aux.json",
)


def filled(llama: Path, folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in {**{f.name: f.read_bytes() for f in llama.iterdir()}, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("way", [[], ["--codes"]])
def test_files_go_along_or_are_named(way: list[str], llama: Path, tmp_path: Path) -> None:
    files = {
        **CARRIED,
        **dict.fromkeys(STAYING, b"x"),
        ".gitattributes": b"",
        "model.safetensors.index.json": b"{}",
    }
    source = filled(llama, tmp_path / "source", files)
    packed = tmp_path / f"m{'.safetensors' if way else '.tw'}"
    told = done("pack", source, "-o", packed, "--bits", 4, *way)
    (line,) = (line for line in told.splitlines() if "not taken along" in line)
    assert all(name.split("/")[0] in line for name in STAYING) and "and 1 more" not in line
    done("unpack", packed, "-o", tmp_path / "back")
    done("unpack", packed, "-o", tmp_path / "back", "--force")
    back = {
        f.relative_to(tmp_path / "back").as_posix(): f for f in (tmp_path / "back").rglob("*") if f.is_file()
    }
    own = {f.name for f in llama.iterdir()}
    assert set(back) == set(CARRIED) | own
    assert all(back[name].read_bytes() == data for name, data in CARRIED.items())
    (tmp_path / "back" / "1_Pooling" / "mine.txt").write_text("")
    assert "1_Pooling/mine.txt besides" in invoke("unpack", packed, "-o", tmp_path / "back", "--force").stderr


def test_code_goes_along_and_is_written_for_who_asks(llama: Path, tmp_path: Path) -> None:
    about = json.loads((llama / "config.json").read_text())
    about |= {
        "model_type": "own",
        "architectures": ["OwnLM"],
        "auto_map": {"AutoModelForCausalLM": "own.OwnLM"},
    }
    source = filled(llama, tmp_path / "own", {"config.json": json.dumps(about).encode(), "own.py": b"pass"})
    assert "own.py: the model's own code" in done("pack", source, "-o", tmp_path / "m.tw", "--bits", 4)
    told = done("unpack", tmp_path / "m.tw", "-o", tmp_path / "back")
    assert "does not load without" in told and "own.py: code" in told
    assert not (tmp_path / "back" / "own.py").exists()
    told = done("unpack", tmp_path / "m.tw", "-o", tmp_path / "with", "--allow-code")
    assert "trust_remote_code=True" in told and (tmp_path / "with" / "own.py").read_bytes() == b"pass"


UNPLAIN = (
    "../up.json",
    "/etc/a.json",
    ".env",
    "a/.b/c.json",
    "C:a.json",
    "a\\b.json",
    "aux.json",
    "com1",
    "a/nul.txt",
)
UNPLAIN += (
    "dot.",
    "blank ",
    "a//b.json",
    "a/b/c/d/e.json",
    "",
    "x" * 300,
    "a\0b",
    "a\nb",
    "./a.json",
    "a/..",
)


@pytest.mark.parametrize("name", UNPLAIN)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(PayloadError, match="no plain name"):
        check_names([name])


def test_names_that_are_one_to_some_systems_are_refused() -> None:
    for names in (("A.json", "a.json"), ("a.txt", "a.txt/b.json"), ("D/x.json", "d/X.json"), ("a/b.md", "a")):
        with pytest.raises(PayloadError):
            check_names(names)
    check_names(["a/b.json", "a/c.json", "b.json"])
    with pytest.raises(PayloadError, match="1001 files beside the tensors, and 1000 go along at most"):
        check_names([f"{i}.json" for i in range(1001)])


@pytest.mark.parametrize("codes", [False, True])
def test_somebody_elses_package_writes_what_a_model_needs_alone(codes: bool, tmp_path: Path) -> None:
    bad = (
        "a.bin",
        "b.pt",
        "c.pkl",
        "d.pth",
        "e.ckpt",
        "f.npy",
        "g.sh",
        "h.so",
        "model.safetensors.index.json",
        "model.safetensors",
        "i",
        "j.py",
    )
    packed = PackedModel(
        {"w": pack_entry(Plain(torch.ones(3)))}, {**dict.fromkeys(bad, b"x"), "config.json": b"[]"}
    )
    file = tmp_path / ("m.safetensors" if codes else "m.tw")
    if codes:
        write_checkpoint(file, code_tensors(packed), {})
    else:
        file.write_bytes(write_model(packed))
        assert read_model(file.read_bytes()).files.keys() == packed.files.keys()
    told = done("unpack", file, "-o", tmp_path / "back")
    assert {f.name for f in (tmp_path / "back").iterdir()} == {"config.json", "model.safetensors"}
    assert torch.equal(read_checkpoint(tmp_path / "back")["w"], torch.ones(3))
    assert "a.bin, b.pt" in told and "j.py" in told and "transformers" not in told
