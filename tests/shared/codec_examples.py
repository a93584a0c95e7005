"""Example instances of every registered codec, and tensors to try them on."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs import (
    Cast,
    ChannelMean,
    ChunkTopK,
    Codec,
    DeadZone,
    Entropy,
    Factors,
    FixedPoint,
    FrameChain,
    Hadamard,
    HardThreshold,
    InTurn,
    LowRank,
    RandomK,
    RankOne,
    Raw,
    Rows,
    Sink,
    TileAdaptive,
    TopK,
    Uniform,
)

EXAMPLES: dict[str, list[Codec]] = {
    "Raw": [Raw()],
    "Cast": [Cast("float16"), Cast("bfloat16"), Cast("float32")],
    "Uniform": [
        *[Uniform(bits=b, group=8) for b in range(1, 9)],
        *[Uniform(bits=4, scale=s) for s in ("tensor", "channel", "token")],
        *[Uniform(bits=b, rounding="stochastic", seed=3) for b in (1, 2, 4, 8)],
        *[Uniform(bits=3, scale_dtype=d) for d in ("float16", "e5m3")],
        Uniform(bits=1, scale="channel", scale_dtype="e5m3"),
        Uniform(bits=3, clip=0.8),
        Uniform(bits=4, group=5),
    ],
    "DeadZone": [
        DeadZone(),
        DeadZone(step=2.0, offset=0.5),
        DeadZone(step=0.001),
        DeadZone(step=9.0, offset=0.0),
        DeadZone(step=0.25, unit="tensor"),
        DeadZone(step=0.5, unit="one"),
        DeadZone(step=1.3, offset=0.5, dither=True),
        DeadZone(step=0.3, offset=0.5, unit="tensor", dither=True),
    ],
    "TopK": [TopK(ratio=0.01), TopK(ratio=0.3, values=Uniform(bits=8)), TopK(ratio=1.0, values=Cast())],
    "ChunkTopK": [
        ChunkTopK(ratio=0.01),
        ChunkTopK(ratio=0.3, chunk=20, values=Uniform(bits=8)),
        ChunkTopK(ratio=0.04, chunk=32, values=Uniform(bits=2)),
        ChunkTopK(ratio=1.0, chunk=300, values=Cast()),
    ],
    "InTurn": [InTurn(every=10, at=3, values=TopK(ratio=0.2, values=Uniform(group=128))), InTurn(every=3)],
    "RandomK": [
        RandomK(ratio=0.05),
        RandomK(ratio=0.4, seed=2, values=Uniform(bits=4)),
        RandomK(ratio=0.3, unbiased=True),
    ],
    "HardThreshold": [
        HardThreshold(threshold=1.0),
        HardThreshold(threshold=3.0, values=Uniform(bits=6)),
        HardThreshold(threshold=0.0),
    ],
    "Hadamard": [
        Hadamard(Raw(), block=4),
        Hadamard(Uniform(bits=4), block=16),
        Hadamard(Entropy(Uniform(bits=3))),
    ],
    "ChannelMean": [ChannelMean(Uniform(bits=2)), ChannelMean(Hadamard(Uniform(bits=4), block=8))],
    "Sink": [
        Sink(Uniform(bits=3)),
        Sink(ChannelMean(Uniform(bits=2)), first=Cast(), positions=2),
        Sink(HardThreshold(threshold=1.0), first=Raw()),
    ],
    "FrameChain": [
        FrameChain(Uniform(bits=4, group=8)),
        FrameChain(RankOne(2), frames=3),
        FrameChain(Raw(), frames=1),
    ],
    "Entropy": [
        *[Entropy(Uniform(bits=b)) for b in range(1, 9)],
        Entropy(Uniform(bits=3, scale_dtype="e5m3", rounding="stochastic")),
        *[Entropy(DeadZone(step=s)) for s in (0.1, 1.0, 2.0)],
        Entropy(DeadZone(offset=0.5, dither=True)),
        Entropy(TopK(ratio=0.1)),
        Entropy(HardThreshold(threshold=1.0), level=3),
        Entropy(Sink(ChannelMean(Uniform(bits=4)))),
        Entropy(Factors(rank=1)),
    ],
    "FixedPoint": [*[FixedPoint(bits=b) for b in (1, 2, 4, 8)], FixedPoint(bits=6, scale_dtype="bfloat16")],
    "TileAdaptive": [
        TileAdaptive(),
        TileAdaptive(tile=16, high=8, low=2, share=0.5),
        TileAdaptive(tile=4, share=0.0, threshold=1.0),
    ],
    "RankOne": [RankOne(), RankOne(bits=2), RankOne(bits=3), RankOne(bits=4)],
    "LowRank": [LowRank(), LowRank(rank=2)],
    "Factors": [Factors(), Factors(rank=2, step=0.3, rest=Raw())],
    "Rows": [Rows(Raw()), Rows(RankOne()), Rows(Uniform(bits=4, group=8))],
}

CODECS = [codec for examples in EXAMPLES.values() for codec in examples]

SHAPES = [
    (),
    (1,),
    (7,),
    (0,),
    (0, 5),
    (3, 0),
    (1, 1),
    (5, 33),
    (2, 3, 40),
    (2, 0, 4),
    (2, 7, 2, 16),
    (4, 64, 48),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal values with a few outliers."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    return (x * (1 + 20 * (torch.rand(shape, generator=g) < 0.01))).to(dtype)
