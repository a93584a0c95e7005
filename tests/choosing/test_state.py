"""The state engine's recipes: what a publisher is given, and that it does what they say."""

from pathlib import Path

import pytest
import torch

from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.replica import Replica
from thinwire.types import InputError
from thinwire.uses.following.recipes import STATE, Values, bounded, cast, exact


@pytest.mark.parametrize(
    ("text", "spec", "options"),
    [
        ("exact", "values=Values()", {"dtype": None, "bounds": None}),
        ("cast", "values=Values(dtype='bf16')", {"dtype": torch.bfloat16, "bounds": None}),
        ("cast:dtype=fp16", "values=Values(dtype='fp16')", {"dtype": torch.float16, "bounds": None}),
        ("bounded:error=0.001", "values=Values(bound=0.001)", {"dtype": None, "bounds": 1e-3}),
        (
            "bounded:error=2.0,dtype=fp32",
            "values=Values(dtype='fp32', bound=2.0)",
            {"dtype": torch.float32, "bounds": 2.0},
        ),
    ],
)
def test_a_recipe_says_what_a_publisher_takes(text, spec, options):
    recipe = STATE.parse(text)
    assert (recipe.name, recipe.spec, recipe.policy) == (text, spec, None)
    assert recipe.schemes["values"].options == options
    assert STATE.parse(spec).schemes == recipe.schemes


def test_recipes_are_functions_too():
    assert exact() == STATE.parse("exact") and cast() == STATE.parse("cast:dtype=bf16")
    assert bounded(1e-3) == STATE.parse("bounded: error=1e-3")
    assert bounded(1e-3, dtype=None) == bounded(1e-3)


@pytest.mark.parametrize(
    ("text", "most"), [("exact", 0.0), ("cast", 2.0**-7), ("bounded:error=0.01", 0.01001)]
)
def test_values_are_off_by_what_a_recipe_says(text, most):
    x = torch.rand(1000)
    history = History(Layout.of({"w": x}, **STATE.parse(text).schemes["values"].options))
    history.publish({"w": x})
    replica = Replica(history.layout)
    replica.apply(history.patch())
    assert replica.swap()
    off = (replica.tensors()["w"].float() - x).abs().max()
    assert (off == 0) if not most else (0 < off <= most)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thinwire", "there is no recipe 'thinwire'; choose one of exact, cast, bounded"),
        ("cast:dtype=int8", "cast: dtype=int8 is not bf16, fp16 or fp32; dtype is what floats are cast to"),
        ("bounded:error=0", "bounded: error=0.0 is not a number in"),
        ("exact:dtype=bf16", "recipe exact has no parameter 'dtype'; it takes none"),
        ("values=Values(dtype='int8')", "not a recipe's spec, values=Values(...): "),
        ("values=Values(bound=-1)", "bound=-1 is not in"),
        ("values=Values(bound='small')", "not a recipe's spec"),
        ("values=3", "'3' is not Values(...)"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(text, message):
    with pytest.raises(InputError) as e:
        STATE.parse(text)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


def test_values_are_what_a_state_can_have():
    with pytest.raises(InputError, match="dtype='float64' is not one of bf16, fp16, fp32"):
        Values("float64")


def test_the_docs_have_every_recipe_and_parameter():
    page = Path(__file__).parents[2] / "docs" / "inside-recipes.md"
    text = page.read_text().partition("## The state engine")[2]
    for name, info in STATE.entries.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        for k, p in info.parameters.items():
            default = "as they are" if p.default is None else f"`{p.default}`"
            assert f"`{k}`: {default}; " in row, (name, k)
