"""The floors: a module imports only from floors below its own. See docs/architecture.md."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "thinwire"
ROOT = "thinwire"

# What each part may import, itself included where its files may import each other. A part is the longest
# prefix of a module's name here; a new module must be given a floor before this test passes.
F0 = {"types", "spec", "wire", "tcp_window", "replacing"}
F1 = {"codecs", "compiled", "zstd"}
F2 = {"memory", "store", "slot_file", "disk_store", "frame", "channel"}
LINKS = {"links"}
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "spec": {"types"},
    "wire": {"types"},
    "tcp_window": set(),
    "replacing": set(),
    "compiled": set(),
    "zstd": {"types", "compiled", "zstd"},
    "codecs": F0 | {"codecs", "compiled", "zstd"},
    "memory": F0 | F1,
    "store": F0 | F1,
    "slot_file": set(),
    "disk_store": {"types", "store", "slot_file"},
    "frame": F0 | {"memory"},
    "channel": F0 | F1 | {"memory", "store", "frame"},
    "links": {"types", "tcp_window", "links"},
    "state": F0 | F1 | {"state"},
    "policies": F0 | F1 | {"policies"},
    "boundary": F0 | F1 | F2 | LINKS | {"policies"},
    "engines": F0 | F1 | F2 | LINKS | {"policies", "boundary", "state", "engines"},  # not each other
    "assets": F0 | F1 | F2 | LINKS,
    "registry": F0 | F1 | F2 | {"policies"},
    "recipes": F0 | F1 | F2 | {"policies", "registry"},
    "lab": F0
    | F1
    | F2
    | LINKS
    | {"boundary", "policies", "state", "engines", "assets", "registry", "recipes", "lab", "__init__"},
    "cli": F0
    | F1
    | F2
    | LINKS
    | {"boundary", "policies", "state", "engines", "assets", "recipes", "lab", "cli", "__init__"},
    "__main__": {"cli"},
    "__init__": F0 | F1 | F2 | LINKS | {"state", "engines", "recipes"},
}
REQUIRED = {"torch", "numpy", "zmq"}  # pyproject's dependencies, by the names they are imported by
FILES = sorted(SRC.rglob("*.py"))


def part(module: str) -> str:
    """Return the part that ``thinwire.a.b`` belongs to."""
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] != "__version__" else "__init__"


def imports(path: Path) -> list[tuple[int, str]]:
    """Return line and full name of everything a file imports, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are written in full"
            names = [a.name for a in node.names]
            whole = node.module == ROOT  # `from thinwire import wire` imports a module, not a name of one
            found += [(node.lineno, f"{node.module}.{n}" if whole else str(node.module)) for n in names]
    return found


def at_import(path: Path) -> set[str]:
    """Return the top-level modules that importing the file imports: not in functions, not for types alone."""
    found: set[str] = set()
    nodes: list[ast.stmt] = list(ast.parse(path.read_text()).body)
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


def name_of(path: Path) -> str:
    return ".".join((ROOT, *path.relative_to(SRC).with_suffix("").parts))


def test_a_module_imports_only_from_floors_below() -> None:
    wrong = []
    for path in FILES:
        own = part(name_of(path))
        assert own in ALLOWED, f"give {own} a floor in this test and in docs/architecture.md"
        wrong += [
            f"{name_of(path)}:{line}: {name}"
            for line, name in imports(path)
            if name.partition(".")[0] == ROOT and part(name) not in ALLOWED[own]
        ]
        wrong += [f"{name_of(path)}: {name}" for name in _siblings(path) if own == "engines"]
    assert wrong == []


def _siblings(path: Path) -> list[str]:
    """Return what a file of one engine, a module or a package, imports of another."""
    engine = ".".join(name_of(path).split(".")[:3])
    return [n for _, n in imports(path) if n.startswith(f"{ROOT}.engines") and not n.startswith(engine)]


def test_the_floors_have_no_way_back_up() -> None:
    """The table itself: following it never leads from a part back to it through another."""
    for start in ALLOWED:
        seen, todo = set(), [p for p in ALLOWED[start] if p != start]
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += [p for p in ALLOWED[at] if p != at]
        assert start not in seen, start


@pytest.mark.parametrize("own", ["types", "spec", "wire", "codecs", "memory", "store", "channel", "recipes"])
def test_the_core_needs_nothing_but_torch_and_numpy(own: str) -> None:
    outside = {m for p in FILES if part(name_of(p)) == own for m in at_import(p)}
    assert outside - set(sys.stdlib_module_names) - {ROOT} <= {"torch", "numpy"}


def test_links_know_nothing_of_tensors() -> None:
    found = {m for p in FILES if part(name_of(p)) == "links" for m in at_import(p)}
    assert "zmq" in found
    assert found - set(sys.stdlib_module_names) - {ROOT} <= {"zmq", "numpy"}


def test_only_command_line_and_laboratory_need_extras() -> None:
    for path in FILES:
        if part(name_of(path)) not in ("cli", "lab"):
            assert at_import(path) - set(sys.stdlib_module_names) - {ROOT} <= REQUIRED, path
