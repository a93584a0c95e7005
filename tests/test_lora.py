"""Adapters on stages: what is trained, from which values, and what is saved of it."""

import copy
import json
from itertools import pairwise

import pytest
import torch

from test_models import IDS, even, make_config, make_source, run, save_unsplit, whole_logits
from thinwire.lab import lora
from thinwire.lab.checkpoint import finish_adapters, finish_model, remove_adapters, save_adapters, save_stage
from thinwire.lab.loss import next_token_loss
from thinwire.lab.models import ModelSource
from thinwire.lab.split import build_stage
from thinwire.types import InputError, MissingExtra

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RANK = 2
KINDS = ["llama", "gpt2"]


class NoTokenizer:
    """What is saved beside a model here: nothing."""

    def save_pretrained(self, folder):
        return ()


def adapted(source, n, seed=3):
    stages = [build_stage(source, even(4, n), k) for k in range(n)]
    for stage in stages:
        lora.add_adapters(stage, RANK, seed)
    return stages


def trained(stages):
    """Move every adapter away from the start, where it adds nothing."""
    g = torch.Generator().manual_seed(7)
    for stage in stages:
        for p in stage.parameters():
            if p.requires_grad:
                p.data += 0.1 * torch.randn(p.shape, generator=g)
    return stages


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_start_equal_for_every_cut_and_add_nothing(kind, tmp_path):
    model = save_unsplit(make_config(kind, tied=True), tmp_path)
    source = make_source(make_config(kind, tied=True), tmp_path)
    found = []
    for n in (1, 2, 4):
        stages = adapted(source, n)
        torch.testing.assert_close(run(stages, IDS), whole_logits(model, IDS), rtol=0, atol=1e-6)
        found.append({k: v for s in stages for k, v in lora.adapters(s).items()})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[k], found[0][k]) for k in other)
    starts = [v for k, v in found[0].items() if ".lora_A." in k]
    assert all(a.std() > 0 for a in starts)
    assert not any(torch.equal(a, b) for a, b in pairwise(starts) if a.shape == b.shape)
    reseeded = lora.adapters(adapted(source, 1, seed=4)[0])
    assert not any(torch.equal(reseeded[k], v) for k, v in found[0].items() if ".lora_A." in k)


def test_adding_adapters_leaves_the_random_state_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    adapted(make_source(make_config("llama"), None), 2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("kind", "linears"), [("llama", 7), ("gpt2", 4)])
def test_adapters_alone_are_trained_on_every_linear_layer(kind, linears):
    first, last = adapted(make_source(make_config(kind), None), 2)
    hidden = first(IDS[:, :-1])
    received = hidden.detach().requires_grad_()
    next_token_loss(last(received), IDS[:, 1:]).backward()
    hidden.backward(received.grad)
    for stage in (first, last):
        names = [n for n, p in stage.named_parameters() if p.requires_grad]
        assert len(names) == 2 * linears * len(stage.layers) and all(".lora_" in n for n in names)
        for name, p in stage.named_parameters():
            assert (p.grad is not None) == p.requires_grad
            if ".lora_B." in name:  # A's gradient is zero while B is
                assert p.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own use of it
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_both_saved_forms_give_the_logits_of_the_stages(kind, tied, tmp_path):
    base, config = tmp_path / "base", make_config(kind, tied)
    save_unsplit(config, base)
    source = ModelSource(str(base), config.model_type, config, NoTokenizer(), base)
    start = run(adapted(source, 2), IDS)
    stages = trained(adapted(source, 2))
    expected = run([s.eval() for s in stages], IDS)
    assert (expected - start).abs().max() > 0.01
    for k, stage in enumerate(stages):
        save_stage(stage, tmp_path / "model", k, 2)
        save_adapters(stage, tmp_path / "adapter", k, 2)
    finish_model(tmp_path / "model", source, 2)
    finish_adapters(tmp_path / "adapter", source, RANK, 2)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(whole_logits(whole, IDS), expected, rtol=0, atol=2e-5)
    files = sorted(f.name for f in (tmp_path / "adapter").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    joined = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(whole_logits(joined, IDS), expected, rtol=0, atol=2e-5)
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")  # finds the base by itself
    assert torch.equal(whole_logits(again, IDS), whole_logits(joined, IDS))


def test_what_is_saved_says_how_it_was_made(tmp_path):
    source = make_source(make_config("gpt2"), None)
    save_adapters(adapted(source, 1)[0], tmp_path, 0, 1)
    finish_adapters(tmp_path, source, RANK, 1)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (RANK, 2 * RANK, True)
    assert config["base_model_name_or_path"] is None and config["inference_mode"] is True
    remove_adapters(tmp_path)
    assert not tmp_path.exists()
    remove_adapters(tmp_path)


def test_merging_leaves_the_stage_as_it_is():
    stage = trained(adapted(make_source(make_config("gpt2"), None), 1))[0]
    before = copy.deepcopy(stage.state_dict())
    whole = lora.merged(stage)
    assert all(torch.equal(before[k], v) for k, v in stage.state_dict().items())
    assert not any("lora" in k or "base_layer" in k for k in whole)
    plain = build_stage(make_source(make_config("gpt2"), None), even(4, 1), 0)
    assert whole.keys() == set(plain.original_names().values())


def test_adapters_are_not_finished_without_all_their_shards(tmp_path):
    source = make_source(make_config("llama"), None)
    save_adapters(adapted(source, 2)[0], tmp_path, 0, 2)
    with pytest.raises(InputError, match="model-00002-of-00002"):
        finish_adapters(tmp_path, source, RANK, 2)


def test_without_peft_the_extra_is_named(monkeypatch):
    lora.require_peft()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"thinwire\[lora\]"):
        lora.require_peft()
