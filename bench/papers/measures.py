"""The figure behind each claim, by seed or round, from the finished cells of the studies.

Each is paired: both sides ran on the same seed, or in the same round. Larger is better for the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from statistics import fmean
from typing import Any

import numpy as np
import torch

from bench.federated.decided import GROUPS, better, found_of, settled
from bench.study.cells import RESULTS, Kept, words_of
from thinwire.codecs import LowRank
from thinwire.runs.records.writer import read_json

Measure = Callable[[], list[float]]
Found = Mapping[str, Any]
SEEDS = range(10)  # as many as any study has


class _NotMeasured(Exception):
    """A cell is not there yet."""


@cache
def _study(name: str) -> Kept:
    return Kept(name)


_settled, _better = cache(settled), cache(better)


def cell(study: str, *words: str | int | float) -> Found:
    """Return a finished cell. Errors: ``_NotMeasured``."""
    found = _study(study).get(*words)
    if found is None:
        raise _NotMeasured(f"{study}: {' '.join(words_of(words))}")
    return dict(found)


def by_seed(value: Callable[[int], float], seeds: Iterable[int] = SEEDS) -> list[float]:
    """Return the values of the seeds whose cells are all there."""
    values = list[float]()
    for seed in seeds:
        with suppress(_NotMeasured):
            values.append(value(seed))
    return values


# Federated learning: runs of the first study are named by group, method and seed, those of the study of
# claims by group, label and seed.
GAMMAS = ("gamma", "gamma-1")
BASELINES = ("fedavg", "fedavg-topk", "fedasync", "fedbuff")
RIVALS = ("fedavg", "topk", "fedasync", "fedbuff")


def federated(group: str, method: str, seed: int) -> Found:
    """Return a run of either study of federated learning."""
    if group not in GROUPS:
        return cell("federated", group, method, f"seed={seed}")
    best = _settled(group, method)
    found = found_of(best, seed) if best else None
    if found is None:
        raise _NotMeasured(f"{group} {method} seed={seed}")
    return found


def gamma_of(group: str) -> str:
    """Return the label of gamma-FedHT with the alpha that its search found. Errors: ``_NotMeasured``."""
    found = _better(group, GAMMAS)
    if found is None:
        raise _NotMeasured(f"{group} {' or '.join(GAMMAS)}")
    return found


def ahead(group: str, seed: int) -> float:
    """Return by how many points gamma-FedHT is ahead of Top-k, at the better alpha."""
    return points(group, gamma_of(group), "topk", seed)


def early(group: str, seed: int) -> float:
    """Return how many times as much of its bytes Top-k sends in the first fifth of the rounds."""
    ours, theirs = (_early(group, method, seed) for method in (gamma_of(group), "topk"))
    return theirs / ours


def _early(group: str, method: str, seed: int) -> float:
    curve = federated(group, method, seed)["accuracy"]["curve"]
    first = [p["density"] for p in curve if p["density"] and p["version"] <= curve[-1]["version"] / 5]
    return sum(first) / sum(p["density"] for p in curve if p["density"])


def points(group: str, mine: str, other: str, seed: int) -> float:
    """Return by how many points of final accuracy a method is ahead."""
    ours, theirs = (federated(group, method, seed)["accuracy"]["final"] for method in (mine, other))
    return 100 * ((ours or 0.0) - (theirs or 0.0))


def drift(group: str, method: str, seed: int) -> float:
    """Return the mean density of the last fifth of a run over that of the second fifth."""
    curve = federated(group, method, seed)["accuracy"]["curve"]
    end = curve[-1]["version"]
    early = [p["density"] for p in curve if p["density"] and end / 5 < p["version"] <= 2 * end / 5]
    late = [p["density"] for p in curve if p["density"] and p["version"] > 4 * end / 5]
    return fmean(late) / fmean(early)


def held_back(group: str, method: str, seed: int) -> float:
    """Return how residuals grow beside the threshold, between the same parts of a run."""
    turns = federated(group, method, seed)["held_back"]
    fifth = len(turns) // 5
    early, late = (
        fmean(rms / level for _, level, rms in part) for part in (turns[fifth : 2 * fifth], turns[-fifth:])
    )
    return late / early


def flatter(group: str, mine: str, other: str, seed: int) -> float:
    """Return how much more the other's density changes, as a ratio."""
    ours, theirs = (abs(math.log(drift(group, method, seed))) for method in (mine, other))
    return math.exp(theirs - ours)


def spent(group: str, what: str, method: str, seed: int) -> float:
    """Return what a run took to its target, or to its end: a bound from below."""
    run = federated(group, method, seed)
    if what == "updates":
        return float(sum(client["updates"] for client in run["clients"]))
    if what == "versions":
        return float(run["totals"]["rounds"])
    end = run["target"] or run["bytes"] | {"virtual_s": run["totals"]["virtual_s"]}
    return float(end["up"] + end["down"] if what == "bytes" else end[what])


def saved(group: str, what: str, mine: str, rivals: tuple[str, ...], seed: int) -> float:
    """Return the share that a method saves, in per cent, as a mean over its rivals."""
    own = spent(group, what, mine, seed)
    return fmean(100 * (1 - own / spent(group, what, rival, seed)) for rival in rivals)


def over(group: str, what: str, mine: str, other: str, seed: int) -> float:
    """Return how many times as much a method takes."""
    return spent(group, what, mine, seed) / spent(group, what, other, seed)


def pace(group: str, mine: str, other: str, seed: int) -> float:
    """Return how many times as many bytes a method sends up an iteration."""
    each = [spent(group, "up", x, seed) / spent(group, "versions", x, seed) for x in (mine, other)]
    return each[0] / each[1]


def best_power(seed: int) -> float:
    """Return the exponent of the fewest iterations, of a parabola through their logarithms."""
    others = {("power", label): float(label[1:]) for label in GROUPS["power"].methods}
    powers = {("skew-100", "topk"): 0.0, ("skew-100", "dagc-r"): 2 / 3} | others
    logs = [math.log(spent(group, "versions", label, seed)) for group, label in powers]
    bend, slope, _ = np.polyfit(list(powers.values()), logs, 2)
    return float(-slope / (2 * bend))


# Replicas.
def replicas(link: str, recipe: str, seed: int, kind: str = "whole") -> Found:
    """Return a cell of the study of replicas, of the small CNN."""
    return cell("replicas", kind, "cnn-fashion", link, recipe, f"seed={seed}")


def to_target(link: str, recipe: str, seed: int) -> float:
    """Return the seconds to the loss of all-reduce: as run, or steps by the timed seconds of one."""
    aim = replicas("unlimited", "allreduce", seed)["loss"]
    with suppress(_NotMeasured):
        run = replicas(link, recipe, seed)
        return float(run["seconds"]) if run["loss"] <= aim else math.inf
    timed, free = replicas(link, recipe, 0, "timed"), replicas("unlimited", recipe, seed)
    return float(free["steps"] * timed["seconds"] / timed["steps"])


def sooner(link: str, mine: str, other: str, seed: int) -> float:
    """Return how many times sooner a recipe is at the loss."""
    return to_target(link, other, seed) / to_target(link, mine, seed)


def more_steps(link: str, mine: str, other: str, seed: int) -> float:
    """Return how many times as many steps a recipe takes to the loss."""
    return float(replicas(link, mine, seed)["steps"] / replicas("unlimited", other, seed)["steps"])


# Pipelines.
DEEP = "deep"


def passes(recipe: str, number: int) -> float:
    """Return the seconds a step of all passes, in a round of many micro-batches over 8 Mbit/s."""
    return fmean(cell("rounds", DEEP, f"round={number}", "8+5", recipe, "cubic")["seconds"])


def faster(mine: str, others: tuple[str, ...], number: int) -> float:
    """Return how many times faster a recipe is than the fastest of others."""
    return min(passes(other, number) for other in others) / passes(mine, number)


def lower(recipe: str, seed: int) -> float:
    """Return by how many per cent a held-out loss is below that of fp32 on the same processor."""
    run, base = (cell("quality", name, "rate=2e-05", f"seed={seed}") for name in (recipe, "fp32"))
    cpu = run["environment"]["machine"]["cpu"]
    if base["environment"]["machine"]["cpu"] != cpu:
        base = cell("quality", "fp32", "rate=2e-05", f"seed={seed}", cpu)
    return float(100 * (1 - run["loss"]["eval_final"] / base["loss"]["eval_final"]))


# Pictures.
def picture(group: str, link: str, way: str, seed: int) -> Found:
    """Return what a way of making a picture came to."""
    return dict(cell("diffusion", group, link, f"seed={seed}")["ways"][way])


def seconds_less(link: str, mine: str, other: str, seed: int) -> float:
    """Return how many times sooner a way has the picture."""
    ours, theirs = (picture("two", link, way, seed)["seconds"] for way in (mine, other))
    return float(theirs / ours)


def fewer(way: str, seed: int) -> float:
    """Return how many times fewer bytes a step has than in 16 bits."""
    sent = picture("two", "unlimited", way, seed)["bytes"]
    return float(sent["fp16_step"] / sent["steady_step"])


def sooner_a_rank(link: str, mine: str, seed: int) -> float:
    """Return how many times sooner a way is than one rank, by the number of ranks."""
    return seconds_less(link, mine, "one", seed) / float(picture("two", link, mine, seed)["ranks"])


def fewer_wide(seed: int) -> float:
    """Return how many times fewer bytes than in 16 bits a packet has of FLUX's shape; encodes it now."""
    matrix = torch.randn(1024, 3072, generator=torch.Generator().manual_seed(seed))
    return 2 * matrix.numel() / LowRank(8).encode(matrix).nbytes


def nearer(group: str, way: str, seed: int) -> float:
    """Return by how many dB a way is nearer to one rank's picture than the displaced one."""
    ours, theirs = picture(group, "unlimited", way, seed), picture("two", "unlimited", "displaced", seed)
    return float(ours["quality"]["psnr_db"] - theirs["quality"]["psnr_db"])


def experts(group: str, link: str, way: str, seed: int) -> Found:
    """Return what a schedule of experts came to."""
    for name, found in _study("experts").all().items():
        words = name.split()
        if words[:2] == [group, link] and words[-1] == f"seed={seed}" and way in found["ways"]:
            return dict(found["ways"][way])
    raise _NotMeasured(f"experts: {group} {link} {way} seed={seed}")


def sooner_experts(link: str, seed: int) -> float:
    """Return how many times sooner DICE is than synchronous experts."""
    ours, theirs = (experts("two", link, way, seed)["seconds"] for way in ("dice", "ep-sync"))
    return float(theirs / ours)


def closer_garments(seed: int) -> float:
    """Return by how much DICE's garments are nearer to real ones than those of displaced experts."""
    ours, theirs = (
        experts("distance", "unlimited", way, seed)["distance"] for way in ("dice", "ep-displaced")
    )
    return float(theirs - ours)


# Models.
TRAININGS = {"scheduler": "no-mitigation", "mitigation": "no-scheduler", "both": "both"}  # by what they have
LARGE = "large"  # a group of the study of one-shot training


def at_widths(variant: str, seed: int) -> float:
    """Return the mean accuracy, in per cent, over uniform widths: of one network, or of those apart."""
    widths = (2, 3, 4, 5, 6)
    parts = (variant,) * 5 if variant != "apart" else tuple(f"apart-{w}" for w in widths)
    rows = [
        cell("supernet", "full", part, f"seed={seed}")["widths"][str(w)]
        for part, w in zip(parts, widths, strict=True)
    ]
    return 100 * fmean(row["accuracy"] for row in rows)


def at_budgets(variant: str, seed: int) -> float:
    """Return the mean accuracy, in per cent, over the budgets of bit operations, of the method's search."""
    served = cell("supernet", "full", variant, f"seed={seed}")["served"]
    rows = [budget["ways"]["search"] for budget in served if budget["kind"] == "bitops"]
    return 100 * fmean(row["accuracy"] for row in rows)


def at_random(variant: str, seed: int) -> float:
    """Return the mean accuracy, in per cent, of configurations drawn at random."""
    return 100 * fmean(cell("supernet", LARGE, variant, f"seed={seed}")["sampled"])


def gained(accuracy: Callable[[str, int], float], mine: str, other: str, seed: int) -> float:
    """Return by how many points one training is ahead of another."""
    return accuracy(mine, seed) - accuracy(other, seed)


def wavering(mine: str, other: str, seed: int) -> float:
    """Return how many times as many weights of a layer waver at the lowest width."""
    ours, theirs = (fmean(cell("supernet", LARGE, v, f"seed={seed}")["wavering"]) for v in (mine, other))
    return ours / theirs


def outpulled(variant: str, seed: int) -> float:
    """Return how many times the gradient of the loss on distortion the rest's has."""
    return float(1 / cell("supernet", LARGE, variant, f"seed={seed}")["pull"])


# Scenes.
def smaller() -> list[float]:
    """Return how many times fewer bytes MesonGS has than the float values, by scene."""
    return [
        found["raw_nbytes"] / row["nbytes"]
        for found in _cells_of_scenes()
        for row in found["rows"]
        if row["name"] == "mesongs" and found["form"] == "float"
    ]


def tuned() -> list[float]:
    """Return the dB that fine-tuning gives MesonGS back, by scene and share pruned."""
    cells = _refined_cells("mesongs")
    return [found["refined"]["psnr_db"] - found["plain"]["psnr_db"] for found in cells]


def removed() -> list[float]:
    """Return the per cent of splats that removal by the exact error takes away, by scene and dB."""
    return [100 * (1 - found["refined"]["splats"] / found["splats"]) for found in _refined_cells("thinwire")]


def _refined_cells(way: str) -> list[Found]:
    return [found for found in _study("refined").all().values() if found["way"] == way]


def _cells_of_scenes() -> Iterator[Found]:
    file = RESULTS / "scenes.json"
    yield from read_json(file)["cells"] if file.exists() else ()


def _seeds(value: Callable[..., float], *given: Any) -> Measure:
    return partial(by_seed, partial(value, *given))


def _rounds(value: Callable[..., float], *given: Any) -> Measure:
    return partial(by_seed, partial(value, *given), (1, 2, 3))


FALLING = "cnn-3", "slow"  # groups of gamma-FedHT that differ in how fast the step size falls
FEDHT = "logistic-2", "logistic-3", "cnn-2", *FALLING

MEASURES: dict[str, Measure] = {
    **{
        f"fedluck-{what}": _seeds(saved, "ten", what, "fedluck", BASELINES)
        for what in ("virtual_s", "up", "bytes")
    },
    "fedluck-topk-up": _seeds(saved, "ten", "up", "fedluck", ("fedavg-topk",)),
    "fedluck-free": _seeds(saved, "free", "virtual_s", "fedluck", ("fedavg", "fedavg-topk", "fedbuff")),
    "fedluck-fetches": _seeds(over, "ten", "down", "fedluck", "fedavg-topk"),
    "fedluck-updates": _seeds(over, "ten", "updates", "fedluck", "fedavg-topk"),
    **{
        f"{group}-{what}": _seeds(saved, group, what, "fedluck", RIVALS)
        for group in ("luck", "luck-counted")
        for what in ("virtual_s", "up", "bytes")
    },
    "luck-fetches": _seeds(over, "luck", "down", "fedluck", "topk"),
    "luck-updates": _seeds(over, "luck", "updates", "fedluck", "topk"),
    "luck-counted-fetches": _seeds(over, "luck-counted", "down", "fedluck", "topk"),
    "luck-pair": _seeds(over, "luck", "virtual_s", "pair", "fedluck"),
    **{f"fedht-{group}": _seeds(ahead, group) for group in FEDHT},
    **{f"fedht-{group}-early": _seeds(early, group) for group in FEDHT},
    **{f"fedht-{group}-density": _seeds(flatter, group, "gamma", "fixed") for group in FALLING},
    **{f"fedht-{group}-held-back": _seeds(held_back, group, "gamma") for group in FALLING},
    **{
        f"dagc-{kind}-{skew}": _seeds(saved, f"skew-{skew}", "versions", f"dagc-{kind}", (other,))
        for kind, other in (("r", "topk"), ("a", "one"))
        for skew in (10, 100, 1000)
    },
    **{
        name: measure
        for skew in (10, 100, 1000)
        for name, measure in (
            (f"dagc-a-{skew}-up", _seeds(saved, f"skew-{skew}", "up", "dagc-a", ("one",))),
            (f"dagc-a-{skew}-pace", _seeds(pace, f"skew-{skew}", "one", "dagc-a")),
        )
    },
    "dagc-power": _seeds(best_power),
    "deco-allreduce": _seeds(sooner, "20mbit", "deco", "allreduce"),
    "deco-cocktail": _seeds(sooner, "20mbit", "deco", "cocktail"),
    "deco-cocktail-narrow": _seeds(sooner, "0.25mbit", "deco", "cocktail"),
    "deco-steps": _seeds(more_steps, "20mbit", "deco", "cocktail"),
    "aqsgd-speed": _rounds(faster, "aqsgd:fw=4,bw=8", ("fp32",)),
    "tahquant-speed": _rounds(faster, "tahquant", ("fp32",)),
    "tahquant-aqsgd": _rounds(faster, "tahquant", ("aqsgd:fw=3,bw=6", "aqsgd:fw=4,bw=8")),
    "aqsgd-loss": _seeds(lower, "aqsgd"),
    "tahquant-loss": _seeds(lower, "tahquant"),
    "compact-one": _seeds(sooner_a_rank, "unlimited", "compact"),
    "compact-displaced": _seeds(seconds_less, "20mbit", "compact", "displaced"),
    "compact-fewer": _seeds(fewer, "lowrank"),
    "compact-fewer-wide": cache(partial(by_seed, fewer_wide, range(3))),
    "compact-psnr": _seeds(nearer, "coding", "compact:order=1,early=0"),
    "compact-lowrank-psnr": _seeds(nearer, "two", "lowrank"),
    "dice-100mbit": _seeds(sooner_experts, "100mbit"),
    "dice-20mbit": _seeds(sooner_experts, "20mbit"),
    "dice-distance": _seeds(closer_garments),
    **{
        f"oneshot-{what}{name}": _seeds(gained, accuracy, mine, "neither")
        for name, accuracy in (("", at_budgets), ("-large", at_random))
        for what, mine in TRAININGS.items()
    },
    "oneshot-wavering": _seeds(wavering, "no-mitigation", "neither"),
    "oneshot-outpulled": _seeds(outpulled, "no-scheduler"),
    "oneshot-apart": _seeds(gained, at_widths, "both", "apart"),
    "mesongs-smaller": smaller,
    "mesongs-refined": tuned,
    "potr-removed": removed,
}
