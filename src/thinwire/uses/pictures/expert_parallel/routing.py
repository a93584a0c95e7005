"""Expert parallelism: the experts of a transformer over the ranks of a mesh, and when a layer waits.

Synchronous: tokens go, outputs come back, both awaited. Displaced: the tokens of a step are computed in the
next one, and their outputs used in the one after, two steps stale. Interweaved: at a layer, the tokens that
the layer before it has sent are computed, and the layer uses its own outputs of the last step (DICE, arXiv
2411.16786). What this rank's own experts make of its own tokens is always of this step [ours].
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.collectives import MeshExchange
from thinwire.links.mesh import Peer
from thinwire.spec import Spec
from thinwire.types import InputError, LinkError, require
from thinwire.uses.pictures.agreement import Parallel, agree, check_whole, facts, own_rank, told, used
from thinwire.uses.pictures.coding import MAX_WARMUP, Coding
from thinwire.uses.pictures.diffusers_names.expert_layers import attached, layers_of, routed
from thinwire.uses.pictures.diffusers_names.hooks import intercepted
from thinwire.uses.pictures.diffusers_names.interfaces import ExpertLayer, Given
from thinwire.uses.pictures.expert_parallel.dispatch import OTHER_TOKENS, ExpertExchange, LayerTurn
from thinwire.uses.pictures.expert_parallel.pairs import WantedPairs
from thinwire.uses.pictures.messages import CheckedExchange
from thinwire.uses.pictures.model_calls import CountedCalls, time_of
from thinwire.uses.pictures.rank_message import Key, TensorKind
from thinwire.uses.pictures.short_turns import short_turns
from thinwire.uses.pictures.weight_checksums import WatchedWeights, weights_checksum

ONE, BATCH = "one", "batch"  # without exchange: every rank computes everything, or pictures of its own
SYNC, DISPLACED, INTERWEAVED = "sync", "displaced", "interweaved"
EXCHANGING = (SYNC, DISPLACED, INTERWEAVED)
MODES = (*EXCHANGING, ONE, BATCH)
SYNCED = ("none", "shallow", "deep", "alternate", "all")

Routed = Mapping[str, tuple[nn.Module, int]]  # the module and number of each expert, by name
Place = tuple[int, int]  # guidance stream, and layer


class Experts(Parallel):
    """A model whose experts are spread over several ranks: what it exchanged so far.

    A generation is a batch of pictures; a new one begins by itself where the time goes back up.
    """


@contextmanager
def over_experts(
    model: nn.Module,
    peers: Mapping[int, Peer],
    dispatch: Coding,
    combine: Coding,
    schedule: Schedule,
    owners: Sequence[int] | None = None,
    deadline: float = 60.0,
) -> Iterator[Experts]:
    """Spread the experts of ``model`` over ranks inside the block; see ``thinwire.spread_experts``."""
    if schedule.mode in (ONE, BATCH) or not peers:
        _check_here(model.named_parameters(), "each rank computes")
        yield Experts(schedule.mode if schedule.mode == BATCH else ONE)
        return
    rank = own_rank(peers)
    with used(peers, "experts") as exchange, ExitStack() as undo:
        with told(exchange):
            check_whole(model)
            found, spread = layers_of(model), Owners(range(len(peers) + 1), owners)
            experts, layers = routed(found), [layer for _, layer in found]
            _check_weights(model, experts, spread, rank)
            session = ExpertParallel(exchange, (dispatch, combine), schedule, spread, layers, deadline)
            undo.push(lambda kind, error, trace: session.leave(error))
            undo.enter_context(attached(found, session))
            undo.enter_context(intercepted(model, session))
            shared = WatchedWeights(model, but=_own_weights(experts))
            recipe = {"schedule": schedule, "dispatch": dispatch, "combine": combine}
            own = facts(model, recipe, shared.checksum(False))
            own |= {"the owners of experts": str(spread), "the choice of experts": _choices(layers)}
            agree(exchange, own, deadline, _checksums(experts))
            session.watch(shared)
        undo.enter_context(short_turns(model))
        yield Experts(schedule.mode, session)


def _own_weights(experts: Routed) -> set[str]:
    """Return the names of all weights of experts, which may be with their owners alone."""
    return {
        f"{name}.{own}"
        for name, (module, _) in experts.items()
        for own, _ in (*module.named_parameters(), *module.named_buffers())
    }


def _check_weights(model: nn.Module, experts: Routed, owners: Owners, rank: int) -> None:
    """Raise ``InputError`` for weights that this rank needs and that are on no device."""
    others = _own_weights(experts)
    shared = ((name, p) for name, p in model.named_parameters() if name not in others)
    _check_here(shared, f"rank {rank} computes")
    many = {name.rpartition(".experts.")[0]: i + 1 for name, (_, i) in experts.items()}
    for name, (module, i) in experts.items():
        if i in owners.of(many[name.rpartition(".experts.")[0]])[rank]:
            parameters = ((f"{name}.{own}", p) for own, p in module.named_parameters())
            _check_here(parameters, f"rank {rank} computes")


def _check_here(parameters: Iterable[tuple[str, nn.Parameter]], who: str) -> None:
    absent = next((name for name, p in parameters if p.device.type == "meta"), None)
    require(absent is None, InputError, f"{absent} is among what {who}, and it is on no device; load it")


def _choices(layers: Sequence[ExpertLayer]) -> str:
    alike = Counter((layer.chosen, layer.experts) for layer in layers)
    return ", ".join(f"{k} of {experts} in {many} layers" for (k, experts), many in alike.items())


def _checksums(experts: Routed) -> dict[str, str]:
    """Return a checksum of each expert that is here, by its name: where two ranks have it, it is one."""
    here = [(name, m) for name, (m, _) in experts.items() if not any(p.is_meta for p in m.parameters())]
    return {f"the weights of {name} (a checksum)": str(weights_checksum(module)) for name, module in here}


# Exchanges of a layer that a peer may not have decoded yet: tokens and outputs of two streams, of the steps
# that outputs are late. And some more of the layers where both are now.
_UNDECODED, _NOW = {SYNC: 0, INTERWEAVED: 4, DISPLACED: 8}, 4


class ExpertParallel(CountedCalls):
    """The experts of one model, spread over ranks, each of which makes pictures of its own."""

    def __init__(
        self,
        exchange: MeshExchange,
        codings: tuple[Coding, Coding],
        schedule: Schedule,
        owners: Owners,
        layers: Sequence[ExpertLayer],
        deadline: float,
    ) -> None:
        self._schedule, self._layers = schedule, len(layers)
        check_choices(layers, schedule)
        due = _UNDECODED[schedule.mode] * len(layers) + _NOW
        self._exchange = CheckedExchange(exchange, deadline, due, "schedule of times")
        super().__init__(self._exchange.inquiry)
        self.tally = self._exchange.tally
        self._owned = {layer.experts: owners.of(layer.experts) for layer in layers}
        self._experts = ExpertExchange(self._exchange, codings)
        self._rank = exchange.rank
        self._own: dict[tuple[int, torch.device], Tensor] = {}  # which of so many experts are this rank's
        self._heard = 0  # layers that have exchanged something
        self._slots: dict[Place, SlotOutputs] = {}
        self._uncomputed: deque[LayerTurn] = deque()
        self._awaited: dict[Place, deque[tuple[LayerTurn, Tensor, Tensor]]] = defaultdict(deque)

    def run(self, given: Given, compute: Callable[[], Any]) -> Any:
        """Return what the model makes of this rank's pictures: ``compute()``."""
        time = time_of(given.inputs)
        self._begin(given, (), time)
        alike = {"time": zlib.crc32(str(time or 0.0).encode())}
        self._inputs = self._inquiry.note(self.clock.generation, alike)
        before = self._heard
        made = compute()
        text = "no layer of experts has exchanged anything in this call; call the model's eval() first"
        require(self._heard > before, InputError, text)
        self._exchange.end()
        self._ended = True
        return made

    def leave(self, cause: BaseException | None = None) -> None:
        """Tell the peers not to wait for this rank any more, and why if it is an error."""
        whole = cause is None and self._ended
        with suppress(LinkError):
            self._drop(whole)  # an error does not wait for what the peers still send
        with suppress(LinkError):
            self._abandon(cause)
        self._exchange.leave(cause)

    def every(self, layer: ExpertLayer, x: Tensor, tokens: Tensor) -> Tensor:
        """Return what each expert makes of its ``tokens`` [experts, n]: [experts * n, width]."""
        wanted = torch.zeros(len(x), layer.experts, dtype=torch.bool, device=x.device)
        column = torch.arange(layer.experts, device=x.device)[:, None].expand_as(tokens)
        wanted[tokens, column] = True
        turn = self._turn(layer, x, wanted)
        self._experts.dispatch(turn, x, self._inputs)
        self._experts.compute(turn, self._inputs)
        self._experts.combine(turn)
        return turn.made.index_select(0, turn.pairs.numbers[tokens, column].flatten())

    def choose(self, layer: ExpertLayer, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
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
        wanted.scatter_(1, chosen, sent)  # a token has each of its experts once
        turn = self._turn(layer, x, wanted)
        if last is None or self._schedule.waits(layer.number, self._layers, step):
            outputs = self._now(place, turn, x, chosen, sent)
        else:
            outputs = self._later(place, turn, x, chosen, sent, local)
        return (outputs * weights[..., None].to(outputs.dtype)).sum(1)

    def _now(self, place: Place, turn: LayerTurn, x: Tensor, chosen: Tensor, sent: Tensor) -> Tensor:
        """Return what all experts make of the tokens of this step [T, k, width]."""
        self._compute_all()
        self._experts.dispatch(turn, x, self._inputs)
        self._experts.compute(turn, self._inputs)
        self._keep(place, turn, chosen, sent)
        return self._slots[place].outputs

    def _later(
        self, place: Place, turn: LayerTurn, x: Tensor, chosen: Tensor, sent: Tensor, local: Tensor
    ) -> Tensor:
        """Return what own experts make of the tokens now, and the others' outputs of an earlier step."""
        awaited, interweaved = self._awaited[place], self._schedule.mode == INTERWEAVED
        if interweaved:
            self._compute_all()
        elif awaited:
            self._experts.compute(awaited[-1][0], self._inputs)
        self._experts.dispatch(turn, x, self._inputs)
        if interweaved:
            self._uncomputed.append(turn)
        if len(awaited) == (1 if interweaved else 2):
            self._keep(place, *awaited.popleft())
        awaited.append((turn, chosen, sent))
        return self._slots[place].with_fresh(chosen, local, _made(turn, chosen)).outputs

    def _keep(self, place: Place, turn: LayerTurn, chosen: Tensor, sent: Tensor) -> None:
        """Take what came back of a turn, and remember it by slot."""
        self._experts.combine(turn)
        last = self._slots.get(place)
        if last is None:
            last = SlotOutputs(chosen, turn.made.new_zeros((*chosen.shape, turn.made.shape[1])))
        self._slots[place] = last.with_fresh(chosen, sent, _made(turn, chosen))

    def _compute_all(self) -> None:
        while self._uncomputed:
            self._experts.compute(self._uncomputed.popleft(), self._inputs)

    def _turn(self, layer: ExpertLayer, x: Tensor, wanted: Tensor) -> LayerTurn:
        self._heard += 1
        key = Key(self._call.stream, layer.number, TensorKind.TOKENS, self._rank)
        owned = self._owned[layer.experts]
        pairs = WantedPairs.of_turn(wanted, owned)
        made = x.new_zeros((max(1, pairs.many), x.shape[1]))
        return LayerTurn(layer, owned, key, self._call.step, pairs, made, x[:0])

    def _local(self, layer: ExpertLayer, chosen: Tensor) -> Tensor:
        place = layer.experts, chosen.device
        if place not in self._own:
            ours = self._owned[layer.experts][self._rank]
            own = torch.tensor([e in ours for e in range(layer.experts)], device="cpu")
            self._own[place] = own.to(chosen.device)
        return self._own[place][chosen]

    def _forget(self) -> None:
        self._drop(not self._interrupted)
        self._experts.forget()
        self._exchange.begin(self.clock.generation)

    def _drop(self, whole: bool) -> None:
        turns = [turn for awaited in self._awaited.values() for turn, _, _ in awaited] if whole else []
        self._slots.clear()
        self._uncomputed.clear()
        self._awaited.clear()
        self._experts.drop(turns)

    def _renew(self) -> None:
        self._exchange.renew()

    def _abandon(self, cause: BaseException | None = None) -> None:
        """Tell whoever waits for one of the next two messages that none comes."""
        for _ in range(2):
            self._exchange.abandon(cause)
            self._exchange.skip()


def _made(turn: LayerTurn, chosen: Tensor) -> Tensor:
    """Return what was made of each token by its experts ``chosen`` [T, k]: [T, k, width]."""
    numbers = turn.pairs.numbers.gather(1, chosen).clamp_(min=0)
    return turn.made.index_select(0, numbers.flatten()).view(*chosen.shape, turn.made.shape[1])


def check_choices(layers: Sequence[ExpertLayer], schedule: Schedule) -> None:
    """Raise ``InputError`` for a layer that a schedule does not serve."""
    for layer in layers:
        text = f"{layer.name} lets experts choose their tokens, which only a synchronous schedule of stride 1"
        require(layer.chosen > 0 or not schedule.chosen_alone, InputError, f"{text} serves; use ep-sync")
        text = f"{layer.name} gives each token {layer.chosen} experts, and a stride is for 2; use stride=1"
        require(schedule.stride == 1 or layer.chosen == 2, InputError, text)


@dataclass(frozen=True)
class SlotOutputs:
    """What the experts last made of each token, by slot: slot 0 is the best expert of the token.

    Of each of T tokens its k experts [T, k], and what they made of it [T, k, width], not yet weighted.
    """

    experts: Tensor
    outputs: Tensor

    def reused(self, chosen: Tensor) -> SlotOutputs:
        """Return what there is for the experts ``chosen`` [T, k] now.

        That is what the same expert made of the token. A new expert of a token takes what the slot's last one
        made, as in DICE (arXiv 2411.16786, conditional communication).
        """
        same = chosen[:, :, None] == self.experts[:, None, :]
        slot = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
        source = torch.where(same.any(2), same.int().argmax(2), slot)
        index = source[:, :, None].expand(-1, -1, self.outputs.shape[2])
        return SlotOutputs(self.experts.gather(1, source), self.outputs.gather(1, index))

    def with_fresh(self, chosen: Tensor, fresh: Tensor, made: Tensor) -> SlotOutputs:
        """Return these for ``chosen``, with what was ``made`` [T, k, width] at the slots ``fresh`` [T, k]."""
        kept = self.reused(chosen)
        outputs = torch.where(fresh[:, :, None], made.to(kept.outputs.dtype), kept.outputs)
        return SlotOutputs(torch.where(fresh, chosen, kept.experts), outputs)


class Owners:
    """Which rank computes which expert.

    ``given``: the rank of each expert; None deals them out in turn, expert 0 to the first rank.
    """

    def __init__(self, ranks: Sequence[int], given: Sequence[int] | None = None) -> None:
        whole = isinstance(given, Sequence) and all(type(rank) is int for rank in given)
        text = f"owners {given!r:.40} are no ranks; give one for each expert, as [0, 1, 0, 1]"
        require(given is None or whole, InputError, text)
        self._ranks, self._given = tuple(ranks), None if given is None else tuple(given)
        for expert, rank in enumerate(self._given or ()):
            text = f"expert {expert} is given to rank {rank}, which nobody is; give it one of {self._ranks}"
            require(rank in self._ranks, InputError, text)

    def __str__(self) -> str:
        return "dealt out in turn" if self._given is None else str(self._given)

    def of(self, experts: int) -> dict[int, list[int]]:
        """Return the experts of each rank, of a layer that has so many. Errors: ``InputError``."""
        given = self._given
        if given is None:
            given = tuple(self._ranks[e % len(self._ranks)] for e in range(experts))
        text = f"owners are given for {len(given)} experts, and a layer has {experts}; name a rank for each"
        require(len(given) == experts, InputError, text)
        return {rank: [e for e in range(experts) if given[e] == rank] for rank in self._ranks}


@dataclass(frozen=True, repr=False)
class Schedule(Spec):
    """How stale what a layer uses may be; the same on all ranks.

    - ``mode``: ``sync`` waits; ``displaced`` uses what was sent two steps ago; ``interweaved`` one step ago;
    - ``synced``: which layers wait all the same: the first half, the second half, or every other one;
    - ``stride``: at all but every so many steps a token goes to the best of its two experts alone, unless the
      other is on its own rank; 1 sends always;
    - ``warmup``: how many steps at first wait and send everything, whatever the mode.

    Source: DICE (arXiv 2411.16786); names are ours.

    >>> Schedule("interweaved", stride=2)
    Schedule(mode='interweaved', stride=2)
    """

    mode: str = SYNC
    synced: str = "none"
    stride: int = 1
    warmup: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("mode", MODES), ("synced", SYNCED)):
            value = getattr(self, name)
            text = f"{name}={value!r} is not one of {', '.join(known)}"
            require(value in known, InputError, text)
        for name in ("stride", "warmup"):
            value = getattr(self, name)
            text = f"{name}={value} is not a number of steps in 1..{MAX_WARMUP}"
            require(1 <= value <= MAX_WARMUP, InputError, text)

    @property
    def chosen_alone(self) -> bool:
        """Whether it makes sense of nothing but tokens that choose two experts, or so many at each step."""
        return self.mode in (DISPLACED, INTERWEAVED) or self.stride > 1

    def waits(self, layer: int, layers: int, step: int) -> bool:
        """Return whether a layer, of so many, uses what the experts make of this very step's tokens."""
        if self.mode == SYNC or step < self.warmup:
            return True
        shallow = 2 * layer < layers
        found = {"shallow": shallow, "deep": not shallow, "alternate": layer % 2 == 0, "all": True}
        return found.get(self.synced, False)

    def sends_all(self, step: int) -> bool:
        """Return whether tokens go to all of their experts in a step."""
        return step < self.warmup or step % self.stride == 0
