"""Adapters alone: a trainer publishes them by the names of peft's files, and the base at a rollout stays."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from waiting import HOST, LONG

from thinwire.types import InputError
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.push.publisher import Publisher


def with_adapter(seed: int) -> Any:
    """Return a model with an adapter of its own, and a head that is trained beside it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)  # all have the same base
    base = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"], init_lora_weights=False)
    return get_peft_model(base, config).eval().requires_grad_(False)


def base_of(model: nn.Module) -> dict[str, Tensor]:
    found = {n: x.clone() for n, x in model.named_parameters() if "default" not in n.split(".")}
    assert found
    return found


def test_apply_to_brings_an_adapter_up_and_leaves_the_base() -> None:
    from peft import get_peft_model_state_dict

    trained, used, x = with_adapter(1), with_adapter(2), torch.randn(5, 6)
    before = base_of(used)
    with Publisher(get_peft_model_state_dict(trained)) as publisher, Follower(HOST, publisher.port) as f:
        for _ in range(2):
            for name, value in trained.named_parameters():
                value += "default" in name.split(".")
            f.wait(publisher.publish().number, LONG)
            assert f.apply_to(used).new and torch.equal(used(x), trained(x))
        assert all(torch.equal(v, before[n]) for n, v in base_of(used).items())


def test_an_adapter_that_comes_in_part_and_a_base_in_part_are_told_by_name() -> None:
    from peft import get_peft_model_state_dict

    trained, used = with_adapter(1), with_adapter(2)
    less = get_peft_model_state_dict(trained)
    left_out = less.pop(next(name for name in less if "lora_B" in name))
    some = dict(base_of(trained)) | get_peft_model_state_dict(trained)
    some.pop(next(iter(some)))
    for tensors, told in ((less, r"lora_B\.default\.weight"), (some, r"base_layer\.weight")):
        with Publisher(tensors) as publisher, Follower(HOST, publisher.port) as f:
            f.wait(publisher.publish().number, LONG)
            with pytest.raises(InputError, match=f"nothing in the state fills the model's .*{told}"):
                f.apply_to(used)
    assert left_out.numel()


def test_load_into_brings_up_an_engine_that_keeps_adapters_stacked() -> None:
    class Engine(nn.Module):
        """A base, and room for the adapters of several customers, as engines have."""

        def __init__(self) -> None:
            super().__init__()
            self.base_weight = nn.Parameter(torch.ones(8, 6), requires_grad=False)
            self.lora_a = nn.Parameter(torch.zeros(4, 2, 6), requires_grad=False)
            self.lora_b = nn.Parameter(torch.zeros(4, 8, 2), requires_grad=False)

        def load_adapter(self, tensors: Iterable[tuple[str, Tensor]], slot: int = 1) -> None:
            for name, x in tensors:
                (self.lora_a if "lora_A" in name else self.lora_b).data[slot].copy_(x)

    tensors = {f"model.0.lora_{x}.weight": torch.randn(s) for x, s in (("A", (2, 6)), ("B", (8, 2)))}
    engine, other = Engine(), Engine()
    with Publisher(tensors) as publisher, Follower(HOST, publisher.port) as f:
        for _ in range(3):
            f.wait(publisher.publish().number, LONG)
            with pytest.raises(InputError, match="nothing in the state fills"):
                f.load_into(other, other.load_adapter, kept={"base*"})
            f.load_into(engine, engine.load_adapter, kept={"base*", "lora_?"})
            assert torch.equal(engine.lora_a[1], tensors["model.0.lora_A.weight"])
            assert torch.equal(engine.lora_b[1], tensors["model.0.lora_B.weight"])
            tensors["model.0.lora_B.weight"] += 1
    others = [0, 2, 3]
    assert engine.base_weight.eq(1).all() and not engine.lora_a[others].any()
