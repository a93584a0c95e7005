"""Training runs for ``costs``: what each step changes in the bf16 weights of SmolLM2-135M.

``python -m bench.following.recording FOLDER RATE STEPS`` trains once; publishing intervals share the run. A
step is kept as the exclusive or of the weights' bits before and after, compressed: some GB, in a scratch
folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from thinwire.runs.machine.cache import cache_folder
from thinwire.runs.machine.processor import cores
from thinwire.runs.models.model_source import resolve_model
from thinwire.runs.records.writer import write_json
from thinwire.state.layout import Layout
from thinwire.uses.following.run.demo_ranks import Tuning, weights_of

MODEL, DATA, BATCH, SEQ, SEED = "smollm2-135m", "shakespeare", 4, 128, 0
RATES = (1e-6, 1e-5, 5e-5)
STEPS = 48
LONG = 192  # steps, for whoever publishes so fast that 48 would come round: what comes back is no news
BASE, LAYOUT, DONE = "base.npy", "layout.json", "run.json"


def scratch() -> Path:
    """Return the folder of the recordings, outside the repository."""
    return cache_folder() / "bench-state"


def words_of(tensors: dict[str, torch.Tensor], out: np.ndarray) -> None:
    """Write the bits of all tensors, cast to bf16, one after another into ``out`` [n]."""
    at = 0
    for x in tensors.values():
        part = out[at : at + x.numel()]
        torch.from_numpy(part).view(torch.bfloat16).copy_(x.reshape(-1))
        at += x.numel()


def place(folder: Path, rate: float, steps: int) -> Path:
    """Return where a run is kept: of another length it has its texts in another order."""
    return folder / f"{rate:g}-{steps}"


def record(folder: Path, rate: float, steps: int = STEPS) -> None:
    """Train and keep each step under ``folder``; what is there already is not made again."""
    own = place(folder, rate, steps)
    if (own / DONE).exists():
        return
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    torch.set_num_threads(cores())
    job = Tuning(resolve_model(MODEL, None), DATA, rate, steps, BATCH, SEQ, SEED)
    tensors = weights_of(job.model)
    layout = Layout.of(tensors, torch.bfloat16)
    words, before = (np.empty(layout.numel, np.int16) for _ in range(2))
    words_of(tensors, before)
    if not (folder / BASE).exists():
        np.save(folder / BASE, before)
        (folder / LAYOUT).write_bytes(layout.to_json())
    coder, rows = zstandard.ZstdCompressor(level=1), []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        loss = job.step()
        seconds = time.perf_counter() - began
        words_of(tensors, words)
        before ^= words
        rows.append({"loss": loss, "changed": int(np.count_nonzero(before)), "seconds": round(seconds, 3)})
        (own / f"{step}.xor").write_bytes(coder.compress(before.data))
        before, words = words, before
        print(f"{rate:g}: step {step}, {rows[-1]}", file=sys.stderr, flush=True)
    write_json(own / DONE, {"rate": rate, "steps": rows})


def in_process(folder: Path, rate: float, steps: int) -> None:
    """Record in a process of its own, which may use all cores."""
    words = (str(folder), str(rate), str(steps))
    subprocess.run([sys.executable, "-m", "bench.following.recording", *words], check=True)


class Recording:
    """A recorded run. ``base`` [n]: the words of all tensors at the start; ``layout``: of them as bf16."""

    def __init__(self, folder: Path, rate: float, steps: int = STEPS) -> None:
        self._own = place(folder, rate, steps)
        self.about: dict[str, Any] = json.loads((self._own / DONE).read_text())
        self.layout = Layout.from_json((folder / LAYOUT).read_bytes())
        self.base: np.ndarray = np.load(folder / BASE)

    @property
    def steps(self) -> int:
        return len(self.about["steps"])

    def change(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions [k] that step number ``step`` (from 1) changes, and the bits that flip [k]."""
        packed = (self._own / f"{step}.xor").read_bytes()
        flips = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), np.int16)
        at = np.flatnonzero(flips)
        return at.astype(np.int32), flips[at]

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in ``flat`` [n] by name."""
        found, at = {}, 0
        for slot in self.layout.slots:
            found[slot.name] = flat[at : at + slot.numel].view(slot.shape)
            at += slot.numel
        return found


class Replay:
    """The run again, without the training: fp32 tensors whose cast to bf16 is what the training had.

    ``words`` [n] are their bits as bf16. The fp32 values are the bf16 ones, so all casts are exact.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.step = recording, 0
        self.words = recording.base.copy()
        half = torch.from_numpy(self.words).view(torch.bfloat16)
        self._flat = half.float()
        self.tensors = recording.views(self._flat)

    def advance(self, steps: int) -> None:
        """Move on by so many steps."""
        for _ in range(steps):
            self.step += 1
            at, flips = self.recording.change(self.step)
            now = self.words[at] ^ flips
            self.words[at] = now
            bits = now.astype(np.uint16).astype(np.uint32) << 16
            self._flat.numpy().view(np.uint32)[at] = bits


if __name__ == "__main__":
    record(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
