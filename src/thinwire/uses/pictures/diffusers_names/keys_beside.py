"""Keys that every rank has beside the shares of a layer, such as those of a text that is not split.

They are left out of what ranks exchange, and put behind the keys of all ranks again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# By the kind of a processor: which of its keys are shares, of so many queries and keys, and tokens of the
# picture that the module was given.
SHARES: dict[str, Callable[[int, int, int], slice]] = {
    "MochiAttnProcessor2_0": lambda queries, keys, picture: slice(0, picture),
    "SD3IPAdapterJointAttnProcessor2_0": lambda queries, keys, picture: slice(0, min(queries, keys)),
    "PRXAttnProcessor2_0": lambda queries, keys, picture: slice(keys - queries, keys),
}
BESIDE = "_with_beside"  # the name of a back end that adds keys


def apart(
    stock: Callable[..., Tensor], given: dict[str, Any], kind: str, picture: int
) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """Return an attention over the keys that are shares, and a back end that adds the others.

    ``given``: query, key and value [B, tokens, heads, channels], and a mask [..., tokens of the keys].
    """
    n = given["key"].shape[1]
    shared = SHARES[kind](given["query"].shape[1], n, picture)
    if shared == slice(0, n):
        return stock, given
    own = {name: given[name][:, shared] for name in ("key", "value")}
    beside = {name: _without(given[name], shared, 1) for name in own}
    mask = given.get("attn_mask")
    if mask is not None:
        own["attn_mask"], beside["attn_mask"] = mask[..., shared], _without(mask, shared, -1)

    def _with_beside(**whole: Any) -> Tensor:
        dims = {name: -1 if name == "attn_mask" else 1 for name in beside}
        return stock(**whole | {name: torch.cat([whole[name], x], dims[name]) for name, x in beside.items()})

    return _with_beside, given | own


def _without(x: Tensor, part: slice, dim: int) -> Tensor:
    """Return ``x`` but for a part along ``dim``."""
    ends = x.narrow(dim, 0, part.start), x.narrow(dim, part.stop, x.shape[dim] - part.stop)
    return torch.cat(ends, dim)
