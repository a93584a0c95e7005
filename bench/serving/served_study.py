"""What ``thinwire serve`` does over slow lines: ``make bench-serving``.

``python -m bench.serving.served_study [ways|at-once|blur|llama] [LINK] [DTYPE] [prompt=N] ...``: the cells
that have these words; ``--list`` names them, ``--smoke`` tries small ones without emulation and keeps
nothing.
SmolLM2-135M in two stages of one core each, over emulated links; prompts are of WikiText-2's held-out part.

- ``ways``: each of three prompts on one machine, by bf16 stages, coded, and coded with drafts, in turn; each
  is continued by likeliest tokens, which are compared, and by drawn ones, which are timed;
- ``at-once``: tokens a second of eight requests together, and of one;
- ``blur``: what coded prompts do to the words that follow, without a link;
- ``llama``: llama.cpp's RPC over the same links, where ``make setup-llama`` has built it.

A cell whose network was late, or that met other work, is measured anew. Needs THINWIRE_DATA.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from statistics import fmean, median
from typing import Any, NamedTuple

from bench.serving import blurred_prompts, llama_rpc
from bench.study.cells import Kept, makers, run_study
from bench.study.runs import session
from thinwire.runs.records.writer import finite
from thinwire.uses.serving.run.options import MeasuredConfig
from thinwire.uses.serving.run.serving_demo import equal_share

STUDY, RANKS = "serving", "bench.serving.served_ranks:rank"
KEPT = Kept(STUDY)
WAYS, AT_ONCE, BLUR, LLAMA = "ways", "at-once", "blur", "llama"
LINKS = {"unlimited": "none", "100mbit": "100mbit,2.5ms", "20mbit": "20mbit,20ms", "lte": "trace:lte"}
SLOW = "20mbit"  # where the goals are
PROMPTS, LLAMA_PROMPTS = (128, 1024, 2048), (128, 1024)
FP32, BF16 = "fp32", "bf16"
TEXTS, TOKENS, MANY = 3, 32, 8
TEMPERATURE = 0.8
JOB: dict[str, Any] = {"model": "smollm2-135m", "data": "wikitext-2", "stages": 2, "threads": 1}
SESSION = 900.0  # seconds that a cell may take
BUSY = 3.0  # load before a cell, above which other work takes the cores
ONE, PLAIN, CODED, DRAFTED = "one", "bf16", "coded", "coded-drafts"


class Cell(NamedTuple):
    """A cell; ``prompt`` in tokens, ``what``: the recipe or the way that it tries."""

    kind: str
    link: str
    dtype: str
    prompt: str
    what: str = ""


def cells() -> Iterator[Cell]:
    """Yield all cells, those of the goals first."""
    for link, prompt in product((SLOW, *(x for x in LINKS if x != SLOW)), PROMPTS):
        yield Cell(WAYS, link, BF16, _prompt(prompt))
    yield Cell(AT_ONCE, SLOW, BF16, _prompt(PROMPTS[0]))
    for prompt in PROMPTS:
        yield Cell(WAYS, SLOW, FP32, _prompt(prompt))
    for bits in blurred_prompts.BITS:
        yield Cell(BLUR, "", FP32, _prompt(blurred_prompts.PREFIX), f"bits={bits}")
    for cell in (Cell(LLAMA, link, "", "") for link in LINKS):
        if llama_rpc.there() or KEPT.get(cell):  # what another checkout measured stays in the tables
            yield cell


def _prompt(tokens: int) -> str:
    return f"prompt={tokens}"


def measure(cell: Cell, texts: int = TEXTS, tokens: int = TOKENS, emulate: bool = True) -> dict[str, Any]:
    """Return what a cell finds."""
    if cell.kind == LLAMA:
        return llama_rpc.measure(LINKS[cell.link], LLAMA_PROMPTS, texts, tokens)
    prompt = int(cell.prompt.removeprefix("prompt="))
    if cell.kind == BLUR:
        return blurred_prompts.measure(f"thinwire:{cell.what}", prompt, 2 * texts, tokens)
    many = MANY if cell.kind == AT_ONCE else 1
    with tempfile.TemporaryDirectory() as out:
        job = JOB | {"link": LINKS[cell.link], "emulate": emulate, "dtype": cell.dtype, "out": out}
        job |= {"texts": max(texts, many), "prompt_tokens": prompt, "tokens": tokens, "at_once": many}
        config = MeasuredConfig.from_dict(job | {"temperature": TEMPERATURE})
        found, network = session(RANKS, SESSION, config)
    told = {k: network[k] for k in ("valid", "load", "lateness", "profiles") if k in network}
    return {"ways": found, "network": told, "drafts": config.drafts}


def stale(cell: Cell, found: dict[str, Any]) -> bool:
    """Return whether a cell's network kept no time, or other work took the cores."""
    network = found.get("network")
    return network is not None and (not network["valid"] or network["load"]["before"] > BUSY)


def summary() -> dict[str, Any]:
    """Return the rows of all finished cells."""
    known = {cell: found for cell in cells() if (found := KEPT.get(cell))}
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in (WAYS, AT_ONCE, BLUR, LLAMA)}
    told = {WAYS: _ways, AT_ONCE: _at_once}
    for cell, found in known.items():
        about = {"link": cell.link, "dtype": cell.dtype, "stale": stale(cell, found)}
        if cell.kind == LLAMA:
            rows[LLAMA] += [about | row for row in found["prompts"]]
            continue
        own = told[cell.kind](found) if cell.kind in told else found | {"what": cell.what}
        rows[cell.kind].append(about | {"prompt": int(cell.prompt.removeprefix("prompt="))} | own)
    job = JOB | {"texts": TEXTS, "tokens": TOKENS, "temperature": TEMPERATURE, "links": LINKS}
    return {"made_by": makers(known.values()), "job": job} | rows


def _ways(found: dict[str, Any]) -> dict[str, Any]:
    """Return each way's figures, and what coding and drafts gain, text by text."""
    by_way: dict[str, list[dict[str, Any]]] = found["ways"]
    likely = {way: [t["likely"] for t in texts] for way, texts in by_way.items()}
    rows = {way: _figures(texts) for way, texts in by_way.items()}
    for way, row in rows.items():
        row["equal_tokens"] = equal_share(likely[way], likely[ONE])
    plain, coded, drafted = (by_way[way] for way in (PLAIN, CODED, DRAFTED))
    return {
        "ways": rows,
        "drafts": found["drafts"],
        "faster": median(_ratios(drafted, plain, "tokens_per_second")),
        "sooner": median(_ratios(plain, coded, "first_token_s")),
        "fewer": fmean(_ratios(plain, coded, "nbytes")),
        "drafts_equal": equal_share(likely[DRAFTED], likely[CODED]),
    }


def _ratios(these: list[dict[str, Any]], those: list[dict[str, Any]], name: str) -> list[float]:
    return [a[name] / b[name] for a, b in zip(these, those, strict=True)]


def _figures(texts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what one way took: medians of its texts; bytes and seconds are a text's."""
    rounds = max(1, sum(t["rounds"] for t in texts))
    return {
        "first_token_s": median(t["first_token_s"] for t in texts),
        "tokens_per_second": median(t["tokens_per_second"] for t in texts),
        "nbytes": fmean(t["nbytes"] for t in texts),
        "accepted": sum(t["accepted"] for t in texts) / rounds,
        "seconds": fmean(t["seconds"] for t in texts),
    }


def _at_once(found: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens a second of one and of many, and what many gain."""
    rows = {}
    for way, rounds in found["ways"].items():
        one, many = (fmean(r[name] for r in rounds) for name in ("one", "many"))
        rows[way] = {"one": one, "many": many, "gain": many / one}
    return {"ways": rows, "many": MANY}


def smoke() -> dict[str, Any]:
    """Return what one small cell of each kind finds, over links that the processes shape."""
    tried = [Cell(WAYS, SLOW, BF16, _prompt(24)), Cell(AT_ONCE, SLOW, BF16, _prompt(16))]
    tried.append(Cell(BLUR, "", FP32, _prompt(160), "bits=4"))
    raw = {cell: measure(cell, 1, 6, emulate=False) for cell in tried}
    told = {WAYS: _ways, AT_ONCE: _at_once}
    return {c.kind: finite(told[c.kind](found) if c.kind in told else found) for c, found in raw.items()}


if __name__ == "__main__":
    if "--smoke" in sys.argv[1:]:
        print(json.dumps(smoke(), indent=1))
    else:
        run_study(STUDY, sys.argv[1:], cells, measure, summary, stale=stale)
