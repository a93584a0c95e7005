"""The documentation: it builds, its links lead somewhere, its code runs, its commands and bytes are real."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer.main

from thinwire.channels import wire
from thinwire.channels.channel import Scheme, Sender
from thinwire.channels.memory import Delta
from thinwire.cli.app import app
from thinwire.codecs import REGISTRY, Uniform

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    # Not --quiet: it makes --strict blind to warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:  # nothing is fetched when a page is opened
        assert not re.search(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)"', page.read_text()), page
    for page in sorted((ROOT / "docs").glob("*.md")):  # a fence that is not understood takes text for code
        headings = re.findall(r"^## ", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), re.M)
        built = (tmp_path / page.with_suffix(".html").name).read_text()
        assert built.count("<h2 id=") == len(headings), page.name


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files(page: Path) -> None:
    prose = BLOCK.sub("", page.read_text())
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", prose)
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []


RUN = ("../README.md", "index.md", "recipes.md", "inside-recipes.md")
PACKED = ("codecs.md", "state.md", "inside-following.md")  # they need zstandard


@pytest.mark.parametrize("name", (*RUN, *PACKED))
def test_python_in_the_docs_runs(name: str) -> None:
    if name == RUN[0] or name in PACKED:
        pytest.importorskip("zstandard")
    blocks = [code for kind, code in BLOCK.findall((ROOT / "docs" / name).read_text()) if kind == "python"]
    assert blocks
    for code in blocks:
        if "torchrun" in code:
            continue  # test_example.py runs it
        exec(compile(code, name, "exec"), {})


def test_a_page_of_use_begins_with_a_command_and_is_short() -> None:
    shelf = (ROOT / "mkdocs.yml").read_text().partition("- Use:")[2].partition("- Results:")[0]
    pages = re.findall(r": (\S+\.md)", shelf)
    assert len(pages) >= 10
    for page in pages:
        text = (ROOT / "docs" / page).read_text()
        own, tables = re.subn(r"<!-- table:.*?<!-- end -->", "", text, flags=re.S)
        assert len(own.split()) <= 1200 and tables <= 2, page
        assert "```" in text.splitlines()[:12], page


def commands() -> list[tuple[str, str]]:
    """Return every command line with thinwire in it, continued lines joined, by page."""
    found = []
    for page in PAGES:
        for _, code in BLOCK.findall(page.read_text()):
            for line in code.replace("\\\n", " ").splitlines():
                line = line.partition("#")[0]
                if re.search(
                    r"(^|[\s/])thinwire (train|compare|report|doctor|recipes|demo|publish|follow|inspect)\b",
                    line,
                ):
                    found.append((named(page), line))
    return found


def test_commands_in_the_docs_have_only_real_options() -> None:
    known = {
        name: {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, command in typer.main.get_group(app).commands.items()
    }
    lines = commands()
    assert len(lines) >= 8
    for page, line in lines:
        command, own = re.findall(r"thinwire ([a-z]+)\b(.*)", line)[0]
        assert set(re.findall(r"--[a-z-]+", own)) <= known[command], f"{page}: {line}"


def test_recipes_in_the_docs_are_read() -> None:
    from thinwire.uses.training.pipeline.recipes import parse_recipe
    from thinwire.uses.training.replicas.recipes import parse_replica_recipe

    for _, line in commands():
        if (found := re.search(r"--recipe (\S+)", line)) is not None:
            parse_recipe(found[1])
        if (found := re.search(r"--replica-recipe (\S+)", line)) is not None:
            parse_replica_recipe(found[1])
        if "thinwire compare" in line:
            parse = parse_replica_recipe if "--replicas" in line else parse_recipe
            for word in line.partition("compare ")[2].partition(" --")[0].split():
                parse(word)


def test_the_example_of_the_wire_format_is_real() -> None:
    page = (ROOT / "docs" / "wire-format.md").read_text()
    example = next(code for _, code in BLOCK.findall(page) if code.startswith("54 57"))
    told = b"".join(
        bytes.fromhex(re.match(r"(?:[0-9a-f]{2} )*[0-9a-f]{2}", line)[0]) for line in example.splitlines()
    )  # type: ignore[index]
    sender, x = Sender(Scheme(Uniform(bits=4), Delta())), torch.tensor([[1.0, -2.0, 0.5]])
    sender.encode(x, [5])
    packet, _ = sender.encode(x + torch.tensor([[0.0, 0.5, -0.25]]), [5])
    assert told == wire.pack(packet)
    assert f"{len(told)} bytes" in page


def test_the_tables_of_the_wire_format_are_complete() -> None:
    from thinwire.links.pair.segment import HEADER, LABELS, Kind

    page = (ROOT / "docs" / "wire-format.md").read_text()
    codes = ", ".join(f"{i} {str(d).removeprefix('torch.')}" for i, d in enumerate(wire.DTYPES))
    assert codes in page
    assert all(f"| {k.value} | {k.name} |" in page for k in Kind)
    assert ", ".join(f"{i} {name}" for i, name in enumerate(LABELS)) in page
    assert f"{HEADER} bytes of header" in page and f"Packet, version {wire.VERSION}" in page


def test_every_room_is_on_the_page_of_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    src = ROOT / "src" / "thinwire"
    rooms = {f"{p.parent.name}/" for d in (src, src / "runs") for p in d.glob("*/__init__.py")}
    rooms |= {f"uses/{p.parent.name}/" for p in (src / "uses").glob("*/__init__.py")}
    rooms |= {p.stem for d in (src, src / "runs", src / "uses") for p in d.glob("[!_]*.py")}
    assert {room for room in rooms if f"`{room}`" not in page} == set()


def test_the_figures_on_the_first_screen_are_those_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = [row for row in readme.partition("\n```")[0].splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) >= 5
    for row in rows:
        figures, page = row.rpartition(" | ")[2], re.findall(r"\]\(([^)#]*)", row)[0]
        source = (ROOT / page).read_text() if page else readme.partition("<!-- table")[2]
        for figure in re.findall(r"\d+\.\d+|\d+(?=×| %)", re.sub(r"\([^)]*\)", "", figures)):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", source), f"{figure} is not in {page}"


def test_every_codec_is_in_the_table_and_its_size_is_known_where_it_says_so() -> None:
    page = (ROOT / "docs" / "codecs.md").read_text()
    known = dict(re.findall(r"^\| `(\w+)` \|.*\| (yes|no|as inside) \|[^|]*\|$", page, re.MULTILINE))
    assert known.keys() == REGISTRY.keys()
    with_layout = {name for name, codec in REGISTRY.items() if hasattr(codec, "layout")}
    assert {name for name, size in known.items() if size != "no"} == with_layout
