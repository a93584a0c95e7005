"""The house rules that a reader relies on, checked over the whole package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean, median

from sources import FILES, SRC, called, nodes, trees

ROOT = Path(__file__).parents[1]
EVERYTHING = [
    p
    for folder in ("src", "tests", "bench", "docs", "examples", ".ci")
    for p in sorted((ROOT / folder).rglob("*"))
    if p.suffix in {".py", ".md", ".toml", ".json", ".sh", ""} and p.is_file() and p.stat().st_size < 1 << 20
] + [
    ROOT / n
    for n in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "mkdocs.yml")
]

MAY_PRINT = {
    "cli",
    "runs/models/fetch.py",
}  # programs; the library's words go into exceptions
HELD = (SRC, ROOT / "bench")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Named = Function | ast.ClassDef


def of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def functions() -> Iterator[tuple[str, Function]]:
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, Function):
                yield f"{of(path)}:{node.lineno} {node.name}", node


def length(node: Named) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def calls(found: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in found:
        if isinstance(node, ast.Call):
            yield node.lineno, called(node.func)


def test_files_are_short() -> None:
    lines = {of(p): len(p.read_text().splitlines()) for p in FILES}
    assert {n: k for n, k in lines.items() if k > 600} == {}
    assert 100 <= median(k for k in lines.values() if k) <= 200


def test_functions_are_short() -> None:
    lengths = {name: length(node) for name, node in functions()}
    assert {n: k for n, k in lengths.items() if k > 60} == {}
    assert mean(lengths.values()) <= 15


def test_no_file_is_a_drawer() -> None:
    assert [p for p in FILES if re.search("utils?$|helpers?$|manager$|common$|misc$", p.stem)] == []


def test_no_folder_has_more_modules_than_a_reader_can_hold() -> None:
    """Sixteen at most."""
    here = [p.parent for root in HELD for p in root.rglob("*.py")]
    assert {str(p.relative_to(ROOT)): here.count(p) for p in here if here.count(p) > 16} == {}


def test_a_name_leads_to_one_place() -> None:
    """Files of one name are those that every wing has; few classes share one, as specs print them."""
    names = [p.name for p in FILES if p.name != "__init__.py"]
    wings = {"cards.py", "demo.py", "options.py", "recipes.py", "record.py", "script.py"}
    assert {n for n in names if names.count(n) > 1} <= wings
    classes = [n.name for t in trees().values() for n in t.body if isinstance(n, ast.ClassDef)]
    public = [name for name in classes if not name.startswith("_")]
    assert len({name for name in public if public.count(name) > 1}) < 10


def test_forbidden_statements() -> None:
    """No ``assert`` (gone under -O), no pickle in any dress, no evaluation of text, no bare print."""
    assert {of(path): found for path in FILES if (found := forbidden_in(path))} == {}


def forbidden_in(path: Path) -> list[object]:
    asserts = [n.lineno for n in nodes(path) if isinstance(n, ast.Assert)]
    modules = {a.name for n in nodes(path) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names} | {
        str(n.module) for n in nodes(path) if isinstance(n, ast.ImportFrom)
    }
    forbidden = {"eval", "exec", "torch.load", "torch.save", "np.load", "numpy.load", "marshal.loads"}
    may_print = of(path) in MAY_PRINT or of(path).partition("/")[0] in MAY_PRINT
    made = list(calls(nodes(path)))
    wrong = [c for c in made if c[1] in forbidden or (c[1] == "print" and not may_print)]
    objects = [c for c in made if re.search(r"_object(_list)?$", c[1])]  # torch's collectives pickle
    pickles = modules & {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    return [*asserts, *wrong, *objects, *pickles]


def test_texts_in_files_and_pipes_have_a_named_encoding() -> None:
    """The locale's is another one on the next machine."""
    assert {of(path): found for path in FILES if (found := unnamed_in(nodes(path)))} == {}


def unnamed_in(those: Iterable[ast.AST]) -> list[tuple[int, str]]:
    found = []
    for node in (n for n in those if isinstance(n, ast.Call)):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else called(node.func)
        named = {str(k.arg): k.value for k in node.keywords}
        at = {"read_text": 0, "write_text": 1}.get(name) if isinstance(node.func, ast.Attribute) else None
        bare = at is not None and len(node.args) <= at
        if name in ("open", "fdopen"):
            places = [named.get("mode"), *node.args[:2]]
            modes = [m.value for m in places if isinstance(m, ast.Constant) and isinstance(m.value, str)]
            bare = any(re.fullmatch("[rwax][t+]*", mode) for mode in modes)
        process = name in ("Popen", "run", "check_output", "check_call")
        bare = bare or (process and ("text" in named or "universal_newlines" in named))
        if bare and "encoding" not in named:
            found.append((node.lineno, name))
    return found


def public() -> Iterator[tuple[str, Named]]:
    """Yield what a user may call: all that stands in a module under a public name."""
    for path, parsed in trees().items():
        for node in parsed.body:
            if isinstance(node, Named) and not node.name.startswith("_"):
                yield f"{of(path)}:{node.lineno} {node.name}", node


def first_line(node: Named | ast.Module) -> str:
    return (ast.get_docstring(node) or "").split("\n", 1)[0]


def test_modules_say_what_they_are() -> None:
    for path, parsed in trees().items():
        if parsed.body:
            assert re.search(r"[.:]$", first_line(parsed) or ""), f"{of(path)}: {first_line(parsed)!r}"


def test_public_names_say_what_they_do() -> None:
    missing = [name for name, node in public() if not first_line(node)]
    assert missing == []
    ends = [f"{name}: {first_line(node)}" for name, node in public() if not first_line(node).endswith(".")]
    assert ends == []


def test_no_machine_paths_and_no_strangers_names() -> None:
    """Nothing committed points at one developer's machine."""
    marks = re.compile(r"(?<![\w.])/(work|home|root|Users|opt)/\w|(?<![\w.])/tmp/\w")
    found = [
        f"{path.relative_to(ROOT)}: {m[0]}"
        for path in EVERYTHING
        if path.exists() and "__pycache__" not in path.parts
        for m in marks.finditer(path.read_text(errors="ignore"))
    ]
    assert found == []


def test_the_rules_catch_what_they_forbid(tmp_path: Path) -> None:
    """The checks above would be worth nothing if they could not see."""
    assert list(calls(ast.walk(ast.parse("torch.load(x)")))) == [(1, "torch.load")]
    assert length(next(iter(ast.parse("def f():\n    pass\n").body))) == 2  # type: ignore[arg-type]
    assert len(FILES) > 50 and len(list(functions())) > 300
