"""Federated learning in Python: compare methods on a virtual clock, serve a model, take part.

>>> from thinwire import federated
>>> records = federated.compare("fedavg", "thinwire", data="fashion-mnist", until=0.78)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.rounds.client_scheduler import MadeVersion
    from thinwire.uses.federated.run.record import FederatedRecord

__all__ = ["compare", "join", "serve"]


def compare(
    *methods: str, told: Callable[[str, MadeVersion, float | None], object] = lambda *_: None, **options: Any
) -> list[FederatedRecord]:
    """Run ``methods`` one after another on a virtual clock, and return their records, seed by seed.

    ``options``: those of ``thinwire federate`` by name (``data``, ``clients``, ``devices``, ``rounds``,
    ``until``, ``out``, ...). ``told`` hears of each version: the method, what was made, perhaps its accuracy.
    Errors: ``InputError`` for a wrong option; that of the first run that failed, once all have ended.

    >>> import tempfile
    >>> from thinwire import federated
    >>> small = {"data": "digits", "model": "logistic", "clients": 3, "rounds": 2, "workers": 1}
    >>> (record,) = federated.compare("fedavg", out=tempfile.mkdtemp(), **small)
    >>> record.totals["rounds"]
    2
    """
    from thinwire.runs.records.folder_lock import holding
    from thinwire.uses.federated.run.comparison import run_all
    from thinwire.uses.federated.run.options import FederatedConfig
    from thinwire.uses.kinds import load_run

    config = FederatedConfig.from_dict({"methods": " ".join(methods), **options})
    with holding(config.out):
        return [load_run(folder) for folder in run_all(config, told)]  # type: ignore[misc]


def serve(
    method: str,
    announce: Callable[[int], object],
    noted: Callable[[str], object] = lambda _: None,
    **options: Any,
) -> FederatedRecord:
    """Serve a model that clients train on data that stay with them, until its last version.

    ``announce`` is told the port as soon as the server listens. ``options``: those of ``federate-serve``.
    Errors: ``InputError``; ``LinkError`` naming the clients that are missing.
    """
    from thinwire.runs.records.folder_lock import holding
    from thinwire.uses.federated.run.options import ServeConfig
    from thinwire.uses.federated.run.server_program import FederationServer
    from thinwire.uses.kinds import load_run

    config = ServeConfig.from_dict({"methods": method, **options})
    with holding(config.out):
        FederationServer(config, lambda *_: None, noted).run(lambda hub: announce(hub.port))
    return load_run(config.out)  # type: ignore[return-value]


def join(address: str, noted: Callable[[str], object] = lambda _: None, **options: Any) -> int:
    """Train the model of the server at ``address`` on data that stay here; return the last version's number.

    ``options``: those of ``federate-join`` (``data``, ``part``, ``token_file``, ...).
    Errors: ``InputError`` where data or model do not fit the server's; ``LinkError`` naming it.
    """
    from thinwire.uses.federated.run.client_program import join as joined
    from thinwire.uses.federated.run.options import JoinConfig

    return joined(JoinConfig.from_dict({"address": address, **options}), noted)
