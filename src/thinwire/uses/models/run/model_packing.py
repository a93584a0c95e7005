"""Pack a model to a target, and measure what is left of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.links.shape import LinkShape
from thinwire.runs.machine.compute import HOST, ON_CPU, Compute
from thinwire.runs.machine.devices import CPU, own
from thinwire.runs.machine.processor import environment
from thinwire.runs.records.run_record import LinkInfo, RecipeText
from thinwire.types import InputError, require
from thinwire.uses.models.budgets import Entries, NextVersion, like, to_budget, to_width
from thinwire.uses.models.entry import PackedTensor, unpack_entry
from thinwire.uses.models.packed_model import PackedModel, write_model
from thinwire.uses.models.run.calibrated_source import CalibratedModel, Source, read_source, read_text_with
from thinwire.uses.models.run.model_folder import listed, read_packed, told_of_code
from thinwire.uses.models.run.record import ModelRecord, TensorInfo
from thinwire.uses.models.tensors import Grouped, Plain, Tied, matrix_shape, memory_of
from thinwire.uses.models.weights_to_pack import Model

BLIND = (
    "without --calibration-data TEXT nothing says which weights matter: "
    "a text makes the same bytes worth far more"
)
WIDER = " has codes or scales now that no patch of --codes brings, wider ones say: publish it to a new place"
NAMED = 3  # tensors that a note each is about
RENEWED = "grew or shrank since the earlier version, whole or in part, past its codes: it has new ones"
WHOLE = "the target is above what the model takes as it is: it is packed without any loss"


@dataclass(frozen=True)
class ModelPacking:
    """What to pack and how: a target in bytes, in bits a weight in memory, or an earlier version's plan.

    ``device``, ``dtype``: of the model's passes over a text; its matrices are coded on the device too.
    """

    source: str
    nbytes: int | None = None
    bits: float | None = None
    base: Path | None = None
    text: str | None = None
    device: str = CPU
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        targets = (self.nbytes, self.bits, self.base)
        told = "give one target: --target 60MB, --seconds 60 --link 10mbit,30ms, --bits 3 or --base OLD"
        require(sum(t is not None for t in targets) == 1, InputError, told)
        good = self.bits is None or 2 <= self.bits <= 9
        require(good, InputError, f"--bits {self.bits} is not in 2..9, scales included; give 3, say")


def pack(job: ModelPacking) -> tuple[PackedModel, ModelRecord]:
    """Return a packed model and the record of it. Errors: ``InputError``, ``MissingExtra``."""
    old = None if job.base is None else read_packed(job.base)
    source = read_source(job.source)
    began = time.process_time()
    compute = ON_CPU if job.text is None else Compute.of(own(job.device), job.dtype)
    reading = None if job.text is None else read_text_with(source, job.text, compute)
    reading = None if reading is None else reading.resting()
    model = Model(source.tensors) if reading is None else reading.model
    files = source.files if old is None else {**old.files, **source.files}
    entries, changed = _entries(job, model, source, None if old is None else old.entries)
    packed = PackedModel(entries, files)
    spent = time.process_time() - began
    record = ModelRecord(recipe=RecipeText("thinwire", _told(job)), source=job.source)
    record.source_nbytes, record.encode_cpu_s = source.nbytes, spent
    record.target_nbytes, record.target_bits = job.nbytes, job.bits
    record.environment = environment(job.dtype, torch.get_num_threads(), compute.device)
    record.notes += [] if job.text else [BLIND]
    describe(record, packed, source)
    record.notes += [f"{name} {RENEWED}" for name in changed[:NAMED]]
    more = len(changed) - NAMED
    record.notes += [f"so have {more} more, and so they have new codes"] if more > 0 else []
    if old is not None and (names := widened(packed, old)):
        record.notes.append(f"{names[0]}{WIDER}")
    record.notes += [f"not taken along: {listed(list(source.left))}"] if source.left else []
    record.notes += told_of_code(files)
    del model, source, entries  # what measuring needs takes as much memory again
    if reading is not None:
        reading = reading.awake()
        measure_source(record, reading)
    measure_packed(record, packed, reading)
    record.status = "done"
    return packed, record


def _told(job: ModelPacking) -> str:
    if job.base is not None:
        return "the plan of an earlier version"
    return "codes of fixed widths in groups" if job.bits is not None else "entropy-coded steps"


def _entries(job: ModelPacking, model: Model, source: Source, old: Mapping[str, Any] | None) -> NextVersion:
    if old is not None:
        return like(replace(model, device=HOST), old)  # where the earlier version's codes are
    if job.bits is not None:
        return NextVersion(to_width(model, job.bits), [])
    return NextVersion(to_budget(model, job.nbytes or 0, Size(source.files)), [])


class Size:
    """How many bytes a file of entries takes, beside other files that go along."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def __call__(self, entries: Entries) -> int:
        """Return the bytes of the file."""
        return len(write_model(PackedModel(entries, self._files)))


def describe(record: ModelRecord, packed: PackedModel, source: Source) -> None:
    """Note what each tensor takes."""
    weights = sum(x.numel() for x in source.tensors.values())
    for name, entry in packed.entries.items():
        size = len(entry.data)
        bits = 8 * size / entry.numel if entry.numel else None
        record.tensors.append(TensorInfo(name, entry.kind, list(entry.shape), size, bits))
    record.bits_a_weight = 8 * sum(t.nbytes for t in record.tensors) / max(weights, 1)
    record.lossless = all(t.kind in (Plain.kind, Tied.kind) for t in record.tensors)
    record.notes += [WHOLE] if record.lossless and record.target_nbytes is not None else []
    held = bits_in_memory(packed)
    if record.target_bits is not None and held > record.target_bits:
        record.notes.append(f"the narrowest codes and their scales take {held:.3g} bits a weight in memory")


def bits_in_memory(packed: PackedModel) -> float:
    """Return the bits a weight of codes of fixed widths in memory, scales included; 0 without any."""
    coded = [entry for entry in packed.entries.values() if entry.kind == Grouped.kind]
    nbytes = sum(memory_of(*matrix_shape(e.shape, "swapped" in e.about), e.about["width"]) for e in coded)
    return 8 * nbytes / max(1, sum(entry.numel for entry in coded))


def widened(packed: PackedModel, old: PackedModel) -> list[str]:
    """Return the tensors whose codes need two bytes, or other scales, than in an earlier version."""
    return sorted(name for name, own in packed.entries.items() if _types(own) != _types(old.entries[name]))


def _types(entry: PackedTensor) -> tuple[Any, ...]:
    return entry.kind == Tied.kind, entry.about.get("wide", False), entry.about.get("scales")


def measure_source(record: ModelRecord, reading: CalibratedModel) -> None:
    """Note what text there is, and how well the model as it was tells its end."""
    record.tokens_read, record.tokens_heldout = reading.tokens, reading.heldout.numel()
    record.perplexity_source = reading.perplexity()


def measure_packed(record: ModelRecord, packed: PackedModel, reading: CalibratedModel | None) -> None:
    """Note what unpacking takes and, where there is a text, how well the model then tells its end."""
    decoded = Decoded(packed)
    if reading is not None:
        reading.put(decoded)
        record.perplexity = reading.perplexity()
    else:
        decoded.all()
    record.decode_cpu_s = decoded.spent


class Decoded(Mapping[str, Tensor]):
    """The tensors of a packed model by name, each decoded when it is asked for: errors ``PayloadError``."""

    def __init__(self, packed: PackedModel) -> None:
        self._entries, self.spent = packed.entries, 0.0  # processor seconds

    def __getitem__(self, name: str) -> Tensor:
        began = time.process_time()
        coded = unpack_entry(self._entries[name], name)
        found = self[coded.name] if isinstance(coded, Tied) else coded.decoded()
        self.spent += 0.0 if isinstance(coded, Tied) else time.process_time() - began
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def all(self) -> None:
        """Decode each once, and keep none."""
        for name in self:
            self[name]


def predicted(record: ModelRecord, shape: LinkShape, sent: int | None = None) -> ModelRecord:
    """Return a record with the seconds until the file, or ``sent`` bytes, are there over a link."""
    seconds = (record.packed_nbytes if sent is None else sent) / (shape.rate or math.inf) + shape.delay
    link = LinkInfo(str(shape), shape.rate, shape.delay or None)
    return replace(record, seconds_predicted=seconds, link=link)
