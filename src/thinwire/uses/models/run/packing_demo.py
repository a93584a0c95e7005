"""SmolLM2 at 3 bits a weight: what is lost, against rounding to the nearest, and how soon it is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.links.shape import LinkShape
from thinwire.runs.machine.compute import Compute
from thinwire.runs.machine.devices import AUTO, own
from thinwire.runs.machine.processor import environment
from thinwire.runs.models.model_source import SMOLLM
from thinwire.runs.records.run_record import RecipeText
from thinwire.runs.records.writer import RUN, forget
from thinwire.runs.report.page import leave_report
from thinwire.uses.models.budgets import at_width, to_budget
from thinwire.uses.models.packed_model import PackedModel, write_model
from thinwire.uses.models.run import cards
from thinwire.uses.models.run.calibrated_source import CalibratedModel, read_source, read_text_with
from thinwire.uses.models.run.model_folder import unpacked, write_packed
from thinwire.uses.models.run.model_packing import Size, describe, measure_packed, measure_source, predicted
from thinwire.uses.models.run.record import ModelRecord, RivalPacking

BITS, WIDTH = 3.0, 3
PROMPT, WORDS = "The history of the Roman Empire began with", 24  # tokens that follow
FILE = "model.tw"


@dataclass(frozen=True)
class DemoModel:
    """What the demo packs, how small, what it reads and where it leaves the file and the record."""

    out: Path
    link: LinkShape
    model: str = SMOLLM
    text: str = "shakespeare"
    bits: float = BITS
    prompt: str = PROMPT
    device: str = AUTO
    dtype: str = "fp32"


def run(demo: DemoModel, tell: Callable[[str], None]) -> ModelRecord:
    """Pack, compare, leave ``model.tw``, ``run.json`` and ``report.html``, and return the record."""
    started = time.monotonic()
    forget(demo.out, FILE, RUN)
    source = read_source(demo.model)
    weights = sum(x.numel() for x in source.tensors.values())
    tell(f"{demo.model}: {weights / 1e6:.1f} M weights, {source.nbytes / 1e6:.0f} MB; it reads {demo.text}")
    began = time.process_time()
    compute = Compute.of(own(demo.device), demo.dtype)
    reading = read_text_with(source, demo.text, compute)
    most = int(demo.bits * weights / 8)
    packed = PackedModel(to_budget(reading.model, most, Size(source.files)), source.files)
    record = ModelRecord(recipe=RecipeText("thinwire", "entropy-coded steps"), source=demo.model)
    record.encode_cpu_s, record.target_nbytes = time.process_time() - began, most
    record.environment = environment(demo.dtype, torch.get_num_threads(), compute.device)
    record.source_nbytes = source.nbytes
    record.config = {"model": demo.model, "text": demo.text, "bits": demo.bits, "link": str(demo.link)}
    demo.out.mkdir(parents=True, exist_ok=True)
    record.packed_nbytes = write_packed(packed, demo.out / FILE, codes=False)
    describe(record, packed, source)
    record = predicted(record, demo.link)
    _compare(demo, record, reading, packed, tell)
    record.status, record.totals["seconds"] = "done", time.monotonic() - started
    leave_report(demo.out, record, cards)
    return record


def _compare(
    demo: DemoModel,
    record: ModelRecord,
    reading: CalibratedModel,
    packed: PackedModel,
    tell: Callable[[str], None],
) -> None:
    """Note perplexities, and tell them with a sentence by each."""
    measure_source(record, reading)
    _tell(tell, "source", record.source_nbytes, record.perplexity_source or 0.0, demo, reading)
    measure_packed(record, packed, reading)
    _tell(tell, "thinwire", record.packed_nbytes, record.perplexity or 0.0, demo, reading)
    rounded = PackedModel(at_width(reading.model, WIDTH), packed.files)
    reading.put(unpacked(rounded))
    name, nbytes = f"{WIDTH} bits, rounded to the nearest in groups of 64", len(write_model(rounded))
    record.rivals = [RivalPacking(name, nbytes, reading.perplexity())]
    _tell(tell, name, nbytes, record.rivals[0].perplexity or 0.0, demo, reading)


def _tell(
    tell: Callable[[str], None],
    name: str,
    nbytes: int,
    found: float,
    demo: DemoModel,
    reading: CalibratedModel,
) -> None:
    seconds = _seconds(nbytes, demo.link)
    tell(f"{name}: {nbytes / 1e6:.1f} MB, {seconds:.0f} s over {demo.link}, perplexity {found:.1f}")
    tell(f"  {_sentence(demo, reading)}")


def _sentence(demo: DemoModel, reading: CalibratedModel) -> str:
    """Return how the model goes on after the prompt."""
    tokenizer: Any = reading.tokenizer
    given = tokenizer(demo.prompt, return_tensors="pt").to(reading.compute.device)
    asked = {"max_new_tokens": WORDS, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    with torch.no_grad(), reading.compute.autocast():
        made = reading.net.generate(given["input_ids"], attention_mask=given["attention_mask"], **asked)
    return " ".join(tokenizer.decode(made[0], skip_special_tokens=True).split())


def _seconds(nbytes: int, link: LinkShape) -> float:
    return nbytes / (link.rate or float("inf")) + link.delay
