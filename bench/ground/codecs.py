"""Measure encode and decode of every kind of codec, and of whole channels: GB/s of float32 input on one core.

A channel is all that a stage does for a tensor: references loaded, coded, moved and checked, the packet
packed; unpacked, decoded, references moved and checked. Copies of the same tensor are timed in the same
rounds: the share of copy bandwidth is that of encode plus decode.

Run ``python -m bench.ground.codecs [--megabytes 1 4 32] [--rounds 15]``. The codecs take turns, round after
round, so a noisy machine disturbs them alike; medians of processor time are reported. A large tensor is made
and dropped first, as in any process that trains: only then does the C library stop returning every freed
megabyte to the kernel, whose page faults would cost more than the codecs. Writes
``bench/results/codecs.json``; stopped between two sizes, it goes on with the next.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import zstandard

import thinwire
from bench.study.cells import RESULTS, Cells
from bench.study.tables import Draw, Row, columns
from thinwire.channels import wire
from thinwire.channels.channel import Receiver, Sender
from thinwire.codecs import Codec, FixedPoint, TileAdaptive, Uniform, parse_codec
from thinwire.codecs.kernels import kernel_calls
from thinwire.runs.machine.processor import cores, cpu_model
from thinwire.uses.training.pipeline.recipes import parse_recipe

RESULT = RESULTS / "codecs.json"
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
    "Sink(ChannelMean(Entropy(Uniform(scale_dtype='e5m3'))))",  # thinwire-groups: first visits, ...
    "Entropy(Uniform(bits=2, scale_dtype='e5m3', clip=0.6))",
    "Entropy(Uniform(bits=3, scale_dtype='e5m3', clip=0.8))",
    "DeadZone()",
    "Sink(ChannelMean(Entropy(DeadZone(step=0.65))))",  # thinwire: first visits, ...
    "Entropy(DeadZone(step=0.977))",
    "Entropy(DeadZone(step=0.977, offset=0.5, dither=True))",  # ... gradients
    "FixedPoint()",
    "TileAdaptive()",
    "TopK(ratio=0.01)",
    "RandomK(ratio=0.01)",
    "HardThreshold(threshold=3.0)",
)


CHANNELS_OF = {  # name: is each message a first visit; does it go forward
    "channel of thinwire, first visit": (True, True),
    "channel of thinwire, revisit": (False, True),
    "channel of thinwire, backward": (False, False),
}


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


@dataclass
class Subject:
    """Something to measure: a turn warms the caches, then returns seconds to encode and decode, and bytes."""

    name: str
    turn: Callable[[], tuple[float, float, int]]
    wanted: float | None = None  # GB/s
    taken: list[tuple[float, float, int]] = field(default_factory=list)


def of_codec(spec: str, x: torch.Tensor) -> Subject:
    """Return a codec alone."""
    codec = parse_codec(spec)
    payload = codec.encode(x)

    def turn() -> tuple[float, float, int]:
        codec.encode(x)
        encoded = seconds(lambda: codec.encode(x))
        codec.decode(payload)
        return encoded, seconds(lambda: codec.decode(payload)), payload.nbytes

    return Subject(repr(codec), turn, wanted(codec))


def of_channel(name: str, x: torch.Tensor) -> Subject:
    """Return a sender and a receiver of the recipe ``thinwire``, packets included."""
    first, forward = CHANNELS_OF[name]
    sender = Sender(parse_recipe("thinwire").schemes["forward" if forward else "backward"])
    receiver = Receiver()
    noise = 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def turn() -> tuple[float, float, int]:
        for _ in range(2):
            if first:
                sender.reset()
                receiver.reset()
            else:
                noise.neg_()
            moved, ids = x + noise, range(len(x))
            start = time.thread_time()
            data = wire.pack(sender.encode(moved, ids)[0])
            sent = time.thread_time()
            receiver.decode(wire.unpack(data))
            end = time.thread_time()
        return sent - start, end - sent, len(data)

    turn()
    return Subject(name, turn)


def measure(subjects: list[Subject], x: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    """Return one row a subject; they take turns within a round."""
    copies, target = list[float](), torch.empty_like(x)
    for _ in range(rounds + 2):
        for subject in subjects:
            subject.taken.append(subject.turn())
        target.copy_(x)
        copies.append(seconds(lambda: target.copy_(x)))
    size = x.numel() * 4 / 1e9
    return [row(s, size, size / statistics.median(copies[2:])) for s in subjects]


def row(subject: Subject, size: float, copy: float) -> dict[str, Any]:
    """Return the record of one subject; ``size`` in GB, ``copy`` in GB/s. The first two rounds warm up."""
    enc, dec = (statistics.median(taken[i] for taken in subject.taken[2:]) for i in (0, 1))
    both = size / (enc + dec)
    return {
        "codec": subject.name,
        "input_bytes": round(size * 1e9),
        "bits_per_value": round(subject.taken[-1][2] * 8 / (size * 1e9 / 4), 3),
        "encode_gb_s": round(size / enc, 3),
        "decode_gb_s": round(size / dec, 3),
        "both_gb_s": round(both, 3),
        "copy_gb_s": round(copy, 3),
        "share_of_memcpy": round(both / copy, 4),
        "wanted_gb_s": subject.wanted,
    }


def wanted(codec: Codec) -> float | None:
    """Return the bar for encode plus decode in GB/s: none for what no recipe uses by default."""
    if isinstance(codec, Uniform):
        return 1.5
    return 0.5 if isinstance(codec, FixedPoint | TileAdaptive) or "Entropy" in repr(codec) else None


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "processor": cpu_model(),
        "cores": cores(),
        "load": os.getloadavg()[0],
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zstandard": zstandard.__version__,
        "thinwire": thinwire.__version__,
    }


speeds = columns(
    lambda rows: rows,
    ("codec", "`{codec}`"), ("bits a value", "{bits_per_value:.2f}"), ("encode, GB/s", "{encode_gb_s:.2f}"),
    ("decode, GB/s", "{decode_gb_s:.2f}"), ("both, GB/s", "{both_gb_s:.2f}"),
    ("both, share of a copy's", "{share_of_memcpy:.1%}"),
)  # fmt: skip


def table(found: Row) -> str:
    """Return the speed of the codecs at the smallest size measured, and what the machine did besides."""
    smallest = min(r["input_bytes"] for r in found["rows"])
    measured = {r["codec"] for r in found["rows"]}
    missing = [n for n in (*(repr(parse_codec(c)) for c in CODECS), *CHANNELS_OF) if n not in measured]
    machine = found["machine"]
    note = f"The system's load was {machine['load']:.1f} on {machine['cores']} cores at the end."
    if missing:
        note += f" Not measured yet: {', '.join(f'`{n}`' for n in missing)}."
    return f"{speeds(r for r in found['rows'] if r['input_bytes'] == smallest)}\n\n{note}"


TABLES: dict[str, Draw] = {"codecs": table}


def timed(megabytes: float, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of one size."""
    # Small tensors are quick to do, and need more rounds for a steady median.
    rounds *= 4 if megabytes <= 4 else 1
    x = hidden_state(int(megabytes * 1e6))
    subjects = [*(of_codec(spec, x) for spec in CODECS), *(of_channel(name, x) for name in CHANNELS_OF)]
    return measure(subjects, x, rounds)


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 4, 32])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.zeros(31 << 18)  # 31 MB, dropped at once: see above
    cells = Cells(args.out, {"rounds": args.rounds, "codecs": CODECS, "channels": CHANNELS_OF})
    rows = []
    for megabytes in args.megabytes:
        rows.append(cells.of(f"{megabytes:g} MB", lambda size=megabytes: timed(size, args.rounds)))
        short = [r["codec"] for r in rows[-1] if r["wanted_gb_s"] and r["both_gb_s"] < r["wanted_gb_s"]]
        copy = f"{megabytes:g} MB of float32, where a copy makes {rows[-1][0]['copy_gb_s']:.1f} GB/s"
        print(f"\n{copy}\n{speeds(rows[-1])}\nbelow the bar: {', '.join(short) or 'none'}", flush=True)
    cells.finish(
        {
            "machine": machine(),
            "rounds": args.rounds,
            "compiled": kernel_calls.there(),
            "rows": [*chain(*rows)],
        }
    )


if __name__ == "__main__":
    main()
