"""The scripts of the README and the docs: run as a user runs them, and shown as they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from launchers import free_port, warm

ROOT = Path(__file__).parents[1]
SCRIPT, PIPELINE = (ROOT / "examples" / name for name in ("own_loop.py", "own_pipeline.py"))
NEEDS = {
    SCRIPT: ("torch.distributed.pipelining", "thinwire:CompressedStage"),
    PIPELINE: ("diffusers:FluxPipeline", "thinwire:parallel"),
}


def code_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def test_it_is_short() -> None:
    assert len(code_lines(SCRIPT.read_text())) <= 20


def run(folder: Path, script: Path = SCRIPT, world: int = 2) -> list[str]:
    """Run a script in two processes; return what each said."""
    common: dict[str, Any] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": world}
    common |= {"GLOO_SOCKET_IFNAME": "lo"}
    options = common | {"needs": NEEDS[script], "cwd": folder}
    ranks = [warm().python(folder / str(r), script, RANK=r, **options) for r in range(world)]
    assert [p.wait() for p in ranks] == [0] * world, [p.err for p in ranks]
    return [p.out for p in ranks]


def test_two_processes_train_with_it(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    first, last = run(tmp_path)
    assert "[]" in first
    losses = [ast.literal_eval(found) for found in re.findall(r"\[.+\]", last)]
    means = [sum(step) / len(step) for step in losses]
    assert len(means) == 12
    assert means[-1] < means[0] - 2  # from near ln 256 down: gradients came through, first and later visits


def test_the_readme_shows_it_as_it_is() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r'```python title="own_loop"\n(.*?)```', text, re.DOTALL)
    assert len(blocks) == 1, "README.md needs one block marked own_loop"
    assert blocks[0] == SCRIPT.read_text()


def test_two_processes_make_one_picture_with_the_other(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    words = re.compile(r"rank \d: mean (\S+), sent (\d+) bytes")
    first, second = (words.findall(said)[0] for said in run(tmp_path, PIPELINE))
    assert first[0] == second[0] and int(first[1]) > 0


def test_the_docs_show_it_as_it_is() -> None:
    text = (ROOT / "docs" / "pictures.md").read_text()
    assert f"```python\n{PIPELINE.read_text()}```" in text
