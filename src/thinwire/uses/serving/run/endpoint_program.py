"""The first stage behind an endpoint: HTTP on a thread of its own, until a signal or an error of the ring."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import closing

from thinwire.runs.ranks.rank_main import next_order, say
from thinwire.runs.records.run_record import status_of
from thinwire.uses.serving.run.asked_texts import AskedReader
from thinwire.uses.serving.run.chat_api import Served, application
from thinwire.uses.serving.run.endpoint.listening import own_endpoint
from thinwire.uses.serving.run.endpoint.open_connections import http_server, most_connections
from thinwire.uses.serving.run.options import EndpointConfig
from thinwire.uses.serving.run.stage_program import FirstStage, run_stage
from thinwire.uses.serving.run.text_recorder import TextRecorder

FAREWELL = 3  # seconds for answers under way, and as many to say that nothing follows
LOOK = 0.2  # seconds


def run_rank(config: EndpointConfig) -> None:
    """Run this process's stage; the first one has the endpoint."""
    run_stage(config, lambda first: serve(config, first), config.resume_requests)


def serve(config: EndpointConfig, first: FirstStage) -> None:
    """Answer calls until a signal comes. Errors: ``InputError`` for an address that is taken."""
    recorder = TextRecorder(first)
    first.engine.ended = recorder.ended
    try:
        _answer(config, first)
    except BaseException as e:
        recorder.close(status_of(e))
        raise
    recorder.close("done")


def _answer(config: EndpointConfig, first: FirstStage) -> None:
    source, room = first.source, config.cache
    longest = getattr(source.config, "max_position_embeddings", None) or room
    reader = AskedReader(source.tokenizer, source.config.vocab_size, min(room, longest))
    served = Served(first.engine, reader, source.tokenizer, source.name, first.ends, config.read_key())
    most, told = most_connections()
    if told and not config.quiet:
        sys.stderr.write(f"{told}\n")
    with closing(own_endpoint(config)) as listener:
        server = http_server(application(served), most, 2 * FAREWELL)
        thread = threading.Thread(target=server.run, args=([listener],), name="endpoint", daemon=True)
        thread.start()
        say("listening", host=config.endpoint[0], port=listener.getsockname()[1])
        try:
            _await_end(first, lambda: first.engine.error is not None or not thread.is_alive())
        finally:
            server.should_exit = True
            thread.join(FAREWELL)
            first.engine.close()  # so that whoever still waits hears that nothing follows
            thread.join(FAREWELL)
    if first.engine.error is not None:
        raise first.engine.error


def _await_end(first: FirstStage, is_over: Callable[[], bool]) -> None:
    """Wait until something is over, or a signal comes; hear meanwhile who was lost."""
    while not is_over():
        match next_order(LOOK):
            case ["lost", index, *why]:
                first.engine.lose(int(index), " ".join(why))
