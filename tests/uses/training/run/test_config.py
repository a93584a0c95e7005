"""The configuration: one list of options, refusals in one sentence, round trips."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from each import each

from thinwire.runs.ranks.launcher import launcher_of
from thinwire.types import InputError
from thinwire.uses.training.run.learning_rates import SAFE_RATES
from thinwire.uses.training.run.options import DEFAULT_STEPS, TrainConfig


def test_round_trip_through_json():
    config = TrainConfig(recipe="direct:bits=4", epochs=3, steps=60, lr=1e-4, cut="3,1", link="10mbit,30ms")
    assert TrainConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json()) == config.to_dict()


def test_every_default_is_valid_and_plain_json():
    values = TrainConfig().to_dict()
    assert json.loads(json.dumps(values)) == values
    assert set(values) == {f.name for f in dataclasses.fields(TrainConfig)}


def test_every_option_has_help_and_panel():
    for f in dataclasses.fields(TrainConfig):
        assert f.metadata["help"].endswith("."), f.name
        assert f.metadata["panel"], f.name


IMAGES = {"model": "cnn-fashion", "data": "fashion-mnist"}
WRONG = [
    ({"stages": 1}, "--stages 1 "),
    ({"stages": 5, "microbatches": 8}, "--stages is 5"),
    ({"batch": 6}, "--batch 6 does not split into 4"),
    ({"schedule": "zigzag"}, "--schedule 'zigzag'"),
    ({"schedule": "1f1"}, "did you mean 1f1b"),
    ({"microbatches": 2, "stages": 3}, "--microbatches from 2 to 3"),
    ({"schedule": "interleaved1f1b"}, "--stages 4 instead of 2"),
    ({"schedule": "interleaved1f1b", "stages": 4, "microbatches": 5, "batch": 5}, "multiple of 2"),
    ({"cut": "19,x"}, "--cut '19,x'"),
    ({"cut": "10,10,10"}, "--cut 10,10,10 names 3 stages"),
    ({"cut": "0,30"}, "--cut '0,30'"),
    ({"steps": 20, "epochs": 3}, "take --steps 18"),
    ({"steps": 0}, "--steps is 0"),
    ({"epochs": -1}, "--epochs is -1"),
    ({"seq": 1}, "--seq is 1"),
    ({"lr": 0.0}, "--lr is 0.0"),
    ({"lr": float("nan")}, "--lr is nan"),
    ({"lr_schedule": "cosin"}, "did you mean cosine"),
    ({"warmup": 500}, "--warmup is 500"),
    ({"grad_clip": -1.0}, "--grad-clip is -1.0"),
    ({"dropout": 1.0}, "--dropout is 1.0"),
    ({"dtype": "fp64"}, "--dtype 'fp64'"),
    ({"device": "gpu"}, "--device 'gpu' is unknown; it can be auto, cpu, cuda"),
    ({"init": "zeros"}, "--init 'zeros'"),
    ({"deadline": 0}, "--deadline is 0.0"),
    ({"steps": 10**20}, "--steps is 100000000000000000000; it must be at most 1000000000"),
    ({"epochs": 10**20}, "--epochs is"),
    ({"checkpoint_every": 10**10}, "--checkpoint-every is"),
    ({"microbatches": 2**16, "batch": 2**16}, "--microbatches is 65536; it must be at most 65535"),
    ({"threads": 100_000}, "--threads is 100000; it must be at most 1024"),
    ({"deadline": 1e300}, "--deadline is 1e+300; it must be at most 1000000"),
    ({"model": " "}, "--model is empty"),
    ({"batch": "8"}, "--batch takes a whole number, not '8'"),
    ({"batch": True}, "--batch takes a whole number, not True"),
    ({"resume": 1}, "--resume takes true or false"),
    ({"link": "10parsec"}, "10parsec"),
    ({"link": "trace:lte"}, "link 'trace:lte' is one of an emulated network; add --emulate"),
    ({"link": "10mbit,queue=100kB"}, "; add --emulate"),
    ({"link": "10mbit", "emulate": True, "host": "192.0.2.7"}, "leave --host out, or --emulate"),
    ({"link": "10mbit", "emulate": True, "advertise": "192.0.2.7"}, "leave --advertise out, or --emulate"),
    ({"link": "10mbit", "emulate": True, "relay": "192.0.2.7:1"}, "leave --relay out, or --emulate"),
    ({"recipe": "teleport"}, "teleport"),
    ({"seed": 10**12 + 1}, "--seed is 1000000000001; it must be at most 1000000000000"),
    ({"host": "192.0.2.7"}, "192.0.2.7"),
    ({"token_file": "nowhere.token"}, "nowhere.token"),
    ({"optimizer": "sdg"}, "--optimizer 'sdg' is unknown; it can be adamw, sgd, or sgd:momentum=M"),
    ({"optimizer": "adamw:momentum=0.9"}, "--optimizer 'adamw:momentum=0.9' is unknown"),
    ({"optimizer": "sgd:momentum=1"}, "with M from 0 to below 1"),
    ({"optimizer": "sgd:momentum=nan"}, "with M from 0 to below 1"),
    ({"optimizer": "sgd:nesterov=1"}, "--optimizer 'sgd:nesterov=1' is unknown"),
    ({"optimizer": ""}, "--optimizer is empty"),
    ({"model": "cnn-fashion"}, "--model cnn-fashion cannot learn --data shakespeare; "),
    ({"data": "fashion-mnist"}, "--model smollm2-135m cannot learn --data fashion-mnist; "),
    (IMAGES | {"stages": 2}, "--stages is 2, but --model cnn-fashion is never cut; take --stages 1"),
    (IMAGES | {"stages": 1, "lora": 4}, "--lora 4 is for language models, not for cnn-fashion"),
    (IMAGES | {"stages": 1, "text_field": "body"}, "--text-field body is for language models"),
]


@pytest.mark.parametrize(("values", "words"), WRONG, ids=lambda v: str(v))
def test_wrong_values_are_refused_in_one_sentence(values, words, monkeypatch):
    monkeypatch.delenv("THINWIRE_TOKEN", raising=False)
    with pytest.raises(InputError) as e:
        TrainConfig(**values)
    assert words in str(e.value)
    assert "\n" not in str(e.value)
    assert e.value.exit_code == 2


def test_a_deadline_too_short_for_others_is_not_the_launcher_s_own():
    with launcher_of(TrainConfig(deadline=1e-3)) as place:
        place.require_alive()


def test_replace_validates():
    with pytest.raises(InputError, match="--batch 7"):
        TrainConfig().replace(batch=7)


def test_unknown_keys_name_the_nearest():
    with pytest.raises(InputError, match="'recipee'; did you mean recipe"):
        TrainConfig.from_dict({"recipee": "fp32"})
    with pytest.raises(InputError, match="the options are advertise, auto_resume, batch, "):
        TrainConfig.from_dict({"xyzzy": 1})


@each("text", ["{", "[1]", "3"])
def test_json_that_is_no_configuration(text):
    with pytest.raises(InputError, match="the configuration is"):
        TrainConfig.from_json(text)


def test_toml_takes_dashes_and_whole_numbers_for_floats(tmp_path: Path):
    file = tmp_path / "job.toml"
    file.write_text('recipe = "fp32"\ngrad-clip = 1\nlr_schedule = "linear"\n')
    config = TrainConfig.from_dict(TrainConfig.read_toml(file))
    assert (config.recipe, config.grad_clip, config.lr_schedule) == ("fp32", 1.0, "linear")
    assert isinstance(config.grad_clip, float)


@pytest.mark.parametrize(
    ("text", "words"),
    [("recipe = ", "not valid TOML"), ("bacth = 8", "did you mean batch"), (b"\xff\xfe", "not valid TOML")],
)
def test_broken_toml(tmp_path: Path, text: str | bytes, words: str):
    file = tmp_path / "job.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=words) as e:
        TrainConfig.read_toml(file)
    assert "job.toml" in str(e.value)


def test_missing_toml():
    with pytest.raises(InputError, match=r"cannot read --config nowhere\.toml"):
        TrainConfig.read_toml("nowhere.toml")


def test_what_follows_from_the_options():
    assert TrainConfig().planned_steps == DEFAULT_STEPS
    assert TrainConfig(epochs=2).planned_steps is None
    assert TrainConfig().learning_rate == 2e-5
    assert TrainConfig(model="gpt2-lab").learning_rate == 1e-3
    assert TrainConfig(model="gpt2", init="random").learning_rate == 1e-3
    assert TrainConfig(lr=3e-4).learning_rate == 3e-4
    assert TrainConfig(optimizer="sgd:momentum=0.9").learning_rate == 0.05
    assert TrainConfig(optimizer="sgd", lr=0.1).learning_rate == 0.1
    assert TrainConfig(stages=3).ranks == 3
    assert TrainConfig(stages=4, schedule="interleaved1f1b").ranks == 2


def test_warnings():
    assert TrainConfig().warnings() == []
    assert "random weights" in TrainConfig(model="gpt2-lab", lora=4).warnings()[0]
    assert TrainConfig(lora=4).warnings() == [] and TrainConfig(lora=4).learning_rate == 2e-4


def test_how_documents_begin_is_alike_on_all_ranks_and_after_a_resume():
    assert TrainConfig().bos and "bos" in TrainConfig.names(alike=True)
    assert "bos" not in TrainConfig.names(free=True)


def test_a_rate_that_a_delay_does_not_bear_is_warned_of() -> None:
    """By the table that was measured."""
    found = json.loads((Path(__file__).parents[4] / "bench/results/delays.json").read_text("utf-8"))
    for row in found["rows"]:
        assert SAFE_RATES[row["model"], row["optimizer"]][row["staleness"]] == row["safe"]
    late = {"model": "cnn-fashion", "data": "fashion-mnist", "optimizer": "sgd", "stages": 1, "replicas": 2}
    late["replica_recipe"] = "dd-ef-sgd:ratio=0.01,staleness=3"
    (note,) = TrainConfig(**late, lr=0.4).warnings()
    assert note.startswith(
        "--lr 0.4 is above 0.2, the largest that was safe here with gradients 3 steps late"
    )
    assert TrainConfig(**late, lr=0.2).warnings() == []
