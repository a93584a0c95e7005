"""Every transformer that a pipeline of diffusers has, on two ranks in every mode: ``make bench-breadth``.

A cell is one class. Its tiny random models, with inputs as its pipelines give them, are called twice, at
times that differ by rounding, by recipe ``raw``. What each mode makes of that is the relative error against
one device, or the sentence that refuses it before the first call has ended.

``python -m bench.pictures.breadth [CLASS]``
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import thinwire
from bench.pictures.experts import Mesh, meshes
from bench.pictures.tiny import Host, Inputs, drawn
from bench.pictures.tiny_images import IMAGES
from bench.pictures.tiny_more import MORE
from bench.pictures.tiny_videos import VIDEOS
from bench.pictures.tiny_whole import WHOLE
from bench.study.cells import ROOT, Kept, run_study
from thinwire.types import InputError

KEPT = Kept("breadth")
MODES = ("gather", "ulysses", "displaced", "pipe", "latent", "guidance", "batch")
LATENT = ("SkyReels-V2", "HunyuanVideo", "ChronoEdit")
EQUAL = 1e-5  # of the relative error
Outcome = dict[str, Any]


class Cell(NamedTuple):
    kind: str


def pipelines() -> dict[str, list[str]]:
    """Return the pipelines of diffusers that have each class of transformer, by what they ask for."""
    import diffusers

    found: dict[str, set[str]] = {}
    for name in sorted(n for n in dir(diffusers) if "Pipeline" in n):
        pipeline = getattr(diffusers, name)
        for part in inspect.signature(pipeline.__init__).parameters.values():
            asked = re.findall(r"\w*(?:Transformer|DiT|UVit)\w*", str(part.annotation))
            if part.name.endswith(("transformer", "transformer_2", "prior")):
                for kind in asked:
                    found.setdefault(kind, set()).add(name)
    return {kind: sorted(names) for kind, names in sorted(found.items()) if hasattr(diffusers, kind)}


def hosts() -> dict[str, Host]:
    """Return all tiny models and their inputs; those of the tests are among them."""
    sys.path.append(str(ROOT / "tests" / "shared"))
    from expert_models import hidream, hidream_inputs, nucleus, nucleus_inputs
    from picture_hosts import HOSTS

    experts = {
        "HiDream": (hidream, lambda: hidream_inputs([0, 1], 0.5)),
        "NucleusMoE": (nucleus, lambda: nucleus_inputs([0, 1], 0.5)),
    }
    return {**HOSTS, **IMAGES, **VIDEOS, **MORE, **WHOLE, **experts, **_widened(HOSTS)}


def _widened(found: dict[str, Host]) -> dict[str, Host]:
    """Return the videos that mode latent divides, of a size that it can divide."""
    return {f"{name}, wider": (found[name][0], partial(_wider, found[name][1])) for name in LATENT}


def _wider(draw: Callable[[], Inputs]) -> Inputs:
    return draw() | {"hidden_states": drawn(1, 4, 3, 6, 10)}


@cache
def by_kind() -> dict[str, dict[str, Host]]:
    """Return the tiny models of each class."""
    found: dict[str, dict[str, Host]] = {}
    for name, host in hosts().items():
        found.setdefault(type(host[0]()).__name__, {})[name] = host
    return found


def cells() -> Iterator[Cell]:
    """Yield all cells."""
    for kind in pipelines():
        yield Cell(kind)


def measure(cell: Cell) -> dict[str, Any]:
    """Try the tiny models of a class in every mode."""
    found = dict[str, dict[str, Outcome]]()
    with warnings.catch_warnings(), meshes(2) as ranks:
        warnings.simplefilter("ignore")
        for name, (make, draw) in by_kind().get(cell.kind, {}).items():
            found[name] = {mode: outcome(make(), draw(), mode, ranks) for mode in MODES}
    return {"pipelines": pipelines()[cell.kind], "tried": found}


def stale(cell: Cell, found: dict[str, Any]) -> bool:
    """Say whether a cell holds a defect, which may be mended by now."""
    return any("failed" in each[mode] for each in found["tried"].values() for mode in each)


def outcome(model: nn.Module, inputs: Inputs, mode: str, ranks: Sequence[Mesh]) -> Outcome:
    """Return what a mode makes of a model: an ``error``, or the sentence by which it is ``refused``."""
    calls = [at(inputs, step) for step in ((0, 0) if mode == "guidance" else (0, 1))]
    wanted, made = [called(model, each) for each in calls], list[list[Tensor]]()

    def rank(peers: Mesh) -> list[list[Tensor]]:
        own, found = copy.deepcopy(model), list[list[Tensor]]()
        with torch.no_grad(), thinwire.parallel(own, peers, "raw", mode, deadline=600.0):
            for each in calls:
                found.append(called(own, each))
                made.append(found[-1])
        return found

    with ThreadPoolExecutor(len(ranks)) as pool:
        try:
            every = list(pool.map(rank, ranks))
        except InputError as e:
            return {"failed": f"refused after a call: {e}"} if made else {"refused": str(e)}
        except Exception as e:  # anything else is a defect, which the table shows
            return {"failed": f"{type(e).__name__}: {e}"}
    pairs = [p for own in every for x, y in zip(own, wanted, strict=True) for p in zip(x, y, strict=True)]
    return {"error": max(float((x - y).norm() / y.norm()) for x, y in pairs)}


@torch.no_grad()
def called(model: Any, inputs: Inputs) -> list[Tensor]:
    """Return the tensors that a model returns; what it takes off its inputs stays with them."""
    given = {name: x.copy() if isinstance(x, dict | list) else x for name, x in inputs.items()}
    return [x.clone() for x in tree_flatten(model(**given))[0] if isinstance(x, Tensor)]


def at(inputs: Inputs, step: int) -> Inputs:
    """Return inputs at a time that is another by rounding alone."""
    name = next((name for name in ("timestep", "timesteps", "t") if name in inputs), None)
    return inputs if name is None else inputs | {name: inputs[name] * (1 - 1e-7 * step)}


def verdict(mode: str, found: Outcome) -> str:
    """Return an outcome in a word.

    >>> verdict("latent", {"error": 0.1}), verdict("pipe", {"refused": "x"})
    ('near', 'no')
    """
    if "error" not in found:
        return "no" if "refused" in found else "failed"
    if found["error"] <= EQUAL:
        return "yes"
    return "near" if mode == "latent" and found["error"] < 0.2 else "failed"


def summary() -> dict[str, Any]:
    """Return for each class its pipelines, and what each mode makes of it."""
    rows = []
    for cell in cells():
        kept = KEPT.get(cell)
        if kept:
            words = {
                mode: sorted({verdict(mode, each[mode]) for each in kept["tried"].values()}) for mode in MODES
            }
            said = {
                (mode, each[mode]["refused"])
                for each in kept["tried"].values()
                for mode in MODES
                if "refused" in each[mode]
            }
            row = {"kind": cell.kind, "pipelines": kept["pipelines"], "models": list(kept["tried"])}
            rows.append(row | {"modes": words, "refused": sorted(said)})
    return {"rows": rows}


if __name__ == "__main__":
    run_study("breadth", sys.argv[1:], cells, measure, summary, stale=stale)
