"""States whose words move step by step, for ``sync_hosts``: recorded fine-tuning, and experts at random."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.following.recording import Recording
from thinwire.state.layout import Layout, Slot

EXPERTS = "experts"
SHARE = 0.05  # of the words, a step
SEED = 50
WIDTH, HIDDEN, LAYERS, MANY, ROWS = 768, 1536, 4, 8, 32_000  # of the model with experts: 148 M values


class Moving(ABC):
    """Words [n] of all tensors, one after another, and ``tensors``, which share their memory as bfloat16."""

    def __init__(self, layout: Layout, words: np.ndarray) -> None:
        self.layout, self.words = layout, words
        self.tensors = views(layout, words)
        self.step = 0

    @abstractmethod
    def flips(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions [k] that a step (from 1) changes, and the bits that flip there [k]."""

    def advance(self) -> None:
        """Move on by a step."""
        self.step += 1
        at, bits = self.flips(self.step)
        self.words[at] ^= bits


class Replayed(Moving):
    """A recorded run again. After its last step the same bits flip back, one step after the other."""

    def __init__(self, folder: Path, rate: float, steps: int) -> None:
        self.recording = Recording(folder, rate, steps)
        super().__init__(self.recording.layout, self.recording.base)

    def flips(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        return self.recording.change((step - 1) % self.recording.steps + 1)


class Experts(Moving):
    """A mixture of experts: normal values, 0.02 wide, of which a share moves by one in the last place.

    Each value moves or stays by a throw of its own; up and down are as likely. ``small``: a model of a few
    thousand values, for tests.
    """

    def __init__(self, small: bool = False) -> None:
        self._rng = np.random.default_rng(SEED)
        shapes = dict(expert_shapes(*((16, 32, 2, 2, 64) if small else (WIDTH, HIDDEN, LAYERS, MANY, ROWS))))
        layout = Layout(tuple(Slot(name, shape, "bfloat16") for name, shape in shapes.items()))
        words = np.empty(layout.numel, np.int16)
        for x in views(layout, words).values():
            values = self._rng.standard_normal(x.numel(), np.float32)
            x.copy_(torch.from_numpy(values).view(x.shape) * 0.02)
        super().__init__(layout, words)

    def flips(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        n = self.words.size
        room = int(SHARE * n + 8 * (SHARE * n) ** 0.5) + 8
        at = np.cumsum(self._rng.geometric(SHARE, room)) - 1
        at = at[at < n]
        now = self.words[at]
        moved = now + np.where((self._rng.random(at.size, np.float32) < 0.5) & (now & 0x7FFF > 0), -1, 1)
        return at, now ^ moved.astype(np.int16)


def expert_shapes(
    width: int, hidden: int, layers: int, many: int, rows: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes, as checkpoints of such models have them."""
    yield "model.embed_tokens.weight", (rows, width)
    for layer in range(layers):
        own = f"model.layers.{layer}"
        yield from ((f"{own}.self_attn.{x}_proj.weight", (width, width)) for x in "qkvo")
        yield f"{own}.mlp.gate.weight", (many, width)
        for expert in range(many):
            one = f"{own}.mlp.experts.{expert}"
            yield from ((f"{one}.{x}_proj.weight", (hidden, width)) for x in ("gate", "up"))
            yield f"{one}.down_proj.weight", (width, hidden)
    yield "model.norm.weight", (width,)


def views(layout: Layout, words: np.ndarray) -> dict[str, Tensor]:
    """Return tensors over ``words`` [n] by name."""
    flat, found, start = torch.from_numpy(words).view(torch.bfloat16), {}, 0
    for slot in layout.slots:
        found[slot.name] = flat[start : start + slot.numel].view(slot.shape)
        start += slot.numel
    return found


def same(tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> bool:
    """Return whether two states are the same, bit for bit."""
    return all(torch.equal(x.view(torch.int16), held[name].view(torch.int16)) for name, x in tensors.items())


def moving(kind: str, folder: Path, steps: int) -> Moving:
    """Return what moves: ``experts``, ``small`` experts, or a recording by its rate."""
    if kind in (EXPERTS, "small"):
        return Experts(kind == "small")
    return Replayed(folder, float(kind), steps)


def stepped(source: Moving, steps: int) -> Iterator[int]:
    """Move on by so many steps, and yield the number of each."""
    for number in count(1):
        if number > steps:
            return
        source.advance()
        yield number
