"""Stages that begin anew find what they stored of prompts, agree on how much, and say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from thinwire.types import InputError, PayloadError
from thinwire.uses.serving.ring_messages import Seek, Sought
from thinwire.uses.serving.row_pool import StageCache, TextRows
from thinwire.uses.serving.stored_blocks import BLOCK, StoredBlocks, chain
from thinwire.uses.serving.text_requests import TextRequest

from .rings import greedy, random_model, ring, works

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
PROMPT = tuple((7 * i) % 300 for i in range(3 * BLOCK + 10))


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(transformers.LlamaConfig(**tiny_models.LLAMA | {"max_position_embeddings": 1024}))


@pytest.fixture(scope="module")
def said(model: Any) -> list[int]:
    return greedy(model, PROMPT, 5)


def asked(model: Any, places: list[Path], prompt: tuple[int, ...] = PROMPT) -> tuple[list[int], int, int]:
    """Return what new stages say, the tokens that were reused, and those that the first one computed."""
    stored = [StoredBlocks(place, f"stage {k}") for k, place in enumerate(places)]
    with ring(works(model, len(places), rows=600), stored=stored) as engine:
        text = engine.submit(TextRequest(prompt, 5))
        found = text.wait(), text.reused, engine.work.spent.tokens
    for one in stored:
        one.close()
    return found


@pytest.mark.parametrize("stages", [1, 3])
def test_stages_that_begin_anew_load_what_they_stored(
    model: Any, said: list[int], tmp_path: Path, stages: int
) -> None:
    places = [tmp_path] * stages
    assert asked(model, places) == (said, 0, len(PROMPT) + 4)
    assert len(list(tmp_path.iterdir())) == 3 * stages
    assert asked(model, places) == (said, 3 * BLOCK, 10 + 4)
    other = (*PROMPT[: 2 * BLOCK + 5], *PROMPT[:9])
    assert asked(model, places, other) == (greedy(model, other, 5), 2 * BLOCK, 14 + 4)


def test_they_take_what_all_of_them_have(model: Any, said: list[int], tmp_path: Path) -> None:
    places = [tmp_path / str(k) for k in range(3)]
    asked(model, places)
    names = [file.name for file in places[2].iterdir()]
    store = StoredBlocks(places[2], "stage 2")
    _, second, _ = (store._file(name) for name in chain(PROMPT))
    assert second in names
    data = bytearray((places[2] / second).read_bytes())
    data[-5] ^= 1
    (places[2] / second).write_bytes(data)
    with pytest.warns(UserWarning, match="was damaged and is removed"):
        assert asked(model, places) == (said, BLOCK, len(PROMPT) - BLOCK + 4)
    assert asked(model, places)[1] == 3 * BLOCK  # it was stored again
    for file in places[0].iterdir():
        file.unlink()
    assert asked(model, places)[:2] == (said, 0)


def test_nothing_else_is_put_into_rows(tmp_path: Path) -> None:
    cache, store = StageCache(2 * BLOCK, {}, torch.device("cpu")), StoredBlocks(tmp_path, "a")
    rows = TextRows(0, 2 * BLOCK)
    cache.put_rows(
        {"keys.0": torch.ones(2, BLOCK, 4), "values.0": torch.ones(2, BLOCK, 4)}, TextRows(0, BLOCK)
    )
    store.save(chain(range(BLOCK)), 0, cache, rows)
    store.close()
    store = StoredBlocks(tmp_path, "a")
    assert (
        store.seek(1, chain(range(BLOCK))) == 1
        and StoredBlocks(tmp_path, "b").seek(1, chain(range(BLOCK))) == 0
    )
    with pytest.raises(PayloadError, match="2 stored blocks are asked for"):
        store.place(1, 2, cache, rows)
    for wrong in (torch.ones(3, BLOCK, 4), torch.ones(2, BLOCK, 4, dtype=torch.float64), torch.ones(2, 5, 4)):
        with pytest.raises(PayloadError, match="stored rows"):
            cache.put_rows({"keys.0": wrong}, TextRows(0, BLOCK))
    with pytest.raises(PayloadError, match="names of blocks"):
        Seek.unpack(Seek(1, b"short").pack()).split()
    assert Sought.unpack(Sought(1, 2).pack()) == Sought(1, 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another folder"):
        StoredBlocks(tmp_path / "file" / "folder", "a")
