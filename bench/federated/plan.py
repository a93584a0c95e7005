"""What ``methods`` compares: methods, data, devices and targets, fixed before the first run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.runs.records.runs import slug

DEVICES = Path(__file__).parent
SEARCH, SEARCHED = "search", (100,)  # seeds
RATES = (0.1, 0.2, 0.05, 0.02)
SEEDS = (0, 1, 2, 3, 4)

METHODS = (
    "fedavg", "fedavg-topk", "fixed-threshold", "gamma-fedht", "dagc-r", "dagc-a", "accordion",
    "fedluck", "fedluck:feedback=1", "fedasync", "fedbuff", "qafel", "thinwire",
)  # fmt: skip
MAIN = ("fedavg", "fedavg-topk", "fedluck", "fedluck:feedback=1", "fedbuff", "qafel", "thinwire")
# Clients of few samples that rarely take part: of four sets of parameters this one, and a period of 2 s, were
# the soonest on the search's seed.
OURS = ("thinwire", "thinwire:up=0.2,down=0.1,period=3")
FEW = ("fedavg", "fedluck", "qafel", "thinwire")
# What is not looked at after each version: runs of many versions, by about as many as their time has.
MANY = {"fedluck": 2400, "fedasync": 800, "qafel": 600}

# Twenty local steps, as FedLuck's code has for FedAvg and FedBuff on this data [source]; fedluck and thinwire
# choose theirs.
TEN: dict[str, Any] = {
    "data": "fashion-mnist",
    "split": "dirichlet:1.0",
    "devices": "ten-one-straggler",
    "until": 0.78,
    "budget": "1h",
    "rounds": 200,
    "steps": 20,
}
PHONES = TEN | {"devices": "phones-1000", "clients": 1000, "participate": 100, "budget": "10m", "steps": 5}
SPEAKERS = TEN | {
    "data": "fsdd",
    "split": "speaker",
    "devices": str(DEVICES / "six-speakers.toml"),
    "clients": 6,
}
# gamma-FedHT's setting: two classes a client, and a step size that falls to a tenth. Thresholds and the ratio
# were set on the search's seed, so that whole runs send some 0.3 % of the bytes of whole updates.
GAMMA: dict[str, Any] = {"split": "classes:2", "rounds": 60, "lr": 0.03, "decay": 0.15}
# DAGC's: ten local steps of each client in every round; what the smallest one has, the largest has 100 times.
# The two thresholds, and ACCORDION's ratios, were set on the search's seed for the bytes of Top-k at 0.1 %.
SKEW: dict[str, Any] = {"split": "dirichlet:0.5+skew:100", "rounds": 40, "lr": 0.05, "steps": 10}
THRESHOLDS = {
    "fixed": "fixed-threshold:threshold=0.055",
    "published": "gamma-fedht:threshold=0.14",
    "linear": "gamma-fedht:threshold=0.45,rule=linear",
    "Top-k": "fedavg-topk:ratio=0.0017",
    "all": "fedavg",
}
SHARES = {
    "DAGC-R": "dagc-r:ratio=0.001",
    "the same share": "fedavg-topk:ratio=0.001",
    "ACCORDION": "accordion:low=0.0007,high=0.007",
    "DAGC-A": "dagc-a:threshold=0.19",
    "one threshold": "fixed-threshold:threshold=0.19",
}


class Group(NamedTuple):
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    options: dict[str, Any]
    versions: dict[str, int] = MANY


GROUPS = {
    SEARCH: Group(METHODS, SEARCHED, TEN | {"budget": "20m"}),
    "ten": Group(METHODS, SEEDS, TEN),
    "free": Group(MAIN, SEEDS[:2], TEN | {"downlink": "free", "rounds": 400}),
    "phones": Group(("fedavg", "fedbuff:size=10", "fedluck", "qafel:size=10", *OURS), SEEDS[:1], PHONES),
    "speakers": Group(FEW, SEEDS[:1], SPEAKERS),
    "gamma": Group(tuple(THRESHOLDS.values()), SEEDS[:3], GAMMA),
    "skew100": Group(tuple(SHARES.values()), SEEDS[:2], SKEW),
    "skew1000": Group(tuple(SHARES.values()), SEEDS[:2], SKEW | {"split": "dirichlet:0.5+skew:1000"}),
}


class Cell(NamedTuple):
    group: str
    method: str
    seed: int
    rate: float = 0.0  # 0: the one that was found for the method, or the group's

    @property
    def name(self) -> str:
        rate = f"-{self.rate:g}" if self.rate else ""
        return f"{self.group}-{slug(self.method)}-{self.seed}{rate}"

    @property
    def words(self) -> tuple[str, ...]:
        return self.group, self.method, f"seed={self.seed}"


def cells() -> Iterator[Cell]:
    """Yield all cells; what is compared runs in turns."""
    for name, group in GROUPS.items():
        for seed in group.seeds:
            for method in group.methods:
                for rate in RATES if name == SEARCH else (0.0,):
                    yield Cell(name, method, seed, rate)
