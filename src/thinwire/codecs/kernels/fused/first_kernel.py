"""The smallest kernel: whether Triton can build and run one here."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rounded(x: tl.tensor, found: tl.tensor, factor: tl.constexpr, size: tl.constexpr) -> None:
    i = tl.arange(0, size)
    y = tl.load(x + i) * factor + 12582912.0  # two roundings, not one
    tl.store(found + i, tl.div_rn(1.0, y - 12582911.0))


def works(device: torch.device) -> bool:
    """Return whether a kernel on ``device`` has the bits that torch has on a CPU."""
    x = torch.arange(64, dtype=torch.float32, device="cpu").mul_(0.37)
    expected = 1.0 / (x.mul(1.7).add_(12582912.0) - 12582911.0)
    there = x.to(device)
    found = torch.empty_like(there)
    _rounded[(1,)](there, found, factor=1.7, size=64, num_warps=1, enable_fp_fusion=False)
    return torch.equal(found.cpu(), expected)
