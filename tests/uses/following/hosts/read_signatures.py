"""What wheels say of what is relied on: ``python -m tests.uses.following.hosts.read_signatures WHEEL...``.

Given wheels of vLLM, verl or SGLang, writes ``vllm.json`` and so on beside this file; with ``--check`` it
compares instead. Nothing of a wheel is run.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.uses.following.hosts import sglang_loader, verl_engine, vllm_names
from thinwire.uses.following.hosts.host_signatures import Called

HERE = Path(__file__).parent
SGLANG = "sglang/srt/"


class Relied(NamedTuple):
    """The sources to read; methods; classes whose fields, and functions whose calls are noted."""

    sources: tuple[str, ...]
    called: Called
    fields: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


RELIED = {
    "vllm": Relied(
        tuple(module.replace(".", "/") + ".py" for module in (vllm_names.BASE, vllm_names.FACTORY)),
        vllm_names.CALLED,
    ),
    "verl": Relied(
        (
            verl_engine.MODULE.replace(".", "/") + ".py",
            "verl/workers/engine_workers.py",
            "verl/workers/config/rollout.py",
        ),
        verl_engine.CALLED,
        ("CheckpointEngineConfig",),
        ("CheckpointEngineRegistry.new", "self.checkpoint_engine.send_weights"),
    ),
    "sglang": Relied(
        (
            f"{SGLANG}entrypoints/engine.py",
            f"{SGLANG}managers/io_struct.py",
            f"{SGLANG}model_executor/model_runner_components/weight_updater.py",
            f"{SGLANG}utils/common.py",
        ),
        sglang_loader.CALLED,
        ("UpdateWeightFromDiskReqInput",),
        ("custom_loader",),
    ),
}


def read(wheel: Path) -> dict[str, object]:
    """Return the version, what is relied on, and the hash of each source file that it is from."""
    name, version = wheel.name.split("-")[:2]
    relied, sources = RELIED[name], dict[str, str]()
    methods, fields, calls = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    with zipfile.ZipFile(wheel) as archive:
        for source in relied.sources:
            data = archive.read(source)
            sources[source] = hashlib.sha256(data).hexdigest()
            tree = ast.parse(data)
            for owner, method, given in _methods(tree, relied.called):
                methods.setdefault(owner, {})[method] = given
            fields |= _fields(tree, relied.fields)
            for function, given in _calls(tree, relied.calls):
                calls.setdefault(function, []).append(given)
    found = {"wheel": wheel.name, "version": version, "sources": sources, "signatures": methods}
    return found | ({"fields": fields} if fields else {}) | ({"calls": calls} if calls else {})


def _methods(tree: ast.Module, called: Called) -> Iterator[tuple[str, str, list[str]]]:
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for node in owner.body:
            known = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if known and node.name in called.get(owner.name, {}):
                yield owner.name, node.name, _parameters(node.args)


def _parameters(given: ast.arguments) -> list[str]:
    named = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [x.arg for x in named if x is not None and x.arg not in ("self", "cls")]


def _fields(tree: ast.Module, wanted: tuple[str, ...]) -> dict[str, list[str]]:
    return {
        owner.name: [ast.unparse(node.target) for node in owner.body if isinstance(node, ast.AnnAssign)]
        for owner in tree.body
        if isinstance(owner, ast.ClassDef) and owner.name in wanted
    }


def _calls(tree: ast.Module, wanted: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield what is passed at each call: "*" for what has no name there, "**" for more by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in wanted:
            yield ast.unparse(node.func), ["*"] * len(node.args) + [k.arg or "**" for k in node.keywords]


def main(arguments: list[str]) -> int:
    """Write or compare what each wheel says; return the exit code."""
    wrong = 0
    for wheel in (Path(text) for text in arguments if text != "--check"):
        file, found = HERE / f"{wheel.name.split('-')[0]}.json", json.dumps(read(wheel), indent=1) + "\n"
        if "--check" not in arguments:
            file.write_text(found, "utf-8")
        elif file.read_text("utf-8") != found:
            wrong += 1
            print(f"{wheel.name} is not as {file.name} says; write it anew, and read what has changed")
        else:
            print(f"{wheel.name} is as {file.name} says")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
