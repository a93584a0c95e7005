"""Models that a host fills by a loader of its own: each element gets where the loader puts it."""

from collections.abc import Callable, Iterable

import pytest
import torch
from fused_model import FusedModel, checkpoint
from torch import Tensor, nn

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.loaded import loaded_model
from thinwire.state.replica import Replica
from thinwire.types import InputError

Wrong = Callable[[FusedModel, str, Tensor], None]


def changed(tensors: dict[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """Return tensors of which some values are others."""
    draw = torch.Generator().manual_seed(seed)

    def one(x: Tensor) -> Tensor:
        return torch.where(torch.rand(x.shape, generator=draw) < share, x + 1, x)

    return {name: one(x) for name, x in tensors.items()}


def same(model: nn.Module, other: nn.Module) -> bool:
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    return all(torch.equal(x, theirs[name]) for name, x in mine.items())


def held(tensors: dict[str, Tensor]) -> Replica:
    replica = Replica(Layout.of(tensors))
    replica.start(tensors)
    replica.swap()
    return replica


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_version_is_what_the_loader_itself_would_make(
    rank: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_model, "WHOLE_HERE", (0, 4)[rank])  # tensors so small are copied whole else
    tensors = checkpoint()
    model, expected = FusedModel(rank, dtype=dtype), FusedModel(rank, dtype=dtype)
    replica = held(tensors)
    replica.fill(model, model.load_weights)
    places = {name: x.data_ptr() for name, x in model.named_parameters()}
    history = History(replica.layout)
    history.start(tensors)
    for step in range(1, 6):
        expected.load_weights(tensors.items())
        assert same(model, expected), step
        tensors = changed(tensors, 0.5**step, step)
        base = history.newest.number
        history.publish(tensors, {"step": step})
        replica.apply(history.patch(base))
        assert replica.swap()
    expected.load_weights(tensors.items())
    assert same(model, expected) and replica.fills(model)
    assert places == {name: x.data_ptr() for name, x in model.named_parameters()}


def test_recording_changes_no_value_of_the_model() -> None:
    tensors = checkpoint()
    model = FusedModel()
    model.load_weights(tensors.items())
    before = {name: x.clone() for name, x in model.named_parameters()}
    Replica(Layout.of(tensors)).fill(model, model.load_weights)
    assert all(torch.equal(x, before[name]) for name, x in model.named_parameters())


@pytest.mark.parametrize(
    "missing", ["lm_head.weight", "model.layers.0.attn.k_proj.weight", "model.scale", "model.norm.weight"]
)
def test_a_parameter_that_the_state_omits_is_refused_by_name_unless_it_may_stay(missing: str) -> None:
    tensors = checkpoint()
    del tensors[missing]
    model, replica = FusedModel(), held(tensors)
    named = {"lm_head": "head", "k_proj": "qkv", "model": missing.split(".")[-1], "norm": "norm"}
    own = named.get(missing.split(".")[-2], missing.split(".")[-2])
    with pytest.raises(InputError, match=rf"nothing in the state fills .*\b{own}"):
        replica.fill(model, model.load_weights)
    assert not replica.fills(model)
    replica.fill(model, model.load_weights, kept={own})
    assert replica.fills(model)


@pytest.mark.parametrize("tied", [False, True])
def test_two_tensors_in_one_place_of_the_host_are_refused_unless_they_are_one(tied: bool) -> None:
    model, embed = FusedModel(), torch.randn(10, 8).bfloat16()
    model.head = model.embed
    replica = held(
        checkpoint() | {"model.embed.weight": embed, "lm_head.weight": embed if tied else embed.clone()}
    )
    if not tied:
        with pytest.raises(InputError, match=r"keeps model.embed.weight and lm_head.weight in one place"):
            replica.fill(model, model.load_weights)
        return
    replica.fill(model, model.load_weights)
    assert torch.equal(model.head, embed[:8])


def test_what_is_filled_twice_does_not_count_for_what_is_not_filled() -> None:
    model, tensors = FusedModel(), checkpoint()

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, x in weights:
            model.load_weights([(name, x), (name, x)])
            if name == "model.norm.weight":
                model.norm.data[4:].copy_(x[4:])
            if "lm_head" in name:
                model.part.data[:2].copy_(x[0, :2])
                model.part.data[:2].copy_(x[0, :2])

    model.part = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
    with pytest.raises(InputError, match="2 of 4 values of the host's part"):
        held(tensors).fill(model, load)
    held(tensors).fill(model, load, kept={"part"})


def add(model: FusedModel, name: str, x: Tensor) -> None:
    model.norm.data.copy_(x + 1)


def through_a_buffer(model: FusedModel, name: str, x: Tensor) -> None:
    whole = torch.empty(x.shape, dtype=x.dtype)
    whole.copy_(x)
    model.norm.data.copy_(whole)


def repeat(model: FusedModel, name: str, x: Tensor) -> None:
    model.norm.data.copy_(x[:1].expand(len(x)))


def unknown(model: FusedModel, name: str, x: Tensor) -> None:
    raise KeyError(f"layers.{name}")


def narrow(model: FusedModel, name: str, x: Tensor) -> None:
    model.quantised.data.copy_(x)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (add, "does not copy model.norm.weight, it computes with it"),
        (through_a_buffer, "no parameter's"),
        (repeat, "to several places"),
        (unknown, "does not take model.norm.weight"),
        (narrow, "float8_e4m3fn, which it quantises itself"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_refused_with_the_name(wrong: Wrong, told: str) -> None:
    model, tensors = FusedModel(), checkpoint()
    model.quantised = nn.Parameter(torch.zeros(8, dtype=torch.float8_e4m3fn), requires_grad=False)
    before = {name: x.clone() for name, x in model.named_parameters()}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, x in weights:
            if name == "model.norm.weight":
                wrong(model, name, x)
            else:
                model.load_weights([(name, x)])

    with pytest.raises(InputError, match=told):
        held(tensors).fill(model, load, kept={"norm", "quantised"})
    now = dict(model.named_parameters())
    assert all(torch.equal(now[n].view(torch.uint8), x.view(torch.uint8)) for n, x in before.items())
