"""Random numbers by a seed, and all generators afterwards as they were: the processor's and the cards'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int | None = None) -> Iterator[None]:
    """Let random numbers in the block come from ``seed``, and no later ones, on no device, depend on them.

    Without a seed they go on from what there was.

    >>> import torch
    >>> with seeded(0):
    ...     first = torch.rand(1)
    >>> with seeded(0):
    ...     torch.equal(torch.rand(1), first)
    True
    """
    # Of a card that is not in use yet nothing is drawn here; asking for its generator would start it.
    cards = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=cards):
        if seed is not None:  # not torch.manual_seed, which also seeds what is started later
            for generator in (torch.default_generator, *(torch.cuda.default_generators[n] for n in cards)):
                generator.manual_seed(seed)
        yield
