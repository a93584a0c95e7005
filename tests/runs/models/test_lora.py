"""Adapters on stages: what is trained, from which values, and what is saved of it."""

import copy
import json
import shutil
from itertools import pairwise

import pytest
import torch
from launchers import record, sentence, warm
from safetensors import safe_open
from safetensors.torch import load_file
from texts import write_text

from tests.runs.models.test_models import IDS, even, make_config, make_source, run, save_unsplit, whole_logits
from thinwire.runs.data.task import next_token_loss
from thinwire.runs.models import lora
from thinwire.runs.models.folder import (
    finish_adapters,
    finish_model,
    remove_adapters,
    save_adapters,
    save_stage,
)
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.models.split import build_stage
from thinwire.types import InputError, MissingExtra

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RANK = 2
KINDS = ["llama", "gpt2"]


class NoTokenizer:
    """What is saved beside a model here: nothing."""

    name_or_path = ""  # as of a tokenizer that was made in memory

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


# Whole runs


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    text = write_text(tmp_path_factory.mktemp("data") / "text.txt", lines=1200)
    return [
        *("train", "--model", "gpt2-lab", "--data", text, "--batch", 4, "--microbatches", 2, "--seq", 32),
        *("--eval-samples", 4, "--threads", 1, "--dtype", "fp32", "--no-tensorboard", "--quiet"),
        *("--lora", 4, "--dropout", 0.1, "--lr", 1e-2),
    ]


def go(place, *args, **options):
    ranks = warm().ranks(place, *args, **options)
    assert [r.wait() for r in ranks] == [0, 0], ranks[0].err + ranks[1].err


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    place = tmp_path_factory.mktemp("whole")
    go(place, *job, "--steps", 8, "--checkpoint-every", 4, "--out", place / "out")
    return place / "out"


def test_a_run_learns_by_its_adapters_and_says_what_they_stand_on(whole):
    found = record(whole)
    assert found["config"]["lora"] == 4 and found["loss"]["eval_final"] < found["loss"]["eval_first"]
    assert any("random weights" in note for note in found["notes"])
    assert {"adapter_config.json", "adapter_model.safetensors"} == {
        f.name for f in (whole / "adapter").iterdir()
    }


def test_the_saved_model_is_the_evaluated_one(whole):
    from thinwire.uses.training.run.options import TrainConfig
    from thinwire.uses.training.run.training_job import prepare

    saved = record(whole)
    blocks = prepare(TrainConfig.from_dict(saved["config"])).eval_blocks()[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(whole / "model").eval()
    loss = next_token_loss(whole_logits(model, blocks[:, :-1]), blocks[:, 1:]).item()
    assert loss == pytest.approx(saved["loss"]["eval_final"], rel=1e-4)


def test_checkpoints_hold_adapters_alone(whole):
    names = []
    for rank in range(2):
        file = whole / "checkpoints" / "step-00000008" / f"rank-{rank}.safetensors"
        with safe_open(file, framework="pt") as f:
            names += [n for n in f.keys() if n.startswith("stage0.")]  # noqa: SIM118  # no mapping
    assert len(names) == 2 * 4 * 4 and all(".lora_" in n for n in names)


def test_a_resumed_run_is_the_undisturbed_one(job, whole, tmp_path):
    """Masks included: they depend on the sample, not on how long the process has run. No folder is shared."""
    own = {"each": lambda rank: ("--out", tmp_path / f"out-{rank}")}
    go(tmp_path, *job, "--steps", 4, "--checkpoint-every", 4, "--no-save-model", **own)
    assert (tmp_path / "out-0" / "adapter" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "out-0" / "model").exists()  # and nothing frozen crossed the link
    go(tmp_path, *job, "--steps", 8, "--checkpoint-every", 4, "--resume", **own)
    out = tmp_path / "out-0"
    assert record(out)["loss"]["train"] == record(whole)["loss"]["train"]
    again = load_file(out / "adapter" / "adapter_model.safetensors")
    for name, tensor in load_file(whole / "adapter" / "adapter_model.safetensors").items():
        assert torch.equal(again[name], tensor)


@pytest.mark.parametrize(("changed", "words"), [(("--lora", 2), "lora 4"), (("--lora", 0), "lora 4")])
def test_another_rank_is_not_resumed(job, whole, tmp_path, changed, words):
    place = tmp_path / "out"
    shutil.copytree(whole, place)
    ranks = warm().ranks(tmp_path, *job, *changed, "--steps", 8, "--resume", "--out", place)
    assert [r.wait() for r in ranks] == [2, 2]
    assert words in ranks[0].err and "--resume" in ranks[0].err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lora", "-1"], "--lora is -1"),
        (["--lora", "257"], "--lora 257 is more than the 256"),
        (["--lora", "0.5"], "--lora"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(job, tmp_path, options, words):
    command = warm().run(tmp_path, *job, *options, "--out", tmp_path / "out")
    assert command.code == 2
    assert words in sentence(command)
