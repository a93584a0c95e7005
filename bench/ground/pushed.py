"""Which ideas lower the bits at an equal error? Real activations and gradients, one coder after another.

Run ``python -m bench.ground.pushed`` (``make bench-pushed``), about ten minutes on two quiet cores. Two
models are fine-tuned in one process (nothing is sent): SmolLM2-135M, which changes slowly, and gpt2-lab from
random weights, which changes fast. What crosses the cut goes, sample by sample, through channels as it would
between machines. Bits are those of whole packets, errors |x_hat - x| / |x| without position 0 (the attention
sink), each by visit of a sample; ``gain`` is <x_hat, x> / <x, x>, below 1 for a coder that shrinks what it
codes. Writes ``bench/results/pushed.json``; what became of each idea is told in ``docs/log.md``. Stopped, it
fine-tunes again, which always gives the same, and goes on with the next coder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bench.ground.deltas import CONFIG, KINDS, capture
from bench.study.cells import RESULTS, Cells
from thinwire.channels.channel import Scheme, Sender
from thinwire.channels.memory import Delta
from thinwire.codecs import ChannelMean, Codec, DeadZone, Entropy, Sink, Uniform
from thinwire.runs.machine.processor import environment
from thinwire.runs.models.split import build_stage
from thinwire.uses.training.pipeline.recipes import parse_recipe
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.training_job import prepare

RESULT = RESULTS / "pushed.json"
JOBS = {
    "smollm2-135m": CONFIG,
    "gpt2-lab": TrainConfig(
        model="gpt2-lab", steps=48, epochs=3, batch=4, microbatches=4, seq=128, eval_samples=0
    ),
}
SEEN_ONCE = TrainConfig(steps=64, epochs=1, batch=8, microbatches=4, seq=128, eval_samples=0)
INT8 = Uniform(bits=8)
Steps = list[tuple[Tensor, Tensor, Tensor]]


def groups(bits: int, clip: float = 1.0, **more: Any) -> Codec:
    """Return group codes as ``thinwire-groups`` sends them."""
    return Entropy(Uniform(bits, clip=clip, scale_dtype=more.pop("scales", "e5m3"), **more))


def steps(step: float, offset: float = 0.4, unit: str = "message", level: int = 1) -> Codec:
    """Return one step a message, entropy-coded, as ``thinwire`` sends it."""
    return Entropy(DeadZone(step, offset, unit), level)


def apart(inner: Codec) -> Codec:
    """Return the code of a first visit: attention sink and means apart."""
    return Sink(ChannelMean(inner))


def change(inner: Codec, first: Codec) -> Scheme:
    """Return the scheme that sends the change since the last visit, and first visits apart."""
    return Scheme(inner, Delta(), first, INT8)


FIRST, OLD = apart(steps(0.65)), apart(groups(4))


def forward_schemes() -> dict[str, Scheme]:
    """Return what activations go through, by name."""
    found = {
        name: parse_recipe(name).schemes["forward"] for name in ("thinwire-groups", "thinwire", "tahquant")
    }
    for clip in (1.0, 0.8, 0.6, 0.4):
        found[f"delta: groups, 2 bits, clip {clip}"] = change(groups(2, clip), OLD)
    for bits in (1, 3):
        found[f"delta: groups, {bits} bits, clip 0.8"] = change(groups(bits, 0.8), OLD)
    for group in (64, 128):
        found[f"delta: groups of {group}, 2 bits"] = change(groups(2, 0.6, group=group), OLD)
    found["delta: groups, 2 bits, bfloat16 scales"] = change(groups(2, 0.6, scales="bfloat16"), OLD)
    for offset in (0.5, 0.4, 0.35):
        for step in (1.5, 2.0, 2.5):
            found[f"delta: step {step} of its own, offset {offset}"] = change(steps(step, offset), OLD)
    for step in (0.2, 0.3, 0.4, 0.5, 0.7):
        found[f"delta: step {step} of the tensor"] = change(steps(step, unit="tensor"), FIRST)
    for step in (0.5, 0.65, 1.0):
        found[f"first visit: step {step}, sink and mean apart"] = Scheme(apart(steps(step)))
    found["first visit: step 0.65, mean not apart"] = Scheme(Sink(steps(0.65)))
    return found


def backward_schemes() -> dict[str, Scheme]:
    """Return what gradients go through, by name."""
    found = {name: parse_recipe(name).schemes["backward"] for name in ("thinwire-groups", "thinwire")}
    for bits in (2, 3):
        for rounding in ("nearest", "stochastic"):
            found[f"direct: groups, {bits} bits, {rounding}"] = Scheme(groups(bits, rounding=rounding))
        found[f"delta: groups, {bits} bits"] = change(groups(bits, 0.8), groups(3, 0.8))
    for offset in (0.5, 0.4):
        for step in (0.8, 1.0, 1.2):
            found[f"direct: step {step}, offset {offset}"] = Scheme(steps(step, offset))
    for level in (3, 9, 19):
        found[f"direct: step 1.0, Zstandard level {level}"] = Scheme(steps(1.0, level=level))
    for step in (1.5, 2.0):
        found[f"delta: step {step} of its own"] = change(steps(step), steps(1.0))
    for step in (0.7, 1.0, 1.3):
        found[f"delta: step {step} of the tensor"] = change(steps(step, unit="tensor"), steps(step))
    return found


def by_visit(run: Steps, which: int, scheme: Scheme, visits: int) -> list[dict[str, float]]:
    """Return bits, error and gain of each visit."""
    sender, size, rows = Sender(scheme), len(run) // visits, []
    for visit in range(visits):
        bits = values = wrong = total = along = 0.0
        for step in run[visit * size : (visit + 1) * size]:
            for k, key in enumerate(step[0].tolist()):
                x = step[which][k : k + 1]
                packet, x_hat = sender.encode(x, [key])
                bits, values = bits + 8 * packet.nbytes, values + x.numel()
                x, x_hat = x[:, 1:], x_hat[:, 1:]
                wrong, total = wrong + float((x_hat - x).square().sum()), total + float(x.square().sum())
                along += float((x_hat * x).sum())
        rows.append({"bits": bits / values, "error": math.sqrt(wrong / total), "gain": along / total})
    return rows


def entropy(levels: Tensor) -> float:
    """Return the order-0 entropy of integers, in bits for all of them."""
    share = levels.flatten().unique(return_counts=True)[1].double() / levels.numel()
    return float(-(share * share.log2()).sum()) * levels.numel()


def entropy_by_class(levels: Tensor, classes: int = 16) -> float:
    """Return the entropy of [tokens, channels] where a coder knows each token's and channel's magnitude."""
    size = levels.abs().float() + 1e-3
    weight = (size.mean(1, keepdim=True) * size.mean(0, keepdim=True)).log().flatten()
    edges = weight.quantile(torch.linspace(0, 1, classes + 1)[1:-1])
    kind, flat = torch.bucketize(weight, edges), levels.flatten()
    parts = (flat[kind == c] for c in range(classes))
    return sum(entropy(p) + 8 * len(p.unique()) for p in parts if len(p)) + 5 * sum(levels.shape)


def coder_gap(run: Steps, step: float) -> dict[str, float]:
    """Return bits a value of gradients: as sent, and by two entropies that a better coder could reach."""
    codec, bits, n = steps(step), [0.0, 0.0, 0.0], 0
    for _, _, gradients in run[:8]:
        for x in gradients.split(1):
            y, scale = codec.decode(codec.encode(x))[0], DeadZone(step).encode(x).parts[2].float()
            levels = (y / scale).round().int()
            n += x.numel()
            found = 8.0 * codec.encode(x).nbytes, entropy(levels), entropy_by_class(levels)
            bits = [a + b for a, b in zip(bits, found, strict=True)]
    return dict(zip(("sent", "entropy", "entropy_by_class"), (b / n for b in bits), strict=True))


def outlier_channels(run: Steps, kept: int, step: float) -> dict[str, float]:
    """Return bits and error of first visits where the ``kept`` largest channels go apart at 8 bits."""
    codec, bits, n, wrong, total = apart(steps(step)), 0.0, 0, 0.0, 0.0
    for _, activations, _ in run[:8]:
        for x in activations.split(1):
            centred = x[0, 1:] - x[0, 1:].mean(0)
            top = centred.square().sum(0).topk(kept).indices
            rest = x.clone()
            rest[..., top] = x[:, :, top].mean(1, keepdim=True)
            payload = codec.encode(rest)
            x_hat = codec.decode(payload)
            if kept:
                x_hat[..., top] = INT8.decode(INT8.encode(x[..., top].contiguous()))
                bits += INT8.encode(x[..., top].contiguous()).nbytes * 8 + 16 * kept
            bits, n = bits + 8 * payload.nbytes, n + x.numel()
            wrong += float((x_hat - x)[:, 1:].square().sum())
            total += float(x[:, 1:].square().sum())
    return {"channels": kept, "bits": bits / n, "error": math.sqrt(wrong / total)}


def rotation(rows: Tensor) -> Tensor:
    """Return the eigenvectors of the channels' covariance, as columns."""
    centred = (rows - rows.mean(0)).double()
    return torch.linalg.eigh(centred.T @ centred)[1].flip(1).float()


def rotated(run: Steps, which: int, step: float) -> dict[str, float]:
    """Return entropies and errors of first visits in a basis learnt from others, whose bytes are free."""
    size = len(run) // 3
    half = size // 2
    rows = torch.cat([s[which][:, 1:].flatten(0, 1) for s in run[:half]])
    found: dict[str, float] = {}
    for name, basis in (("channels", torch.eye(rows.shape[1])), ("rotated", rotation(rows))):
        bits = wrong = total = n = 0.0
        for s in run[half:size]:
            for x in s[which][:, 1:]:
                y = x - rows.mean(0) * (which == KINDS["activations"])
                scale = step * y.abs().mean()
                z = y @ basis
                levels = ((z.abs() / scale + 0.4).floor() * z.sign()).int()
                bits, n = bits + entropy_by_class(levels), n + x.numel()
                wrong += float((levels * scale @ basis.T - y).square().sum())
                total += float(x.square().sum())
        found |= {f"{name}_bits": bits / n, f"{name}_error": math.sqrt(wrong / total)}
    return found


def hidden_states() -> Iterable[tuple[Tensor, Tensor]]:
    """Yield token ids and hidden states of samples seen once, weights at rest: the best case for a table."""
    job = prepare(SEEN_ONCE)
    lower = build_stage(job.source, job.cut, 0, SEEN_ONCE.seed)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for ids in job.batches:
            block = job.train[ids]
            yield from zip(block, lower(block[:, :-1]).float(), strict=True)


class Table:
    """Running sums of centred hidden states by key, shrunk towards a guess where little was seen."""

    def __init__(self) -> None:
        self.sums: dict[Any, Tensor] = {}
        self.counts: dict[Any, int] = {}

    def guess(self, key: Any, otherwise: Tensor) -> Tensor:
        if key not in self.sums:
            return otherwise
        return otherwise + (self.sums[key] - self.counts[key] * otherwise) / (self.counts[key] + 1.5)

    def add(self, key: Any, value: Tensor) -> None:
        self.sums[key] = self.sums.get(key, 0) + value
        self.counts[key] = self.counts.get(key, 0) + 1


def by_token(quarters: int = 4) -> list[dict[str, float]]:
    """Return, by quarter of one epoch, the bits a value that prediction saves by mean magnitude."""
    states = list(hidden_states())
    size, rows = len(states) // quarters, []
    tokens, pairs, total, n = Table(), Table(), torch.zeros(states[0][1].shape[-1]), 0
    for quarter in range(quarters):
        saved = [0.0, 0.0, 0.0]
        for ids, x in states[quarter * size : (quarter + 1) * size]:
            z = x[1:] - total / max(n, 1)
            keys = list(zip(ids[:-2].tolist(), ids[1:-1].tolist(), strict=True))
            token = torch.stack([tokens.guess(k[1], torch.zeros_like(total)) for k in keys])
            pair = torch.stack([pairs.guess(k, t) for k, t in zip(keys, token, strict=True)])
            left = [x[1:], z, z - token, z - pair]
            sizes = [float(v.abs().mean().log2()) for v in left]
            saved = [s + sizes[0] - after for s, after in zip(saved, sizes[1:], strict=True)]
            for k, row in zip(keys, z, strict=True):
                tokens.add(k[1], row)
                pairs.add(k, row)
            total, n = total + x[1:].sum(0), n + len(x) - 1
        rows.append(
            dict(zip(("mean", "mean_and_token", "mean_and_pair"), (s / size for s in saved), strict=True))
        )
    return rows


def measure(model: str, config: TrainConfig, cells: Cells) -> dict[str, Any]:
    """Return everything that is measured on one model's steps."""
    run = capture(config, skip=0)
    visits = config.epochs or 1

    def coded(of: str, name: str, scheme: Scheme) -> dict[str, Any]:
        row = cells.of(f"{model}, {of}, {name}", lambda: by_visit(run, KINDS[of], scheme, visits))
        return {"name": name, "visits": row}

    makers = {"activations": forward_schemes, "gradients": backward_schemes}
    found: dict[str, Any] = {
        of: [coded(of, name, scheme) for name, scheme in schemes().items()] for of, schemes in makers.items()
    }
    return found | cells.of(f"{model}, apart from channels", lambda: bounds(run))


def bounds(run: Steps) -> dict[str, Any]:
    """Return what better coders could gain: by entropies, with outlier channels apart, in another basis."""
    return {
        "coder": {str(step): coder_gap(run, step) for step in (0.7, 1.0, 2.0)},
        "outlier_channels": [outlier_channels(run, kept, 0.65) for kept in (0, 4, 16)],
        "rotation": {
            of: rotated(run, KINDS[of], step) for of, step in (("activations", 0.65), ("gradients", 1.0))
        },
    }


def main() -> None:
    """Measure and write."""
    shown = ("model", "data", "steps", "epochs", "batch", "seq", "seed")
    jobs = {n: {k: getattr(c, k) for k in shown} | {"lr": c.learning_rate} for n, c in JOBS.items()}
    cells = Cells(RESULT, jobs)
    cells.finish(
        {
            "jobs": jobs,
            "environment": environment("bf16", torch.get_num_threads()),
            "models": {name: measure(name, config, cells) for name, config in JOBS.items()},
            "prediction_by_token": cells.of("prediction by token", by_token),
        }
    )


if __name__ == "__main__":
    main()
