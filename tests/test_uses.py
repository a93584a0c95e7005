"""Every use in every list: what pages, package and ``--help`` name is there, and nothing is left out."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

import thinwire
from thinwire.cli.app import app
from thinwire.uses import NAMES, uses
from thinwire.uses.kinds import kinds

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TEXT = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
README, INDEX, RECORD = (TEXT[name] for name in ("README.md", "docs/index.md", "docs/run-record.md"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS: dict[str, Any] = typer.main.get_group(app).commands
# Each kind of run: its page, the command that makes it and the demo that shows it.
USES = {
    "pipeline": ("quickstart", "train", ""),
    "replicas": ("replicas", "train", "replicas"),
    "pictures": ("pictures", "generate", "pictures"),  # and video
    "swarm": ("swarm", "swarm", "swarm"),
    "federated": ("federated", "federate", "federated"),
    "state": ("state", "publish", "state"),
    "rollouts": ("rollouts", "report", ""),
    "scene": ("scenes", "pack", "scenes"),
    "model": ("models", "pack", "models"),
    "serving": ("serving", "serve", "serve"),
}
# Options of other programs that the pages use.
OTHERS = {
    *(
        "--nnodes",
        "--node-rank",
        "--nproc-per-node",
        "--master-addr",
        "--master-port",
        "--max-restarts",
    ),  # torchrun
    *("--custom-weight-loader", "--custom-pull-weights-pre-read-hook"),  # SGLang
    "--weight-transfer-config",  # vLLM
    *("--constraint", "--no-deps"),  # pip
    *("--device", "--rate", "--tokens"),  # examples/
}


def options(command: Any) -> set[str]:
    """Return the options of a command and of those below it."""
    shown = [p for p in command.params if not getattr(p, "hidden", False)]  # else an old name
    own = {o for p in shown for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}
    return own.union(*(options(c) for c in getattr(command, "commands", {}).values()), {"--help"})


def test_each_kind_of_run_has_a_use() -> None:
    assert USES.keys() == kinds().keys()
    folders = {folder.parent.name for folder in (ROOT / "src" / "thinwire" / "uses").glob("*/__init__.py")}
    assert folders == {*NAMES}
    assert {demo for _, _, demo in USES.values() if demo} | {"video"} == COMMANDS["demo"].commands.keys()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_use_names_is_there(name: str) -> None:
    use = dict(zip(NAMES, uses(), strict=True))[name]
    homes = [command.home for command in use.commands] + [
        home for kind in use.kinds.values() for home in kind
    ]
    homes += [*use.demos.values(), *use.registries, *use.readers, *filter(None, [use.layered])]
    assert homes and all(use.named(home) is not None for home in homes)


@pytest.mark.parametrize("kind", USES)
def test_a_use_is_in_every_list(kind: str) -> None:
    page, command, demo = USES[kind]
    table = INDEX.partition("| use |")[2].partition("\n\n")[0]
    rows = [row for row in table.splitlines() if f"({page}.md)" in row and f"`{command}" in row]
    assert len(rows) == 1, "docs/index.md, first table"
    assert f": {page}.md\n" in (ROOT / "mkdocs.yml").read_text()
    assert f"(docs/{page}.md)" in README.partition("## Where to read on")[2]
    first = README.partition("\n```")[0]
    assert (f"thinwire demo {demo}" if demo else "make demo") in first, "README.md, first table"
    assert f"`{kind}`" in RECORD.partition("| `kind` |")[2].partition("\n")[0], "about() in records/schema.py"


def test_the_record_of_each_kind_is_described() -> None:
    from bench.study.record import TABLES

    placed = re.findall(r"<!-- table:(record[\w-]*) -->", RECORD)
    assert sorted(placed) == sorted(TABLES)


def test_pages_name_commands_that_exist_and_all_of_them() -> None:
    words = r"(?<![\w./])thinwire ([a-z][a-z-]*)"
    code = {name: re.findall(r"`[^`\n]+`|^```.*?^```", text, re.S | re.M) for name, text in TEXT.items()}
    named = {
        (name, command)
        for name, blocks in code.items()
        for block in blocks
        for command in re.findall(rf"(?:`|^|\$ |&& |-m ){words}", block, re.M)
    }
    unknown = {(name, c) for name, c in named if c not in COMMANDS}
    assert unknown <= {("docs/wire-format.md", "link"), ("docs/state-format.md", "shelf")}  # of messages
    assert {c for _, c in named} >= COMMANDS.keys()
    on_the_first_page = {c for c in COMMANDS if re.search(rf"`(thinwire )?{c}\b", README + INDEX)}
    assert COMMANDS.keys() - on_the_first_page <= {"compare", "demo", "doctor", "emulate", "plan", "recipes"}
    assert all(f"thinwire {c}" in README for c in COMMANDS.keys() - on_the_first_page)


def test_pages_name_options_that_exist_and_all_of_them() -> None:
    known = set().union(*map(options, COMMANDS.values()), {"--version"})
    for name, text in TEXT.items():
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)) <= known | OTHERS, name
    pages = "\n".join(TEXT.values())
    told = {o for o in known if re.search(rf"{o}(?![\w-])|`config\.{o[2:].replace('-', '_')}`", pages)}
    assert {o for o in known - told if not o.startswith("--no-")} <= {"--version"}


def test_extras_are_described_and_all_is_all_of_them() -> None:
    extras = PYPROJECT["optional-dependencies"]
    table = INDEX.partition("| extra |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", re.sub(r"\|[^|]*\|$", "|", table, flags=re.M))) == extras.keys() - {
        "dev"
    }
    (whole,) = extras["all"]
    assert set(re.findall(r"\w+", whole.partition("[")[2])) == extras.keys() - {"all", "dev", "flower"}
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    asked = {*re.findall(r"thinwire\[(\w+)\]", "\n".join([sources, *TEXT.values()]))}
    asked |= {*re.findall(r"extra `(\w+)`", "\n".join(TEXT.values()))}
    assert asked <= extras.keys()


def test_each_engine_s_recipes_are_on_its_page() -> None:
    registries = [use.named(home) for use in uses() for home in use.registries]
    own = {"replicas": "docs/replicas.md", "federated": "docs/federated.md"}
    assert {r.engine for r in registries} >= own.keys() | {"pipeline", "state", "diffusion"}
    for registry in registries:
        page = TEXT[own.get(registry.engine, "docs/recipes.md")]
        assert [name for name in registry.entries if f"`{name}`" not in page] == [], registry.engine


def test_one_sentence_says_what_it_is() -> None:
    sentence = PYPROJECT["description"]
    assert (thinwire.__doc__ or "").startswith(f"{sentence}\n")
    assert f"site_description: {sentence}\n" in (ROOT / "mkdocs.yml").read_text()
    assert README.startswith(f"# thinwire\n\n{sentence}\n")
    assert INDEX.startswith(f"# thinwire\n\n{sentence}\n")
    assert app.registered_callback is not None
    assert app.registered_callback.callback.__doc__ == sentence  # type: ignore[union-attr]
