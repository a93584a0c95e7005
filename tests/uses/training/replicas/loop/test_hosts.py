"""Local steps where they are used: sites of several processes, and the frameworks that own a loop."""

from __future__ import annotations

import itertools
import re
import signal
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from launchers import free_port, hosted_store, rank_environment, warm

HERE = Path(__file__).parent
RANKS, FORK = HERE / "sharded_ranks.py", HERE.parent / "fork_ranks.py"
EXAMPLES = Path(__file__).parents[5] / "examples/loops"
KINDS = ["fsdp", "fsdp whole", "fsdp thinwire", "tensor parallel", "ddp", "ddp whole", "ddp auto"]
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
    """All have the same bits, and by an exact recipe those of one site, where nothing rounds."""
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


@pytest.mark.parametrize(
    "kind, host, processes",
    [("lora", "peft", 1), ("whole", "transformers", 2), ("lightning", "lightning", 1)],
)
def test_a_host_resumes_to_the_same_bits(kind: str, host: str, processes: int, tmp_path: Path) -> None:
    """At two sites, of as many processes as a launcher starts there."""
    if find_spec(host) is None:
        pytest.skip(f"{host} is not installed")
    address, stores = f"127.0.0.1:{free_port()}", [hosted_store() for _ in range(2)]
    started = []
    for rank, place in itertools.product(range(2), range(processes)):
        own = rank_environment(place, processes, stores[rank].port) if processes > 1 else {}
        words = (QUIET, HERE / "resumed_host.py", kind, address, rank, tmp_path)
        where, needs = tmp_path / f"{rank}-{place}", [host, "thinwire:local_steps"]
        started.append(warm().python(where, "-c", *words, needs=needs, ACCELERATE_USE_CPU="true", **own))
    assert {site.wait(LONG) for site in started} == {0}, started[0].said[-3000:]
    said = {re.findall(r"(same|APART) (\w+)", site.out)[0] for site in started}
    assert len(said) == 1 and said.pop()[0] == "same"
