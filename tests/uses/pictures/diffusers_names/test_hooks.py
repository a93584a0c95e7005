"""The seam with diffusers: what it relies on, what it leaves behind, and what it refuses in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from each import each
from meshes import Mesh, together
from picture_models import flux, flux_inputs, on_ranks, one_device, wan, wan_inputs
from torch import Tensor, nn

import thinwire
from thinwire.types import InputError, LinkError
from thinwire.uses.pictures.agreement import Parallel
from thinwire.uses.pictures.diffusers_names import hooks
from thinwire.uses.pictures.diffusers_names.tested_version import check_host

pytest.importorskip("diffusers")

Meshes = dict[int, list[Mesh]]


def test_diffusers_has_what_the_seam_relies_on() -> None:
    check_host()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("diffusers.__version__", "0.43.0", "0.43.0 is not 0.42"),
        ("diffusers.models.attention_dispatch._AttentionBackendRegistry._backends", {}, "._backends"),
        ("diffusers.models.attention_dispatch.dispatch_attention_fn", len, "dispatch_attention_fn"),
        ("diffusers.hooks.hooks.StateManager", None, "StateManager"),
        ("diffusers.hooks.hooks.ModelHook.another", lambda hook: None, "ModelHook.another"),
        ("diffusers.models._modeling_parallel.ContextParallelOutput", object, "ContextParallelOutput"),
    ],
)
def test_a_change_of_diffusers_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, words: str
) -> None:
    monkeypatch.setattr(name, value, raising=False)
    with pytest.raises(InputError, match=words.replace(".", r"\.")):
        check_host()


def state(model: nn.Module) -> list[Any]:
    """What the seam touches: attributes of modules and processors, and the registry of back ends."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    modules = [(name, sorted(vars(m))) for name, m in model.named_modules()]
    processors = [dict(vars(m.processor)) for m in model.modules() if getattr(m, "processor", None)]
    return [modules, processors, dict(registry._backends), copy.deepcopy(registry._supported_arg_names)]


@pytest.mark.parametrize("error", [False, True])
def test_removal_leaves_all_as_it_was(ranks: Meshes, error: bool) -> None:
    model, calls = flux(), [flux_inputs()]
    before, wanted = state(model), one_device(model, calls)[0]
    copies = [copy.deepcopy(model) for _ in ranks[2]]

    def rank(own: nn.Module, peers: Mesh) -> None:
        with thinwire.parallel(own, peers, "fp16"):
            one_device(own, calls)
            if error:
                raise KeyError

    pairs = zip(copies, ranks[2], strict=True)
    with pytest.raises(KeyError) if error else nullcontext():
        together([lambda pair=pair: rank(*pair) for pair in pairs])
    for own in copies:
        assert state(own) == before
        assert torch.equal(one_device(own, calls)[0], wanted)


def test_hooks_of_others_stay(ranks: Meshes) -> None:
    from diffusers.hooks import HookRegistry, ModelHook

    class Twice(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return (output[0] * 2,)

    def use(own: nn.Module, found: Parallel) -> nn.Module:
        HookRegistry.check_if_exists_or_initialize(own).register_hook(Twice(), "twice")
        return own

    model, calls = flux(), [flux_inputs()]
    for own in on_ranks(ranks[2], model, "fp16", use):
        assert torch.equal(one_device(own, calls)[0], one_device(model, calls)[0] * 2)


class Deaf:
    """A processor that takes the configuration and ignores it, as some back ends did."""

    _parallel_config = None

    def __call__(self, attn: nn.Module, hidden_states: Tensor, *others: Any) -> Tensor:
        return hidden_states


def replicated() -> nn.Module:
    """A model whose plan forgets the text."""
    model = flux()
    inputs = {k: v for k, v in model._cp_plan[""].items() if k in ("hidden_states", "img_ids")}
    model._cp_plan = model._cp_plan | {"": inputs}
    return model


def deaf() -> nn.Module:
    model = wan()
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor = Deaf()
    return model


def legacy() -> nn.Module:
    """With a processor that neither takes the configuration nor calls torch's attention."""
    model = flux()
    model.transformer_blocks[0].attn.processor = lambda attn, x, text, *others: (x, text)
    return model


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    sizes = {"block_out_channels": (8,), "norm_num_groups": 2, "attention_head_dim": 4}
    return UNet2DModel(**blocks, **sizes, sample_size=8)


def cached() -> nn.Module:
    from diffusers import FirstBlockCacheConfig

    model = flux()
    model.enable_cache(FirstBlockCacheConfig())
    return model


@pytest.mark.parametrize(
    ("make", "inputs", "words"),
    [
        (lambda: nn.Linear(2, 2), {}, "Linear has no plan for how to split it"),
        (unet, {}, "UNet2DModel has no plan"),
        (legacy, flux_inputs(), "function has exchanged nothing"),
        (replicated, flux_inputs(), "transformer_blocks.0.attn has 39 tokens here, no shares of what was"),
        (deaf, wan_inputs(), "Deaf has exchanged nothing"),
        (cached, flux_inputs(), "caches that skip layers"),
        (flux, flux_inputs(1), "hidden_states has 1 tokens, too few for 2 ranks"),
    ],
)
def test_what_would_give_a_wrong_picture_is_refused(
    ranks: Meshes, make: Callable[[], nn.Module], inputs: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        on_ranks(ranks[2], make(), "raw", lambda own, _: own(**inputs))


def another_processor(model: Any) -> None:
    model.set_attn_processor(type(model.transformer_blocks[0].attn.processor)())


def wrapped_output(model: Any) -> None:
    """As an adapter wraps a layer: the hook that joins its output is then inside."""
    model.proj_out = nn.Sequential(model.proj_out)


@each(
    "change, words",
    [
        (another_processor, r"processor of transformer_blocks\.0\.attn was replaced"),
        (wrapped_output, "proj_out was replaced while the model was parallel"),
    ],
)
def test_what_has_hooks_may_not_be_replaced_meanwhile(
    ranks: Meshes, change: Callable[[nn.Module], None], words: str
) -> None:
    def use(own: nn.Module, found: Parallel) -> None:
        change(own)
        own(**flux_inputs())

    for mode in ("gather", "pipe"):
        with pytest.raises(InputError, match=words):
            on_ranks(ranks[2], flux(), "raw", use, mode=mode)


def test_a_model_is_parallel_once_and_has_no_gradients(ranks: Meshes) -> None:
    def use(own: nn.Module, found: Parallel) -> None:
        with torch.enable_grad(), pytest.raises(InputError, match=r"call it under torch\.no_grad"):
            own(**flux_inputs())
        with pytest.raises(InputError, match="is parallel already"), hooks.attached(own, found._session):
            pass

    on_ranks(ranks[2], flux(), "raw", use)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "ring"}, "no mode 'ring'; choose gather, .* or one"),
        ({"recipe": "compct"}, "did you mean compact"),
        ({"plan": {"proj_out": None}}, "the plan of FluxTransformer2DModel says None|its plan"),
        ({"plan": {}}, r"rank \d has its plan"),
    ],
)
def test_what_one_rank_is_refused_all_are_told(ranks: Meshes, options: dict[str, Any], words: str) -> None:
    """And go on together."""

    models = [flux(), flux()]

    def rank(number: int) -> None:
        own = {"recipe": "fp16", "deadline": 20.0} | (options if number else {})
        entered = thinwire.parallel(models[number], ranks[2][number], **own)
        with pytest.raises(InputError, match=words), entered:
            pass

    together([lambda n=n: rank(n) for n in (0, 1)])
    on_ranks(ranks[2], flux(), "fp16", lambda own, _: one_device(own, [flux_inputs()]))


def test_ranks_have_one_model_and_one_noise(ranks: Meshes) -> None:
    other = flux()
    other.x_embedder.weight.data += 1

    def rank(model: nn.Module, peers: Mesh, seed: int) -> None:
        with torch.no_grad(), thinwire.parallel(model, peers, "fp16"):
            model(**flux_inputs(seed=seed))

    for models, seeds, words in (
        ((flux(), other), (1, 1), r"rank \d has its weights \(a checksum\) '\d+', and this rank '\d+'"),
        ((flux(), flux()), (1, 2), r"rank \d called the model with other inputs; give all ranks one prompt"),
    ):
        made = zip(models, ranks[2], seeds, strict=True)
        with pytest.raises(InputError, match=words):
            together([lambda one=one: rank(*one) for one in made])


def test_the_others_learn_that_a_rank_has_ended(ranks: Meshes) -> None:
    """At once, and not by the deadline."""

    def use(own: nn.Module, found: Parallel) -> None:
        gather: Any = found._session
        own(**flux_inputs(time=0.9))
        if gather._rank == 1:
            raise KeyError
        with pytest.raises(LinkError, match="rank 1 has left, or ended with an error"):
            own(**flux_inputs(time=0.8))
        with pytest.raises(LinkError, match="rank 1 has left, or ended with an error"):
            own(**flux_inputs(time=0.9))

    with pytest.raises(KeyError):
        on_ranks(ranks[2], flux(), "compact", use, deadline=600.0)
