"""What stores are given in tests, and when two of them hold the same."""

import torch

from thinwire.channels.references import Parts


def parts(seed: int, n: int = 6) -> Parts:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 255, (n,), generator=g, dtype=torch.uint8),
        torch.randn(n, generator=g).to(torch.bfloat16),
        torch.randn(3, generator=g),
    )


def equal(a: Parts | None, b: Parts | None) -> bool:
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )
