"""The client's end inside Flower: a mod that decodes versions, and codes what local training changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.channels.memory import ErrorFeedback, NoMemory
from thinwire.channels.references import under
from thinwire.rounds.model_copy import ModelCopy
from thinwire.rounds.parameters import unpack_row
from thinwire.rounds.residuals import ClientResiduals
from thinwire.rounds.update_messages import Update
from thinwire.types import DesyncError, PayloadError, ThinwireError, require
from thinwire.uses.federated.flower import flwr_names
from thinwire.uses.federated.flower.records import (
    CLIPPED,
    UPDATE,
    ArrayLayout,
    VersionPlan,
    only,
    payload,
    replaced,
)

STATE = "thinwire"  # the record in context.state
MODEL, RESIDUALS = "model.", "residuals."  # what its arrays' names begin with


def compression_mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
    """Hand the app a whole model, and send the server what the app changed, as the server's plan wants it.

    The first of an app's mods, so that clipping and noise work on whole arrays, before anything is coded::

        app = ClientApp(mods=[compression_mod, fixedclipping_mod, LocalDpMod(...)])

    Where the server's strategy clips at clients, what is sent keeps to its norm, and feedback is refused.

    A train function finds the step size and the number of local steps in its config, as ``thinwire.rate`` and
    ``thinwire.steps``. What was not sent yet is kept in ``context.state`` and goes with the next update.
    Messages without a plan pass as they are. Where a version or a reply cannot be coded, the reply is an
    error that says why in one sentence.
    """
    try:
        plan = VersionPlan.find(message.content)
        return call_next(message, context) if plan is None else _turn(plan, message, context, call_next)
    except ThinwireError as e:
        return flwr_names.failed(message, str(e))


def _turn(plan: VersionPlan, message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
    node = Node(context)
    key, arrays = only(message.content.array_records, "array", "a message with a plan")
    layout, start = node.take(plan)
    message.content = replaced(message.content, {key: layout.record(start, layout.rest(arrays))})
    reply = call_next(message, context)
    if reply.has_error() or not message.metadata.message_type.startswith("train"):
        return reply
    key, arrays = only(reply.content.array_records, "array", "the reply")
    change = start - layout.row(arrays, "the reply")
    update = node.answer(plan, change, _samples(reply.content, plan.weighted_by), _limit(message.content))
    coded = flwr_names.app().ArrayRecord({**layout.rest(arrays), UPDATE: payload(update.pack())})
    reply.content = replaced(reply.content, {key: coded})
    return reply


def _limit(content: Any) -> float:
    """Return the norm that what is sent may have."""
    found = [
        config[flwr_names.CLIPPING]
        for config in content.config_records.values()
        if flwr_names.CLIPPING in config
    ]
    return float(found[0]) if found else math.inf


def _samples(content: Any, weighted_by: str) -> int:
    found = [metrics[weighted_by] for metrics in content.metric_records.values() if weighted_by in metrics]
    return int(found[0]) if found else 1


class Node:
    """What this node keeps from message to message, in Flower's ``context.state``.

    These are the residuals, updates under way, and the shared model where versions are sent as deltas.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._arrays: dict[str, Any] = dict(context.state[STATE]) if STATE in context.state else {}

    def _kept(self, prefix: str) -> dict[str, Tensor]:
        return {n: torch.from_numpy(array.numpy()) for n, array in under(self._arrays, prefix).items()}

    def _keep(self, prefix: str, tensors: dict[str, Tensor]) -> None:
        """Keep these tensors in place of those under ``prefix``."""
        flwr = flwr_names.app()
        others = {n: array for n, array in self._arrays.items() if not n.startswith(prefix)}
        new = {f"{prefix}{n}": flwr.Array(x.contiguous().numpy()) for n, x in tensors.items()}
        self._arrays = others | new
        self._context.state[STATE] = flwr.ArrayRecord(self._arrays)

    def take(self, plan: VersionPlan) -> tuple[ArrayLayout, Tensor]:
        """Return how the model is laid out, and the values of the plan's version, [1, N].

        Errors: ``DesyncError`` or ``PayloadError`` where that cannot be followed; nothing is held then.
        """
        held = self._kept(MODEL)
        layout = plan.layout or _layout(held)
        copy = ModelCopy(layout.values)
        if plan.layout is None:
            copy.hold(held["row"], int(held["number"]))
        try:
            return layout, copy.take(plan.version)
        finally:
            self._keep(MODEL, _state(copy, layout))

    def answer(self, plan: VersionPlan, change: Tensor, samples: int, limit: float = math.inf) -> Update:
        """Return the update for what the app changed, [1, N], and what was not delivered before.

        Where the server clips, it decodes to a norm of ``limit`` at most, or to that of ``change``.
        """
        version, client, made = plan.version, plan.client, plan.version.sequence
        residuals, kept = (
            ClientResiduals(ErrorFeedback() if plan.feedback else NoMemory()),
            self._kept(RESIDUALS),
        )
        last = int(kept.pop("sequence", torch.tensor(0)))
        again = f"update {made} was made already, and {last} is the last; ask for another"  # sent twice
        require(made > last, DesyncError, again)
        if kept:
            residuals.load_state_dict(kept)
        residuals.settle(client, version.confirmed)
        require(not (plan.feedback and limit < math.inf), PayloadError, CLIPPED)
        limit = max(limit, float(change.norm()))  # what mods add after clipping is their own affair
        packet = residuals.encode(client, made, change, version.codec)
        while limit < math.inf and (norm := float(unpack_row(packet, change.numel(), client).norm())) > limit:
            change = change * (0.999 * limit / norm)  # rounding had lengthened it
            packet = residuals.encode(client, made, change, version.codec)
        self._keep(RESIDUALS, residuals.state_dict() | {"sequence": torch.tensor(made)})
        return Update(client, version.sequence, version.number, samples, version.steps, packet)


def _state(copy: ModelCopy, layout: ArrayLayout) -> dict[str, Tensor]:
    if copy.row is None or copy.held is None:
        return {}
    text = torch.frombuffer(bytearray(layout.pack().encode()), dtype=torch.uint8)
    return {"row": copy.row, "number": torch.tensor(copy.held.number), "layout": text}


def _layout(held: dict[str, Tensor]) -> ArrayLayout:
    require("layout" in held, DesyncError, "this node holds no version to lead on from; send the whole")
    return ArrayLayout.unpack(held["layout"].numpy().tobytes().decode())
