"""Weights divided over the ranks: a part is what ``from_pretrained`` loads of it, and takes no more."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each
from meshes import Mesh, together
from picture_hosts import VIDEO, adapted, made
from picture_models import flux, flux_inputs, one_device, sample, wan
from picture_pipelines import wan_pipeline
from torch import Tensor, nn

import thinwire
from tests.uses.pictures.context_parallel.test_pipe_families import CUT, HOSTS, called
from thinwire.types import InputError
from thinwire.uses.pictures.absent_block import AbsentBlock
from thinwire.uses.pictures.context_parallel.divided import loading
from thinwire.uses.pictures.context_parallel.divided.block_ranges import cut

pytest.importorskip("diffusers")
pytest.importorskip("accelerate")

Meshes = dict[int, list[Mesh]]


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def parts(kind: Any, folder: Path, ranks: list[Mesh], **options: Any) -> list[Any]:
    return together([lambda p=p: thinwire.load_part(kind, folder, p, **options) for p in ranks])


@pytest.mark.parametrize(
    ("make", "options"),
    [(flux, {"max_shard_size": "30KB"}), (wan, {}), (wan, {"variant": "fp16", "max_shard_size": "30KB"})],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_parts_are_what_is_loaded_whole(
    ranks: Meshes, tmp_path: Path, make: Callable[[], Any], options: dict[str, Any], dtype: torch.dtype | None
) -> None:
    folder = saved(make(), tmp_path / "pipeline" / "transformer", **options)
    assert len(list(folder.glob("*.safetensors"))) > ("max_shard_size" in options)
    given = {"torch_dtype": dtype, "variant": options.get("variant")}
    kind: Any = type(make())
    whole, seen = kind.from_pretrained(folder, **given), set[str]()
    wanted = whole.state_dict()
    for part in parts(kind, folder.parent, ranks[2], subfolder="transformer", **given):
        own = part.state_dict()
        assert own.keys() < wanted.keys() and not part.training
        for name, x in own.items():
            assert x.dtype == wanted[name].dtype and torch.equal(x, wanted[name]), name
        for name, x in whole.named_buffers():
            assert torch.equal(part.get_buffer(name), x)
        part.to(torch.float64)
        seen |= own.keys()
    assert seen == wanted.keys()


def test_a_picture_by_parts_is_that_of_whole_models(ranks: Meshes, tmp_path: Path) -> None:
    """Also where the ranks have unequal shares."""
    model, inputs = flux(singles=4), flux_inputs(64)
    folder, wanted = saved(model, tmp_path), sample(model, inputs, 3)
    for shares in (None, [3, 1]):
        own = parts(type(model), folder, ranks[2], shares=shares)
        assert [absent(each) for each in own] == ([2, 3] if shares is None else [1, 4])
        first, second = run(own, ranks[2], lambda each: sample(each, inputs, 3), "raw", mode="pipe")
        assert torch.equal(first, second)
        assert (first - wanted).norm() < 0.05 * wanted.norm()
        again = run([flux(4), flux(4)], ranks[2], lambda each: sample(each, inputs, 3), "raw", mode="pipe")
        assert shares or torch.equal(again[0], first)


@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")  # of Chroma, by diffusers
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # of Mochi, by diffusers
@each("name", [name for name in CUT if "," not in name and name != "DiT"])
def test_each_family_runs_by_parts(ranks: Meshes, tmp_path: Path, name: str) -> None:
    make, draw = HOSTS[name]
    model, inputs = make(), draw()
    wanted = called(model, inputs, 2)
    own = parts(type(model), saved(model, tmp_path / name), ranks[2])
    for found in run(own, ranks[2], lambda part: called(part, inputs, 2), "raw", mode="pipe"):
        for x, y in zip(found, wanted, strict=True):
            assert (x - y).norm() <= 1e-5 * y.norm()


def absent(model: nn.Module) -> int:
    return sum(isinstance(m, AbsentBlock) for m in model.modules())


def run(
    models: list[Any], ranks: list[Mesh], use: Callable[[Any], Tensor], recipe: str = "raw", **options: Any
) -> list[Tensor]:
    def rank(model: Any, peers: Mesh) -> Tensor:
        with torch.no_grad(), thinwire.parallel(model, peers, recipe, deadline=20.0, **options):
            return use(model)

    return together([lambda one=one: rank(*one) for one in zip(models, ranks, strict=True)])


def test_a_part_is_refused_where_it_does_not_belong(ranks: Meshes, tmp_path: Path) -> None:
    model = flux()
    folder = saved(model, tmp_path)
    first, second = parts(type(model), folder, ranks[2])
    nothing = lambda own: torch.zeros(())  # noqa: E731
    with pytest.raises(InputError, match=r"transformer_blocks.* is on another rank; call the model inside"):
        one_device(first, [flux_inputs()])
    with pytest.raises(InputError, match="this model has blocks 0 to 1 of 3 alone; use mode pipe"):
        run([first, second], ranks[2], nothing, "compact")
    with pytest.raises(InputError, match="those of rank 1 of 2, and this is rank 0 of 2; load it here"):
        run([second, first], ranks[2], nothing, mode="pipe")
    with pytest.raises(InputError, match="those of rank 0 of 2, and this is rank 0 of 3; load it here"):
        run([first, second, model], ranks[3], nothing, mode="pipe")
    with pytest.raises(InputError, match=r"rank \d has the blocks of each rank '(all|0 to 1, 2)'"):
        run([first, model], ranks[2], nothing, mode="pipe")
    with pytest.raises(InputError, match="this model has block 2 of 3 alone; save it where it is whole"):
        second.save_pretrained(tmp_path / "part")
    with pytest.raises(InputError, match="this model has block 2 of 3 alone; use mode pipe"):
        thinwire.parallel(second, {}, "compact-pipe").__enter__()


def test_an_adapter_that_counts_blocks_is_refused(ranks: Meshes, tmp_path: Path) -> None:
    model = flux()
    own = parts(type(model), saved(model, tmp_path), ranks[2])
    whole: Any = adapted()
    own[0].transformer_blocks[0].attn.processor = whole.transformer_blocks[0].attn.processor
    with pytest.raises(
        InputError, match="an IP-Adapter counts blocks, and this model has blocks 0 to 1 of 3"
    ):
        run(own, ranks[2], lambda each: torch.zeros(()), mode="pipe")


def test_an_adapter_is_loaded_in_parts_and_on_all_ranks(ranks: Meshes, tmp_path: Path) -> None:
    peft, inputs = pytest.importorskip("peft"), flux_inputs(64)
    model: Any = flux(singles=3)
    folder = saved(model, tmp_path)
    lora = peft.LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "proj_mlp"])
    model.add_adapter(lora)
    weights = {f"transformer.{n}": x for n, x in peft.get_peft_model_state_dict(model).items()}
    one, two, other = (parts(type(model), folder, ranks[2]) for _ in range(3))
    for own in (*one, other[0]):
        own.load_lora_adapter(dict(weights), prefix="transformer")
    whole = [model, copy.deepcopy(model)]
    with_it, without, wanted = (
        run(models, ranks[2], lambda each: sample(each, inputs, 2), mode="pipe")
        for models in (one, two, whole)
    )
    assert torch.equal(with_it[0], wanted[0]) and not torch.equal(without[0], wanted[0])
    with pytest.raises(InputError, match=r"rank \d has its adapters '(default_0 \(\d+\))?', and this rank"):
        run(other, ranks[2], lambda each: torch.zeros(()), mode="pipe")


def test_a_pipeline_takes_parts(ranks: Meshes, tmp_path: Path) -> None:
    folder = saved(wan(), tmp_path)
    own = parts(type(wan()), folder, ranks[2], torch_dtype=torch.float32)
    made = run(own, ranks[2], lambda part: wan_pipeline(part, 96), "raw", mode="pipe")
    whole = run([wan(), wan()], ranks[2], lambda model: wan_pipeline(model, 96), "raw", mode="pipe")
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], whole[0])


@pytest.mark.parametrize("name", ["single_transformer_blocks.0.proj_mlp.bias", "proj_out.weight"])
def test_another_version_on_one_rank_is_refused(ranks: Meshes, tmp_path: Path, name: str) -> None:
    """Also where it is another in a block that this rank alone has."""
    model = flux()
    folders = [saved(model, tmp_path / "first")]
    model.get_parameter(name).data[-1] += 0.5
    folders.append(saved(model, tmp_path / "second", max_shard_size="30KB"))
    kind = type(model)
    own = together([lambda k=k: thinwire.load_part(kind, folders[k], ranks[2][k]) for k in (0, 1)])
    what = r"its checkpoint \(a checksum of samples\)"
    with pytest.raises(InputError, match=rf"rank \d has {what} '\d+', and this rank '\d+'"):
        run(own, ranks[2], lambda each: torch.zeros(()), mode="pipe")


def test_weights_around_the_blocks_are_compared_as_they_are(ranks: Meshes, tmp_path: Path) -> None:
    model = flux()
    own = parts(type(model), saved(model, tmp_path), ranks[2])
    own[1].proj_out.weight.data[3, 3] += 0.5
    with pytest.raises(InputError, match=r"rank \d has its weights \(a checksum\)"):
        run(own, ranks[2], lambda each: torch.zeros(()), mode="pipe")


def config(folder: Path, **changed: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def cut_short(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-9])


def other(make: Callable[[], Any], folder: Path) -> None:
    saved(make(), folder / "other")
    name = "diffusion_pytorch_model.safetensors"
    (folder / "other" / name).replace(folder / name)


def pickled(folder: Path) -> None:
    next(folder.glob("*.safetensors")).rename(folder / "diffusion_pytorch_model.bin")


def deeper() -> Any:
    return made("WanTransformer3DModel", **VIDEO, num_layers=3, rope_max_seq_len=32)()


WRONG: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "config.json").unlink(), "has no config.json; give a transformer's folder"),
    (lambda f: (f / "config.json").write_text("[]"), "config.json is no config of a model"),
    (lambda f: config(f, _class_name="Other"), "is of a Other, not of a WanTransformer3DModel"),
    (lambda f: config(f, num_layers="many"), "makes no WanTransformer3DModel"),
    (lambda f: config(f, quantization_config={"quant_method": "gguf"}), "is quantised by gguf, and plain"),
    (lambda f: config(f, ffn_dim=40), r"of shape \(32, 24\), and a WanTransformer3DModel by its config"),
    (lambda f: config(f, num_layers=3), r"lacks blocks\.2\.attn1\.norm_k\.weight and \d+ more of a Wan"),
    (lambda f: other(deeper, f), r"has blocks\.2\.attn1\.norm_k\.weight and \d+ more, which a Wan"),
    (lambda f: next(f.glob("*.safetensors")).unlink(), "has no diffusion_pytorch_model.safetensors, nor"),
    (pickled, "a .bin is a pickle, and not read"),
    (cut_short, "the file is cut short or damaged"),
]


@pytest.mark.parametrize(("spoil", "told"), WRONG)
def test_what_cannot_be_loaded_is_told_in_a_sentence(
    ranks: Meshes, tmp_path: Path, spoil: Callable[[Path], object], told: str
) -> None:
    folder = saved(wan(), tmp_path)
    spoil(folder)
    with pytest.raises(InputError, match=told) as found:
        parts(type(wan()), folder, ranks[2])
    assert "\n" not in str(found.value)


def test_a_family_whose_calls_take_weights_of_one_block_is_refused(ranks: Meshes, tmp_path: Path) -> None:
    model = HOSTS["DiT"][0]()
    with pytest.raises(InputError, match="a DiTTransformer2DModel takes weights of one block for all"):
        parts(type(model), saved(model, tmp_path), ranks[2])


def test_an_index_names_files_of_its_folder(ranks: Meshes, tmp_path: Path) -> None:
    folder = saved(wan(), tmp_path, max_shard_size="30KB")
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(InputError, match=r"index\.json names .*00002-of-.*, which .* does not have"):
        parts(type(wan()), folder, ranks[2])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shares": [1]}, "are not 2 numbers above 0"),
        ({"shares": [1, float("nan")]}, "are not 2 numbers above 0"),
        ({"torch_dtype": "float31"}, "none of torch's"),
        ({"torch_dtype": torch.int8}, "is no dtype of weights"),
        ({"variant": "fp8"}, "has no diffusion_pytorch_model.fp8.safetensors.*; give another variant"),
        ({"subfolder": "transformer"}, "transformer is not there; give a local folder"),
        ({"device": "there"}, "'there' is no device"),
    ],
)
def test_wrong_options_are_refused(ranks: Meshes, tmp_path: Path, options: dict[str, Any], told: str) -> None:
    folder = saved(wan(), tmp_path)
    with pytest.raises(InputError, match=told):
        parts(type(wan()), folder, ranks[2], **options)


def test_what_one_rank_has_no_room_for_is_told_to_all_before_it_is_read(
    ranks: Meshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = flux(singles=6)
    folder, shares = saved(model, tmp_path), [1, 6]
    first, second = parts(type(model), folder, ranks[2], shares=shares)
    monkeypatch.setattr(loading, "memory_bytes", lambda: (None, (nbytes(first) + nbytes(second)) // 2))

    def rank(peers: Mesh) -> None:
        own = thinwire.load_part(type(model), folder, peers, shares=shares)
        with thinwire.parallel(own, peers, "raw", mode="pipe", deadline=20.0):
            pass

    said = together([lambda p=p: refusal(lambda: rank(p)) for p in ranks[2]])
    told = "rank 1 needs 2 MB for blocks 1 to 6 of 7 and what all ranks have, and cpu has 2 MB free; free"
    assert said[1].startswith(told) and said[0] == said[1]


def nbytes(model: nn.Module) -> int:
    return sum(x.nbytes for x in model.state_dict().values())


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as found:
        call()
    return str(found.value)


@pytest.mark.parametrize(
    ("n", "shares", "wanted"),
    [(7, [5, 2], [5, 2]), (30, [2, 1], [20, 10]), (4, [1e9, 1, 1, 1], [1] * 4), (5, [1, 1e9, 1], [1, 3, 1])],
)
def test_shares_cut_all_blocks_in_proportion(n: int, shares: list[float], wanted: list[int]) -> None:
    found = cut(range(n), len(shares), shares)
    assert [i for each in found for i in each] == list(range(n)) and [len(each) for each in found] == wanted


BLOCKS = 24
PEAK = """
import os, sys
from pathlib import Path
from diffusers import WanTransformer3DModel as Wan
from thinwire.runs.machine.processor import forget_peak, resident_peak
from thinwire.uses.pictures.context_parallel.divided.loading import part_of_rank
def took(load):
    forget_peak()
    before = resident_peak(os.getpid())
    model = load()
    sum(x.sum() for x in model.parameters())  # what is mapped alone is read
    return resident_peak(os.getpid()) - before
folder = Path(sys.argv[1])
print(took(lambda: part_of_rank(Wan, folder, 1, 2)), took(lambda: Wan.from_pretrained(folder)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a peak")
def test_half_of_the_blocks_take_little_more_than_half_of_the_memory(tmp_path: Path) -> None:
    """By the largest resident set of a process, against loading all of them."""
    sizes = {**VIDEO, "num_attention_heads": 16, "attention_head_dim": 24, "ffn_dim": 1536}
    model = made("WanTransformer3DModel", **sizes, num_layers=BLOCKS, rope_max_seq_len=32)()
    saved(model, tmp_path, max_shard_size="30MB")
    command = [sys.executable, "-c", PEAK, tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=200)
    assert run.returncode == 0, run.stderr
    half, whole = map(int, run.stdout.split())
    assert nbytes(model) > 2e8 and whole > 0.95 * nbytes(model)
    assert half <= 0.6 * whole
