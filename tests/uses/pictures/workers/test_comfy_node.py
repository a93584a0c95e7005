"""The node for ComfyUI, with what stands for ComfyUI here: its interface as read, and models of our own."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy_stand_in as comfy
import pytest
import torch
from crews import crew
from meshes import Mesh, together
from picture_pipelines import drawn
from safetensors.torch import save_file
from torch import Tensor, nn

import thinwire
from thinwire.types import InputError, LinkError
from thinwire.uses.pictures.comfy_names.comfy_attention import prepared
from thinwire.uses.pictures.comfy_names.comfy_loading import ComfyLoader
from thinwire.uses.pictures.comfy_names.comfy_models import COMFY, known_family

pytest.importorskip("diffusers")

ROOT = Path(__file__).parents[4]
PACKAGE = ROOT / "comfyui-thinwire"
TEXTS = drawn(1, 7, 16), drawn(1, 7, 16, seed=2)
VIDEO = drawn(1, 4, 3, 8, 8)
NOISE = {"Flux": drawn(1, 4, 16, 16)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with comfy.installed(tmp_path_factory.mktemp("ComfyUI")) as found:
        yield found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("files")
    for name in comfy.KINDS:
        save_file(made(name).state_dict(), place / f"{name}-tiny.safetensors")
    return place


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    """The package as ComfyUI imports it: a folder with any name."""
    spec = importlib.util.spec_from_file_location("comfyui_thinwire", PACKAGE / "__init__.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules["comfyui_thinwire"] = module
    spec.loader.exec_module(module)
    yield module.NODE_CLASS_MAPPINGS["ThinwireSample"]
    for name in ("comfyui_thinwire", "comfyui_thinwire.nodes"):
        del sys.modules[name]


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return comfy.KINDS[name]().eval().requires_grad_(False)


def picture(patcher: comfy.ModelPatcher, each: comfy.Each = lambda step: None) -> Tensor:
    return comfy.sampled(
        patcher, NOISE.get(type(patcher.model.diffusion_model).__name__, VIDEO), TEXTS, 4, each
    )


def test_the_package_is_in_comfyui_s_form(node: Any) -> None:
    shown = node.INPUT_TYPES()
    assert shown["required"].keys() | shown["optional"].keys() == {
        *list(inspect.signature(getattr(node, node.FUNCTION)).parameters)[1:]
    }
    assert node.RETURN_TYPES == ("MODEL",) and node.CATEGORY
    types = {name: form[0] for name, form in shown["required"].items()}
    assert (types.pop("recipe")[0], *types.values()) == ("compact", "MODEL", "STRING", "STRING", "STRING")
    module = sys.modules["comfyui_thinwire"]
    assert module.NODE_DISPLAY_NAME_MAPPINGS.keys() == module.NODE_CLASS_MAPPINGS.keys()
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    assert {"PublisherId", "DisplayName"} <= project["tool"]["comfy"].keys()
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["project"]["version"])


KNOWN = ("WanModel", "Flux", "QwenImageTransformer2DModel", "HunyuanVideo", "LTXVModel")
PATCHED = "pipe-fp16:warmup=1,patches=3"
CASES = [*((name, "raw") for name in KNOWN), ("WanModel", "pipe-fp16:warmup=4"), ("Flux", "ulysses")]


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_a_sampler_over_workers_makes_the_picture_of_one_machine(
    folder: Path, files: Path, node: Any, name: str, recipe: str
) -> None:
    """After one that was interrupted, and twice with one model: each run of a sampler begins anew."""
    own = comfy.ModelPatcher(made(name))
    wanted = picture(own)

    def interrupt(step: int) -> None:
        if step == 1:
            comfy.ASKED.append(True)

    with crew(files, loaders={"comfy": ComfyLoader(folder)}) as (worker,):
        (spread,) = node().spread(own, worker.address, "", recipe, f"{name}-tiny.safetensors")
        with pytest.raises(comfy.InterruptProcessingException):
            picture(spread, interrupt)
        pictures = [picture(spread), picture(spread)]
    bound = 1e-5 if recipe == "raw" else 1e-2
    for one in pictures:
        assert (one - wanted).norm() <= bound * wanted.norm()
    assert torch.equal(*pictures) and torch.equal(picture(own), wanted)
    assert not own.wrappers and not hasattr(own.model.diffusion_model, "_diffusers_hook")


@pytest.mark.parametrize("name", KNOWN)
def test_patches_make_what_one_machine_makes_while_nothing_changes(
    ranks: dict[int, list[Mesh]], name: str
) -> None:
    """The second time three patches pass, each with the whole text."""
    model, x = made(name), NOISE.get(name, VIDEO)

    def calls(own: nn.Module) -> list[Tensor]:
        times = torch.tensor([[500.0], [499.9999]])
        return [own(x, time, context=TEXTS[0], transformer_options={}) for time in times]

    def rank(peers: Mesh) -> list[Tensor]:
        own = copy.deepcopy(model)
        with torch.no_grad(), prepared(own, COMFY), thinwire.parallel(own, peers, PATCHED):
            return calls(own)

    wanted = calls(model)
    for found in together([lambda peers=peers: rank(peers) for peers in ranks[2]]):
        assert all((x - y).norm() <= 1e-3 * y.norm() for x, y in zip(found, wanted, strict=True))


def test_a_patch_of_the_weights_is_refused_by_the_worker_s_name(folder: Path, files: Path, node: Any) -> None:
    own = comfy.ModelPatcher(made("WanModel"))
    own.model.diffusion_model.head.head.weight.mul_(1.01)  # as a LoRA does
    with crew(files, loaders={"comfy": ComfyLoader(folder)}) as (worker,):
        (spread,) = node().spread(own, worker.address, "", "fp16", "WanModel-tiny.safetensors")
        with pytest.raises(
            InputError, match=f"rank 1 is the worker {worker.address}; LoRAs and other patches"
        ):
            picture(spread)


def test_a_patch_that_weights_do_not_show_is_refused(folder: Path, files: Path, node: Any) -> None:
    """As ComfyUI adds a LoRA where memory is low: to the weights as they are used."""
    own = comfy.ModelPatcher(made("WanModel"))
    with crew(files, loaders={"comfy": ComfyLoader(folder)}) as (worker,):
        (spread,) = node().spread(own, worker.address, "", "fp16", "WanModel-tiny.safetensors")
        layer = own.model.diffusion_model.blocks[0].self_attn.q
        for name, value in (("weight_function", [abs]), ("bias_lowvram_function", abs)):
            setattr(layer, name, value)
            with pytest.raises(InputError, match=r"changes blocks\.0\.self_attn\.q of this model as it"):
                picture(spread)
            delattr(layer, name)


def test_other_nodes_that_change_the_model_are_refused(folder: Path, files: Path, node: Any) -> None:
    own = comfy.ModelPatcher(made("WanModel"))
    with crew(files, loaders={"comfy": ComfyLoader(folder)}) as (worker,):
        (spread,) = node().spread(own, worker.address, "", "fp16", "WanModel-tiny.safetensors")
        for name, value in (
            ("patches_replace", {"dit": {1: print}}),
            ("optimized_attention_override", print),
        ):
            spread.model_options["transformer_options"] = {name: value}
            with pytest.raises(InputError, match=rf"another node changes the model \({name} in"):
                picture(spread)
        spread.model_options["transformer_options"] = {}
        spread.add_wrapper_with_key(comfy.WrappersMP.DIFFUSION_MODEL, "another", print)
        with pytest.raises(InputError, match=r"another node changes the model \(wrappers in"):
            picture(spread)


def test_what_shares_of_tokens_cannot_take_is_refused(folder: Path, files: Path) -> None:
    model, x = made("Flux"), NOISE["Flux"]
    time, options = torch.tensor([500.0]), {"transformer_options": {}}
    given = {"model": "Flux-tiny.safetensors", "source": "comfy"}
    with (
        torch.no_grad(),
        crew(files, loaders={"comfy": ComfyLoader(folder)}) as (worker,),
        thinwire.over_workers(model, [worker.address], "fp16", **given),
    ):
        for more, told in (
            ({"control": {"input": []}}, r"a control network's \(control\) does not go"),
            ({"attention_mask": torch.ones(1, 7)}, r"a mask \(attention_mask\) does not go"),
        ):
            with pytest.raises(InputError, match=told):
                model(x, time, context=TEXTS[0], **options, **more)
        with pytest.raises(InputError, match="a time of its own"):
            model(x, torch.full((1, 3), 500.0), context=TEXTS[0], **options)
        block = model.double_blocks[0]
        with pytest.raises(InputError, match="DoubleStreamBlock is given attn_mask, which shares"):
            block(img=x, txt=x, vec=x, pe=x, attn_mask=x)


def test_a_worker_that_fails_is_named_with_what_it_said(folder: Path, files: Path, node: Any) -> None:
    own = comfy.ModelPatcher(made("WanModel"))

    def fail(*_: object) -> None:
        raise RuntimeError("the card is full")

    with crew(files, loaders={"comfy": ComfyLoader(folder)}) as (worker,):
        (spread,) = node().spread(own, worker.address, "", "fp16", "WanModel-tiny.safetensors")
        with pytest.raises(
            LinkError, match=f"the worker {worker.address} said: RuntimeError: the card is full"
        ):
            picture(spread, lambda step: worker.model.blocks[1].register_forward_pre_hook(fail))


WRONG = [
    ({"workers": ""}, "0 workers are given"),
    ({"workers": "127.0.0.1:many"}, "'127.0.0.1:many' is not HOST or HOST:PORT"),
    ({"workers": "192.0.2.2"}, "needs a shared token"),
    ({"token_file": "nowhere"}, "cannot read the token file nowhere"),
    ({"recipe": "teleport"}, "teleport"),
    ({"recipe": "batch"}, "in mode batch workers have nothing to do"),
    ({"model_name": " "}, "is no name"),
    ({"model": comfy.ModelPatcher(made("VaceWanModel"))}, "ComfyUI's VaceWanModel cannot be cut yet"),
]


@pytest.mark.parametrize(("changed", "told"), WRONG, ids=lambda x: str(x)[:30])
def test_wrong_input_of_the_node_is_refused_in_a_sentence(
    folder: Path, node: Any, changed: dict[str, Any], told: str
) -> None:
    own = comfy.ModelPatcher(made("WanModel"))
    given = {"model": own, "workers": "127.0.0.1", "token_file": "", "recipe": "compact", "model_name": "wan"}
    with pytest.raises(InputError, match=re.escape(told)) as refused:
        node().spread(**given | changed)
    assert "\n" not in str(refused.value)


def test_a_comfyui_that_has_changed_is_refused_in_a_sentence() -> None:
    class Block(nn.Module):
        def forward(self, hidden: Tensor, freqs: Tensor) -> Tensor:
            return hidden

    model = made("WanModel")
    model.blocks = nn.ModuleList([Block()])
    with pytest.raises(InputError, match=r"blocks\.0 of WanModel takes no x, transformer_options, as it did"):
        known_family(model)
    del model.blocks
    with pytest.raises(InputError, match=r"WanModel has no blocks\.0, as it had"):
        known_family(model)


def test_files_that_are_no_safetensors_and_folders_without_comfyui_are_refused(
    folder: Path, files: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"has no comfy/sd\.py; give the folder"):
        ComfyLoader(tmp_path)
    given = {"model": "Flux-tiny.safetensors", "source": "comfy"}
    with (
        crew(files) as (worker,),
        pytest.raises(InputError, match="start it with --comfy"),
        thinwire.over_workers(made("Flux"), [worker.address], "fp16", **given),
    ):
        pass
    (tmp_path / "wan.pt").touch()
    with pytest.raises(InputError, match="is no file of safetensors, and others can run programs"):
        from thinwire.uses.pictures.workers.worker_models import AskedModel

        ComfyLoader(folder)(
            tmp_path / "wan.pt", AskedModel("wan.pt", "WanModel", "float32"), torch.device("cpu")
        )
