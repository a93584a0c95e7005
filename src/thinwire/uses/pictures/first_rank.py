"""What one rank computes for all, such as a prompt's embeddings: the others need not hold what makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from thinwire.links.mesh import Peer
from thinwire.types import InputError, PayloadError, require
from thinwire.uses.pictures.agreement import check_deadline, own_rank, told, used
from thinwire.uses.pictures.rank_message import RankMessage
from thinwire.uses.pictures.workers.call_messages import CallReader, CallWriter, HostCall

Result = TypeVar("Result")
_WHAT = "what the first rank computes"


def on_first(
    peers: Mapping[int, Peer],
    compute: Callable[[], Result],
    *,
    device: torch.device | str = "cpu",
    deadline: float = 600.0,
) -> Result:
    """Let the first rank compute something, and return it on all ranks, the same bits.

    - ``peers``: links of ``connect_mesh`` to all other ranks, each of which makes this call too;
    - ``compute``: is called on the first rank alone, without gradients. It returns tensors, numbers, texts
      and None, or tuples, lists and dicts of these, 1 GiB at most. Other mappings arrive as dicts;
    - ``device``: where the other ranks get the tensors; what was on the CPU beside tensors of a card stays;
    - ``deadline``: seconds without any data after which the others give up.

    So a text encoder is loaded by one rank::

        embeds, negative = thinwire.on_first(peers, lambda: pipe.encode_prompt(prompt))

    Errors: ``InputError`` on all ranks for a result that cannot be sent, and for one that the first rank
    raises; ``LinkError`` naming the first rank where it is lost, silent, or ended with another error.
    """
    require(isinstance(peers, Mapping), InputError, f"{peers!r:.40} are no links; give connect_mesh's")
    require(callable(compute), InputError, f"{compute!r:.40} cannot be called; give a function")
    check_deadline(deadline)
    if not peers:
        return compute()
    first = min(own_rank(peers), *peers)
    with used(peers, "first") as exchange:
        if exchange.rank == first:
            with told(exchange):
                with torch.no_grad():  # the others get values, and nothing of how they came about
                    made = compute()
                call = CallWriter(_WHAT).pack(HostCall(None, (made,), {}))
                exchange.post(0, RankMessage(packets=[call]).pack())
            exchange.drain(deadline)
            return made
        message = RankMessage.unpack(exchange.receive(first, 0, deadline, "what it computes for all"))
        message.check_sender(first)
        _, found = CallReader(torch.device(device)).unpack(b"".join(message.data[:1]))
        text = f"rank {first} sent no result, where one is due; take one version of thinwire on all ranks"
        require(found is not None and len(found.args) == 1, PayloadError, text)
        result: Result = found.args[0]  # type: ignore[union-attr]  # require has checked it
        return result
