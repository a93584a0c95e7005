"""The seam with Flower: all that is asked of flwr beyond its public names, as tested with version 1.42.0."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module, metadata
from typing import Any

from thinwire.types import InputError, MissingExtra, require

TESTED = "1.42"
TRAIN = "train"
CLIPPING = "clipping_norm"  # what strategies that clip at clients tell these in their config
_FAILED, _RAISED = "MOD_FAILED_PRECONDITION", "CLIENT_APP_RAISED_EXCEPTION"
_GONE = ("NODE_UNAVAILABLE", "MESSAGE_UNAVAILABLE", "REPLY_MESSAGE_UNAVAILABLE")
_ID = "_message_id"
_CONTEXT = ["run_id", "node_id", "node_config", "state", "run_config"]


def version() -> str:
    """Return the version of flwr. Errors: ``MissingExtra``."""
    try:
        return metadata.version("flwr")
    except metadata.PackageNotFoundError as e:
        raise MissingExtra("this needs Flower: pip install 'thinwire[flower]'") from e


def app() -> Any:
    """Return the module ``flwr.app``. Errors: ``MissingExtra``; ``InputError`` for a version not tested."""
    found = version()
    text = f"flwr {found} is not {TESTED}; pip install 'thinwire[flower]' brings one that is"
    require(found.startswith(f"{TESTED}."), InputError, text)
    return import_module("flwr.app")


def check_host() -> None:
    """Raise ``InputError`` unless flwr has all that this file relies on."""
    app()
    try:
        lacks = ", ".join(_lacking())
    except (ImportError, AttributeError, TypeError, ValueError) as e:  # what is gone, or takes other values
        lacks = str(e)
    wrong = f"flwr {version()} has changed: {lacks} is not as expected; pin 1.42.0"
    require(not lacks, InputError, wrong)


def _lacking() -> Iterator[str]:
    flwr, codes, task = app(), _codes(), _task()
    names = (_FAILED, _RAISED, *_GONE)
    yield from (f"ErrorCode.{n}" for n in names if not isinstance(getattr(codes, n, None), int))
    yield from (f"TaskIdentity.{n}" for n in ("task_id", "run_id", "node_id") if not hasattr(type(task), n))
    if flwr.MessageType.TRAIN != TRAIN:
        yield "MessageType.TRAIN"
    if [*inspect.signature(flwr.Context).parameters][: len(_CONTEXT)] != _CONTEXT:
        yield "Context"
    if _ID not in vars(flwr.Metadata(0, "", 0, 0, "", "", 0.0, 1.0, TRAIN)):
        yield "Metadata"


def _codes() -> Any:
    return import_module("flwr.common.constant").ErrorCode


def _task() -> Any:
    return import_module("flwr.supercore.task_identity").TaskIdentity


def failed(message: Any, reason: str, code: int | None = None) -> Any:
    """Return the reply to a message that a mod could not handle, or that failed by another ``code``."""
    flwr, own = app(), int(getattr(_codes(), _FAILED))
    return flwr.Message(flwr.Error(own if code is None else code, reason), reply_to=message)


def raised(message: Any, error: Exception) -> Any:
    """Return the reply to a message that made an app raise."""
    return failed(message, f"{type(error).__name__}: {error}", int(getattr(_codes(), _RAISED)))


def is_gone(code: int) -> bool:
    """Return whether an error says that a node is not there, rather than that it failed."""
    return code in {int(getattr(_codes(), name)) for name in _GONE}


def be_server() -> None:
    """Let this process be a server's, who may make messages."""
    task = _task()
    task.task_id, task.run_id, task.node_id = 1, 1, 1


def number(message: Any, text: str) -> None:
    """Give a message its id, as the SuperLink does."""
    vars(message.metadata)[_ID] = text


def context(node: int, node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Any:
    """Return the context of a node before its first message."""
    flwr = app()
    return flwr.Context(1, node, dict(node_config), flwr.RecordDict(), dict(run_config))
