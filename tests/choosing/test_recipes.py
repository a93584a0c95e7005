"""Every recipe over the wire: both ends agree, bytes are what its description says, errors are ordered."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Scheme, Sender
from thinwire.channels.memory import Delta, NoMemory
from thinwire.codecs import Uniform
from thinwire.types import InputError, MissingExtra, TensorSpec
from thinwire.uses.training.pipeline import recipes
from thinwire.uses.training.pipeline.recipes import PIPELINE, Recipe, parse_recipe

SAMPLES, ROWS, LENGTH, CHANNELS, EPOCHS = 4, 2, 64, 192, 3
CHANNEL = 16 / (ROWS * LENGTH)  # bits a value for one 16-bit scale a channel

# What a value costs at the first and at the last step: (forward first, last), (backward first, last).
BITS = {
    "fp32": ((32, 32), (32, 32)),
    "bf16": ((16, 16), (16, 16)),
    "direct": ((8.5, 8.5), (8.5, 8.5)),
    "direct:bits=4": ((4.5, 4.5), (4.5, 4.5)),
    "direct:bits=8,fw=2,group=16": ((3, 3), (9, 9)),
    "direct:bw=2,rounding=stochastic": ((8.5, 8.5), (2.5, 2.5)),
    "step-delta": ((32, 8), (32, 8)),
    "step-delta:bits=4,scale=group": ((32, 4.5), (32, 4.5)),
    "aqsgd": ((32, 4 + CHANNEL), (8 + CHANNEL, 8 + CHANNEL)),
    "aqsgd:fw=2,bw=6,rounding=nearest": ((32, 2 + CHANNEL), (6 + CHANNEL, 6 + CHANNEL)),
    "aqsgd-code": ((32, 4 + CHANNEL), (32, 8 + CHANNEL)),
    "aqsgd-code:fw=3,bw=4": ((32, 3 + CHANNEL), (32, 4 + CHANNEL)),
    "tahquant": ((4.41, 4.41), (6 + CHANNEL, 6 + CHANNEL)),
    "tahquant:bw=8,scale=group": ((4.41, 4.41), (8.5, 8.5)),
    # 4.25 with one-byte scales, the means' 16 bits a channel, and 1 position of 64 at 8.5 bits.
    # Later activations cost what little a walk of 0.05 changed; as deltas, gradients without anything in
    # common cost half a bit more than direct ones, as their difference has twice the energy.
    "thinwire": ((3.0 * 63 / 64 + CHANNEL + 8.5 / 64, 0.42), (2.5, 2.5)),
    "thinwire:dither=0,bw=3.4": ((3.0 * 63 / 64 + CHANNEL + 8.5 / 64, 0.42), (3.4, 3.4)),
    "thinwire:gdelta=1,dither=0": ((3.0 * 63 / 64 + CHANNEL + 8.5 / 64, 0.42), (2.4, 2.9)),
    "thinwire:gdelta=1,bw=1.4": ((3.0 * 63 / 64 + CHANNEL + 8.5 / 64, 0.42), (1.7, 2.2)),
    "thinwire:memory=none": ((3.0 * 63 / 64 + CHANNEL + 8.5 / 64,) * 2, (2.5, 2.5)),
    "thinwire-groups:entropy=0": ((4.25 * 63 / 64 + CHANNEL + 8.5 / 64, 2.25), (3.25, 3.25)),
    "thinwire-groups:entropy=0,sink=0,mean=0,scales=bfloat16,gdelta=1,bw=4": ((4.5, 2.5), (4.5, 4.5)),
    "thinwire-groups:entropy=0,first=8,fw=4,bw=2,group=64,refs=float32": ((8.25, 4.125), (2.125, 2.125)),
    # Its floor; what the policy makes of it is in test_policies.py.
    "auto": ((1.9 * 63 / 64 + CHANNEL + 8.5 / 64, 0.22), (2.1, 2.1)),
    "auto:memory=none": ((1.9 * 63 / 64 + CHANNEL + 8.5 / 64,) * 2, (2.1, 2.1)),
}


@dataclass
class Trip:
    """What one direction of a run cost and lost, by step."""

    bits: list[float]
    errors: list[float]


def activations(seed=0, drift=0.05, outliers=True):
    """Yield (tensor, sample ids) for some epochs of a random walk by sample, shuffled anew in each."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, LENGTH, CHANNELS, generator=g)
    if outliers:  # constant outlier channels and an attention sink, as in language models
        x[..., [7, 100]] += 20
        x[:, 0, 33] += 500
    for _ in range(EPOCHS):
        ids = torch.randperm(SAMPLES, generator=g)
        for rows in ids.split(ROWS):
            yield x[rows].clone(), rows.tolist()
        x += drift * torch.randn(x.shape, generator=g)


def gradients(seed=1):
    """The same for gradients: small, and new each time."""
    g = torch.Generator().manual_seed(seed)
    for _, ids in activations():
        yield 1e-6 * torch.randn(ROWS, LENGTH, CHANNELS, generator=g), ids


def trip(scheme, frames):
    sender, receiver, out = Sender(scheme), Receiver(), Trip([], [])
    for x, ids in frames:
        packet, x_hat = sender.encode(x, ids)
        data = wire.pack(packet)
        assert torch.equal(receiver.decode(wire.unpack(data), expect=TensorSpec.of(x)), x_hat)
        out.bits.append(8 * len(data) / x.numel())
        out.errors.append(((x_hat - x).norm() / x.norm()).item())
    return out


def both(text):
    recipe = parse_recipe(text)
    return trip(recipe.schemes["forward"], activations()), trip(recipe.schemes["backward"], gradients())


def close(found, expected):
    """Within the framing of a packet, 0.15 bits a value at this size, and 1 %."""
    return expected * 0.99 <= found <= expected * 1.01 + 0.15


def test_every_recipe_has_its_bits_stated():
    assert {text.partition(":")[0] for text in BITS} == set(PIPELINE.entries)


@pytest.mark.parametrize("text", BITS)
def test_a_recipe_costs_what_it_says_and_both_ends_agree(text):
    for (first, last), way in zip(BITS[text], both(text), strict=True):
        assert close(way.bits[0], first), (way.bits, first)
        assert close(way.bits[-1], last), (way.bits, last)
        assert max(way.errors) < 1


def test_entropy_coding_saves_bytes_and_changes_no_value():
    for plain, coded in zip(both("thinwire-groups:entropy=0"), both("thinwire-groups"), strict=True):
        assert coded.errors == plain.errors
        assert sum(coded.bits) < 0.97 * sum(plain.bits)


def test_lossless_recipes_lose_nothing_and_bf16_next_to_nothing():
    for way in both("fp32"):
        assert max(way.errors) == 0
    for way in both("bf16"):
        assert 0 < max(way.errors) < 0.004


def last(text):
    return both(text)[0].errors[-1]


def test_a_delta_by_sample_beats_a_direct_code_of_as_many_bits():
    assert last("aqsgd:fw=4") < 0.5 * last("direct:bits=4")
    assert last("aqsgd-code:fw=4") < 0.5 * last("direct:bits=4")
    assert last("thinwire-groups:fw=2,entropy=0") < 0.5 * last("direct:bits=4")


def test_coded_first_visits_are_mended_by_later_ones():
    errors = both("thinwire-groups:entropy=0,fw=4")[0].errors
    assert errors[-1] < 0.5 * errors[0]


def test_ours_errs_alike_at_each_visit_and_spends_only_on_what_changed():
    for way in both("thinwire"):
        assert max(way.errors) < 1.3 * min(way.errors)
    forward = both("thinwire")[0]
    assert forward.bits[-1] < 0.25 * forward.bits[0]
    groups = both("thinwire-groups")[0]
    assert sum(forward.bits) < 0.8 * sum(groups.bits)


@pytest.mark.parametrize("name", ["thinwire", "auto"])
def test_without_memory_every_visit_is_a_first_one(name):
    recipe = parse_recipe(f"{name}:memory=none")
    assert [s.memory for s in recipe.schemes.values()] == [NoMemory(), NoMemory()]
    for way in both(f"{name}:memory=none"):
        assert max(way.bits) < 1.02 * min(way.bits)
    sender = Sender(recipe.schemes["forward"])
    sender.encode(torch.randn(2, 8, 64), [0, 1])
    assert not any(k for k in sender.state_dict() if k != "versions")  # nothing is kept


def test_means_and_the_sink_apart_make_first_visits_better():
    def first(text):
        return both(text)[0].errors[0]

    assert first("thinwire-groups:entropy=0") < 0.8 * first("thinwire-groups:entropy=0,sink=0,mean=0")


def test_turned_tiles_beat_direct_codes_where_there_are_outliers():
    assert last("tahquant") < 0.8 * last("direct:bits=4,group=64")


def test_the_step_before_is_a_worse_reference_than_none_where_samples_differ():
    """Theory: the difference of two unrelated tensors has twice the variance, so sqrt(2) times the error."""

    def at_the_end(scheme):
        return trip(scheme, activations(outliers=False)).errors[-1]

    code = Uniform(bits=4)
    ratio = at_the_end(Scheme(code, Delta("step"))) / at_the_end(Scheme(code))
    assert ratio == pytest.approx(math.sqrt(2), rel=0.1)


def choices(info):
    """Texts that set each parameter to the ends of its range, or to each of its words."""
    for k, p in info.parameters.items():
        for value in p.choices or (p.low, p.high):
            rest = ",high=8" if (info.name, k) == ("tahquant", "low") else ""
            rest = ",low=1" if (info.name, k) == ("tahquant", "high") else rest
            yield (
                f"{info.name}:{k}={value:g}{rest}"
                if not isinstance(value, str)
                else f"{info.name}:{k}={value}"
            )


@pytest.mark.parametrize("name", PIPELINE.entries)
def test_specs_read_back_for_any_parameters(name):
    for text in [name, *choices(PIPELINE.entries[name])]:
        recipe = parse_recipe(text)
        again = parse_recipe(recipe.spec)
        assert again.schemes == recipe.schemes
        assert parse_recipe(recipe.name) == recipe
        sender = Sender(recipe.schemes["forward"])
        x = torch.randn(2, 8, 64)
        for _ in range(2):
            packet, x_hat = sender.encode(x, [0, 1])
            assert x_hat.isfinite().all() and packet.nbytes


def test_recipes_are_functions_too():
    assert (
        recipes.aqsgd(fw=3)
        == recipes.aqsgd(3)
        == parse_recipe("aqsgd:fw=3")
        == parse_recipe(" aqsgd: fw = 3 ")
    )
    assert recipes.aqsgd(fw=3).name == "aqsgd:fw=3"
    assert recipes.aqsgd(fw=4).name == parse_recipe("aqsgd:fw=4,bw=8").name == "aqsgd"
    assert isinstance(recipes.fp32(), Recipe)
    for text in ("thinwire:", "aqsgd: "):
        with pytest.raises(InputError, match="has no parameters behind its colon"):
            parse_recipe(text)
    with pytest.raises(InputError, match=r"fw=9 is not a whole number in 1\.\.8"):
        recipes.aqsgd(fw=9)
    with pytest.raises(InputError, match=r"fw=2\.5 is not a whole number"):
        recipes.aqsgd(fw=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("aqsdg", "there is no recipe 'aqsdg'; did you mean aqsgd?"),
        ("AQSGD:fw=4", "there is no recipe 'AQSGD'; choose one of fp32, bf16, direct"),
        ("", "there is no recipe ''; choose one of fp32"),
        ("direct:bit=4", "recipe direct has no parameter 'bit'; it takes bits, fw, bw"),
        ("fp32:bits=4", "recipe fp32 has no parameter 'bits'; it takes none"),
        ("direct:bits=four", "direct: bits=four is not a whole number in 1..8; bits is"),
        ("direct:bits=4.5", "bits=4.5 is not a whole number in 1..8"),
        ("direct:bits=0", "bits=0 is not a whole number in 1..8"),
        ("direct:bits=", "bits= is not a whole number in 1..8"),
        ("direct:4", "'4' is no parameter=value; write direct:k=v"),
        ("direct:bits=4,bits=5", "bits is given twice"),
        ("direct:rounding=up", "rounding=up is not nearest or stochastic"),
        ("thinwire-groups:entropy=yes", "entropy=yes is not a whole number in 0..1"),
        ("thinwire-groups:fclip=0", "fclip=0.0 is not a number in 0.05..1"),
        ("tahquant:share=nan", "share=nan is not a number in 0..1"),
        ("tahquant:tile=48", "tile=48 is not a power of two"),
        ("tahquant:low=5", "low=5 and high=4"),
        ("forward=Scheme(", "not a recipe's spec"),
        ("forward=Scheme(), backward=Raw()", "not a recipe's spec"),
        ("forward=Scheme(), backward=Scheme(Uniform(bits=99))", "bits=99 is not in 1..8"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(text, message):
    with pytest.raises(InputError) as e:
        parse_recipe(text)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


def test_ours_without_the_entropy_coder_says_so_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)  # as if not installed
    with pytest.raises(
        MissingExtra, match=r"pip install 'thinwire\[entropy\]', or take thinwire-groups:entropy=0"
    ):
        parse_recipe("thinwire")
    with pytest.raises(MissingExtra, match="recipe thinwire-groups needs zstandard"):
        parse_recipe("thinwire-groups")
    assert parse_recipe("thinwire-groups:entropy=0").name == "thinwire-groups:entropy=0"


def test_the_docs_have_every_recipe_and_parameter():
    text = (Path(__file__).parents[2] / "docs" / "inside-recipes.md").read_text()
    sections = {part.partition("\n")[0].strip("` "): part for part in text.split("\n## ")[1:]}
    assert set(PIPELINE.entries) <= set(sections)
    for name, info in PIPELINE.entries.items():
        for k, p in info.parameters.items():
            default = "as `bits`" if p.default is None else f"`{p.default}`"
            assert f"| `{k}` | {default} |" in sections[name], (name, k)
