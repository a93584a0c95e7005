"""Start the stages on this machine, and hear what the first one says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from thinwire.links.address import shown
from thinwire.runs.machine.interrupts import stopped_by_signals
from thinwire.runs.ranks.launcher import launcher_of
from thinwire.runs.ranks.supervise import Workers
from thinwire.uses.serving.run.options import ContinueConfig, EndpointConfig, StagesConfig
from thinwire.uses.serving.run.stage_program import prepared

ENDPOINT = "thinwire.uses.serving.run.endpoint_program:run_rank"
CONTINUE = "thinwire.uses.serving.run.continue_program:run_rank"
LOAD = 600.0  # seconds to load a model


def serve(config: EndpointConfig, listening: Callable[[str], object]) -> None:
    """Serve until a signal comes; ``listening`` is told where. Errors: of the stage that failed first."""
    with _started(config, ENDPOINT) as ranks:
        where = ranks.until("listening", 0, LOAD)
        listening(shown(where["host"], where["port"]))
        ranks.wait()


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
def _started(config: StagesConfig, program: str) -> Iterator[Workers]:
    prepared(config)
    with stopped_by_signals(), launcher_of(config) as place, Workers(place, program) as ranks:
        for _ in range(config.ranks):
            ranks.start(config)
        yield ranks
