"""The schedules: when a layer of experts waits for other ranks, and whose outputs of which step it uses.

Synchronous: tokens go, outputs come back, both awaited. Displaced: the tokens of a step are computed in the
next one, and their outputs used in the one after, two steps stale. Interweaved: at a layer, the tokens that
the layer before it has sent are computed, and the layer uses its own outputs of the last step (DICE, arXiv
2411.16786). What this rank's own experts make of its own tokens is always of this step [ours].
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives import MeshExchange
from thinwire.types import InputError, LinkError, require
from thinwire.uses.pictures.context_parallel.clock import Call, Clock
from thinwire.uses.pictures.context_parallel.coding import Coding
from thinwire.uses.pictures.context_parallel.inputs import time_of
from thinwire.uses.pictures.context_parallel.keys import Key, Kind
from thinwire.uses.pictures.context_parallel.seam import Given
from thinwire.uses.pictures.context_parallel.traffic import Traffic
from thinwire.uses.pictures.context_parallel.weights import Weights
from thinwire.uses.pictures.expert_parallel.crossing import Crossing, Turn
from thinwire.uses.pictures.expert_parallel.lines import OTHER_TOKENS
from thinwire.uses.pictures.expert_parallel.owners import Owners
from thinwire.uses.pictures.expert_parallel.schedule import DISPLACED, INTERWEAVED, SYNC, Schedule
from thinwire.uses.pictures.expert_parallel.seam import Layer
from thinwire.uses.pictures.expert_parallel.slots import Slots

Place = tuple[int, int]  # guidance stream, and layer
# Exchanges of a layer that a peer may not have decoded yet: tokens and outputs of two streams, of the steps
# that outputs are late. And some more of the layers where both are now.
_UNDECODED, _NOW = {SYNC: 0, INTERWEAVED: 4, DISPLACED: 8}, 4


class Spread:
    """The experts of one model, spread over ranks, each of which makes pictures of its own."""

    def __init__(
        self,
        exchange: MeshExchange,
        codings: tuple[Coding, Coding],
        schedule: Schedule,
        owners: Owners,
        layers: Sequence[Layer],
        deadline: float,
    ) -> None:
        self.clock, self._schedule, self._layers = Clock(), schedule, len(layers)
        check_choices(layers, schedule)
        for layer in layers:
            owners.of(layer.experts)
        due = _UNDECODED[schedule.mode] * len(layers) + _NOW
        self._traffic = Traffic(exchange, deadline, due, "schedule of times")
        self.tally, self._owners = self._traffic.tally, owners
        self._crossing = Crossing(self._traffic, codings, owners)
        self._rank = exchange.rank
        self._call, self._inputs, self._heard = Call(0, 0, True), 0, 0
        self._ended = True
        self._slots: dict[Place, Slots] = {}
        self._unserved: deque[Turn] = deque()
        self._awaited: dict[Place, deque[tuple[Turn, Tensor, Tensor]]] = defaultdict(deque)

    def run(self, given: Given, compute: Callable[[], Any]) -> Any:
        """Return what the model makes of this rank's pictures: ``compute()``."""
        whole = self._ended
        if not whole:  # an error or an interrupt: the ranks may be at different layers of that call
            self._abandon()
            self.clock.reset()
        time = time_of(given.inputs)
        self._call, self._ended = self.clock.call(given.stream, time, ()), False
        if self._call.begins:
            self._forget(whole)
        given.check()
        self._inputs = self._traffic.inquiry.note(self.clock.generation, {"time": time or 0.0})
        before = self._heard
        made = compute()
        text = "no layer of experts has exchanged anything in this call; call the model's eval() first"
        require(self._heard > before, InputError, text)
        self.tally.calls += 1
        self._ended = True
        return made

    def reset(self) -> None:
        """Let the next call of the model begin a generation."""
        self.clock.reset()

    def watch(self, weights: Weights) -> None:
        """Compare these weights with the other ranks' in each call."""
        self._traffic.inquiry.watch(weights)

    def fail(self, cause: BaseException) -> None:
        """Tell the peers at once that a call of the model has failed."""
        with suppress(LinkError):
            self._abandon(cause)

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peers not to wait for this rank any more, and why if it is an error."""
        whole = cause is None and self._ended
        with suppress(LinkError):
            self._drop(whole)  # an error does not wait for what the peers still send
        with suppress(LinkError):
            self._abandon(cause)
        self._traffic.leave(cause)

    def every(self, layer: Layer, x: Tensor, tokens: Tensor) -> Tensor:
        """Return what each expert makes of its ``tokens`` [experts, n]: [experts * n, width]."""
        wanted = torch.zeros(len(x), layer.experts, dtype=torch.bool, device=x.device)
        column = torch.arange(layer.experts, device=x.device)[:, None].expand_as(tokens)
        wanted[tokens, column] = True
        turn = self._turn(layer, x, wanted)
        self._crossing.dispatch(turn, x, self._inputs)
        self._serve(turn)
        self._crossing.collect(turn)
        return turn.made[turn.numbers[tokens, column].flatten()]

    def choose(self, layer: Layer, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return for tokens ``x`` [T, width] the weighted sum over their experts ``chosen`` [T, k]."""
        weights, order = weights.sort(dim=1, descending=True, stable=True)
        chosen = chosen.gather(1, order)
        place, step = (self._call.stream, layer.number), self._call.step
        last = self._slots.get(place)
        require(last is None or len(last.experts) == len(x), InputError, OTHER_TOKENS)
        local = self._local(layer, chosen)
        sends_all = last is None or self._schedule.sends_all(step)
        sent = torch.ones_like(local) if sends_all else local.clone()
        sent[:, :1] = True  # the best one, always
        wanted = torch.zeros(len(x), layer.experts, dtype=torch.bool, device=x.device)
        wanted[sent.nonzero()[:, 0], chosen[sent]] = True
        turn = self._turn(layer, x, wanted)
        if last is None or self._schedule.waits(layer.number, self._layers, step):
            outputs = self._now(place, turn, x, chosen, sent)
        else:
            outputs = self._later(place, turn, x, chosen, sent, local)
        return (outputs * weights[..., None].to(outputs.dtype)).sum(1)

    def _now(self, place: Place, turn: Turn, x: Tensor, chosen: Tensor, sent: Tensor) -> Tensor:
        """Return what all experts make of the tokens of this step [T, k, width]."""
        self._serve_all()
        self._crossing.dispatch(turn, x, self._inputs)
        self._serve(turn)
        self._keep(place, turn, chosen, sent)
        return self._slots[place].outputs

    def _later(
        self, place: Place, turn: Turn, x: Tensor, chosen: Tensor, sent: Tensor, local: Tensor
    ) -> Tensor:
        """Return what own experts make of the tokens now, and the others' outputs of an earlier step."""
        awaited, interweaved = self._awaited[place], self._schedule.mode == INTERWEAVED
        if interweaved:
            self._serve_all()
        elif awaited:
            self._serve(awaited[-1][0])
        self._crossing.dispatch(turn, x, self._inputs)
        if interweaved:
            self._unserved.append(turn)
        if len(awaited) == (1 if interweaved else 2):
            self._keep(place, *awaited.popleft())
        awaited.append((turn, chosen, sent))
        own = turn.made[turn.numbers.gather(1, chosen)[local]]
        return self._slots[place].with_fresh(chosen, local, own).outputs

    def _keep(self, place: Place, turn: Turn, chosen: Tensor, sent: Tensor) -> None:
        """Take what came back of a turn, and remember it by slot."""
        self._crossing.collect(turn)
        last, made = self._slots.get(place), turn.made[turn.numbers.gather(1, chosen)[sent]]
        if last is None:
            last = Slots(chosen, turn.made.new_zeros((*chosen.shape, turn.made.shape[1])))
        self._slots[place] = last.with_fresh(chosen, sent, made)

    def _serve_all(self) -> None:
        while self._unserved:
            self._serve(self._unserved.popleft())

    def _serve(self, turn: Turn) -> None:
        self._crossing.serve(turn, self._inputs)

    def _turn(self, layer: Layer, x: Tensor, wanted: Tensor) -> Turn:
        self._heard += 1
        key = Key(self._call.stream, layer.number, Kind.TOKENS, self._rank)
        return Turn.of(layer, key, self._call.step, x, wanted)

    def _local(self, layer: Layer, chosen: Tensor) -> Tensor:
        own = torch.zeros(layer.experts, dtype=torch.bool, device=chosen.device)
        own[self._owners.of(layer.experts)[self._rank]] = True
        return own[chosen]

    def _forget(self, whole: bool) -> None:
        """Begin a generation; ``whole``: the one before it ended as it should."""
        self._drop(whole)
        self._crossing.forget()
        self._traffic.begin(self.clock.generation)

    def _drop(self, whole: bool) -> None:
        turns = [turn for awaited in self._awaited.values() for turn, _, _ in awaited] if whole else []
        self._slots.clear()
        self._unserved.clear()
        self._awaited.clear()
        self._crossing.drop(turns)

    def _abandon(self, cause: BaseException | None = None) -> None:
        """Tell whoever waits for one of the next two messages that none comes."""
        for _ in range(2):
            self._traffic.abandon(cause)
            self._traffic.skip()


def check_choices(layers: Sequence[Layer], schedule: Schedule) -> None:
    """Raise ``InputError`` for a layer that a schedule does not serve."""
    for layer in layers:
        text = f"{layer.name} lets experts choose their tokens, which only a synchronous schedule of stride 1"
        require(layer.chosen > 0 or not schedule.chosen_alone, InputError, f"{text} serves; use ep-sync")
        text = f"{layer.name} gives each token {layer.chosen} experts, and a stride is for 2; use stride=1"
        require(schedule.stride == 1 or layer.chosen == 2, InputError, text)
