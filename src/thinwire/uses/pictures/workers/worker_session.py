"""What a worker does for one host after the other: load its model, be a rank, and make its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.collectives import MeshExchange
from thinwire.links.hub.hub import Hub
from thinwire.links.mesh import Peer, connect_mesh
from thinwire.types import LinkError, ThinwireError
from thinwire.uses.pictures.comfy_names.comfy_attention import prepared
from thinwire.uses.pictures.context_parallel.recipes import parallel
from thinwire.uses.pictures.workers.call_messages import CallReader, HostCall, HostTurn
from thinwire.uses.pictures.workers.worker_door import HostVisit, Words, WorkerDoor
from thinwire.uses.pictures.workers.worker_models import AskedModel, KeptModel
from thinwire.uses.pictures.workers.worker_words import MOST_TEXT, MeetingBoard, WorkerJob, WorkerWord

CALLS = "workers"  # the exchange of calls
SILENCE = 20.0  # seconds without a sign of life after which a link counts as lost, at most


@dataclass(frozen=True)
class WorkerWaits:
    """Where a worker waits, and how long: ``deadline`` for data of a call, ``idle`` for the next one [s]."""

    host: str
    token: bytes | None
    deadline: float = 60.0
    idle: float = 900.0


def wait_for_hosts(
    hub: Hub, kept: KeptModel, waiting: WorkerWaits, tell: Callable[[str], object] = lambda text: None
) -> None:
    """Serve one host after the other at ``hub``, until interrupted. What goes wrong with one is told.

    Errors: ``LinkError`` where the port itself has failed.
    """
    door = WorkerDoor(hub, tell)
    try:
        while True:
            visit = door.next()
            if visit is not None:
                _serve(visit, hub, kept, waiting, tell)
    finally:
        door.close()


def _serve(
    visit: HostVisit, hub: Hub, kept: KeptModel, waiting: WorkerWaits, tell: Callable[[str], object]
) -> None:
    job = visit.job
    try:
        tell(f"{visit.name}: {job.model} by {job.recipe}, rank {job.rank} of {job.world}")
        model = _loaded(visit, kept)
        with _met(visit, hub, waiting) as peers:
            calls = _follow(visit, model, kept.device, peers, waiting, tell)
        tell(f"{visit.name} has ended: {calls} calls")
    except ThinwireError as e:
        tell(f"{visit.name}: {str(e).removeprefix(visit.name).strip()}")
    except Exception as e:  # any, such as a full card: the next host may ask for less
        tell(f"{visit.name}: {_said(e)}")
    finally:
        visit.end("its turn is over")


def _loaded(visit: HostVisit, kept: KeptModel) -> nn.Module:
    """Return the model that the host asks for; tell it why not otherwise."""
    job = visit.job
    try:
        model = kept.get(_asked(job))
    except Exception as e:
        visit.say(WorkerWord.REFUSED, text=_said(e))
        if isinstance(e, ThinwireError):
            raise
        raise LinkError(f"{job.model} cannot be loaded: {_said(e)}") from e
    visit.say(WorkerWord.READY)
    return model


def _asked(job: WorkerJob) -> AskedModel:
    rank = job.rank if job.blocks else 0  # a whole model serves any rank
    return AskedModel(job.model, job.kind, job.dtype, job.source, job.blocks, rank)


@contextmanager
def _met(visit: HostVisit, hub: Hub, waiting: WorkerWaits) -> Iterator[Mapping[int, Peer]]:
    """Be a rank of the host's mesh in the block: this end listens, the host dials."""
    board = MeetingBoard(
        lambda key, value: visit.say(WorkerWord.NOTE, key=key, value=value), lambda: _read(visit, board)
    )
    visit.wait(WorkerWord.CONNECT, waiting.idle, lambda words: _take(board, words))
    peers = _connected(visit, board, hub.port + 1, waiting)
    try:
        visit.over(peers)
        visit.say(WorkerWord.MET)
        yield peers
    finally:
        visit.over({})
        for peer in peers.values():
            peer.close(0.0 if visit.gone else 1.0)


def _connected(visit: HostVisit, board: MeetingBoard, port: int, waiting: WorkerWaits) -> Mapping[int, Peer]:
    """Return the links to the others; tell the host why there are none otherwise, such as a taken port."""
    job = visit.job
    try:
        return connect_mesh(
            job.rank,
            job.world,
            board,
            host=waiting.host,
            port=port,
            advertise=job.reach,
            token=waiting.token,
            deadline=min(SILENCE, waiting.deadline),
            connect_timeout=waiting.deadline,
            first_dials=True,
        )
    except ThinwireError as e:
        visit.say(WorkerWord.FAILED, text=_said(e))
        raise


def _read(visit: HostVisit, board: MeetingBoard) -> None:
    while (words := visit.hear()) is not None:
        _take(board, words)


def _take(board: MeetingBoard, words: Words) -> None:
    if words[0] is WorkerWord.NOTE:
        board.put(words[1])


def _follow(
    visit: HostVisit,
    model: nn.Module,
    device: torch.device,
    peers: Mapping[int, Peer],
    waiting: WorkerWaits,
    tell: Callable[[str], object],
) -> int:
    """Make the host's calls until it ends; return how many. One that fails is told, and the next awaited."""
    job, calls, step = visit.job, 0, 0
    exchange, reader = MeshExchange(job.rank, peers, name=CALLS), CallReader(device)
    try:
        with (
            torch.no_grad(),
            prepared(model, job.source),
            parallel(model, peers, job.recipe, job.mode, deadline=waiting.deadline) as found,
        ):
            while True:
                data = exchange.receive(0, step, waiting.idle, "the next call of the model")
                step += 1
                turn, call = reader.unpack(data)
                if turn is HostTurn.END:
                    return calls
                if call is None:
                    found.reset()
                    continue
                calls += 1
                try:
                    _call(model, call)
                except Exception as e:  # any, such as a full card: the host hears of it, and may try again
                    visit.say(WorkerWord.FAILED, text=_said(e))
                    tell(f"{visit.name}: call {calls} failed: {_said(e)}")
    except Exception as e:
        visit.say(WorkerWord.FAILED, text=_said(e))
        raise
    finally:
        exchange.close(0.0)


def _call(model: nn.Module, call: HostCall) -> None:
    with _stream(model, call.stream):
        model(*call.args, **call.kwargs)


def _stream(model: Any, name: str | None) -> AbstractContextManager[Any]:
    named = name is not None and hasattr(model, "cache_context")
    return model.cache_context(name) if named else nullcontext()


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, ThinwireError) else f"{type(error).__name__}: {text}")[:MOST_TEXT]
