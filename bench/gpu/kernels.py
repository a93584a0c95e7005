"""The codecs as kernels: GB/s of float32 input, against the copies that the device makes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from thinwire.codecs import Codec, parse_codec

CODECS = (
    "Cast(dtype='bfloat16')",
    *(f"Uniform(bits={b})" for b in (2, 3, 4, 8)),
    "Uniform(bits=4, scale='channel')",
    "Uniform(bits=3, scale_dtype='e5m3')",
    "Hadamard(Uniform(bits=4))",
    "TileAdaptive()",
    "DeadZone(step=0.977)",
    "Entropy(DeadZone(step=0.977))",  # its coder runs on the CPU
)
LARGE = 1 << 28  # bytes: a copy too large for caches and launch times to count


def measure(
    shape: tuple[int, ...], device: torch.device, rounds: int, compiled: bool, large: int = LARGE
) -> list[dict[str, Any]]:
    """Return one row a codec, eager and (if ``compiled``) through ``torch.compile``; they take turns."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    target, size = torch.empty_like(x), x.numel() * 4 / 1e9
    big = torch.zeros(large // 4, device=device)
    place = torch.empty_like(big)
    works: dict[tuple[str, str], Callable[[], Any]] = {
        ("copy", "tensor"): lambda: target.copy_(x),
        ("copy", "card"): lambda: place.copy_(big),
    }
    notes: dict[str, str] = {}
    for text in CODECS:
        works |= _works(parse_codec(text), x, "eager")
        if compiled:
            try:
                works |= _works(parse_codec(text), x, "compiled")
                same = _same(works, parse_codec(text))
                notes[text] = (
                    "bits equal to eager's" if same else "bits differ from eager's: no use for references"
                )
            except Exception as e:  # what a compiler cannot do is a result too
                notes[text] = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    times: dict[tuple[str, str], list[float]] = {name: [] for name in works}
    for turn in range(rounds + 2):
        for name, work in works.items():
            spent = seconds(work, device)
            if turn > 1:  # the first two warm up
                times[name].append(spent)
    gb_s = {name: size / statistics.median(t) for name, t in times.items()}
    gb_s["copy", "card"] *= big.numel() / x.numel()
    return [_row(text, shape, gb_s, notes.get(text)) for text in CODECS]


def _same(works: dict[tuple[str, str], Callable[[], Any]], codec: Codec) -> bool:
    decoded = [works[repr(codec), f"{how} decode"]() for how in ("eager", "compiled")]
    return torch.equal(*decoded)


def _works(codec: Codec, x: torch.Tensor, how: str) -> dict[tuple[str, str], Callable[[], Any]]:
    encode, decode, name = codec.encode, codec.decode, repr(codec)
    if how == "compiled":
        encode, decode = torch.compile(encode), torch.compile(decode)
    payload = encode(x)
    decode(payload)
    return {
        (name, f"{how} encode"): lambda: encode(x),
        (name, f"{how} decode"): lambda: decode(payload),
    }


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return how long a call takes, until the device has done it."""
    finish = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    finish()
    start = time.perf_counter()
    work()
    finish()
    return time.perf_counter() - start


def _row(
    text: str, shape: tuple[int, ...], gb_s: dict[tuple[str, str], float], note: str | None
) -> dict[str, Any]:
    name = repr(parse_codec(text))
    row: dict[str, Any] = {"codec": name, "shape": list(shape)}
    row |= {f"copy_{k}_gb_s": round(gb_s["copy", k], 2) for k in ("tensor", "card")}
    for (codec, what), speed in gb_s.items():
        if codec == name:
            row[what.replace(" ", "_") + "_gb_s"] = round(speed, 3)
            row[what.replace(" ", "_") + "_share_of_card"] = round(speed / gb_s["copy", "card"], 4)
    return row | ({"compiled": note} if note else {})
