"""The floors: a module imports only from floors below its own. See docs/architecture.md."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest
from sources import FILES, SRC, nodes, tree

ROOT = "thinwire"

# What each room may import, besides itself. A module's room is the longest prefix of its name here; a new
# module must be given one before this test passes.
F0 = {
    "checksum",
    "checksum.bit_sums",
    "types",
    "heads",
    "dtypes",
    "spec",
    "replacing",
    "compiled",
    "similarity",
    "staging",
    "verdicts",
    "seeding",
}
FUSED = "codecs.kernels.fused"
F1 = F0 | {"codecs"}
F2 = F1 | {"channels"}
LINKS = {"links", "links.names", "links.tcp.idle"}
ROUNDS = {"rounds", "rounds.client_profile"}
F3 = F2 | LINKS | {"collectives", "state", "files", "choosing"} | ROUNDS
# In order: each may import those before it.
ORDER = ["options", "machine", "records", "report", "data", "models", "emulator", "ranks"]
ORDER = [f"runs.{room}" for room in [*ORDER, "terminal"]]
RUNS = {*ORDER, "__init__"}
LISTS = {"uses", "uses.use", "uses.kinds", "uses.readers", "uses.layered", "uses.packing"}
WINGS = sorted(folder.name for folder in (SRC / "uses").iterdir() if (folder / "__init__.py").exists())
ENGINES = {f"uses.{name}" for name in WINGS}
RAN = {f"{use}.{part}" for use in ENGINES for part in ("run", "planning", "swarm.run")}
COMMANDS = {f"{use}.commands" for use in ENGINES}
POLICIES = {  # pure functions from what was measured to what to do
    ".".join(folder.relative_to(SRC).parts) for folder in (SRC / "uses").rglob("choosing") if folder.is_dir()
}
ALL = F3 | RUNS | LISTS | ENGINES | POLICIES | RAN


def wing(use: str) -> dict[str, set[str]]:
    """Return the rooms of a use, each above the one before: what it is made of, its runs, its commands."""
    policies = {room for room in POLICIES if room.startswith(f"{use}.")}
    made, run, planning = F3 | policies | {"uses.use"}, f"{use}.run", f"{use}.planning"
    ran, swarm = made | RUNS | {"uses", "uses.kinds", use}, f"{use}.swarm.run"
    above = {planning: ran | {run}, swarm: ran | {run}}
    return {use: made, run: ran, **above, f"{use}.commands": ran | LISTS | {run, planning, swarm}}


ALLOWED: dict[str, set[str]] = {
    **{
        key: set()
        for key in ("types", "replacing", "similarity", "seeding", "compiled", "moved", "runs", "uses.use")
    },
    "dtypes": {"types"},
    "heads": {"types"},
    "checksum": {"compiled"},
    "checksum.bit_sums": {"staging"},
    "staging": {"types"},
    "verdicts": {"staging"},
    "spec": {"types", "dtypes"},
    FUSED: F0,
    "codecs": F0 | {FUSED},
    "channels": F1,
    "links.names": {"types"},
    "links.tcp.idle": {"types"},
    "links": {"types", "heads", "checksum", *LINKS},
    "collectives": {"types", "staging", *LINKS},
    "state": F1,
    "files": F0 | {"state", "links.names"},
    "choosing": F2 | {"links.tcp.idle"},
    "rounds.client_profile": F1,
    "rounds": F2 | LINKS | ROUNDS | {"state"},
    **{room: F3 | {"__init__", *ORDER[:i]} for i, room in enumerate(ORDER)},
    "uses": {"uses.use"},
    **dict.fromkeys(
        ("uses.kinds", "uses.readers", "uses.layered", "uses.packing"), F3 | RUNS | {"uses", "uses.use"}
    ),
    "uses.listing": {"uses"},
    **dict.fromkeys(POLICIES, F1 | {"choosing", "links.tcp.idle", "rounds.client_profile"}),
    **{room: allowed for use in ENGINES for room, allowed in wing(use).items()},
    **dict.fromkeys(
        ("federated", "models", "scenes", "swarm"), F3 | RUNS | LISTS | ENGINES | POLICIES | RAN
    ),  # a use in Python
    "kv": F3,  # caches that travel: no use has them
    "cli": F3 | RUNS | LISTS | ENGINES | POLICIES | RAN | COMMANDS | {"uses.listing"},
    "__main__": {"cli"},
    "__init__": F3 | ENGINES | {"moved"},
}
REQUIRED = {"torch", "numpy", "zmq"}  # pyproject's dependencies and its extra `torch`, as they are imported


def name_of(path: Path) -> str:
    name = ".".join((ROOT, *path.relative_to(SRC).with_suffix("").parts))
    return name.removesuffix(".__init__")


MODULES = {name_of(path) for path in FILES}


def room_of(module: str) -> str:
    """Return the room that ``thinwire.a.b`` lies in."""
    own = module.removeprefix(f"{ROOT}.") if module not in (ROOT, f"{ROOT}.__version__") else "__init__"
    found = [r for r in ALLOWED if own == r or own.startswith(f"{r}.")]
    assert found, f"give {module} a room in this test and in docs/architecture.md"
    return max(found, key=len)


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
        if name.partition(".")[0] == ROOT
        and room_of(name) not in ALLOWED[room := room_of(name_of(path))] | {room}
    ]
    assert wrong == []


def test_the_table_has_no_way_back_up() -> None:
    """Following it never leads from a room back to it through another."""
    assert not circles({own: allowed & ALLOWED.keys() - {own} for own, allowed in ALLOWED.items()})


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


@pytest.mark.parametrize("own", ["types", "spec", "codecs", "channels", "choosing"])
def test_the_core_needs_nothing_but_torch_and_numpy(own: str) -> None:
    outside = {m for p in FILES if room_of(name_of(p)) == own for m in at_import(p)}
    assert outside - set(sys.stdlib_module_names) - {ROOT} <= {"torch", "numpy"}


def test_triton_is_imported_by_kernels_alone() -> None:
    """Which the others import in functions, where ``triton_calls`` says that they work."""
    fused = [p for p in FILES if room_of(name_of(p)) == FUSED]
    outside = {m for p in fused for m in at_import(p)} - set(sys.stdlib_module_names)
    assert outside <= {"torch", "triton", ROOT} and "triton" in outside
    for path in set(FILES) - set(fused):
        assert not [n for n in tree(path).body if ".fused" in ast.unparse(n).partition("\n")[0]], path


def test_links_know_nothing_of_tensors() -> None:
    found = {m for p in FILES if room_of(name_of(p)) in LINKS for m in at_import(p)}
    assert "zmq" in found
    assert found - set(sys.stdlib_module_names) - {ROOT} <= {"zmq", "numpy"}


def test_only_runs_and_commands_need_extras() -> None:
    """So a script loads what a use is made of without the command line's and the report's libraries."""
    for path in FILES:
        if room_of(name_of(path)) not in {
            "cli",
            "uses.kinds",
            "codecs.kernels.fused",
            *ORDER,
            *RAN,
            *COMMANDS,
        }:
            assert at_import(path) - set(sys.stdlib_module_names) - {ROOT} <= REQUIRED, path


def test_a_wing_knows_no_other() -> None:
    """What two uses share stands below both, or in a list that both are in."""
    for use in ENGINES:
        for room, allowed in wing(use).items():
            assert not {a for a in allowed if within_a_wing(a) and not a.startswith(use)}, room


def within_a_wing(room: str) -> bool:
    return any(room == use or room.startswith(f"{use}.") for use in ENGINES)
