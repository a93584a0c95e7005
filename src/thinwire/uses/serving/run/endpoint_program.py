"""The first stage behind an endpoint: HTTP on a thread of its own, until a signal or an error of the ring."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import uvicorn

from thinwire.runs.ranks.rank_main import say
from thinwire.runs.records.run_record import status_of
from thinwire.types import InputError
from thinwire.uses.serving.run.asked_texts import AskedReader
from thinwire.uses.serving.run.chat_api import Served, application
from thinwire.uses.serving.run.options import EndpointConfig
from thinwire.uses.serving.run.stage_program import FirstStage, await_end, run_stage
from thinwire.uses.serving.run.text_recorder import TextRecorder

IDLE = 20  # seconds that a connection may keep quiet between two calls
MOST_OPEN = 1000  # connections
FAREWELL = 5  # seconds for answers under way


def run_rank(config: EndpointConfig) -> None:
    """Run this process's stage; the first one has the endpoint."""
    run_stage(config, lambda first: serve(config, first))


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
    with closing(_listener(config)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(
                application(served),
                log_level="warning",
                timeout_keep_alive=IDLE,
                timeout_graceful_shutdown=FAREWELL,
                backlog=MOST_OPEN,
            )
        )
        thread = threading.Thread(target=server.run, args=([listener],), name="endpoint", daemon=True)
        thread.start()
        say("listening", host=config.endpoint[0], port=listener.getsockname()[1])
        try:
            await_end(lambda: first.engine.error is not None or not thread.is_alive())
        finally:
            server.should_exit = True
            thread.join(2 * FAREWELL)
    if first.engine.error is not None:
        raise first.engine.error


def _listener(config: EndpointConfig) -> socket.socket:
    host, port = config.endpoint
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=MOST_OPEN)
    except (OSError, OverflowError) as e:
        why = getattr(e, "strerror", None) or e
        raise InputError(f"cannot listen at --listen {config.listen}: {why}; choose another address") from e
