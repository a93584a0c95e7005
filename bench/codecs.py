"""Measure encode and decode of every kind of codec: GB/s of float32 input on one core.

Run ``python -m bench.codecs [--megabytes 1 4 32] [--rounds 15]``. The codecs take turns, round after round,
so a noisy machine disturbs them alike; medians of processor time are reported. A large tensor is made and
dropped first, as in any process that trains: only then does the C library stop returning every freed megabyte
to the kernel, whose page faults would cost more than the codecs. Writes ``bench/results/codecs.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zstandard

import thinwire
from thinwire.codecs import Codec, FixedPoint, TileAdaptive, Uniform, parse_codec

RESULTS = Path(__file__).parent / "results" / "codecs.json"
CHANNELS = 576  # of SmolLM2-135M
CODECS = (
    "Cast(dtype='bfloat16')",
    *(f"Uniform(bits={b})" for b in (1, 2, 3, 4, 5, 6, 8)),
    *(f"Uniform(bits={b}, rounding='stochastic')" for b in (2, 3, 4, 8)),
    "Uniform(bits=3, scale_dtype='e5m3')",
    "Uniform(bits=4, scale_dtype='float16')",
    *(f"Uniform(bits=4, scale='{s}')" for s in ("tensor", "channel", "token")),
    "Uniform(bits=4, group=16)",
    "Uniform(bits=4, group=64)",
    *(f"Entropy(Uniform(bits={b}))" for b in (2, 3, 4, 8)),
    "Entropy(Uniform(bits=3, rounding='stochastic'))",
    "Entropy(Uniform(bits=3, scale_dtype='e5m3'))",
    "ChannelMean(Uniform(bits=4))",
    "Hadamard(Uniform(bits=4))",
    "Sink(ChannelMean(Entropy(Uniform(scale_dtype='e5m3'))))",  # thinwire: first visits, deltas, gradients
    "Entropy(Uniform(bits=2, scale_dtype='e5m3', clip=0.6))",
    "Entropy(Uniform(bits=3, scale_dtype='e5m3', clip=0.8))",
    "FixedPoint()",
    "TileAdaptive()",
    "TopK(ratio=0.01)",
    "RandomK(ratio=0.01)",
    "HardThreshold(threshold=3.0)",
)


def hidden_state(nbytes: int) -> torch.Tensor:
    """Return float32 [4, tokens, channels] of about ``nbytes``: normal values, a few large channels."""
    g = torch.Generator().manual_seed(0)
    tokens = max(1, nbytes // (4 * 4 * CHANNELS))
    x = torch.randn((4, tokens, CHANNELS), generator=g)
    x[..., :4] *= 8
    return x


def seconds(work: Callable[[], Any]) -> float:
    """Return the processor time of one call: what other processes take of the core does not count."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def measure(codecs: list[Codec], x: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    """Return one row a codec; the codecs take turns within a round."""
    payloads = [codec.encode(x) for codec in codecs]
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in codecs]
    copies, target = [], torch.empty_like(x)
    for turn in range(rounds + 2):
        for codec, payload, (enc, dec) in zip(codecs, payloads, times, strict=True):
            codec.encode(x)  # warm: the caches are this codec's
            enc.append(seconds(lambda codec=codec: codec.encode(x)))
            codec.decode(payload)
            dec.append(seconds(lambda codec=codec, payload=payload: codec.decode(payload)))
        copies.append(seconds(lambda: target.copy_(x)))
        if turn == 1:  # the first two rounds warm up
            times = [([], []) for _ in codecs]
            copies = []
    size = x.numel() * 4 / 1e9
    copy = size / statistics.median(copies)
    return [
        row(codec, payload.nbytes * 8 / x.numel(), size, statistics.median(enc), statistics.median(dec), copy)
        for codec, payload, (enc, dec) in zip(codecs, payloads, times, strict=True)
    ]


def row(codec: Codec, bits: float, size: float, enc: float, dec: float, copy: float) -> dict[str, Any]:
    """Return the record of one codec; ``size`` in GB, times in seconds, ``copy`` in GB/s."""
    both = size / (enc + dec)
    return {
        "codec": repr(codec),
        "input_bytes": round(size * 1e9),
        "bits_per_value": round(bits, 3),
        "encode_gb_s": round(size / enc, 3),
        "decode_gb_s": round(size / dec, 3),
        "both_gb_s": round(both, 3),
        "share_of_memcpy": round(both / copy, 4),
        "wanted_gb_s": wanted(codec),
    }


def wanted(codec: Codec) -> float | None:
    """Return the bar for encode plus decode in GB/s: none for what no recipe uses by default."""
    if isinstance(codec, Uniform):
        return 1.5
    return 0.5 if isinstance(codec, FixedPoint | TileAdaptive) or "Entropy" in repr(codec) else None


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zstandard": zstandard.__version__,
        "thinwire": thinwire.__version__,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of one size."""
    print(f"\n{rows[0]['input_bytes'] / 1e6:.1f} MB of float32; GB/s of it on one core")
    print(f"{'codec':52s} {'bits':>6s} {'encode':>7s} {'decode':>7s} {'both':>6s} {'memcpy':>7s}")
    for r in rows:
        short = "  below the bar" if r["wanted_gb_s"] and r["both_gb_s"] < r["wanted_gb_s"] else ""
        print(
            f"{r['codec']:52s} {r['bits_per_value']:6.2f} {r['encode_gb_s']:7.2f} {r['decode_gb_s']:7.2f} "
            f"{r['both_gb_s']:6.2f} {r['share_of_memcpy']:7.1%}{short}"
        )


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 4, 32])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.zeros(31 << 18)  # 31 MB, dropped at once: see above
    codecs = [parse_codec(spec) for spec in CODECS]
    rows = []
    for megabytes in args.megabytes:
        # Small tensors are quick to do, and need more rounds for a steady median.
        rounds = args.rounds * (4 if megabytes <= 4 else 1)
        rows.append(measure(codecs, hidden_state(int(megabytes * 1e6)), rounds))
        show(rows[-1])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine(), "rounds": args.rounds, "rows": [r for size in rows for r in size]}
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
