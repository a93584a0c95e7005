"""Local steps where they are used: sites of several processes, and the frameworks that own a loop."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from launchers import free_port, warm

HERE = Path(__file__).parent
RANKS, FORK = HERE / "sharded_ranks.py", HERE.parent / "fork_ranks.py"
EXAMPLES = Path(__file__).parents[5] / "examples/loops"
KINDS = ["fsdp", "fsdp thinwire", "tensor parallel", "ddp", "ddp auto"]
HOSTS = {"any_loop": "torch", "with_accelerate": "accelerate", "with_trainer": "transformers"}
HOSTS |= {"with_lightning": "lightning"}
QUIET = """
import runpy, sys, warnings
warnings.simplefilter("ignore")  # what the hosts warn of is theirs
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LONG = 240.0  # seconds; a limit, not an expectation


def test_two_sites_of_two_processes(tmp_path: Path) -> None:
    """All have the same bits, and by an exact recipe those of one site with all of the data."""
    store = tmp_path / "store"
    started = warm().python(tmp_path, FORK, RANKS, 4, store)
    try:
        started.wait(LONG)
    finally:
        with suppress(ProcessLookupError):
            started.signal(signal.SIGKILL, group=True)
    for rank in range(4):
        printed = store.with_name(f"store.{rank}").read_text()
        for kind in KINDS:
            assert f"{kind} same near" in printed.splitlines(), f"rank {rank}:\n{printed[-3000:]}"


@pytest.mark.parametrize("name", HOSTS)
def test_an_example_ends_with_the_same_weights_at_both_sites(name: str, tmp_path: Path) -> None:
    if find_spec(HOSTS[name]) is None:
        pytest.skip(f"{HOSTS[name]} is not installed")
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 40
    address = f"127.0.0.1:{free_port()}"
    needs = [HOSTS[name], "thinwire:local_steps"]
    sites = [
        warm().python(tmp_path / str(rank), "-c", QUIET, script, address, rank, needs=needs)
        for rank in range(2)
    ]
    assert [site.wait(LONG) for site in sites] == [0, 0], sites[0].said[-3000:]
    losses, weights = zip(
        *(re.findall(r"loss ([\d.]+), weights (\S+)", site.out)[0] for site in sites), strict=True
    )
    assert weights[0] == weights[1] and max(map(float, losses)) < 3.5
