"""Prefixes packed in every way: bytes, what is lost of what follows, and seconds, ``make bench-caches``.

SmolLM2-135M in float32, its cache in bfloat16; prefixes of 2,048 tokens of WikiText-2's test text, and the
256 tokens that follow each. Components are of 12 texts of 1,280 tokens of its training text, calibrated in
bfloat16.

- ``exact``: the cache as it is;
- ``direct``: keys and values as they are, in groups of 64 with a scale each, entropy-coded;
- ``ours``: components of three layers together; ``layer``: of each layer alone; ``six``: of six together.

The first 4 and last 64 tokens are exact in all of them. Seconds are those of one core's work: others may
have used it in between. ``python -m bench.serving.caches [WAY] [BITS] [round=PREFIX]``: the cells that have
these words. Needs THINWIRE_DATA.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.study.cells import Kept, interval, run_study
from bench.study.tables import Draw, Row, columns, spread
from thinwire import kv
from thinwire.codecs.entropy import Entropy
from thinwire.codecs.uniform import Uniform
from thinwire.kv.calibrating import CacheCalibration, sampled
from thinwire.runs.data.documents import Document, read_text
from thinwire.runs.machine.cache import cache_folder
from thinwire.runs.models.families import import_transformers
from thinwire.runs.models.smollm import smollm_folder
from thinwire.runs.models.tokenizer import tokenise

KEPT = Kept("caches")
TEXT, PREFIXES, TOKENS, FOLLOWING = "wikitext-2", 4, 2048, 256
CALIBRATED = (12, 1280, 256)  # texts, tokens of each, those of them that follow
WIDE = {"layer": 400, "ours": 1200, "six": 2400}  # numbers of a row that share components
EXACT, DIRECT, OURS = "exact", "direct", "ours"
WAYS = {
    EXACT: (16.0,),
    OURS: (1.0, 1.5, 0.7, 0.5, 2.0),
    "layer": (1.0,),
    "six": (1.0, 0.7),
    DIRECT: (4.0, 2.0),
}


class Cell(NamedTuple):
    way: str
    bits: float
    round: int


def cells() -> list[Cell]:
    """Return all cells: a prefix after the other, which is computed once."""
    return [Cell(way, bits, i) for i in range(PREFIXES) for way, own in WAYS.items() for bits in own]


def texts(part: str, n: int, tokens: int) -> list[Tensor]:
    """Return token ids [tokens] of ``n`` places all over a part of the text."""
    file = Path(os.environ["THINWIRE_DATA"]) / TEXT / f"{part}.txt.xz"
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(smollm_folder())
    ids = tokenise(tokenizer, Document(read_text(file)), limit=1 << 20)
    whole = ids[: len(ids) // tokens * tokens].view(-1, tokens)
    return list(whole[torch.linspace(0, len(whole) - 1, n).long()])


def model(dtype: torch.dtype) -> Any:
    """Return the model."""
    return import_transformers().AutoModelForCausalLM.from_pretrained(smollm_folder(), dtype=dtype).eval()


def file_of(way: str) -> Path:
    """Return the file of the components of a way."""
    return cache_folder() / "bench-caches" / f"{way}-{'-'.join(map(str, CALIBRATED))}.safetensors"


@cache
def components(way: str) -> Any:
    """Return the components of a way, calibrated at the first call."""
    if not file_of(way).exists():
        calibrate()
    return kv.load(file_of(way))


def calibrate() -> None:
    """Write the components of all ways, from the same texts."""
    n, tokens, following = CALIBRATED
    own = model(torch.bfloat16)
    found = {way: CacheCalibration(own, wide) for way, wide in WIDE.items()}
    for ids in texts("train", n, tokens):
        sample = sampled(own, ids, following)
        for calibration in found.values():
            calibration.add(sample)
    for way, calibration in found.items():
        file_of(way).parent.mkdir(parents=True, exist_ok=True)
        kv.save(calibration.components(), file_of(way))


class Prefix:
    """A prefix, its cache, and what the model says of the text that follows."""

    def __init__(self, number: int) -> None:
        self.model = model(torch.float32)
        self.ids = texts("test", PREFIXES, TOKENS + FOLLOWING)[number]
        past, began = import_transformers().DynamicCache(), time.process_time()
        with torch.no_grad():
            self.model(self.ids[None, :TOKENS], past_key_values=past, logits_to_keep=1)
        self.seconds = time.process_time() - began
        for layer in past.layers:
            layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()
        self.past = past
        self.nbytes = sum(x.nbytes for layer in past.layers for x in (layer.keys, layer.values))
        self.scores = self.told(self.copied(lambda x: x))

    def copied(self, of: Callable[[Tensor], Tensor]) -> Any:
        """Return a cache of what ``of`` makes of each tensor [heads, tokens, width]."""
        found = import_transformers().DynamicCache()
        for i, layer in enumerate(self.past.layers):
            found.update(of(layer.keys[0])[None], of(layer.values[0])[None], i)
        return found

    def told(self, past: Any) -> Tensor:
        """Return the log-probabilities [following, words] with a cache, which it uses up."""
        for layer in past.layers:
            layer.keys, layer.values = layer.keys.float(), layer.values.float()
        with torch.no_grad():
            scores: Tensor = self.model(self.ids[None, TOKENS:], past_key_values=past).logits[0]
        return scores.log_softmax(-1)

    def lost(self, past: Any) -> dict[str, float]:
        """Return the loss with a cache, and how far the model's words are from those with the exact one."""
        scores, exact = self.told(past), self.scores
        wanted = self.ids[TOKENS + 1 :, None]
        return {
            "loss": float(-scores[:-1].gather(1, wanted).mean()),
            "exact_loss": float(-exact[:-1].gather(1, wanted).mean()),
            "divergence": float((exact.exp() * (exact - scores)).sum(-1).mean()),
        }


@cache
def prefix(number: int) -> Prefix:
    """Return a prefix; one at a time is kept."""
    prefix.cache_clear()
    return Prefix(number)


def measure(cell: Cell) -> dict[str, Any]:
    """Pack and unpack a prefix; return its bytes, what is lost, and the seconds of each step."""
    torch.set_num_threads(1)
    own = prefix(cell.round)
    told = {"plain_nbytes": own.nbytes, "computing_s": own.seconds}
    if cell.way == EXACT:
        return told | {"nbytes": own.nbytes} | own.lost(own.copied(lambda x: x))
    if cell.way == DIRECT:
        nbytes, past = direct(own, int(cell.bits))
        return told | {"nbytes": nbytes} | own.lost(past)
    used = components(cell.way)
    data, packing = quickest(lambda: kv.pack_cache(own.past, used, bits=cell.bits))
    past, unpacking = quickest(lambda: kv.unpack_cache(data, used))
    return told | {"nbytes": len(data), "packing_s": packing, "unpacking_s": unpacking} | own.lost(past)


def quickest(work: Callable[[], Any], tries: int = 3) -> tuple[Any, float]:
    """Return what ``work`` returns, and the least seconds of a processor that it took."""
    times = []
    for _ in range(tries):
        began = time.process_time()
        found = work()
        times.append(time.process_time() - began)
    return found, min(times)


def direct(own: Prefix, bits: int) -> tuple[int, Any]:
    """Return bytes and cache of a prefix whose numbers are coded where they are."""
    codec, sent = Entropy(Uniform(bits=bits, group=64)), []

    def coded(x: Tensor) -> Tensor:
        few, middle = (x[:, : kv.FIRST], x[:, -kv.LAST :]), x[:, kv.FIRST : -kv.LAST].float().contiguous()
        payload = codec.encode(middle)
        sent.append(payload.nbytes + sum(e.nbytes for e in few))
        return torch.cat([few[0], codec.decode(payload).to(x.dtype), few[1]], 1)

    past = own.copied(coded)
    return sum(sent), past


def summary() -> dict[str, Any]:
    """Return each way's bytes, what it loses and its seconds, over all prefixes that are measured."""
    rows = []
    for way, own in WAYS.items():
        for bits in own:
            found = [KEPT.get(Cell(way, bits, i)) for i in range(PREFIXES)]
            if there := [f for f in found if f is not None]:
                rows.append({"way": way, "bits": bits, "prefixes": len(there)} | over(there))
    return {"tokens": TOKENS, "rows": rows}


def over(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means, and intervals of what is lost, over prefixes."""
    ratio = fmean(c["plain_nbytes"] / c["nbytes"] for c in cells)
    found: dict[str, Any] = {"nbytes": fmean(c["nbytes"] for c in cells), "ratio": ratio}
    found["lost"] = interval([c["loss"] / c["exact_loss"] - 1 for c in cells])
    found["divergence"] = interval([c["divergence"] for c in cells])
    for name in ("packing_s", "unpacking_s"):
        speeds = [c["plain_nbytes"] / c[name] for c in cells if name in c]
        found[name[:-2]] = fmean(speeds) if speeds else None
    return found | {"computing_s": fmean(c["computing_s"] for c in cells)}


def _rows(found: dict[str, Any]) -> list[Row]:
    order = (EXACT, DIRECT, "layer", OURS, "six")
    rows: list[Row] = sorted(found["rows"], key=lambda r: (order.index(r["way"]), -r["bits"]))
    return rows


caches = columns(
    _rows,
    ("way", "`{way}`"),
    ("bits", "{bits:g}"),
    ("MB", "{nbytes:.2fM}"),
    ("fewer", "{ratio:.1f}×"),
    ("loss, %", lambda r: spread(r["lost"], "{:.2f}", 0.01)),
    ("KL, nats", lambda r: spread(r["divergence"], "{:.4f}")),
    ("pack, MB/s", "{packing:.0fM}"),
    ("unpack, MB/s", "{unpacking:.0fM}"),
)
TABLES: dict[str, Draw] = {"caches": caches}

if __name__ == "__main__":
    run_study("caches", sys.argv[1:], cells, measure, summary)
