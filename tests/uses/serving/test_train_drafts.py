"""``train-drafts``: from a model and a text to a file that stages draft by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from thinwire.types import InputError
from thinwire.uses.serving.drafting.draft_head import DraftHead, DraftShape
from thinwire.uses.serving.run.drafts.draft_options import DraftsConfig
from thinwire.uses.serving.run.drafts.draft_program import PIECE, train
from thinwire.uses.serving.run.drafts.head_file import load_head, save_head
from thinwire.uses.serving.run.options import MeasuredConfig
from thinwire.uses.serving.run.stage_program import drafter_of, head_of, prepared

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    return tiny_models.write_llama(tmp_path_factory.mktemp("drafted"), tiny_tokenizer, 60 * PIECE)


def test_a_head_is_trained_and_found_by_the_stages(place: Path, tmp_path: Path) -> None:
    file, said = tmp_path / "head.safetensors", list[str]()
    given = {
        "model": str(place / "model"),
        "data": str(place / "text.txt"),
        "out": str(file),
        "dtype": "fp32",
    }
    config = DraftsConfig.from_dict(given | {"steps": 20, "common": 100, "tokens": 4096})
    found = train(config, said.append)
    assert (
        min(found.right) >= 0 and found.expected <= len(found.right) and found.nbytes == file.stat().st_size
    )
    assert len(said) == 1 and "lesson 20 of 20" in said[0]
    head = load_head(file)
    assert len(head.common) == 100 and head.shape.window == config.window
    serving = MeasuredConfig(model=given["model"], drafts=str(file), stages=2)
    source = prepared(serving)
    own = head_of(serving, source)
    assert own is not None and own.shape == head.shape
    assert head_of(serving.replace(drafts="auto"), source) is None  # none comes with this model
    assert drafter_of(serving.replace(drafts="auto"), source) is not None


def test_too_little_text_is_refused(place: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("a few words\n\n" * 3)
    given = {"model": str(place / "model"), "data": str(few), "out": str(tmp_path / "head.safetensors")}
    with pytest.raises(InputError, match="tokens to learn from or to be tried on; give a text of"):
        train(DraftsConfig.from_dict(given), lambda text: None)
    assert not (tmp_path / "head.safetensors").exists()


def test_what_is_no_head_for_the_model_is_refused_before_anything_starts(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_head(DraftHead(DraftShape("other", 8, 2, 4), torch.arange(5)), other)
    for file, why in (
        (other, "is for hidden states of 8 values"),
        (tmp_path / "none.safetensors", "is no file"),
    ):
        with pytest.raises(InputError, match=why):
            prepared(MeasuredConfig(model=str(place / "model"), drafts=str(file), stages=2))
