"""The package's own sources, each read and parsed once in a process: some rules look at all of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "thinwire"
FILES = sorted(SRC.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree."""
    return tuple(ast.walk(tree(path)))


def trees() -> dict[Path, ast.Module]:
    """Return the syntax tree of each file."""
    return {path: tree(path) for path in FILES}


def called(function: ast.expr) -> str:
    """Return what is called, with dots: names as they are, all else as a question mark."""
    if isinstance(function, ast.Attribute):
        return f"{called(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else "?"
