"""Models of many families are packed by what a text says, and measured as what they are unpacked to."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from packed_models import TEXT

from thinwire.files.checkpoint import write_checkpoint
from thinwire.runs.data.corpus import Corpus
from thinwire.runs.data.documents import Document
from thinwire.runs.models.tokenizer import trained_bpe
from thinwire.uses.models.run import calibrated_source
from thinwire.uses.models.run.calibrated_source import read_source, read_text_with
from thinwire.uses.models.run.layerwise import perplexity
from thinwire.uses.models.run.model_folder import unpacked, write_unpacked
from thinwire.uses.models.run.model_packing import ModelPacking, pack

pytest.importorskip("zstandard")
pytestmark = pytest.mark.usefixtures("one_thread")
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
CONFIGS = {
    "bloom": lambda: transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=1, n_head=2, **ENDS),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, state_size=4, **ENDS
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_perplexity_is_that_of_what_unpacks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrated_source, "WINDOW", 64)
    folder, text = tmp_path / kind, tmp_path / "text.md"
    tokenizer = trained_bpe(Corpus("t", (Document(TEXT),), (), "test"), vocab=300)
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(4 if p.ndim > 1 else 1)  # so that what is lost shows
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text.write_text(TEXT * 3)
    packed, record = pack(ModelPacking(str(folder), bits=3.0, text=str(text)))
    write_unpacked(packed, tmp_path / "back")
    back = read_text_with(read_source(str(tmp_path / "back")), str(text))
    found = perplexity(back.net, back.heldout)
    assert record.perplexity is not None and record.perplexity_source is not None
    assert math.isclose(record.perplexity, found, rel_tol=1e-4)
    assert not math.isclose(record.perplexity_source, found, rel_tol=1e-3)
    assert set(unpacked(packed)) == set(read_source(str(folder)).tensors)


def test_a_file_too_large_to_go_along_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrated_source, "SMALL", 100)
    write_checkpoint(tmp_path / "model.safetensors", {"w": torch.ones(4)}, {})
    (tmp_path / "vocab.txt").write_text("x" * 101)
    found = read_source(str(tmp_path))
    assert found.left == ("vocab.txt (above 0 MiB)",) and "vocab.txt" not in found.files
