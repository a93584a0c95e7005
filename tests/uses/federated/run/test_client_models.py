"""What clients train: size, seed, learning, the way of parameters to one row and back, a user's own."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from each import each
from torch import nn
from torch.nn import functional as F

from thinwire.rounds.parameters import Parameters
from thinwire.types import InputError
from thinwire.uses.federated.run.client_models import build_model

SHAPES = [(1, 28, 28), (1, 8, 8), (1, 32, 32), (3, 32, 32), (1, 2, 3), (2, 20, 60)]

OWN = """
import torch
from torch import nn

def good(shape, classes):
    torch.rand(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes).double())

def normed(shape, classes):
    return nn.Sequential(nn.BatchNorm2d(1), good(shape, classes))

def narrow(shape, classes): return good(shape, classes + 1)
def wrong(shape, classes): return nn.Linear(5, classes)
def text(shape, classes): return "a model"
def nothing(shape, classes): return nn.Flatten()
def raises(shape, classes): raise RuntimeError("out of ideas\\nand of lines")
value = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a module with models of a user's own lie in the folder where the command is called."""
    (tmp_path / "fed_own_models.py").write_text(OWN)
    (tmp_path / "fed_own_broken.py").write_text("import no_such_module_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))


def flat(model: nn.Module) -> torch.Tensor:
    return Parameters(model).read()


def descend(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Take one step; torch's own optimisers would first import for seconds what they do not need here."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= 0.2 * gradient


@each("shape", SHAPES)
def test_the_network_is_small_and_takes_any_image(shape: tuple[int, ...]) -> None:
    model = build_model("cnn", shape, 10)
    assert model(torch.randn(3, *shape)).shape == (3, 10)
    assert flat(model).numel() == 46_730 + 400 * (shape[0] - 1) <= 50_000
    assert not list(model.buffers())  # no statistics that an average of parameters would leave out


@pytest.mark.parametrize("name", ["cnn", "logistic"])
@pytest.mark.usefixtures("one_thread")
def test_a_model_learns_from_its_seed_on(name: str) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model, same, other = (build_model(name, (1, 8, 8), 10, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(flat(model), flat(same)) and not torch.equal(flat(model), flat(other))
    y = torch.arange(40) % 10
    x = F.one_hot(y, 64).float().view(40, 1, 8, 8) * 8
    for _ in range(25):
        descend(model, x, y)
    assert (model(x).argmax(1) == y).float().mean() > 0.9


def test_parameters_go_into_a_row_and_back_without_sharing_memory() -> None:
    model, other = (build_model("cnn", (1, 8, 8), 10, seed) for seed in (0, 1))
    row = flat(other)
    Parameters(model).write(row)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.equal(flat(model), row) and row.dtype == torch.float32 and not row.requires_grad
    before = row.clone()
    descend(model, torch.ones(4, 1, 8, 8), torch.arange(4))
    assert torch.equal(row, before) and not torch.equal(flat(model), before)
    assert model[3].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index, union-attr]
    for wrong in (row[:, :-1], row[0], torch.cat((row, row))):
        with pytest.raises(InputError, match=r"for a model of 46730 values; give \[1, 46730\]"):
            Parameters(model).write(wrong)


@pytest.mark.usefixtures("own")
def test_a_models_function_of_ones_own_is_called_with_shape_and_classes() -> None:
    state = torch.get_rng_state()
    a, b, c = (build_model("fed_own_models:good", (1, 4, 4), 3, seed) for seed in (0, 0, 1))
    assert torch.equal(flat(a), flat(b)) and not torch.equal(flat(a), flat(c))
    assert flat(a).shape == (1, 51) and flat(a).dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in a.parameters())


@pytest.mark.usefixtures("own")
@each(
    "name, words",
    [
        ("resnet", "--model 'resnet' is unknown; give cnn, logistic, or module:function"),
        (":good", "is unknown"),
        ("fed_own_models:", "is unknown"),
        ("no_such_module:good", "cannot be imported .*No module named"),
        ("fed_own_broken:good", "cannot be imported .*no_such_module_at_all"),
        ("fed_own_models:absent", "cannot be imported .*absent"),
        ("fed_own_models:value", "is no function"),
        ("fed_own_models:raises", r"fails for samples of shape \[1, 4, 4\] \(RuntimeError: out of ideas\)"),
        ("fed_own_models:text", "returns str, not an nn.Module"),
        ("fed_own_models:nothing", "has no parameters"),
        ("fed_own_models:normed", "batch norm.*GroupNorm"),
        ("fed_own_models:wrong", r"takes no samples of shape \[1, 4, 4\]"),
        ("fed_own_models:narrow", r"returns \[2, 4\], not \[2, 3\]"),
    ],
)
def test_a_model_that_clients_could_not_train_is_refused(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as e:
        build_model(name, (1, 4, 4), 3)
    assert "\n" not in str(e.value)


def test_the_network_is_for_images_alone() -> None:
    with pytest.raises(InputError, match=r"cnn takes images, not samples of shape \[64\]; give logistic"):
        build_model("cnn", (64,), 10)
    model: nn.Module = build_model("logistic", (2, 3, 4), 5)
    assert flat(model).numel() == math.prod((2, 3, 4)) * 5 + 5
