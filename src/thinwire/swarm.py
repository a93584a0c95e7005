"""Swarms in Python: take part with a training loop of one's own, keep a module, or run what the commands do.

>>> from thinwire import swarm
>>> with swarm.join(model, optimizer, "192.0.2.7:7300", token=b"...") as joined:  # doctest: +SKIP
...     for batch in batches:
...         loss(model, batch).backward()
...         optimizer.step()  # the last local step of a round sends what changed, and goes on from the next
...         optimizer.zero_grad()
...         if joined.over:
...             break
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from thinwire.uses.training.swarm.loop import SwarmLoop
    from thinwire.uses.training.swarm.run.options import SwarmConfig
    from thinwire.uses.training.swarm.run.record import SwarmRecord

__all__ = ["join", "keep", "serve"]


def join(
    model: nn.Module,
    optimizer: Optimizer,
    address: str,
    *,
    token: bytes | None = None,
    name: str = "",
    samples: int = 1,
    patience: float = 600.0,
    noted: Callable[[str], object] = lambda _: None,
) -> SwarmLoop:
    """Let the steps of ``optimizer`` be local steps of the swarm at ``address``, ``HOST:PORT``.

    Weights and learning rate come from the keeper with each round; the model must have the parameters of the
    keeper's by name, shape and type. ``samples``: how many a step is of, at most the keeper's ``batch``.
    ``patience``: seconds without a sign of the keeper. Errors: ``InputError`` where the model is another;
    ``LinkError`` naming the keeper.
    """
    from thinwire.links.address import Address
    from thinwire.links.security import read_token
    from thinwire.uses.training.swarm.loop import join_loop
    from thinwire.uses.training.swarm.run.options import PORT

    place = Address.parse(address, like=PORT, port=PORT)
    secret = token if token is not None else read_token()
    return join_loop(model, optimizer, place, secret, name, samples, patience, noted)


def keep(
    model: nn.Module,
    announce: Callable[[int], object],
    *,
    heldout: Callable[[nn.Module], float] | None = None,
    losses: Callable[[nn.Module, Tensor], Tensor] | None = None,
    samples: Tensor | None = None,
    noted: Callable[[str], object] = lambda _: None,
    **options: Any,
) -> SwarmRecord:
    """Keep ``model``, any module, for members whose loops ``join``; return the record of its last round.

    ``announce`` is told the port as soon as the keeper listens. ``heldout`` returns the loss of the model on
    data that nobody trains on. With ``losses``, one a sample, of ``samples`` [n, ...] that nobody trains on,
    members' updates are scored, and those that harm do not count. ``options``: those of ``thinwire swarm`` by
    name (``rounds``, ``lr``, ``listen``, ``out``, ...); a member's step counts for at most ``batch``
    samples. At the end the model has the newest weights.
    Errors: ``InputError``; ``LinkError`` where nobody comes.
    """
    from thinwire.uses.training.swarm.run.taught import of_module

    return _kept(
        {"model": type(model).__name__, **options},
        announce,
        noted,
        lambda config: of_module(model, heldout, losses, samples, config.batch),
    )


def serve(
    model: str,
    announce: Callable[[int], object],
    noted: Callable[[str], object] = lambda _: None,
    **options: Any,
) -> SwarmRecord:
    """Keep a language model by name or folder, as ``thinwire swarm`` does, until its last round.

    ``announce`` and ``options``: as of ``keep``.
    """
    return _kept({"model": model, **options}, announce, noted, None)


def _kept(
    options: dict[str, Any],
    announce: Callable[[int], object],
    noted: Callable[[str], object],
    taught: Callable[[SwarmConfig], Any] | None,
) -> SwarmRecord:
    from thinwire.runs.records.folder_lock import holding
    from thinwire.uses.kinds import load_run
    from thinwire.uses.training.swarm.run.keeper_program import Keeper
    from thinwire.uses.training.swarm.run.options import SwarmConfig

    config = SwarmConfig.from_dict(options)
    with holding(config.out):
        lesson = taught(config) if taught is not None else None
        Keeper(config, lambda *_: None, noted, lesson).run(lambda hub: announce(hub.port))
    return load_run(config.out)  # type: ignore[return-value]
