"""Every family of models in stages: what it learns, what its files hold, and which are refused."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from texts import write_text
from tiny_models import CONFIGS, IDS, even, make_config, make_source, run, save_unsplit, transformers

from thinwire.files.checkpoint import INDEX, SINGLE, read_checkpoint
from thinwire.runs.data.task import next_token_loss
from thinwire.runs.models import model_source as sources
from thinwire.runs.models.folder import finish_model, save_stage
from thinwire.runs.models.lora import add_adapters, merged
from thinwire.runs.models.model_source import model_config, resolve_model
from thinwire.runs.models.split import build_stage
from thinwire.runs.models.trial import check_split
from thinwire.types import InputError
from thinwire.uses.following.run import state_demo
from thinwire.uses.following.run.options import StateConfig
from thinwire.uses.training.run import training_launch
from thinwire.uses.training.run import training_rank as rank
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.training_job import prepare

pytestmark = pytest.mark.usefixtures("own_cache")

TARGETS = IDS.roll(-1, 1)
EXPERTS = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]


def learn(modules, forward, steps=3):
    """Return the first gradients and the last weights of a plain loop, by module."""
    optimiser = torch.optim.SGD([p for m in modules for p in m.parameters()], 0.05)
    grads = None
    for _ in range(steps):
        next_token_loss(forward(), TARGETS).backward()
        grads = grads or [{n: p.grad.clone() for n, p in m.named_parameters()} for m in modules]
        optimiser.step()
        optimiser.zero_grad()
    return grads, [dict(m.named_parameters()) for m in modules]


def numel(module):
    return sum(p.numel() for p in module.parameters())


def through(stages):
    x = IDS
    for stage in stages:
        x = stage(x)
    return x


@pytest.mark.parametrize("kind", CONFIGS)
def test_stages_learn_what_the_whole_learns(kind, tmp_path):
    config = make_config(kind)
    whole = save_unsplit(config, tmp_path).train()
    source = make_source(config, tmp_path)
    stages = [build_stage(source, even(4, 3), k) for k in range(3)]
    assert sum(p.numel() for s in stages for p in s.parameters()) == sum(
        p.numel() for p in whole.parameters()
    )
    for found, (expected,) in zip(
        learn(stages, lambda: through(stages)),
        learn([whole], lambda: whole(input_ids=IDS, use_cache=False).logits),
        strict=True,
    ):
        for stage, own in zip(stages, found, strict=True):
            for name, value in own.items():
                torch.testing.assert_close(value, expected[stage.original_name(name)], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_family_s_own_sizes_pass_the_trial(kind):
    config = getattr(transformers, CONFIGS[kind][0])()
    config.attention_dropout = 0.0
    for rate in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"):
        if hasattr(config, rate):
            setattr(config, rate, 0.0)
    before = torch.get_rng_state()
    check_split(config)
    assert torch.equal(before, torch.get_rng_state())


def mixed_up(config, layers):
    part = copy.deepcopy(config)
    part.num_hidden_layers = len(layers)
    return part


@pytest.mark.parametrize(
    ("kind", "change", "to"),
    [
        ("granite", "ModelStage._enter", lambda _self, _module, args, options: (args, options)),
        ("gemma3_text", "_part", mixed_up),
    ],
)
def test_stages_that_come_out_wrong_are_refused(kind, change, to, monkeypatch):
    """As they would if each stage did again what the first does to the embedding, or mixed its layers up."""
    monkeypatch.setattr(f"thinwire.runs.models.stage.{change}", to)
    with pytest.raises(InputError, match=f"'{kind}' cannot be split: its stages in a row do not give"):
        check_split(make_config(kind))


def test_a_model_whose_layers_share_more_than_a_hidden_state_is_refused(tmp_path, tiny_tokenizer):
    config = transformers.Gemma3nTextConfig()
    config.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"'gemma3n_text' cannot be split: .*; use another model") as e:
        model_config(str(tmp_path), "random")
    assert "\n" not in str(e.value)


# What is in the files


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_saved_as_the_model_s_own_files_have_them(kind, tmp_path, tiny_tokenizer):
    config = make_config(kind)
    model = save_unsplit(config, tmp_path / "own")
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape))
    model.save_pretrained(tmp_path / "own")
    source = make_source(config, tmp_path / "own", tiny_tokenizer)
    for k in range(2):
        save_stage(build_stage(source, even(4, 2), k), tmp_path / "saved", k, 2)
    finish_model(tmp_path / "saved", source, 2)
    own, saved = read_checkpoint(tmp_path / "own"), read_checkpoint(tmp_path / "saved")
    assert own.keys() == saved.keys() and all(torch.equal(own[name], saved[name]) for name in own)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    def make(kind="llama", change=lambda held: held):
        save_unsplit(make_config(kind), tmp_path / kind)
        tiny_tokenizer.save_pretrained(tmp_path / kind)
        held = load_file(tmp_path / kind / SINGLE)
        save_file(change(held), tmp_path / kind / SINGLE, {"format": "pt"})
        return tmp_path / kind

    return make


def test_tensors_without_a_place_are_named(folder):
    biases = {f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(32) for i in range(4)}
    silent = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # from_pretrained is, too
    (note,) = resolve_model(str(folder(change=lambda held: held | biases | silent)), None, None).notes
    assert "no place for 4 of the tensors" in note and all(name in note for name in biases)
    assert resolve_model(str(folder("gpt2")), None, None).notes == ()


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda held: held | {Q: held[Q].to(torch.float8_e4m3fn)}, f"'{Q}' .* is F8_E4M3: scaled or packed"),
        (lambda held: held | {Q: held[Q].to(torch.uint8)}, f"'{Q}' .* is U8: scaled or packed"),
        (lambda held: held | {Q + "_scale_inv": torch.ones(1)}, f"'{Q}_scale_inv' .* no place .*: scaled"),
        (lambda held: held | {Q.replace("weight", "qzeros"): torch.ones(1)}, "qzeros' .*: scaled or packed"),
        (lambda held: {name: t for name, t in held.items() if name != Q}, f"lack tensor '{Q}'"),
        (
            lambda held: {f"module.{n}": t for n, t in held.items()},
            r"all names .*'module\.'.*save its \.module",
        ),
    ],
)
def test_weights_that_cannot_be_trained_as_they_are_are_refused(folder, change, words):
    with pytest.raises(InputError, match=words):
        resolve_model(str(folder(change=change)), None, None)


def test_a_single_file_counts_beside_an_older_index(folder):
    made = folder()
    held = load_file(made / SINGLE)
    save_file({name: torch.zeros_like(t) for name, t in held.items()}, made / "old.safetensors")
    (made / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(held, "old.safetensors")}))
    model = transformers.AutoModelForCausalLM.from_pretrained(made).eval()
    stage = build_stage(resolve_model(str(made), None, None), even(4, 1), 0).eval()
    with torch.no_grad():
        torch.testing.assert_close(run([stage], IDS), model(IDS).logits, rtol=0, atol=1e-6)
    assert torch.equal(read_checkpoint(made)[Q], held[Q])  # what publish takes


def test_a_token_without_an_embedding_is_refused_before_anything_starts(folder, tmp_path):
    made, text = folder(), write_text(tmp_path / "text.txt")
    vocabulary = json.loads((made / "config.json").read_text())["vocab_size"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    tokenizer.add_tokens([f"<new {i}>" for i in range(vocabulary - len(tokenizer) + 1)])
    tokenizer.save_pretrained(made)
    config = TrainConfig(
        model=str(made), data=str(text), seq=16, batch=4, eval_samples=0, out=str(tmp_path / "out")
    )
    assert prepare(config).source.config.vocab_size == vocabulary  # a token that no text has does not matter
    last = tokenizer.convert_ids_to_tokens(vocabulary)
    (other := tmp_path / "other.txt").write_text(f"a {last} word\n" + text.read_text())
    with pytest.raises(
        InputError, match=f"token '{last}', number {vocabulary} of .* vocabulary of .* has {vocabulary};"
    ):
        prepare(config.replace(data=str(other)))


def test_whether_a_model_can_be_split_is_tried_once_a_run(folder, tmp_path, monkeypatch):
    class Reached(Exception):
        """What would start, or join, the ranks."""

    def reached(*_):
        raise Reached

    tried = []
    monkeypatch.setattr(sources, "check_split", tried.append)
    for module, name in ((training_launch, "_check_resume"), (rank, "joined"), (state_demo, "_place")):
        monkeypatch.setattr(module, name, reached)
    made, text = folder(), write_text(tmp_path / "text.txt")
    own = {"model": str(made), "data": str(text), "out": str(tmp_path / "out")}
    config = TrainConfig(**own, seq=16, batch=4, eval_samples=0)

    def times(begin):
        tried.clear()
        with pytest.raises(Reached):
            begin()
        return len(tried)

    assert times(lambda: training_launch.launch(config)) == 1
    assert times(lambda: rank.run_rank(config)) == 0  # as the launcher starts it
    assert times(lambda: state_demo.run(StateConfig(**own), print)) == 0  # which splits nothing
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert times(lambda: training_launch.launch(config)) == 1  # where nobody did before


# What else depends on a family


@pytest.mark.parametrize("kind", ["gpt_neox", "phi3", "bloom", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_adapters_are_on_every_linear_layer_but_of_experts(kind):
    pytest.importorskip("peft")
    for k in range(4):  # of which some have no experts
        stage = build_stage(make_source(make_config(kind), None), even(4, 4), k)
        layers = stage.family.layers_of(stage.model)
        linears = [n for n, m in layers.named_modules() if isinstance(m, torch.nn.Linear)]
        before = merged(stage)
        add_adapters(stage, 2, seed=0)
        adapted = [n for n, m in layers.named_modules() if hasattr(m, "lora_A")]
        assert adapted == [n for n in linears if kind not in EXPERTS or "attn" in n] != []
        assert before.keys() == merged(stage).keys()


def test_dropout_that_has_no_masks_by_sample_is_refused(folder):
    with pytest.raises(InputError, match="'bloom' drop where no masks"):
        resolve_model(str(folder("bloom")), None, None, dropout=0.1)
    assert resolve_model(str(folder("gpt_neox")), None, None, dropout=0.1).dropout == 0.1
