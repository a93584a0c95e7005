"""Meshes for the tests of pictures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from meshes import Mesh, meshes


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, list[Mesh]]]:
    """Meshes of 2, 3 and 4 ranks, which the tests of a module use one after another."""
    with meshes(2) as two, meshes(3) as three, meshes(4) as four:
        yield {2: two, 3: three, 4: four}


@pytest.fixture(autouse=True)
def all_kernels_of_attention() -> None:
    """Let torch choose among its kernels: ranks in threads that ask for one may leave others switched off."""
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
