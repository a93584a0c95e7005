"""Start the stages on this machine, and hear what the first one says."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from thinwire.links.address import shown
from thinwire.runs.machine.interrupts import GRACE, stopped_by_signals
from thinwire.runs.ranks.launcher import launcher_of
from thinwire.runs.ranks.supervise import Workers
from thinwire.uses.serving.run.endpoint.listening import HANDED, open_endpoint
from thinwire.uses.serving.run.options import ContinueConfig, EndpointConfig, StagesConfig
from thinwire.uses.serving.run.stage_program import prepared

ENDPOINT = "thinwire.uses.serving.run.endpoint_program:run_rank"
CONTINUE = "thinwire.uses.serving.run.continue_program:run_rank"
LOAD = 600.0  # seconds to load a model
LIVED = 10.0  # seconds: a stage that is lost sooner after it was started again is given up


def serve(config: EndpointConfig, listening: Callable[[str], object]) -> None:
    """Serve until a signal comes; ``listening`` is told where. Errors: of the stage that failed first.

    This process listens and hands that over to the first stage, which may be in a network of its own.
    """
    with open_endpoint(config) as endpoint, _started(config, ENDPOINT, {HANDED: endpoint.fileno()}) as ranks:
        endpoint.close()  # only the first stage has it from here on
        where = ranks.until("listening", 0, LOAD)
        listening(shown(where["host"], where["port"]))
        _watch(config, ranks)


def _watch(config: EndpointConfig, ranks: Workers) -> None:
    """Watch over the stages to their end; start one again that is lost, where requests are to go on.

    Errors: of the stage that failed first, once clients have heard of it.
    """
    began = dict.fromkeys(range(config.ranks), -math.inf)
    while (failure := ranks.watch()) is not None:
        rank, lost = failure.rank, failure.rank > 0 and failure.returned < 0
        if lost:
            ranks.order(0, f"lost {rank} it {failure.how}")
        if not lost or not config.resume_requests or time.monotonic() - began[rank] < LIVED:
            with suppress(subprocess.TimeoutExpired):
                ranks.processes[0].wait(GRACE if lost else 0)
            ranks.wait()
        began[rank] = time.monotonic()
        ranks.restart(config, rank)


def go_on(config: ContinueConfig, show: Callable[[str], object]) -> dict[str, Any]:
    """Continue a prompt, show pieces of text as they come, and return what that took."""
    text = ""
    with _started(config, CONTINUE) as ranks:
        while True:
            rank, said = ranks.hear(LOAD)
            if rank == 0 and said["kind"] == "text":
                text += said["text"]
                show(said["text"])
            elif rank == 0 and said["kind"] == "end":
                break
        ranks.wait()
    return {k: v for k, v in said.items() if k not in ("kind", "at")} | {"text": text}


@contextmanager
def _started(
    config: StagesConfig, program: str, handed: Mapping[str, int] | None = None
) -> Iterator[Workers]:
    """Start all stages; ``handed``: descriptors of this process for the first one."""
    prepared(config)
    with stopped_by_signals(), launcher_of(config) as place, Workers(place, program) as ranks:
        for rank in range(config.ranks):
            ranks.start(config, None if rank else handed)
        yield ranks
