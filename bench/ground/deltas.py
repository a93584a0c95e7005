"""What is a delta worth? Real activations through every memory, at 2, 4 and 8 bits.

Run ``python -m bench.ground.deltas`` (``make bench-deltas``), about three minutes. SmolLM2-135M with its
pretrained weights is fine-tuned on Shakespeare in one process (nothing is sent); the hidden states and their
gradients at the cut pass through channels as they would between machines. Position 0, the attention sink, is
left out: it carries most of the energy, and would be most of the mean. Writes ``bench/results/deltas.json``;
stopped, it fine-tunes again, which always gives the same, and goes on with the next memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.study.cells import RESULTS, Cells
from bench.study.tables import Draw, columns
from thinwire.channels.channel import Scheme, Sender
from thinwire.channels.memory import Delta, Memory, NoMemory, RunningMean
from thinwire.codecs import Uniform
from thinwire.runs.data.task import next_token_loss
from thinwire.runs.machine.processor import environment
from thinwire.runs.models.split import ModelStage, build_stage
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.training_job import Job, prepare

RESULT = RESULTS / "deltas.json"
EPOCHS, LAST = 3, 2  # how many there are, and the last one, counted from 0
CONFIG = TrainConfig(steps=24, epochs=EPOCHS, batch=4, microbatches=4, seq=128, eval_samples=0)
MEMORIES: dict[str, Memory] = {
    "direct": NoMemory(),
    "running mean": RunningMean(),
    "delta to the previous step": Delta("step"),
    "delta by sample": Delta(),
}
BITS = (2, 4, 8)
KINDS = {"activations": 1, "gradients": 2}  # where each stands in a step
Frame = tuple[Tensor, Tensor, Tensor]  # sample ids, hidden states, their gradients


def capture(config: TrainConfig = CONFIG, skip: int = 1) -> list[Frame]:
    """Fine-tune, and return what crossed the cut in each step, without the first ``skip`` positions."""
    job = prepare(config)
    stages = [build_stage(job.source, job.cut, i, config.seed) for i in (0, 1)]
    return [frame for _, frame in fine_tune(job, stages, skip)]


def fine_tune(
    job: Job,
    stages: Sequence[ModelStage],
    skip: int = 1,
    on_samples: Callable[[list[int]], None] = lambda ids: None,
    dtype: str = "bf16",
) -> Iterator[tuple[float, Frame]]:
    """Train both stages in this process, and yield the loss of each step and what crossed the cut.

    The first ``skip`` positions of each sequence are left out; ``on_samples`` is told the ids before a step.
    """
    parameters = [p for stage in stages for p in stage.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, job.config.learning_rate, weight_decay=0.0, fused=True)
    for ids in job.batches:
        on_samples(ids.tolist())
        loss, hidden, gradient = both_ways(stages, job.train[ids], dtype)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        yield loss, (ids, hidden[:, skip:].clone(), gradient[:, skip:].clone())


def both_ways(stages: Sequence[ModelStage], block: Tensor, dtype: str) -> tuple[float, Tensor, Tensor]:
    """Pass forward and back; return the loss, the hidden states and their gradients."""
    lower, upper = stages
    cast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16")
    with cast:
        hidden = lower(block[:, :-1])
    seen = hidden.detach().requires_grad_()
    with cast:
        logits = upper(seen)
    loss = next_token_loss(logits, block[:, 1:])
    loss.backward()
    if seen.grad is None:
        raise RuntimeError("no gradient reached the boundary")
    hidden.backward(seen.grad)
    return loss.item(), seen.detach(), seen.grad


def energy(steps: Sequence[Frame], which: int, memory: Memory, epoch: int = LAST) -> float:
    """Return the residual's share of the energy over one epoch, the last unless it is named."""
    sender, residual, total = Sender(Scheme(memory=memory)), 0.0, 0.0
    for i, step in enumerate(steps[: (epoch + 1) * len(steps) // EPOCHS]):
        ids, x = step[0].tolist(), step[which]
        if i >= epoch * len(steps) // EPOCHS:
            residual += (x - predicted(sender, memory, x, ids)).square().sum().item()
            total += x.square().sum().item()
        sender.encode(x, ids)
    return residual / total


def predicted(sender: Sender, memory: Memory, x: Tensor, ids: list[int]) -> Tensor:
    """Return what both ends would know of ``x`` beforehand: what a residual of zeros decodes to."""
    if isinstance(memory, NoMemory):
        return torch.zeros_like(x)
    probe = Sender(sender.scheme)
    probe.load_state_dict(sender.state_dict())
    return probe.encode(x, ids, codec=Uniform(bits=2, clip=1e-6, scale="tensor"))[1]


def error(steps: Sequence[Frame], which: int, memory: Memory, bits: int) -> float:
    """Return |x_hat - x| / |x| over the last epoch of a closed loop."""
    code = Uniform(bits=bits, group=32)
    sender, wrong, total = Sender(Scheme(code, memory, Uniform(bits=8))), 0.0, 0.0
    for i, step in enumerate(steps):
        x = step[which]
        _, x_hat = sender.encode(x, step[0].tolist())
        if i >= LAST * len(steps) // EPOCHS:
            wrong += (x_hat - x).square().sum().item()
            total += x.square().sum().item()
    return float((wrong / total) ** 0.5)


def row(steps: Sequence[Frame], of: str, label: str) -> dict[str, Any]:
    """Return what one memory makes of activations or gradients."""
    which, memory = KINDS[of], MEMORIES[label]
    errors = {str(b): error(steps, which, memory, b) for b in BITS}
    return {"of": of, "memory": label, "energy": energy(steps, which, memory), "error": errors}


table = columns(  # what each memory leaves to send, and the error at equal bits
    "rows", ("of", "{of}"), ("memory", "{memory}"), ("residual's energy", "{energy:.4f}"),
    ("error, 2 bits", lambda r: f"{r['error']['2']:.4f}"), ("4 bits", lambda r: f"{r['error']['4']:.4f}"),
    ("8 bits", lambda r: f"{r['error']['8']:.4f}"),
)  # fmt: skip
TABLES: dict[str, Draw] = {"deltas": table}


def main() -> None:
    """Measure and write."""
    job = {k: getattr(CONFIG, k) for k in ("model", "data", "steps", "epochs", "batch", "seq", "seed")}
    cells = Cells(RESULT, {**job, "bits": BITS, "memories": [repr(m) for m in MEMORIES.values()]})
    steps = capture()
    rows = [
        cells.of(f"{of}, {label}", lambda of=of, label=label: row(steps, of, label))
        for of in KINDS
        for label in MEMORIES
    ]
    cells.finish({"job": job, "environment": environment("bf16", torch.get_num_threads()), "rows": rows})


if __name__ == "__main__":
    main()
