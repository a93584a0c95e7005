"""A model over this machine and workers: the calls that one script makes here are made by all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from thinwire.collectives import MeshExchange
from thinwire.links.address import Address
from thinwire.links.security import check_host
from thinwire.types import InputError, LinkError, require
from thinwire.uses.pictures.absent_block import check_part, part_of
from thinwire.uses.pictures.agreement import Parallel, check_given
from thinwire.uses.pictures.comfy_names.comfy_attention import prepared
from thinwire.uses.pictures.comfy_names.comfy_models import COMFY, loaded_family, sendable
from thinwire.uses.pictures.context_parallel.parallel import BATCH, ONE
from thinwire.uses.pictures.context_parallel.recipes import division_of, parallel
from thinwire.uses.pictures.diffusers_names.hooks import hooked
from thinwire.uses.pictures.diffusers_names.told_calls import ToldCalls
from thinwire.uses.pictures.workers.call_messages import CALLS, CallWriter, HostCall, HostTurn
from thinwire.uses.pictures.workers.worker_crew import close, hired
from thinwire.uses.pictures.workers.worker_session import CALLS as EXCHANGE
from thinwire.uses.pictures.workers.worker_session import SILENCE
from thinwire.uses.pictures.workers.worker_words import DIFFUSERS, MOST_RANKS, WorkerJob, address_of

if TYPE_CHECKING:
    from torch import nn


class ParallelWorkers(Parallel):
    """A model that runs over this machine and its workers: what it exchanged so far, and what they were sent.

    ``input_nbytes``: bytes of the inputs of calls, to all workers together; they are among ``tally.nbytes``.
    """

    def __init__(self, found: Parallel, exchange: MeshExchange) -> None:
        super().__init__(found.mode, found._session)
        self.input_nbytes = 0
        self._exchange, self._writer, self._step = exchange, CallWriter(), 0

    def reset(self) -> None:
        """Let the next call of the model begin a new picture, on all machines."""
        super().reset()
        with suppress(LinkError):  # the next call says so, if there is one
            self._send(CALLS.pack(HostTurn.RESET, []))

    def call(self, stream: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the workers make a call of the model. Errors: ``InputError``, ``LinkError``."""
        self._send(self._writer.pack(HostCall(stream, args, kwargs)))

    def end(self) -> None:
        """Let the workers wait for the next host."""
        with suppress(LinkError):
            self._send(CALLS.pack(HostTurn.END, []))

    def _send(self, body: bytes) -> None:
        self._exchange.hand_over(self._step, dict.fromkeys(self._exchange.peers, body))
        self._step += 1
        nbytes = len(body) * len(self._exchange.peers)
        self.tally.nbytes += nbytes
        self.input_nbytes += nbytes


@contextmanager
def over_workers(
    transformer: nn.Module,
    workers: Sequence[str],
    recipe: str = "compact",
    mode: str | None = None,
    *,
    model: str,
    token: bytes | None = None,
    deadline: float = 60.0,
    patience: float = 600.0,
    source: str = DIFFUSERS,
) -> Iterator[ParallelWorkers]:
    """Run a transformer over this machine and ``workers`` inside the block; leave it as it was.

    The script runs here alone. Each worker is a ``thinwire worker`` on another machine. It has its own copy
    of the model, is sent the inputs of each call, and makes the call as well::

        with thinwire.over_workers(pipe.transformer, ["192.0.2.2"], "compact", model="flux", token=token):
            picture = pipe(prompt).images[0]

    - ``transformer``, ``recipe``, ``mode``: as for ``thinwire.parallel``; not in modes batch and one. Of one
      that ``load_part`` made, the workers load their blocks alone;
    - ``workers``: their addresses, ``HOST`` or ``HOST:PORT``; port 29600 where none is given;
    - ``model``: its name below the workers' ``--models``;
    - ``token``: the workers' own, as ``thinwire.read_token`` reads it; needed off loopback;
    - ``deadline``: seconds without any data after which a wait for a worker fails;
    - ``patience``: seconds for the workers to load the model;
    - ``source``: whose classes the model is of: ``diffusers`` or ``comfy``.

    Errors: ``InputError`` for what cannot be spread, or what a worker refuses, such as other weights;
    ``LinkError`` naming a worker that is not there, is busy, or is lost; ``AuthError`` for another token.
    """
    check_given(transformer, recipe, deadline)
    addresses = check_workers(workers, recipe, mode, model, token)
    reduced = partial(sendable, transformer, loaded_family(transformer)) if source == COMFY else None
    check_part(transformer, mode or division_of(recipe).mode, 0, len(addresses) + 1)
    part = part_of(transformer)
    blocks = () if part is None else tuple(map(len, part.ranges))
    kind, dtype = type(transformer).__name__, _dtype(transformer)
    jobs = [
        WorkerJob(model, kind, dtype, recipe, mode, rank, len(addresses) + 1, address.host, source, blocks)
        for rank, address in enumerate(addresses, 1)
    ]
    with ExitStack() as stack:
        crew = stack.enter_context(hired(addresses, token, deadline, patience))
        crew.begin(jobs)
        peers = crew.connect(token, min(SILENCE, deadline))
        stack.callback(close, peers)
        stack.enter_context(crew.named())
        exchange = MeshExchange(0, peers, name=EXCHANGE)
        stack.callback(exchange.close, 1.0)
        stack.enter_context(prepared(transformer, source))
        found = stack.enter_context(parallel(transformer, peers, recipe, mode, deadline=deadline))
        made = ParallelWorkers(found, exchange)
        stack.callback(made.end)
        stack.callback(hooked(transformer, ToldCalls(made, reduced), "workers"))
        yield made


def check_workers(
    workers: Sequence[str], recipe: str, mode: str | None, model: str, token: bytes | None
) -> list[Address]:
    """Return the addresses of workers that can be asked so. Errors: ``InputError``, one sentence."""
    asked = mode or division_of(recipe).mode
    text = f"in mode {asked} workers have nothing to do with a picture of this machine; take another recipe"
    require(asked not in (ONE, BATCH), InputError, text)
    named = isinstance(model, str) and bool(model.strip())
    require(
        named, InputError, f"model={model!r:.60} is no name; give the model's below the workers' --models"
    )
    listed = not isinstance(workers, str) and all(isinstance(each, str) for each in workers)
    require(listed, InputError, f"{workers!r:.60} is no list of addresses; give it like ['192.0.2.2:29600']")
    text = f"{len(workers)} workers are given; give 1 to {MOST_RANKS - 1} addresses"
    require(0 < len(workers) < MOST_RANKS, InputError, text)
    addresses = [address_of(each) for each in workers]
    twice = [str(address) for address, n in Counter(addresses).items() if n > 1]
    require(not twice, InputError, f"the worker {' and '.join(twice)} is given twice; give each once")
    for address in addresses:
        check_host(address.host, token)
    return addresses


def _dtype(transformer: nn.Module) -> str:
    """Return the type of most of a model's weights: what it was loaded in."""
    sizes = Counter[str]()
    for p in transformer.parameters():
        sizes[str(p.dtype).removeprefix("torch.")] += p.numel()
    return sizes.most_common(1)[0][0] if sizes else "float32"
