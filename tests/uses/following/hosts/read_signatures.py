"""What a wheel's own source says of the methods that are relied on: ``read_signatures.py vllm-0.33.0*.whl``.

Writes ``vllm.json`` beside this file. Nothing of the wheel is run.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import zipfile
from pathlib import Path

from thinwire.uses.following.hosts import vllm_names

FILE = Path(__file__).with_name("vllm.json")


def signatures(source: str) -> dict[str, dict[str, list[str]]]:
    """Return the parameters of each method in ``CALLED`` that a module's source defines."""
    found: dict[str, dict[str, list[str]]] = {}
    for owner in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        wanted = vllm_names.CALLED.get(owner.name, {})
        methods = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
        for method in methods:
            given = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
            names = [x.arg for x in given if x.arg not in ("self", "cls")]
            found.setdefault(owner.name, {})[method.name] = names
    return found


def read(wheel: Path) -> dict[str, object]:
    """Return the version, the signatures, and the hash of each source file that they are from."""
    found: dict[str, dict[str, list[str]]] = {}
    sources: dict[str, str] = {}
    with zipfile.ZipFile(wheel) as archive:
        for module in (vllm_names.BASE, vllm_names.FACTORY):
            name = module.replace(".", "/") + ".py"
            data = archive.read(name)
            sources[name] = hashlib.sha256(data).hexdigest()
            found |= signatures(data.decode())
    return {"wheel": wheel.name, "version": wheel.name.split("-")[1], "sources": sources, "signatures": found}


if __name__ == "__main__":
    FILE.write_text(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n", "utf-8")
