"""The floors: a module imports only from floors below its own. See docs/architecture.md."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from sources import FILES, SRC, nodes, tree

ROOT = "thinwire"

# What each room may import, itself included. A module's room is the longest prefix of its name here; a new
# module must be given one before this test passes.
F0 = {"types", "heads", "dtypes", "spec", "replacing", "compiled", "similarity"}
F1 = F0 | {"codecs", "zstd"}
F2 = F1 | {"channels"}
F3 = F2 | {"links", "exchange", "state", "files", "policies"}
F4 = F3 | {"engines", "assets", "recipes"}
# In order: each may import those before it.
LAB = ["options", "shared", "machine", "records", "report", "data", "models", "emulator", "ranks", "train"]
LAB += ["planning", "doctor", "following", "pictures", "federated", "scenes", "weights", "engines"]
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "dtypes": {"types"},
    "heads": {"types"},
    "spec": {"types", "dtypes"},
    "replacing": set(),
    "similarity": set(),
    "compiled": set(),
    "zstd": {"types", "compiled", "zstd"},
    "codecs": F1,
    "channels": F2,
    "links": {"types", "links"},
    "exchange": {"types", "links", "exchange"},
    "state": F1 | {"state"},
    "files": F0 | {"state", "files", "links.names"},
    "policies": F1 | {"links.tcp.idle", "policies"},
    "engines": set(),
    "engines.diffusion": F2 | {"links", "exchange", "engines.diffusion"},
    "engines.experts": F2 | {"links", "exchange", "engines.diffusion", "engines.experts"},
    "engines.federated": F2 | {"links", "state", "policies", "engines.federated"},
    "engines.pipeline": F2 | {"links", "policies", "engines.pipeline"},
    "engines.replicas": F2 | {"links", "exchange", "policies", "engines.replicas"},
    "engines.sync": F0 | {"links", "state", "files", "engines.sync"},
    "assets": F2 | {"links", "policies", "files", "assets"},
    "recipes": F3 | {"engines", "assets", "recipes"},
    "lab": set(),
    **{f"lab.{room}": F4 | {"__init__"} | {f"lab.{r}" for r in LAB[: i + 1]} for i, room in enumerate(LAB)},
    "cli": F4 | {"lab", "cli", "__init__"},
    **dict.fromkeys(("federated", "models", "scenes"), F4 | {"lab"}),  # a use in Python
    "__main__": {"cli"},
    "__init__": {"types", "channels", "links", "state", "engines", "recipes"},
}
REQUIRED = {"torch", "numpy", "zmq"}  # pyproject's dependencies, by the names they are imported by


def name_of(path: Path) -> str:
    name = ".".join((ROOT, *path.relative_to(SRC).with_suffix("").parts))
    return name.removesuffix(".__init__")


MODULES = {name_of(path) for path in FILES}


def within(module: str, rooms: Iterable[str]) -> list[str]:
    """Return those of ``rooms`` that ``thinwire.a.b`` lies in, the innermost last."""
    own = module.removeprefix(f"{ROOT}.") if module not in (ROOT, f"{ROOT}.__version__") else "__init__"
    return sorted((r for r in rooms if own == r or own.startswith(f"{r}.")), key=len)


def room_of(module: str) -> str:
    """Return the room of a module."""
    found = within(module, ALLOWED)
    assert found, f"give {module} a room in this test and in docs/architecture.md"
    return found[-1]


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Return line and full name of everything a file imports, inside functions too.

    What is imported from a package counts as a module where it is one, else as the package.
    """
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are written in full"
            names = {f"{node.module}.{a.name}" for a in node.names}
            modules = {n for n in names if n in MODULES or n == f"{ROOT}.__version__"}
            found += [(node.lineno, n) for n in sorted(modules)]
            found += [(node.lineno, str(node.module))] if names - modules else []
    return found


def at_import(path: Path) -> set[str]:
    """Return the top-level modules that importing the file imports: not in functions, not for types alone."""
    found: set[str] = set()
    nodes: list[ast.stmt] = list(tree(path).body)
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            nodes += [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
        elif isinstance(node, ast.Import):
            found |= {a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def test_a_module_imports_only_what_its_room_may() -> None:
    wrong = [
        f"{name_of(path)}:{line}: {name}"
        for path in FILES
        for line, name in imports(path)
        if name.partition(".")[0] == ROOT and not within(name, ALLOWED[room_of(name_of(path))])
    ]
    assert wrong == []


def test_the_table_has_no_way_back_up() -> None:
    """Following it never leads from a room back to it through another."""
    below = {own: {r for r in ALLOWED if within(r, allowed) and r != own} for own, allowed in ALLOWED.items()}
    assert not circles(below)


def test_no_modules_import_each_other_in_a_circle() -> None:
    below = {name_of(path): {name for _, name in imports(path)} & MODULES - {name_of(path)} for path in FILES}
    assert not circles(below)


def circles(below: dict[str, set[str]]) -> set[str]:
    """Return what is left of a graph without all that leads to an end: its circles, and ways to them."""
    left = dict(below)
    while ends := [name for name, others in left.items() if not others & left.keys()]:
        for name in ends:
            del left[name]
    return set(left)


@pytest.mark.parametrize("own", ["types", "spec", "codecs", "channels", "recipes"])
def test_the_core_needs_nothing_but_torch_and_numpy(own: str) -> None:
    outside = {m for p in FILES if room_of(name_of(p)) == own for m in at_import(p)}
    assert outside - set(sys.stdlib_module_names) - {ROOT} <= {"torch", "numpy"}


def test_links_know_nothing_of_tensors() -> None:
    found = {m for p in FILES if room_of(name_of(p)) == "links" for m in at_import(p)}
    assert "zmq" in found
    assert found - set(sys.stdlib_module_names) - {ROOT} <= {"zmq", "numpy"}


def test_only_command_line_and_laboratory_need_extras() -> None:
    for path in FILES:
        if room_of(name_of(path)).partition(".")[0] not in ("cli", "lab"):
            assert at_import(path) - set(sys.stdlib_module_names) - {ROOT} <= REQUIRED, path
