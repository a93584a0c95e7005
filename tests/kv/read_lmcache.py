"""What LMCache's wheel says of the serde that is relied on: ``read_lmcache.py lmcache-0.5.6*.whl``.

Writes ``lmcache.json`` beside this file. Nothing of the wheel is run.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import zipfile
from pathlib import Path

FILE = Path(__file__).with_name("lmcache.json")
FOLDER = "lmcache/v1/distributed/serde"
MODULES = "base", "factory", "async_processor"
CALLED = {
    "Serializer": ("serialize", "estimate_serialized_size"),
    "Deserializer": ("deserialize",),
    "AsyncSerdeProcessor": ("__init__",),
    "": ("register_serde_factory",),
}


def signatures(source: str) -> dict[str, list[str]]:
    """Return the parameters of each function in ``CALLED`` that a module's source defines."""
    found = {}
    tree = ast.parse(source)
    owners = [("", tree.body)] + [(n.name, n.body) for n in tree.body if isinstance(n, ast.ClassDef)]
    for owner, body in owners:
        for node in (n for n in body if isinstance(n, ast.FunctionDef) and n.name in CALLED.get(owner, ())):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found[f"{owner}.{node.name}"] = [x.arg for x in given if x.arg != "self"]
    return found


def read(wheel: Path) -> dict[str, object]:
    """Return the version, the signatures, and the hash of each source file that they are from."""
    found: dict[str, list[str]] = {}
    sources = {}
    with zipfile.ZipFile(wheel) as archive:
        for module in MODULES:
            name = f"{FOLDER}/{module}.py"
            data = archive.read(name)
            sources[name] = hashlib.sha256(data).hexdigest()
            found |= signatures(data.decode())
    return {"wheel": wheel.name, "version": wheel.name.split("-")[1], "sources": sources, "signatures": found}


if __name__ == "__main__":
    FILE.write_text(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n", "utf-8")
