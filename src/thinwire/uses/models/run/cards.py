"""The page of packed models: bytes and perplexity beside other ways, and what each tensor took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.runs.records.finished_runs import Run
from thinwire.runs.records.progress import megabytes
from thinwire.runs.report.details import Rows
from thinwire.runs.report.elements import card, memory, table, terminal_table
from thinwire.uses.models.run.record import ModelRecord, TensorInfo

ModelRun = Run[ModelRecord]
Runs = Sequence[ModelRun]
WAYS = ("packed by", "bytes", "× smaller", "bits a weight", "perplexity", "packing", "unpacking")
TENSORS = ("tensor", "shape", "coded as", "bytes", "share", "bits a weight")
NAMED = 40  # tensors that have a row of their own, the largest ones
UNKNOWN = "–"


def headline(runs: Runs) -> str:
    """Return how small the model became, and what that cost, good or bad."""
    if len(runs) > 1:
        least = min(runs, key=lambda run: run.record.packed_nbytes)
        return f"{len(runs)} packed models; the smallest, by {least.label}, has {_became(least.record)}"
    record = runs[0].record
    return f"{Path(record.source).name}: {megabytes(record.source_nbytes)} became {_became(record)}"


def setting(runs: Runs) -> str:
    """Return what was packed, over which link, and what perplexity is of."""
    record = runs[0].record
    read = "No text was read: all weights count by their size alone."
    if record.tokens_read:
        read = f"{record.tokens_read:,} tokens of text said what matters."
    held = f" Perplexity is on {record.tokens_heldout:,} other tokens." if record.tokens_heldout else ""
    sent = ""
    if record.seconds_predicted is not None:
        sent = f" Over {record.link.asked} it takes {record.seconds_predicted:.0f} s [derived]."
    return f"{record.source}, {len(record.tensors)} tensors. {read}{held}{sent}"


def warnings(runs: Runs) -> list[str]:
    """Return what no record's notes say: nothing."""
    return []


def folds(runs: Runs) -> dict[str, Rows]:
    """Return what each run was asked for."""
    return {"Target": [(run.label, _target(run.record)) for run in runs]}


def cards(runs: Runs) -> list[str]:
    """Return the cards, in order."""
    text = "All perplexities of a run are on the same tokens. Packing and unpacking are processor seconds."
    several = len(runs) > 1
    return [
        card("The figures", text, table(WAYS, _ways(runs))),
        *(
            card(f"Tensors{f' of {run.label}' * several}", _about(run.record), table(TENSORS, _tensors(run)))
            for run in runs
        ),
        memory(runs),
    ]


def summary_table(runs: Runs) -> Any:
    """Return the figures for a terminal."""
    return terminal_table(WAYS, _ways(runs))


def _became(record: ModelRecord) -> str:
    size = f"{megabytes(record.packed_nbytes)}, {record.bits_a_weight:.2f} bits a weight"
    if record.perplexity is None or record.perplexity_source is None:
        return size
    return f"{size}, perplexity {record.perplexity:.1f}, of the source {record.perplexity_source:.1f}"


def _target(record: ModelRecord) -> str:
    if record.target_bits is not None:
        return f"{record.target_bits:g} bits a weight in memory"
    return f"{record.target_nbytes:,} bytes at most" if record.target_nbytes else "nothing lost"


def _ways(runs: Runs) -> list[list[str]]:
    """Return a row for each model as it was, as it was packed, and as others pack it."""
    rows = list[list[str]]()
    for run in runs:
        r = run.record
        took = f"{r.encode_cpu_s:.1f} s", f"{r.decode_cpu_s:.1f} s"
        bits = f"{r.bits_a_weight:.2f}"
        rows.append(_way(r, f"{Path(r.source).name}, as it was", r.source_nbytes, r.perplexity_source))
        rows.append(_way(r, run.label, r.packed_nbytes, r.perplexity, bits, *took))
        rows += [_way(r, rival.name, rival.nbytes, rival.perplexity) for rival in r.rivals]
    return rows


def _way(
    record: ModelRecord,
    name: str,
    nbytes: int,
    perplexity: float | None,
    bits: str = UNKNOWN,
    encode: str = UNKNOWN,
    decode: str = UNKNOWN,
) -> list[str]:
    smaller = f"{record.source_nbytes / nbytes:.1f}" if nbytes else UNKNOWN
    found = UNKNOWN if perplexity is None else f"{perplexity:.1f}"
    return [name, f"{nbytes:,}", smaller, bits, found, encode, decode]


def _about(record: ModelRecord) -> str:
    more = len(record.tensors) - NAMED
    return "The largest ones first." + (f" {more} smaller ones are in run.json." if more > 0 else "")


def _tensors(run: ModelRun) -> list[list[str]]:
    largest = sorted(run.record.tensors, key=lambda tensor: -tensor.nbytes)[:NAMED]
    return [_tensor(tensor, run.record.packed_nbytes) for tensor in largest]


def _tensor(tensor: TensorInfo, whole: int) -> list[str]:
    shape = " × ".join(map(str, tensor.shape)) or UNKNOWN
    bits = UNKNOWN if tensor.bits is None else f"{tensor.bits:.2f}"
    share = f"{tensor.nbytes / max(1, whole):.1%}"
    return [tensor.name, shape, tensor.kind, f"{tensor.nbytes:,}", share, bits]
