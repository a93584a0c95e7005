"""Spread a transformer's experts over the ranks of a mesh, once all have said that theirs is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from thinwire.links.mesh import Peer
from thinwire.types import InputError, require
from thinwire.uses.pictures.context_parallel.coding import Coding
from thinwire.uses.pictures.context_parallel.host import intercepted
from thinwire.uses.pictures.context_parallel.parallel import (
    Parallel,
    agree,
    check_whole,
    facts,
    own_rank,
    told,
    used,
)
from thinwire.uses.pictures.context_parallel.weights import Weights, weights_checksum
from thinwire.uses.pictures.expert_parallel.host import attached, layers_of, routed
from thinwire.uses.pictures.expert_parallel.owners import Owners
from thinwire.uses.pictures.expert_parallel.schedule import BATCH, ONE, Schedule
from thinwire.uses.pictures.expert_parallel.seam import Layer
from thinwire.uses.pictures.expert_parallel.session import Spread

Routed = Mapping[str, tuple[nn.Module, int]]  # the module and number of each expert, by name


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
            session = Spread(exchange, (dispatch, combine), schedule, spread, layers, deadline)
            undo.push(lambda kind, error, trace: session.leave(error))
            undo.enter_context(attached(found, session))
            undo.enter_context(intercepted(model, session))
            shared = Weights(model, but=_own_weights(experts))
            own = facts(model, f"{dispatch!r}, {combine!r}, {schedule!r}", shared.checksum(False))
            own |= {"the owners of experts": str(spread), "the choice of experts": _choices(layers)}
            agree(exchange, own, deadline, _checksums(experts))
            session.watch(shared)
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


def _choices(layers: Sequence[Layer]) -> str:
    alike = Counter((layer.chosen, layer.experts) for layer in layers)
    return ", ".join(f"{k} of {experts} in {many} layers" for (k, experts), many in alike.items())


def _checksums(experts: Routed) -> dict[str, str]:
    """Return a checksum of each expert that is here, by its name: where two ranks have it, it is one."""
    here = [(name, m) for name, (m, _) in experts.items() if not any(p.is_meta for p in m.parameters())]
    return {f"the weights of {name} (a checksum)": str(weights_checksum(module)) for name, module in here}
