"""What a user may rely on: the public names, what importing them costs, and examples that run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
import types as python_types
from pathlib import Path

import pytest
import torch

import thinwire
from thinwire import moved

ROOT = Path(__file__).parents[1]
OPTIONAL = (
    "transformers",
    "tokenizers",
    "zstandard",
    "typer",
    "rich",
    "matplotlib",
    "safetensors",
    "gguf",
    "fsspec",
    "diffusers",
    "flwr",
)
MODULES = sorted(m.name for m in pkgutil.walk_packages(thinwire.__path__, "thinwire."))

DOORS = ("federated", "kv", "models", "scenes", "swarm")
PUBLIC = [
    "AuthError",
    "CompressedStage",
    "DesyncError",
    "Follower",
    "InputError",
    "Keeping",
    "LinkError",
    "LinkShape",
    "MeasurementError",
    "MissingExtra",
    "PayloadError",
    "Publisher",
    "Receiver",
    "Recipe",
    "RetentionPolicy",
    "Scheme",
    "Sender",
    "ShardFollower",
    "ShardPublisher",
    "ShelfReader",
    "ShelfWriter",
    "ThinwireError",
    "Version",
    "__version__",
    "connect_mesh",
    "federated",
    "kv",
    "load_part",
    "local_steps",
    "local_steps_callback",
    "local_steps_lightning",
    "meet",
    "models",
    "on_first",
    "over_workers",
    "parallel",
    "parse_recipe",
    "publish_callback",
    "read_token",
    "replicate",
    "scenes",
    "spread_experts",
    "swarm",
]


def test_the_public_names_are_these() -> None:
    assert thinwire.__all__ == PUBLIC == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(thinwire))
    for name in PUBLIC:
        found = getattr(thinwire, name)
        home = found.__name__ if name in DOORS else "" if name == "__version__" else found.__module__
        assert home.startswith("thinwire." if home else "")
    with pytest.raises(AttributeError, match="no attribute 'Sendr'"):
        thinwire.Sendr  # noqa: B018


def test_every_error_is_public() -> None:
    from thinwire import types

    errors = {n for n, v in vars(types).items() if isinstance(v, type) and issubclass(v, types.ThinwireError)}
    assert errors <= set(PUBLIC)


def test_the_version_is_the_package_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert thinwire.__version__ == project["version"]


def imported(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after ``statement``."""
    code = f"import sys; {statement}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_importing_everything_public_needs_no_extra() -> None:
    found = imported("from thinwire import *")
    assert {"thinwire", "torch", "numpy", "zmq"} <= found
    assert not found & set(OPTIONAL)


def test_import_alone_loads_nothing() -> None:
    found = imported("import thinwire")
    assert "thinwire" in found
    assert not found & {*OPTIONAL, "torch", "numpy", "zmq"}


def test_links_and_the_emulator_s_relay_need_no_torch() -> None:
    assert "torch" not in imported("import thinwire.links, thinwire.runs.emulator.router")


def test_sender_and_receiver_in_five_lines() -> None:
    recipe = thinwire.parse_recipe("direct:bits=8")
    sender, receiver = thinwire.Sender(recipe.schemes["forward"]), thinwire.Receiver()
    x = torch.randn(2, 3, 32)
    packet, x_hat = sender.encode(x, keys=[7, 9])
    assert torch.equal(receiver.decode(packet), x_hat)
    assert (x - x_hat).abs().max() < 0.02 * x.abs().max()


def test_the_examples_in_docstrings_run() -> None:
    done = {}
    for module in filter(None, map(load, MODULES)):
        result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
        assert result.failed == 0, module.__name__
        done[module.__name__] = result.attempted
    for name in ("types", "channels.channel", "codecs.uniform", "links.shape", "runs.models.cuts"):
        assert done[f"thinwire.{name}"], "its examples are gone, or not seen"


def load(name: str) -> python_types.ModuleType | None:
    """Import a module; none where an extra is missing, and only then."""
    try:
        return None if name.endswith("__main__") else importlib.import_module(name)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] not in (*OPTIONAL, "tensorboard"):
            raise
    except thinwire.MissingExtra:
        pass
    return None


@pytest.mark.parametrize("old", sorted(moved.PLACES.keys() - moved.FOLDERS))
def test_an_old_path_names_the_new_one(old: str) -> None:
    new = f"thinwire.{moved.new_name(old)}"
    importlib.import_module(new)
    with pytest.raises(ImportError, match=re.escape(f"thinwire.{old} is {new} now; import it from there")):
        importlib.import_module(f"thinwire.{old}")
    package, _, name = f"thinwire.{old}".rpartition(".")
    with pytest.raises(ImportError, match=re.escape(new)):
        exec(f"from {package} import {name}", {})
