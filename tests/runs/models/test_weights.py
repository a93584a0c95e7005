"""Whether two machines hold one model: by what is in its files, wherever they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launchers import record, sentence, warm
from safetensors.torch import load_file, save_file
from texts import write_text

from thinwire.files.checkpoint import INDEX, SINGLE
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.models.weight_loading import WeightFolder

TENSORS = {
    "wide": torch.arange(300 * 500, dtype=torch.float32).view(300, 500),
    "bias": torch.ones(7),
    "half": torch.ones(40, 3, dtype=torch.bfloat16),
    "number": torch.tensor(3.0),
    "none": torch.empty(0, 4),
}


def folder(place: Path, tensors: dict[str, torch.Tensor], parts: int = 1) -> Path:
    place.mkdir()
    names = list(tensors)
    shards = {f"part-{i}.safetensors": names[i::parts] for i in range(parts)}
    if parts == 1:
        shards = {SINGLE: names}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, place / file)
    if parts > 1:
        where = {name: file for file, held in shards.items() for name in held}
        (place / INDEX).write_text(json.dumps({"weight_map": where}))
    return place


def test_copies_have_one_digest_also_in_other_files(tmp_path: Path) -> None:
    first = WeightFolder(folder(tmp_path / "a", TENSORS)).digest()
    assert first == WeightFolder(folder(tmp_path / "b", TENSORS, parts=3)).digest()


@pytest.mark.parametrize("name", [name for name, t in TENSORS.items() if t.numel()])
def test_training_shows_in_whichever_tensor_it_changed(tmp_path: Path, name: str) -> None:
    changed = TENSORS | {name: TENSORS[name] + 1}
    assert (
        WeightFolder(folder(tmp_path / "a", TENSORS)).digest()
        != WeightFolder(folder(tmp_path / "b", changed)).digest()
    )


@pytest.mark.parametrize(
    "other",
    [
        TENSORS | {"wide": TENSORS["wide"].view(500, 300)},
        TENSORS | {"half": TENSORS["half"].half()},
        {name: t for name, t in TENSORS.items() if name != "none"},
        {"narrow" if name == "wide" else name: t for name, t in TENSORS.items()},
    ],
    ids=["shape", "type", "absence", "name"],
)
def test_shapes_types_and_names_count(tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
    assert (
        WeightFolder(folder(tmp_path / "a", TENSORS)).digest()
        != WeightFolder(folder(tmp_path / "b", other)).digest()
    )


def source(weights: Path | None, **config: Any) -> ModelSource:
    return ModelSource("tiny", "gpt2", SimpleNamespace(to_dict=lambda: config), None, weights)


def test_a_model_is_its_config_and_its_weights_but_not_their_place(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a", TENSORS), folder(tmp_path / "b", TENSORS)
    one = source(a, layers=2, _name_or_path="a", transformers_version="5.0", torch_dtype=torch.float32)
    assert one.digest == source(b, layers=2, _name_or_path="b", transformers_version="5.1").digest
    assert one.digest != source(b, layers=3).digest
    assert one.digest != source(None, layers=2).digest
    assert source(None, layers=2).digest == source(None, layers=2).digest


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    text = write_text(tmp_path_factory.mktemp("data") / "text.txt")
    return [
        *("train", "--data", text, "--seq", 32, "--batch", 4, "--steps", 1, "--eval-samples", 0),
        *("--quiet", "--no-tensorboard"),
    ]


@pytest.fixture(scope="module")
def saved(job: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that a run saved in half the bytes."""
    out = tmp_path_factory.mktemp("saved")
    made = warm().run(out, *job, "--model", "gpt2-lab", "--save-dtype", "bf16", "--out", out)
    assert made.code == 0, made.err
    return out / "model"


def test_a_model_saved_as_bf16_is_bf16_and_loads(saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    held = [t for file in saved.glob("*.safetensors") for t in load_file(file).values()]
    assert held and all(t.dtype == torch.bfloat16 for t in held)
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"
    model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16


def test_ranks_train_copies_of_one_model_and_refuse_another(
    job: list[Any], saved: Path, tmp_path: Path
) -> None:
    copied, trained = tmp_path / "copied", tmp_path / "trained"
    for other in (copied, trained):
        shutil.copytree(saved, other)
    for file in trained.glob("*.safetensors"):
        save_file({name: 1.01 * t for name, t in load_file(file).items()}, file, {"format": "pt"})

    def ranks(second: Path) -> Any:
        def each(rank: int) -> tuple[Any, ...]:
            return ("--model", second if rank else saved)

        return warm().ranks(tmp_path / second.name, *job, "--out", tmp_path / "out", each=each)

    for rank in ranks(trained):
        assert rank.wait() == 2
        what = "not the same model on rank 0 and rank 1"
        assert sentence(rank) == f"--model is {what}; start all ranks with the same"
    assert not (tmp_path / "out").exists()
    assert [rank.wait() for rank in ranks(copied)] == [0, 0]
    assert record(tmp_path / "out")["status"] == "done"
