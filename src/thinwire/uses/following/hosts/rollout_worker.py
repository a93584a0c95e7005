"""A rollout worker: follows a trainer's weights, and generates what the trainer asks for with the newest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from thinwire.links.hub.spoke import Spoke
from thinwire.links.hub.station import EventKind
from thinwire.types import LinkError, PayloadError
from thinwire.uses.following.follower_base import TIMEOUT, Applied
from thinwire.uses.following.hosts import rollout_messages as messages
from thinwire.uses.following.hosts.rollout_messages import (
    Completions,
    Failed,
    Join,
    Prompts,
    Sample,
    WaitsForWeights,
)
from thinwire.uses.following.push.follower import Follower
from thinwire.uses.following.shards.shard_follower import ShardFollower

Tell = Callable[[bytes], object]
Generate = Callable[[list[list[int]], dict[str, Any]], Sequence[Sample]]  # prompts, settings
LOOK = 0.2  # seconds between two looks at ``stop``
POLL = 0.005  # seconds between two looks whether a version that came is in use


@dataclass
class RolloutWorker:
    """Generate for the pool at ``host``:``port``, with the weights that ``follower`` has.

    ``bring_up`` brings the model to the newest version here, between two batches: as a rule
    ``lambda: follower.apply_to(model)``. ``generate`` takes prompts (tokens) and the trainer's settings, and
    returns a sample for each. ``patience``: seconds that a worker waits for weights that are not too old.
    """

    follower: Follower | ShardFollower
    bring_up: Callable[[], Applied]
    generate: Generate
    host: str
    port: int
    token: bytes | None = None
    patience: float = TIMEOUT

    def serve(self, stop: threading.Event | None = None, idle: float = float("inf")) -> None:
        """Generate until ``stop`` is set, or the pool is silent for ``idle`` seconds.

        What fails is told to the trainer, whose batch ends with it. Errors: ``LinkError`` naming the pool
        that was silent.
        """
        spoke, heard = Spoke.connect(self.host, self.port, token=self.token, max_message=1 << 28), monotonic()
        try:
            while stop is None or not stop.is_set():
                event = spoke.recv(LOOK)
                heard = heard if event is None else monotonic()
                if event is None and monotonic() - heard > idle:
                    raise LinkError(
                        f"no prompts from {spoke.peer} for {idle:g} s; see whether the trainer runs"
                    )
                if event is not None and event.kind is EventKind.JOINED:
                    spoke.send(Join(messages.PROTOCOL).pack())
                elif event is not None and event.kind is EventKind.DATA:
                    spoke.send(self._answer(event.data, spoke.send))
        finally:
            spoke.close(1.0)

    def _answer(self, data: bytes, tell: Tell) -> bytes:
        message = messages.unpack(data)
        if not isinstance(message, Prompts):
            raise PayloadError("the pool says what only workers say")
        try:
            applied, waited = self._weights(message, tell)
            samples = self.generate(*messages.unpack_prompts(message.body))
            age = max(0.0, self.follower.clock - applied.version.published)
        except Exception as e:  # whatever generates may raise: the trainer is who can do something
            return Failed(message.part, (str(e) or type(e).__name__).encode()).pack()
        body = messages.pack_samples(samples)
        return Completions(message.part, applied.version.number, age, waited, body).pack()

    def _weights(self, asked: Prompts, tell: Tell) -> tuple[Applied, float]:
        """Bring the model up to the newest version here; return it, and the seconds of waiting for it.

        The worker waits only where what is here is too old, and tells so before.
        """
        least, bounded = max(1, asked.newest - asked.max_age), asked.max_age < messages.ANY_AGE
        here = self.follower.held.number
        if here >= least and (self.follower.current or not bounded):
            applied = self.bring_up()
            here = applied.version.number
            if here >= least:
                return applied, 0.0
        began = monotonic()
        tell(WaitsForWeights(asked.part, here).pack())
        self.follower.wait(least, self.patience, current=bounded)
        while (applied := self.bring_up()).version.number < least:
            if monotonic() - began > self.patience:
                raise LinkError(f"version {least} is not in use here after {self.patience:g} s")
            sleep(POLL)
        return applied, monotonic() - began


def transformers_generate(model: Any, pad: int = 0) -> Generate:
    """Return what generates with a model of transformers: settings are those of its ``generate``.

    Prompts are padded on the left with ``pad``. A completion ends with the token that ends it, if any does.
    """
    import torch

    def generate(prompts: list[list[int]], settings: dict[str, Any]) -> list[Sample]:
        width = max(map(len, prompts))
        rows = [[pad] * (width - len(p)) + p for p in prompts]
        seen = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        device = next(model.parameters()).device
        inputs, mask = (torch.tensor(x, device=device) for x in (rows, seen))
        fixed: Any = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": pad}
        with torch.no_grad():
            made = model.generate(inputs, attention_mask=mask, **(settings | fixed))
        tokens = made.sequences[:, width:]
        logits = torch.stack(made.logits, 1).float() / float(settings.get("temperature", 1.0))
        chosen = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        ends = _ends(settings.get("eos_token_id", model.generation_config.eos_token_id))
        return [_cut(t, p, ends) for t, p in zip(tokens.tolist(), chosen.tolist(), strict=True)]

    return generate


def _ends(given: Any) -> frozenset[int]:
    return frozenset(given if isinstance(given, list | tuple) else [] if given is None else [given])


def _cut(tokens: list[int], logprobs: list[float], ends: frozenset[int]) -> Sample:
    last = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return Sample(tokens[:last], logprobs[:last])
