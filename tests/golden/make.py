"""Write the golden payloads that are missing: run ``python tests/golden/make.py`` after adding an example.

A file that exists is never rewritten: old payloads must stay readable.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "shared"))

from codec_examples import CODECS, tensor  # noqa: E402

from thinwire.codecs import Codec, DeadZone, Entropy, Uniform  # noqa: E402


def record(codec: Codec, x: torch.Tensor) -> dict[str, object]:
    """Return the readable record of one payload."""
    payload = codec.encode(x)
    return {
        "codec": repr(codec),
        "shape": list(x.shape),
        "x": [v.hex() for v in x.flatten().tolist()],
        "parts": [
            {
                "dtype": str(p.dtype).removeprefix("torch."),
                "bytes": p.view(torch.uint8).numpy().tobytes().hex(),
            }
            for p in payload.parts
        ],
        "decoded": [v.hex() for v in codec.decode(payload).flatten().tolist()],
    }


def write(path: Path, codec: Codec, x: torch.Tensor) -> None:
    """Write the record of one payload, unless there is one."""
    if not path.exists():
        path.write_text(json.dumps(record(codec, x.round(decimals=2)), indent=1) + "\n")


if __name__ == "__main__":
    for codec in CODECS:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", repr(codec)).strip("-")
        write(HERE / f"{name}.json", codec, tensor((2, 3, 9), seed=1))
    for codec in (Entropy(DeadZone()), Entropy(Uniform(bits=3))):  # the others are too small for a frame
        write(HERE / f"range-coded-{type(codec.inner).__name__}.json", codec, tensor((3, 150), seed=1))
