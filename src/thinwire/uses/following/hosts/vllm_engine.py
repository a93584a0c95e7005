"""thinwire as a weight-transfer backend of vLLM, at both ends.

Worker: ``vllm serve MODEL --weight-transfer-config '{"backend": "thinwire"}'``; vLLM finds it by its plugins.
``init_info`` is what ``TrainerAddress`` has, ``update_info`` what ``VersionWanted`` has.

Trainer: publish with ``Publisher`` and tell the engine each version's number, or let ``TrainerEngine`` do
both, as vLLM's own trainer engines do.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cache
from time import monotonic, sleep
from typing import Any, ClassVar

from thinwire.types import InputError, ThinwireError, require
from thinwire.uses.following.follower_base import TIMEOUT, Applied
from thinwire.uses.following.hosts import vllm_names
from thinwire.uses.following.hosts.rollout_weights import RolloutWeights, TrainerAddress, VersionWanted
from thinwire.uses.following.push.publisher import POLL, Publisher

BACKEND = "thinwire"
WORKER, TRAINER = "ThinwireWeightTransferEngine", "ThinwireTrainerWeightTransferEngine"


def register() -> None:
    """Make the backend known to vLLM: the entry point of its plugins, called in each of its processes.

    Where vLLM's interface is another one, a warning says so, and vLLM starts as it would without thinwire.
    """
    try:
        vllm_names.check_host()
        factory = vllm_names.factory()
    except (ThinwireError, ImportError) as e:
        warnings.warn(f"thinwire is no weight-transfer backend here: {e}", stacklevel=2)
        return
    ends = (factory.WeightTransferEngineFactory, WORKER), (factory.WeightTransferTrainerFactory, TRAINER)
    for registry, name in ends:
        if BACKEND not in registry._registry:  # a process may load its plugins twice
            registry.register_engine(BACKEND, __name__, name)


def __getattr__(name: str) -> Any:
    """Return the engines, which need vLLM's base classes, once they are asked for."""
    made = {WORKER: worker_engine, TRAINER: trainer_engine}.get(name)
    if made is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return made()


class WorkerEngine:
    """vLLM's end, in each of its workers: follow the trainer, and write what changed into the loaded model.

    The model keeps its own memory, fused and sharded as vLLM has it. Each worker holds the state once in the
    host's memory. ``applied``: what the last update did; ``weights.pauses``: how long each one took.
    """

    init_info_cls, update_info_cls = TrainerAddress, VersionWanted
    supports_draft_weight_update = False
    model: Any
    weights: RolloutWeights | None = None
    applied: Applied | None = None

    def init_transfer_engine(self, init_info: TrainerAddress) -> None:
        """Begin to follow; versions come from now on, and wait for updates. Twice: the other trainer's."""
        self.shutdown()
        self.weights = RolloutWeights(init_info)

    def start_weight_update(self) -> None:
        """Do nothing: nothing is laid out anew."""

    def receive_weights(self, update_info: VersionWanted) -> None:
        """Write the wanted version into the model. Errors: as ``RolloutWeights.update``."""
        weights = self.weights
        require(
            weights is not None, InputError, "no trainer is known yet; call init_weight_transfer_engine first"
        )
        if weights is not None:
            self.applied = weights.update(self.model, self.model.load_weights, update_info)

    def finish_weight_update(self) -> None:
        """Do nothing: what came is in place."""

    def shutdown(self) -> None:
        """Stop following. Safe to call twice."""
        weights, self.weights = self.weights, None
        if weights is not None:
            weights.close()


@dataclass
class TrainerInit:
    """The trainer's end: where workers reach it, and how it publishes.

    ``rank`` 0 publishes. ``host``, ``port``: where to listen; ``advertise``: the address that workers are
    told, if another. ``options`` are ``Publisher``'s, ``worker`` what workers are told besides the address.
    """

    backend: ClassVar[str] = BACKEND
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    token: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    worker: dict[str, Any] = field(default_factory=dict)
    timeout: float = TIMEOUT

    @property
    def is_sender(self) -> bool:
        return self.rank == 0

    def told(self, port: int) -> dict[str, Any]:
        """Return the workers' ``init_info``."""
        address = self.advertise or f"{self.host}:{port}"
        return {"address": address, "token": self.token, **self.worker}


class TrainerEngine:
    """vLLM's trainer engine: publish the source's tensors, and have all workers brought up to them."""

    init_info_cls = TrainerInit
    client: Any
    source: Any
    is_sender: bool
    publisher: Publisher | None = None
    _init = TrainerInit()
    _held: dict[str, Any]

    @classmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: Any = None) -> Any:
        """Publish nothing yet, but listen, and let the workers follow; on every rank of the trainer."""
        require(
            source is not None, InputError, "there is no source; give the WeightSource that is to be sent"
        )
        engine: Any = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)  # type: ignore[call-arg]
        engine._init, engine._held = init_info, dict(source.iter_full())
        if engine.is_sender:
            own = {"token": init_info.token.encode() or None} | init_info.options
            engine.publisher = Publisher(engine._held, init_info.host, init_info.port, **own)
            client.init_weight_transfer_engine(init_info.told(engine.publisher.port))
        return engine

    def send_weights(self) -> None:
        """Publish what the source has now, and return when the workers use it; called on every rank."""
        self._held.clear()  # what the source leaves out from now on is missed, and not sent as it was
        self._held.update(self.source.iter_full())  # all ranks: it may gather
        if self.publisher is not None:
            version = publish_to_all(self.publisher, self._init.timeout)
            self.client.start_weight_update()
            self.client.update_weights({"version": version, "timeout": self._init.timeout})
            self.client.finish_weight_update(str(version))

    def shutdown(self) -> None:
        """Stop publishing. Safe to call twice."""
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.close()


def publish_to_all(publisher: Publisher, timeout: float) -> int:
    """Publish, and return the version's number once those that had the last one have it, or are gone.

    So an engine does not stand still while the version is on its way. Nobody waits for those further behind,
    nor for longer than ``timeout`` seconds.
    """
    last, end = publisher.newest.number, monotonic() + timeout
    ready = {f.name for f in publisher.followers if f.version >= last}
    version = publisher.publish().number
    while monotonic() < end and any(
        f.name in ready and f.version < version for f in publisher.followers if f.greeted
    ):
        publisher.check()
        sleep(POLL)
    return version


@cache
def worker_engine() -> type:
    """Return the worker's engine as a class of vLLM's. Errors: as ``vllm_names.base``."""
    return type(WORKER, (WorkerEngine, getattr(vllm_names.base(), vllm_names.WORKER)), {})


@cache
def trainer_engine() -> type:
    """Return the trainer's engine as a class of vLLM's. Errors: as ``vllm_names.base``."""
    return type(TRAINER, (TrainerEngine, getattr(vllm_names.base(), vllm_names.TRAINER)), {})
