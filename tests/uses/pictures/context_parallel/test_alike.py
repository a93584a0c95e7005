"""What ranks must have in common, in each call: all bytes of the weights, and what adapters are set to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from gc import collect
from typing import Any
from weakref import ref

import pytest
import torch
from each import each
from meshes import Mesh, meshes, together
from picture_models import flux, flux_inputs, on_ranks, one_device
from torch import Tensor, nn

import thinwire
from thinwire.types import InputError, LinkError
from thinwire.uses.pictures import agreement, weight_checksums
from thinwire.uses.pictures.agreement import Parallel

pytest.importorskip("diffusers")

Meshes = dict[int, list[Mesh]]
Change = Callable[[Any], object]
OTHER_NOW = r"rank \d now has other weights or adapters than this rank|rank \d has left"


def one_value(model: Any) -> None:
    """One of 4,096 values, the last but some: what a checksum of samples does not see."""
    model.transformer_blocks[0].attn.to_q.weight.data[61, 37] += 0.01


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.transformer_blocks[0].attn.to_q.weight[61, 37] += 0.01


def some_rows(model: Any) -> None:
    """As adapters are fused: by ``.data``, which torch does not count."""
    model.proj_out.weight.data[3:5] *= 1.1


def another_module(model: Any) -> None:
    """As adapters are loaded."""
    old = model.transformer_blocks[0].attn.to_k
    model.transformer_blocks[0].attn.to_k = nn.Sequential(old, nn.Linear(64, 64))


def buffer(model: Any) -> None:
    model.register_buffer("mean", torch.zeros(3))


def scale(model: Any) -> None:
    """As ``set_adapters`` weighs an adapter."""
    model.transformer_blocks[0].attn.to_k.scaling = {"default": 0.5}


def setting(model: Any) -> None:
    """Of the configuration alone: the weights are the same."""
    model.register_to_config(axes_dims_rope=(6, 4, 6))


@each("change", [one_value, some_rows, another_module, buffer, scale, setting])
def test_other_weights_are_refused_at_first(ranks: Meshes, change: Change) -> None:
    models = [flux(), flux()]
    change(models[1])

    def rank(model: nn.Module, peers: Mesh) -> None:
        with thinwire.parallel(model, peers, "fp16"):
            pass

    words = (
        r"rank \d has (its weights \(a checksum\) '\d+', and this rank '\d+'|the setting axes_dims_rope '\[)"
    )
    with pytest.raises(InputError, match=words):
        together([lambda one=one: rank(*one) for one in zip(models, ranks[2], strict=True)])


@each(
    "other, words",
    [
        ("ulysses", "mode '(ulysses|gather)', and this rank '(ulysses|gather)'"),
        ("compact:bits=2", r"attention '.*, and this rank "),
    ],
)
def test_other_recipes_are_told_by_the_part_that_differs(ranks: Meshes, other: str, words: str) -> None:
    def rank(recipe: str, model: nn.Module, peers: Mesh) -> None:
        with thinwire.parallel(model, peers, recipe):
            pass

    given = [("compact", flux(), ranks[2][0]), (other, flux(), ranks[2][1])]
    with pytest.raises(InputError, match=rf"rank \d has the recipe's {words}.*make them alike"):
        together([lambda one=one: rank(*one) for one in given])


@each("mode, change", [("gather", c) for c in (in_place, some_rows, another_module, buffer, scale)])
def test_weights_may_change_in_the_block_on_all_ranks_or_none(
    ranks: Meshes, mode: str, change: Change
) -> None:
    calls = [flux_inputs(time=1.0)]

    before = 1.0 if change is scale else 0.5  # settings are looked at within a picture too

    def use(own: nn.Module, found: Parallel, both: bool) -> Tensor | None:
        one_device(own, [flux_inputs(time=before)])
        if both or found._session._rank == 1:
            change(own)
        if both:
            return one_device(own, calls)[0]
        with pytest.raises((InputError, LinkError), match=OTHER_NOW):
            one_device(own, calls)
        return None

    model = flux()
    on_ranks(ranks[2], model, "raw", lambda *a: use(*a, False), mode=mode, deadline=20.0)
    torch.manual_seed(1)
    if change is not another_module:  # whose new weights are drawn
        made = on_ranks(ranks[2], model, "raw", lambda *a: use(*a, True), mode=mode)
        change(model)
        assert torch.allclose(made[0], one_device(model, calls)[0], atol=1e-5)


@each("mode", ["ulysses", "displaced", "guidance", "pipe"])
def test_in_all_modes(ranks: Meshes, mode: str) -> None:
    def use(own: nn.Module, found: Parallel) -> None:
        for time in (1.0, 0.9):
            one_device(own, [flux_inputs(time=time, seed=s) for s in (1, 2)])
        if found._session._rank == 1:
            in_place(own)
        with pytest.raises((InputError, LinkError), match=OTHER_NOW):
            for time in (0.8, 0.7):
                made = one_device(own, [flux_inputs(time=time, seed=s) for s in (1, 2)])
                made[0] + made[1]

    on_ranks(ranks[2], flux(), "raw", use, mode=mode, deadline=20.0)


def test_weights_are_read_whole_again_only_where_they_may_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not where they moved: those of a group that is offloaded lie elsewhere in each call."""
    model: Any = flux()
    found = weight_checksums.WatchedWeights(model)
    first, read = found.checksum(True), list[nn.Module]()
    whole = weight_checksums.bits_checksum
    monkeypatch.setattr(weight_checksums, "bits_checksum", lambda m, but=(): read.append(m) or whole(m, but))
    for p in model.parameters():
        p.data = p.data.clone()
    assert found.checksum(False) == first and not read
    for change in (in_place, buffer):
        change(model)
        found.checksum(False)
    some_rows(model)
    model.proj_out.weight.data = model.proj_out.weight.data.clone()
    assert found.checksum(False) != first and len(read) == 3


def test_weights_that_accelerate_keeps_elsewhere_are_compared_too() -> None:
    cpu_offload = pytest.importorskip("accelerate").cpu_offload
    models = [flux(), flux()]
    plain = weight_checksums.WatchedWeights(models[0]).checksum(True)
    one_value(models[1])
    for model in models:
        cpu_offload(model, torch.device("cpu"))
    same, other = (weight_checksums.WatchedWeights(model) for model in models)
    assert same.checksum(True) == plain != other.checksum(True)
    one_device(models[0], [flux_inputs()])
    assert same.checksum(True) == plain


class Quantised(Tensor):
    """8-bit weights inside a tensor of another kind, as libraries of quantisation have them."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)
        return made

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data8, self.scale8 = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale8"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Quantised(args[0].data8, args[0].scale8)
        plain = [x.data8.to(x.scale8.dtype) * x.scale8 if isinstance(x, Quantised) else x for x in args]
        return func(*plain, **(kwargs or {}))


def quantised(scale: float) -> nn.Module:
    model: Any = flux()
    weight = model.proj_out.weight.detach()
    data = (weight / weight.abs().max() * 127).round().to(torch.int8)
    model.proj_out.weight = nn.Parameter(Quantised(data, torch.tensor(scale)), requires_grad=False)
    return model  # type: ignore[no-any-return]


def test_quantised_weights_are_compared_by_what_is_inside(ranks: Meshes) -> None:
    calls, models = [flux_inputs(63)], [quantised(0.01), quantised(0.02)]

    def rank(model: nn.Module, peers: Mesh, mode: str) -> Tensor:
        with thinwire.parallel(model, peers, "raw", mode=mode):
            return one_device(model, calls)[0]

    wanted = one_device(models[0], calls)[0]
    for mode in ("gather", "ulysses", "guidance"):
        two = [(quantised(0.01), peers, mode) for peers in ranks[2]]
        for made in together([lambda one=one: rank(*one) for one in two]):
            assert (made - wanted).norm() < 1e-6 * wanted.norm()
    with pytest.raises(InputError, match="has its weights"):
        two = [(model, peers, "gather") for model, peers in zip(models, ranks[2], strict=True)]
        together([lambda one=one: rank(*one) for one in two])


def first_block(model: Any) -> None:
    from diffusers import FirstBlockCacheConfig
    from diffusers.hooks import apply_first_block_cache

    apply_first_block_cache(model, FirstBlockCacheConfig())


def taylor(model: Any) -> None:
    from diffusers import TaylorSeerCacheConfig
    from diffusers.hooks import apply_taylorseer_cache

    apply_taylorseer_cache(model, TaylorSeerCacheConfig())


def broadcast(model: Any) -> None:
    from diffusers import PyramidAttentionBroadcastConfig

    config = PyramidAttentionBroadcastConfig(2, current_timestep_callback=lambda: 500)
    model.enable_cache(config)


def magnitude(model: Any) -> None:
    from diffusers import MagCacheConfig
    from diffusers.hooks import apply_mag_cache

    apply_mag_cache(model, MagCacheConfig(mag_ratios=[1.0] * 4, num_inference_steps=4))


@each(
    "set_up, mode", [(c, "gather") for c in (first_block, taylor, broadcast, magnitude)] + [(taylor, "pipe")]
)
def test_caches_are_refused_on_all_ranks_in_one_sentence(ranks: Meshes, set_up: Change, mode: str) -> None:
    """Also where one rank alone has one: before the first step is computed."""

    def use(own: nn.Module, found: Parallel, both: bool) -> str:
        if both or found._session._rank == 1:
            set_up(own)
        with pytest.raises(
            InputError, match=r"(caches that skip layers|the hook .*) do(es)? not go|which does not"
        ):
            one_device(own, [flux_inputs()])
        return ""

    for both in (True, False):
        on_ranks(ranks[2], flux(), "raw", lambda *a, both=both: use(*a, both), mode=mode, deadline=20.0)


def test_noise_that_was_drawn_in_a_picture_is_named(ranks: Meshes) -> None:
    def use(own: nn.Module, found: Parallel) -> None:
        inputs = flux_inputs(time=1.0)
        for time in (1.0, 0.9):
            inputs["timestep"] = torch.full((2,), time)
            own(**inputs)
        inputs |= {"hidden_states": inputs["hidden_states"] + found._session._rank}
        inputs["timestep"] = torch.full((2,), 0.8)
        with pytest.raises(
            InputError, match=r"other hidden_states in call 3 of the picture, .*torch\.manual_seed"
        ):
            own(**inputs)

    on_ranks(ranks[2], flux(), "raw", use, deadline=20.0)


def test_all_ranks_draw_as_the_first(ranks: Meshes) -> None:
    """So what a scheduler draws without a generator is one noise; then each goes on with its own."""
    model, before = flux(), torch.get_rng_state()
    first = agreement.state_of(model)
    wanted = torch.randn(3)
    torch.manual_seed(5)
    own, wanted_after = agreement.state_of(model), torch.get_rng_state()
    with agreement.drawing_alike(model, own, first):
        assert torch.equal(torch.randn(3), wanted)
    assert torch.equal(torch.get_rng_state(), wanted_after)
    torch.set_rng_state(before)


@each("recipe", ["compact", "guidance", "pipe-fp16", "batch", "displaced"])
def test_many_blocks_leave_nothing_behind(recipe: str) -> None:
    """Neither handlers nor messages, but for those of the last one."""
    model, sizes = flux(), list[int]()
    with meshes(2) as two:
        for _ in range(3):
            on_ranks(
                two, model, recipe, lambda own, _: one_device(own, [flux_inputs(), flux_inputs(time=0.4)])
            )
            boxes = [peer.mailbox for rank in two for peer in rank.values()]
            sizes.append(sum(len(box._handlers) + len(box._filed) + len(box._claimed) for box in boxes))
    assert sizes[-1] <= sizes[1]


@each("recipe", ["raw", "compact-pipe", "guidance"])
def test_the_links_do_not_keep_a_model_after_its_block(ranks: Meshes, recipe: str) -> None:
    def rank(peers: Mesh) -> ref[Any]:
        model = made.pop()
        with torch.no_grad(), thinwire.parallel(model, peers, recipe):
            model(**flux_inputs())
        return ref(model)

    made = [flux(), flux()]
    left = together([partial(rank, peers) for peers in ranks[2]])
    collect()
    assert not any(found() for found in left)
