"""Synthetic runs for the tests of records and reports: plausible shapes, invented numbers."""

from __future__ import annotations

import math
import random
from pathlib import Path

from thinwire.runs.machine.processor import environment
from thinwire.runs.records.run_record import EMULATED, LinkInfo, PeakMemory, RecipeText
from thinwire.runs.records.writer import RunWriter
from thinwire.uses.training.run.record import BoundaryBytes, Loss, StepMetrics, TrainRecord

RAW = 1_179_648  # bytes of a [4, 128, 576] fp32 tensor
RATE = 1.25e6  # bytes/s
WAYS = ("forward", "backward")


def metrics_of(steps: int, bits: tuple[float, float], worse: float = 0.0, seed: int = 0) -> list[StepMetrics]:
    """Return steps whose loss falls in three epochs, and whose time follows from the bytes."""
    noise = random.Random(seed)
    lines = []
    for step in range(1, steps + 1):
        epoch = (step - 1) * 3 // steps
        loss = 3.72 - 0.16 * epoch - 0.2 * math.log1p(step) / 3 + worse + noise.gauss(0, 0.05)
        sent = [int(RAW * b / 32) for b in bits]
        line_s, compute = sum(sent) / RATE, 1.9 + noise.random() * 0.2
        coding = 0.02 if bits[0] < 32 else 0.004
        wait = max(0.1, line_s - 0.4)
        lines.append(
            StepMetrics(
                step=step,
                loss=loss,
                seconds=compute + coding + wait + 0.03,
                compute_s=compute,
                encode_s=coding * 0.6,
                decode_s=coding * 0.4,
                wait_s=wait,
                bytes=dict(zip(WAYS, sent, strict=True)),
                bits=dict(zip(WAYS, bits, strict=True)),
                lr=2e-5,
            )
        )
    return lines


def record_of(
    name: str, metrics: list[StepMetrics], bits: tuple[float, float], final: float, boundaries: int = 1
) -> TrainRecord:
    """Return the finished record that belongs to ``metrics``."""
    record = TrainRecord(
        recipe=RecipeText(name, f"forward Uniform(bits={bits[0]:.0f}); backward Uniform(bits=3)")
    )
    record.config = {
        "recipe": name,
        "model": "smollm2-135m",
        "data": "shakespeare",
        "seed": 0,
        "steps": len(metrics),
        "batch": 4,
        "seq": 128,
    }
    record.environment = environment("fp32", 1)
    record.link = LinkInfo("10mbit,30ms", RATE, 0.03, 0.0612, EMULATED)
    record.recount(metrics)
    record.bytes |= {"control": 24_000, "evaluation": 9_437_184}
    record.boundaries = [
        BoundaryBytes(f"{i}-{i + 1}", way, record.bytes[way] // boundaries)
        for i in range(boundaries)
        for way in WAYS
    ]
    record.loss = Loss([m.loss for m in metrics], 3.741, final, 3.702, final - 0.2)
    record.memory = PeakMemory([1_900_000_000, 2_300_000_000])
    return record


def write_run(
    folder: Path,
    name: str,
    bits: tuple[float, float] = (32.0, 32.0),
    final: float = 3.5,
    steps: int = 21,
    boundaries: int = 1,
    status: str = "done",
) -> TrainRecord:
    """Write a whole run into ``folder`` through the real writer, and return its record."""
    metrics = metrics_of(steps, bits, seed=len(name))
    record = record_of(name, metrics, bits, final, boundaries)
    writer = RunWriter(folder, record)
    for line in metrics:
        writer.add(line)
    writer.close(status)
    return record
