"""thinwire as a checkpoint engine of verl, at both ends, as tested with verl 0.9.1.

verl imports this module by its configuration, and importing it registers the backend::

    actor_rollout_ref.rollout.checkpoint_engine.backend=thinwire
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=thinwire.uses.following.hosts.verl_engine

The trainer's first rank publishes what verl hands over, and each node of rollouts follows it once: its other
ranks follow the first one there. ``engine_kwargs.thinwire`` may have what ``VerlOptions`` has.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thinwire.links.address import shown
from thinwire.links.security import read_token
from thinwire.types import InputError, MissingExtra, ThinwireError, require
from thinwire.uses.following.hosts.host_signatures import lacking, signatures
from thinwire.uses.following.hosts.rollout_weights import RolloutWeights, TrainerAddress
from thinwire.uses.following.push.publisher import Publisher

TESTED = "0.9"
BACKEND, ENGINE = "thinwire", "ThinwireCheckpointEngine"
MODULE, BASE, REGISTRY = "verl.checkpoint_engine.base", "CheckpointEngine", "CheckpointEngineRegistry"
LOOPBACK = "127.0.0.1"
WIDE = torch.float32, torch.float64
# What this overrides or calls, and the parameters behind ``self`` or ``cls``.
CALLED: dict[str, dict[str, tuple[str, ...]]] = {
    BASE: {
        "prepare": (),
        "build_topology": ("actor_wg_world_size", "rollout_world_size", "metadata"),
        "init_process_group": ("kwargs",),
        "finalize": (),
        "send_weights": ("weights", "global_steps"),
        "receive_weights": ("global_steps",),
    },
    REGISTRY: {
        "register": ("backend",),
        "record_import_error": ("module", "error"),
        "new": ("backend", "args", "kwargs"),
    },
}


@dataclass(frozen=True)
class VerlOptions:
    """What ``engine_kwargs.thinwire`` may have; the same for trainer and rollouts.

    ``host``, ``port``: where the trainer's first rank listens; port 0 takes a free one. ``advertise``: the
    address that rollouts dial, where it is not that of the trainer's node. ``token_file``: what proves that
    one may follow; without it THINWIRE_TOKEN, or else a token made for this training. Ray carries it to the
    rollouts. ``base``: the checkpoint that training begins with, as rollouts find it: then the first version
    need not cross whole. ``dtype``: "bf16" casts wider floats, "" leaves them. ``timeout``: seconds that a
    rollout waits for a version.
    """

    host: str = "0.0.0.0"
    port: int = 0
    advertise: str = ""
    token_file: str = ""
    base: str = ""
    dtype: str = "bf16"
    timeout: float = 600.0

    def __post_init__(self) -> None:
        require(
            self.dtype in ("bf16", ""), InputError, f"dtype={self.dtype!r} is not known here; give bf16 or ''"
        )
        require(self.timeout > 0, InputError, f"timeout={self.timeout} is not above 0 seconds; give more")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> VerlOptions:
        """Return options by name. Errors: ``InputError`` naming one that there is not."""
        known = [own.name for own in fields(cls)]
        unknown = ", ".join(sorted(given.keys() - set(known)))
        told = f"engine_kwargs.{BACKEND} has {unknown}, which there is not; it may have {', '.join(known)}"
        require(not unknown, InputError, told)
        return cls(**given)


@dataclass(frozen=True)
class Prepared:
    """What a rank says before a transfer: its node, and where it publishes or could relay (port 0: not)."""

    node: str
    address: str = ""
    token: str = field(default="", repr=False)
    version: int = 0
    relay: int = 0
    relays: bool = False


@dataclass(frozen=True)
class SourceTold:
    """Whom a rollout's rank is to follow, the version that comes, and the port to relay at (0: none)."""

    address: str
    token: str = field(repr=False)
    version: int
    relay: int = 0


class VerlEngine:
    """A checkpoint engine: made by verl in each rank of the trainer and of the rollouts.

    verl's rollouts take all tensors at each update, since some of their ways drop or requantise what there
    was; they are yielded from the follower's copy in the host's memory, one at a time. Nothing is kept on a
    card. The trainer's first rank holds the state twice in the host's memory, a rank of the rollouts twice,
    and one that relays three times.
    """

    wire_format = "named_tensors"

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any) -> None:
        self.bucket_size, self.is_master, self.options = bucket_size, is_master, VerlOptions.of(options)
        self._copy, self._token = HostCopy(bool(self.options.dtype)), ""
        self._publisher: Publisher | None = None
        self._weights: RolloutWeights | None = None
        self._source: SourceTold | None = None  # whom these follow
        self._reserved: socket.socket | None = None

    def prepare(self) -> Prepared:
        """Return what the others need to know of this rank. Errors: ``InputError`` for a token file."""
        ip, node = this_node()
        if not self.is_master:
            port = self._source.relay if self._source else 0
            return Prepared(node, relay=port or self._port(LOOPBACK), relays=port > 0)
        if not self._token:
            self._token = _token(self.options.token_file)
        at = self._publisher.port if self._publisher else self.options.port or self._port(self.options.host)
        newest = self._publisher.newest.number if self._publisher else 0
        return Prepared(node, self.options.advertise or shown(ip, at), self._token, newest + 1)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Prepared]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return what each rank is told: rollouts follow the trainer, or the rank of their node that does."""
        trainer, rollouts = metadata[0], list(metadata[actor_wg_world_size:])
        told = f"the trainer's first rank publishes nothing; give its {BACKEND} engine is_master=True"
        require(bool(trainer.address), InputError, told)
        nodes: dict[str, list[Prepared]] = {}
        for own in rollouts:
            nodes.setdefault(own.node, []).append(own)
        first = {node: next((own for own in all_ if own.relays), all_[0]) for node, all_ in nodes.items()}
        return {}, {"source": [_source(trainer, own, first[own.node], nodes[own.node]) for own in rollouts]}

    def init_process_group(self, source: SourceTold | None = None) -> None:
        """Follow ``source``, unless this rank does so already; a rank of the trainer has none."""
        if source is not None:
            if self._source is None or _way(self._source) != _way(source):
                self._follow(source)
            self._source = source
        if not self.is_master:
            self._release()

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Publish what verl hands over as one version; called on every rank, since verl gathers meanwhile.

        Return its number, and how many values changed. Errors: ``InputError`` naming a tensor that was there
        before and is no more, or has another shape; as ``Publisher``.
        """
        for name, x in weights:
            if self.is_master:
                self._copy.take(name, x)
        if not self.is_master:
            return {}
        tensors = self._copy.all()
        if self._publisher is None:
            port = self.options.port or self._port(self.options.host)
            self._publisher = Publisher(tensors, self.options.host, port, self._token.encode())
            self._release()
        version = self._publisher.publish(global_steps)
        return {f"{BACKEND}/version": version.number, f"{BACKEND}/changed": version.changed}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the version that this transfer brings: valid until the next one.

        Errors: ``LinkError`` naming whom this follows where it does not come in time.
        """
        weights, source = self._weights, self._source
        if weights is None or source is None:
            raise InputError("this rank follows nobody yet; call init_process_group first")
        timeout = self.options.timeout
        await asyncio.to_thread(weights.follower.wait, source.version, timeout, current=True)
        tensors = await asyncio.to_thread(weights.follower.tensors)
        for name, x in tensors.items():
            yield name, self._handed(x)

    def finalize(self) -> None:
        """Do nothing: who follows goes on to."""

    def close(self) -> None:
        """Stop publishing and following. Safe to call twice."""
        publisher, weights = self._publisher, self._weights
        self._publisher = self._weights = self._source = None
        self._release()
        for end in (publisher, weights):
            if end is not None:
                end.close()

    def _follow(self, source: SourceTold) -> None:
        """Follow another source with what is held, which it may know, or else with the checkpoint."""
        had, self._weights, self._source = self._weights, None, None
        held = None if had is None else _held(had)
        if had is not None:
            had.close()
        relay = (LOOPBACK, source.relay) if source.relay else None
        trainer = TrainerAddress(source.address, source.token, base=self.options.base)
        self._weights = RolloutWeights(trainer, relay, held)

    def _handed(self, x: Tensor) -> Tensor:
        """Return a tensor as verl's senders take it: what is larger than a bucket they share by its card."""
        if x.nbytes <= self.bucket_size or not torch.accelerator.is_available():
            return x
        return x.to(torch.accelerator.current_accelerator())

    def _port(self, host: str) -> int:
        """Return a free port at ``host`` that is kept until somebody listens there."""
        if self._reserved is None:
            found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as listeners do
            found.bind((host, 0))
            self._reserved = found
        return int(self._reserved.getsockname()[1])

    def _release(self) -> None:
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.close()


class HostCopy:
    """A trainer's tensors in this machine's memory, to which they come one at a time."""

    def __init__(self, narrow: bool) -> None:
        self._narrow, self._tensors, self._seen = narrow, dict[str, Tensor](), set[str]()

    def take(self, name: str, x: Tensor) -> None:
        """Copy a tensor; of wider floats as bfloat16 where that is wanted."""
        kind = torch.bfloat16 if self._narrow and x.dtype in WIDE else x.dtype
        held = self._tensors.get(name)
        if held is None or held.shape != x.shape or held.dtype != kind:
            held = self._tensors[name] = torch.empty(x.shape, dtype=kind)
        held.copy_(x.detach())
        self._seen.add(name)

    def all(self) -> dict[str, Tensor]:
        """Return all of them. Errors: ``InputError`` naming one that did not come since the last time."""
        left, self._seen = self._tensors.keys() - self._seen, set()
        told = f"verl handed over no {min(left, default='')}, which it did before; hand over all"
        require(not left, InputError, told)
        return self._tensors


def register() -> None:
    """Make the backend known to verl; where its interface is another one, verl says why when asked for it.

    Errors: ``MissingExtra`` without verl.
    """
    registry = getattr(base(), REGISTRY)
    try:
        found = ", ".join(lacking(CALLED, signatures(CALLED, lambda name: getattr(base(), name, None))))
        told = f"verl {version()} has changed: {found} is not as in {TESTED}, which this was written for"
        require(not found, InputError, f"{told}; install verl {TESTED}")
        registry.register(BACKEND)(engine())
    except ThinwireError as e:
        registry.record_import_error(BACKEND, ImportError(str(e)))


def version() -> str:
    """Return the version of verl. Errors: ``MissingExtra``."""
    try:
        return metadata.version("verl")
    except metadata.PackageNotFoundError as e:
        raise MissingExtra("this needs verl: pip install verl, beside a GPU that it runs on") from e


def base() -> ModuleType:
    """Return verl's module of base classes. Errors: ``MissingExtra``; ``InputError`` where it has none."""
    found = version()
    try:
        return import_module(MODULE)
    except ImportError as e:
        raise InputError(f"verl {found} has no {MODULE} ({e}); install verl {TESTED}") from e


@cache
def engine() -> type:
    """Return the engine as a class of verl's. Errors: as ``base``."""
    return type(ENGINE, (VerlEngine, getattr(base(), BASE)), {})


def this_node() -> tuple[str, str]:
    """Return the address of this node among Ray's, and its name there."""
    ray = import_module("ray")
    return ray.util.get_node_ip_address().strip("[]"), ray.get_runtime_context().get_node_id()


def _token(file: str) -> str:
    """Return the token that both ends share. Errors: ``InputError`` for a file that has none."""
    given = read_token(file or None)
    try:
        return secrets.token_hex(32) if given is None else given.decode()
    except UnicodeDecodeError as e:
        raise InputError("the token is no UTF-8, in which it goes to the rollouts; give a text") from e


def _source(trainer: Prepared, own: Prepared, first: Prepared, all_: Sequence[Prepared]) -> SourceTold:
    """Return whom a rank follows; ``first`` of ``all_`` on its node follows the trainer, for all of them."""
    if own is first:
        relay = own.relay if len(all_) > 1 or own.relays else 0
        return SourceTold(trainer.address, trainer.token, trainer.version, relay)
    return SourceTold(shown(LOOPBACK, first.relay), trainer.token, trainer.version)


def _way(source: SourceTold) -> tuple[str, str, int]:
    return source.address, source.token, source.relay


def _held(weights: RolloutWeights) -> dict[str, Tensor] | None:
    try:
        return weights.follower.tensors()
    except ThinwireError:  # nothing came yet, or it has ended: then it is begun anew
        return None


def _is_here() -> bool:
    try:
        version()
    except MissingExtra:
        return False
    return True


if _is_here():
    register()
