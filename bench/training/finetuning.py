"""What adapters, dropout and packing anew do to a delta: how much of the energy a later visit has to send.

Run ``python -m bench.training.finetuning`` (``make bench-finetuning``), a quarter of an hour on two slow
cores. Two models are fine-tuned on Shakespeare in one process, as in ``bench.ground.deltas``, in float32:
SmolLM2-135M with all weights and with adapters, gpt2-lab with and without dropout. Then, with no weight
changed, SmolLM2-135M reads the same tokens under other dropout masks, and behind another prefix. Position 0,
the attention sink, is left out everywhere. Writes ``bench/results/finetuning.json``; stopped, it goes on
after its last finished run.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.ground.deltas import EPOCHS, KINDS, energy, fine_tune
from bench.study.cells import RESULTS, Cells
from bench.study.tables import Draw, Row, columns
from thinwire.channels.memory import Delta
from thinwire.runs.machine.processor import environment
from thinwire.runs.models.dropout import seed_dropout
from thinwire.runs.models.lora import add_adapters
from thinwire.runs.models.split import ModelStage, build_stage
from thinwire.uses.training.run.options import TrainConfig
from thinwire.uses.training.run.training_job import Job, prepare

RESULT = RESULTS / "finetuning.json"
DTYPE = "fp32"  # on every machine, whether or not it has bf16 instructions
SMOLLM = TrainConfig(steps=18, epochs=EPOCHS, batch=4, seq=64, cut="15,15", eval_samples=0)
LAB = TrainConfig(
    model="gpt2-lab", steps=45, epochs=EPOCHS, batch=4, seq=64, cut="2,2", lr=2e-5, eval_samples=0
)
RANK, P, SINK = 8, 0.1, 100
TRAINED = [replace(SMOLLM, lr=lr) for lr in (2e-5, 5e-5)] + [
    replace(SMOLLM, lr=lr, lora=RANK) for lr in (2e-4, 1e-3)
]
DROPOUT = {"none": (0.0, False), "by sample": (P, False), "drawn anew": (P, True)}
SEEDS = range(3)
SETTINGS = ("model", "data", "steps", "epochs", "batch", "seq", "cut", "lr")
BRANCHES = ("o_proj", "down_proj")  # what ends a residual branch of a Llama layer


def stages_of(job: Job) -> list[ModelStage]:
    """Return both stages as a run trains them, but for dropout by sample."""
    config = job.config
    stages = [build_stage(job.source, job.cut, i, config.seed) for i in (0, 1)]
    if config.lora:
        for stage in stages:
            add_adapters(stage, config.lora, config.seed, config.dropout)
    return stages


def run(config: TrainConfig, anew: bool = False) -> dict[str, Any]:
    """Fine-tune; return how many values were trained, losses by pass, and the delta's share at later visits.

    Dropout is drawn by sample, or ``anew`` at each visit.
    """
    torch.manual_seed(config.seed)  # of masks drawn anew; all else has generators of its own
    job = prepare(config)
    stages = stages_of(job)
    holders = [] if anew else [seed_dropout(stage, config.seed) for stage in stages]

    def on_samples(ids: list[int]) -> None:
        for holder in holders:
            holder.set(ids)

    values = sum(p.numel() for stage in stages for p in stage.parameters() if p.requires_grad)
    losses, frames = zip(*fine_tune(job, stages, on_samples=on_samples, dtype=DTYPE), strict=True)
    size = len(losses) // EPOCHS
    return {
        "values": values,
        "loss": [statistics.fmean(losses[k * size : (k + 1) * size]) for k in range(EPOCHS)],
        "share": [energy(frames, KINDS["activations"], Delta(), k) for k in range(1, EPOCHS)],
    }


def same_weights(seed: int) -> dict[str, dict[str, float]]:
    """Return what other masks, and another prefix, change of hidden states while no weight changes.

    Behind another sample's first half, only the second half of each sample is compared.
    """
    job = prepare(replace(SMOLLM, seed=seed))
    lower = build_stage(job.source, job.cut, 0, seed)
    block = job.train[job.batches.samples()][:, :-1]
    half = block.shape[1] // 2
    packed = torch.cat([block.roll(1, 0)[:, :half], block[:, half:]], 1)
    with torch.no_grad():
        prefix = moved(lower(packed)[:, half:], lower(block)[:, half:])
        drop_branches(lower)
        torch.manual_seed(seed)
        first, second = (lower(block)[:, 1:] for _ in range(2))
    return {"masks": moved(second, first), "prefix": prefix}


def moved(x: Tensor, reference: Tensor) -> dict[str, float]:
    """Return the energy of the difference as a share of that of ``x``: of all tokens, and the median token's.

    They are far apart where masks make a token another attention sink, with the energy of a thousand others;
    so ``sinks`` counts the tokens, of both together, with more than ``SINK`` times the median energy.
    """
    difference, whole, before = (t.square().sum(-1) for t in (x - reference, x, reference))
    both = torch.cat([whole, before])
    return {
        "all": (difference.sum() / whole.sum()).item(),
        "median": (difference / whole).median().item(),
        "sinks": float((both > SINK * both.median()).sum()),
    }


def drop_branches(stage: ModelStage) -> None:
    """Put dropout behind each residual branch: models of the Llama kind have none of their own."""
    for name in [n for n, _ in stage.named_modules() if n.endswith(BRANCHES)]:
        stage.set_submodule(name, nn.Sequential(stage.get_submodule(name), nn.Dropout(P)))


def spread(values: list[float]) -> dict[str, float]:
    """Return the mean over the seeds, the least and the largest."""
    return {"mean": statistics.fmean(values), "least": min(values), "largest": max(values)}


def adapters(cells: Cells) -> list[dict[str, Any]]:
    """Return SmolLM2-135M trained in each way, one seed."""
    return [
        {"rank": c.lora, "rate": c.lr} | cells.of(f"rank {c.lora}, rate {c.lr}", partial(run, c))
        for c in TRAINED
    ]


def dropout(cells: Cells) -> list[dict[str, Any]]:
    """Return gpt2-lab under each kind of dropout, over the seeds."""
    rows = []
    for name, (rate, anew) in DROPOUT.items():
        found = [
            cells.of(f"{name}, seed {seed}", partial(run, replace(LAB, dropout=rate, seed=seed), anew))
            for seed in SEEDS
        ]
        shares = [spread(list(each)) for each in zip(*(f["share"] for f in found), strict=True)]
        rows.append({"masks": name, "rate": rate, "share": shares, "by_seed": found})
    return rows


def disturbances(cells: Cells) -> list[dict[str, Any]]:
    """Return what masks and prefixes change of SmolLM2-135M's hidden states, over the seeds."""
    found = [cells.of(f"same weights, seed {seed}", partial(same_weights, seed)) for seed in SEEDS]
    return [
        {"changed": name, **{of: spread([f[name][of] for f in found]) for of in ("all", "median", "sinks")}}
        for name in ("masks", "prefix")
    ]


MASKS = {"none": "none", "by sample": "{:g}, by sample", "drawn anew": "{:g}, drawn anew at each visit"}
CHANGED = {"masks": "other dropout masks", "prefix": "another prefix of {} tokens"}
RANGED = "{{{0}[mean]:.1fc}} % ({{{0}[least]:.1fc}} to {{{0}[largest]:.1fc}})"


def _sinks(r: Row) -> str:
    least, largest = (f"{r['sinks'][of]:.0f}" for of in ("least", "largest"))
    return least if least == largest else f"{least} to {largest}"


TABLES: dict[str, Draw] = {
    "finetuning-adapters": columns(  # what is trained, how fast it learns, and what a later visit has to send
        "adapters",
        ("trained", lambda r: f"adapters, rank {r['rank']}" if r["rank"] else "all weights"),
        ("values", "{values:.1fM} million"), ("rate", lambda r: f"{r['rate']:.0e}".replace("e-0", "e-")),
        ("loss by pass", "{loss[0]:.2f}, {loss[1]:.2f}, {loss[2]:.2f}"),
        ("delta's share of the energy, second pass", "{share[0]:.2fc} %"), ("third", "{share[1]:.2fc} %"),
    ),
    "finetuning-dropout": columns(  # what dropout makes of a delta
        "dropout",
        ("dropout", lambda r: MASKS[r["masks"]].format(r["rate"])),
        ("second pass", RANGED.format("share[0]")), ("third", RANGED.format("share[1]")),
    ),
    "finetuning-disturbed": columns(  # what destroys a delta even where no weight has changed
        lambda found: (r | {"half": found["jobs"][SMOLLM.model]["seq"] // 2} for r in found["same_weights"]),
        ("changed", lambda r: CHANGED[r["changed"]].format(r["half"])),
        ("share of the energy, all tokens", RANGED.format("all")),
        ("median token", RANGED.format("median")), ("new sinks, tokens", _sinks),
    ),
}  # fmt: skip


def main() -> None:
    """Measure what is missing, and write."""
    configs = [asdict(c) for c in (*TRAINED, LAB)]
    cells = Cells(RESULT, {"configs": configs, "dropout": DROPOUT, "dtype": DTYPE, "seeds": list(SEEDS)})
    jobs = {c.model: {k: getattr(c, k) for k in SETTINGS} for c in (SMOLLM, LAB)}
    cells.finish(
        {
            "jobs": jobs,
            "mask_rate": P,
            "seeds": {"adapters": [SMOLLM.seed], "dropout": list(SEEDS), "same_weights": list(SEEDS)},
            "same_weights": disturbances(cells),
            "dropout": dropout(cells),
            "adapters": adapters(cells),
            "environment": environment(DTYPE, torch.get_num_threads()),
        }
    )


if __name__ == "__main__":
    main()
