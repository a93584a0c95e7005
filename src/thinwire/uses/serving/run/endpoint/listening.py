"""Where an endpoint listens: a socket of the process that starts the stages, handed over to the first one."""

from __future__ import annotations

import os
import socket

from thinwire.types import InputError
from thinwire.uses.serving.run.options import EndpointConfig

MOST = 1000  # connections
HANDED = "THINWIRE_ENDPOINT"  # environment variable: the number of the socket


def open_endpoint(config: EndpointConfig) -> socket.socket:
    """Return a socket that listens. Errors: ``InputError`` for an address that is taken."""
    host, port = config.endpoint
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=MOST)
    except (OSError, OverflowError) as e:
        why = getattr(e, "strerror", None) or e
        raise InputError(f"cannot listen at --listen {config.listen}: {why}; choose another address") from e


def own_endpoint(config: EndpointConfig) -> socket.socket:
    """Return the socket that was handed over to this process, or a new one of ``open_endpoint``."""
    number = os.environ.pop(HANDED, "")
    return socket.socket(fileno=int(number)) if number else open_endpoint(config)
