"""Write the golden packets that are missing: run ``python tests/golden/make_wire.py`` after adding one.

A file that exists is never rewritten: old packets must stay readable.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from packets import frames  # noqa: E402

from thinwire.channels import wire  # noqa: E402
from thinwire.channels.channel import Sender, parse_scheme  # noqa: E402

SCHEMES = {
    "raw": "Scheme()",
    "delta": "Scheme(Uniform(bits=3, group=8), memory=Delta(), keyframe=Cast(),"
    " references=Uniform(bits=8, group=16))",
    "delta-by-step": "Scheme(Uniform(bits=8, scale='tensor'), memory=Delta(key='step'))",
    "second-order": "Scheme(Uniform(bits=2), memory=SecondOrderDelta(decay=0.25), references=Cast())",
    "running-mean": "Scheme(Uniform(bits=4), memory=RunningMean())",
    "error-feedback": "Scheme(TopK(ratio=0.1), memory=ErrorFeedback())",
    "error-feedback-by-runs": "Scheme(ChunkTopK(ratio=0.1, chunk=32, values=Uniform(bits=8)),"
    " memory=ErrorFeedback(decay=0.75))",
    "in-turn": "Scheme(InTurn(every=10, at=3, values=TopK(ratio=0.2, values=Uniform(group=128))),"
    " memory=ErrorFeedback(key='step'))",
    "first-visit": "Scheme(Uniform(scale_dtype='e5m3'), memory=FirstVisit(),"
    " keyframe=Cast(dtype='bfloat16'))",
    "sink": "Scheme(Uniform(bits=2), memory=Delta(), keyframe=Sink(ChannelMean(Uniform())),"
    " references=Uniform(bits=8))",
}


def record(scheme: str) -> dict[str, object]:
    """Return the packets of one sender: inputs in 64ths, bytes, and what they decode to (float32, hex)."""
    sender, packets = Sender(parse_scheme(scheme)), []
    for x, ids in frames():
        numbers = (x * 64).round()
        packet, x_hat = sender.encode(numbers / 64, ids)
        packets.append(
            {
                "ids": ids,
                "x": [int(v) for v in numbers.flatten().tolist()],
                "bytes": wire.pack(packet).hex(),
                "decoded": x_hat.numpy().tobytes().hex(),
            }
        )
    return {"version": wire.VERSION, "scheme": scheme, "packets": packets}


if __name__ == "__main__":
    for name, scheme in SCHEMES.items():
        path = HERE / "wire" / f"{name}.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(record(scheme)) + "\n")
