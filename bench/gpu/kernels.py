"""The codecs as kernels: GB/s of float32 input, against the copies that the device makes."""

from __future__ import annotations

from typing import Any

import torch

from bench.gpu.ranks import failing_alone, median_seconds, row
from thinwire.codecs import Codec, parse_codec
from thinwire.codecs.codec import roundtrip_against

CODECS = (
    "Uniform(bits=4)",
    "DeadZone(step=0.977)",
    "Entropy(DeadZone(step=0.977))",
    "Hadamard(Uniform(bits=4))",
    "TileAdaptive()",
    "RankOne(bits=1)",
    "RankOne(bits=2)",
    "ChunkTopK(ratio=0.02)",
    "ChunkTopK(ratio=0.02, values=Uniform(bits=8))",
    "TopK(ratio=0.01)",
    "LowRank(rank=4)",
    "Uniform(bits=2)",
    "Uniform(bits=8)",
    "Uniform(bits=4, scale='channel')",
    "Cast(dtype='bfloat16')",
)
SHAPES = ((8, 2048, 4096), (1, 2048, 4096))
TINY = ((2, 16, 64), (1, 16, 64))
LARGE = 1 << 28  # bytes: a copy too large for caches and launch times to count


def measure(device: torch.device, smoke: bool) -> None:
    """Print a row a codec and shape: GB/s of encode, decode and both with the reference moved on."""
    big = torch.zeros((1 << 16 if smoke else LARGE) // 4, device=device)
    place = torch.empty_like(big)
    copy = big.nbytes / median_seconds(lambda: place.copy_(big), device) / 1e9
    row(copy_gb_s=round(copy, 1))
    for shape in TINY if smoke else SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        for text in CODECS:
            with failing_alone(codec=text, shape=list(shape)):
                row(codec=text, shape=list(shape), **_speeds(parse_codec(text), x, device, copy))


def _speeds(codec: Codec, x: torch.Tensor, device: torch.device, copy: float) -> dict[str, Any]:
    payload, size, reference = codec.encode(x), x.nbytes / 1e9, torch.zeros_like(x)
    works = {
        "encode": lambda: codec.encode(x),
        "decode": lambda: codec.decode(payload),
        "against": lambda: roundtrip_against(
            codec, x, reference
        ),  # what a sender does: the next reference too
    }
    found: dict[str, Any] = {"bits": round(8 * payload.nbytes / x.numel(), 3)}
    for name, work in works.items():
        speed = size / median_seconds(work, device)
        found |= {f"{name}_gb_s": round(speed, 1), f"{name}_share": round(speed / copy, 4)}
    return found
