"""What of a DDP model is exchanged, and what is refused.

Tested with torch 2.13, of whose DDP it uses private names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.types import InputError, require

STATISTICS = ("running_mean", "running_var")  # what torch's norms, and those after them, call their buffers


class Copied:
    """What a copy of the model has in place of its hook: it exchanges nothing."""


def check_free(ddp: object) -> None:
    """Raise ``InputError`` unless this is a DDP model without a hook."""
    if not isinstance(ddp, DistributedDataParallel):
        raise InputError(
            f"replicate takes a DistributedDataParallel, not {type(ddp).__name__}; wrap the model"
        )
    sparse = [
        name or type(module).__name__
        for name, module in ddp.module.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and module.sparse
        and module.weight.requires_grad
    ]
    wrong = f"the gradients of {', '.join(sparse)} are sparse tensors; build it with sparse=False"
    require(not sparse, InputError, wrong)
    ddp._comm_hooks = [known for known in ddp._comm_hooks if not isinstance(known[1], Copied)]
    # A built-in hook, or one of mixed_precision, leaves a name with the logger alone.
    name = ddp._get_ddp_logging_data().get("comm_hook", "")
    taken = ddp._comm_hooks or name
    require(
        not taken, InputError, f"this model has the hook {name or taken}, and DDP takes one; leave it out"
    )


def trained(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return what DDP reduces, by name.

    Errors: ``InputError`` where a parameter was added, replaced, frozen or unfrozen since DDP was made.
    """
    found = to_train(ddp)
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    known = {id(p): bucket.buffer().dtype for bucket in buckets for p in bucket.parameters()}
    new = [name for name, p in found.items() if id(p) not in known]
    text = f"DDP does not reduce {', '.join(new)}, which was added or unfrozen after it was made"
    require(not new, InputError, f"{text}; wrap the model once it is complete")
    gone = len(known) - len(found)
    text = f"DDP reduces {gone} parameters that were removed or frozen after it was made"
    require(gone == 0, InputError, f"{text}; wrap the model once it is complete")
    other = [name for name, p in found.items() if p.dtype.to_real() != known[id(p)]]
    text = f"{', '.join(other)} has another dtype than when DDP was made"
    require(not other, InputError, f"{text}; convert the model before it is wrapped")
    return found


def check_same(ddp: DistributedDataParallel, known: Collection[nn.Parameter]) -> None:
    """Raise ``InputError`` where something is trained that is not ``known``."""
    ids = set(map(id, known))
    new = [name for name, p in to_train(ddp).items() if id(p) not in ids]
    text = f"{', '.join(new)} was added or unfrozen after replicate, and is not exchanged"
    require(not new, InputError, f"{text}; wrap the model and call replicate once it is complete")


def to_train(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters that DDP would reduce if it were made now, by name, each once."""
    return {name: p for name, p in _parameters(ddp) if p.requires_grad}


def _parameters(ddp: DistributedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    seen: set[int] = set()
    left_out = set(ddp.parameters_to_ignore)
    for place, module in ddp.module.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if f"{place}.{name}" not in left_out and id(p) not in seen:  # DDP's own rule, also at the root
                seen.add(id(p))
                yield f"{place}.{name}".lstrip("."), p


def digest_of_weights(ddp: DistributedDataParallel) -> str:
    """Return a digest of all bits of what DDP keeps alike: trained parameters and frozen ones."""
    digest = hashlib.blake2b(digest_size=16)
    for name, p in sorted(_parameters(ddp)):
        digest.update(f"{name} {list(p.shape)} {p.dtype}".encode())
        values = p.detach().resolve_conj().contiguous().cpu().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def average_statistics(
    ddp: DistributedDataParallel, beyond: Callable[[Tensor], Tensor] = lambda mean: mean
) -> None:
    """Average the running statistics of norms, such as BatchNorm's, over DDP's own group.

    In float64, so that equal ones stay what they are; counts and all other buffers stay as they are.
    ``beyond`` makes the mean of all sites of this site's.
    """
    found = statistics(ddp)
    if not found:
        return
    flat = torch.cat([x.detach().reshape(-1).double() for x in found])
    dist.all_reduce(flat, group=ddp.process_group)
    flat = beyond(flat / ddp.process_group.size())
    with torch.no_grad():
        for x, part in zip(found, flat.split([x.numel() for x in found]), strict=True):
            x.copy_(part.view_as(x))


def broadcast_the_rest(ddp: DistributedDataParallel) -> None:
    """Send rank 0's buffers to all others, but for statistics: what DDP does before a forward pass."""
    averaged = set(map(id, statistics(ddp)))
    ddp._assign_modules_buffers()
    rest = [x for x in ddp.modules_buffers if id(x) not in averaged]
    if rest:
        with torch.no_grad():
            ddp._default_broadcast_coalesced(bufs=rest)


def statistics(ddp: DistributedDataParallel) -> list[Tensor]:
    """Return the running means and variances of the model's norms."""
    left_out = set(ddp.parameters_to_ignore)
    return [
        x
        for name, x in ddp.module.named_buffers()
        if name.rpartition(".")[2] in STATISTICS and x.is_floating_point() and name not in left_out
    ]
