"""The options of federated runs, simulated or real: command line, TOML keys and records follow from them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from thinwire.links.address import Address
from thinwire.links.security import check_host, read_token
from thinwire.runs import options as shared
from thinwire.runs.options import Options, option
from thinwire.runs.records.finished_runs import slug
from thinwire.types import InputError, require

LEARNING, DATA, CLIENTS, OUTPUT, MACHINES = "Learning", "Data", "Clients", "Output", "Machines"
PORT = 7300
MOST_EMULATED = 15
ROUNDS, MOST_ROUNDS = 100, 10**6
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?")
_SEED = re.compile(r"[0-9]{1,9}")
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True)
class FederatedConfig(Options):
    """What is learnt, by whom, in which ways. ``methods``: their names, blanks in between."""

    methods: str = option("thinwire", LEARNING, "How clients and server exchange.", metavar="NAMES")
    model: str = option(
        "cnn", LEARNING, "cnn, logistic, or module:function, which returns a model.", metavar="MODEL"
    )
    rounds: int | None = option(
        None,
        LEARNING,
        f"Versions at most; by default {ROUNDS}, or with --budget as many as it has time for.",
        metavar="N",
        least=1,
        most=MOST_ROUNDS,
    )
    until: float = option(
        0.0, LEARNING, "Accuracy at which a run ends; 0 takes all rounds.", metavar="SHARE", least=0, most=1
    )
    eval_every: int = option(
        0,
        LEARNING,
        "Versions from one evaluation to the next; 0 makes about 200 evaluations of --rounds or --budget.",
        metavar="N",
        least=0,
        most=10**6,
    )
    budget: str = option("", LEARNING, "Virtual time at which a run ends, as in 600s or 1h.", metavar="TIME")
    steps: int = option(5, LEARNING, "Local steps of a turn.", metavar="N", least=1, most=10**4)
    batch: int = option(20, LEARNING, "Samples of a local step.", metavar="N", least=1, most=10**5)
    lr: float = option(0.05, LEARNING, "Step size of local steps.", metavar="RATE", above=0, most=100)
    device: str = shared.device(LEARNING)
    dtype: str = shared.compute_dtype(LEARNING, "fp32")
    decay: float = option(
        0.0, LEARNING, "Step size of version t: LR / (1 + DECAY t).", metavar="DECAY", least=0, most=100
    )
    seeds: str = option("0", LEARNING, "Seeds, a run for each, as in 0,1,2.", metavar="N,N,...")
    data: str = option(
        "fashion-mnist", DATA, "fashion-mnist, digits, fsdd, or a FILE.npz of arrays.", metavar="DATA"
    )
    split: str = option(
        "dirichlet:1.0",
        DATA,
        "How samples are split over clients: iid, dirichlet:A, classes:N, skew:R, speaker, or two as in A+B.",
        metavar="SPLIT",
    )
    clients: int = option(10, CLIENTS, "Clients.", metavar="N", least=1, most=10**5)
    participate: int = option(
        0, CLIENTS, "Clients of a round, drawn anew each time; 0 takes all.", metavar="N", least=0, most=10**5
    )
    devices: str = option(
        "equal", CLIENTS, "Their speeds and links: a TOML file, or a name.", metavar="FILE|NAME"
    )
    downlink: str = option(
        "counted",
        CLIENTS,
        "free: what the server sends takes no time, as papers assume; its bytes are counted all the same.",
        choices=("counted", "free"),
        metavar="counted|free",
    )
    deploy: str | None = option(
        None,
        CLIENTS,
        "'processes' also runs the first method in real processes, and compares.",
        choices=("processes",),
        metavar="processes",
    )
    link: str = option(
        "none", CLIENTS, "With --deploy and --emulate: the link of each process.", metavar="SHAPE", free=True
    )
    emulate: bool = option(
        False,
        CLIENTS,
        "With --deploy: a network namespace a process, links under the kernel's TCP.",
        free=True,
    )
    workers: int = option(
        0,
        OUTPUT,
        "Processes that compute; 0 takes one a core, on a GPU one.",
        metavar="N",
        least=0,
        most=256,
        free=True,
    )
    out: str = option("runs/federated", OUTPUT, "Folder of the runs, which replaces those there.", free=True)
    quiet: bool = shared.quiet(OUTPUT)
    json: bool = shared.printed("the run records", OUTPUT)

    def validate(self) -> None:
        """Raise ``InputError`` for what cannot be."""
        many = f"--participate is {self.participate} of --clients {self.clients}; give at most as many"
        require(self.participate <= self.clients, InputError, many)
        require(bool(self.ways), InputError, "no method is named; give thinwire or fedavg")
        planned = self.rounds is not None or not self.decay or self.budget_seconds is None
        wrong = f"--decay {self.decay:g} is planned for a number of versions, and --budget names none"
        require(planned, InputError, f"{wrong}; give --rounds too")
        self._check_deployment()
        _once([str(seed) for seed in self.every_seed], "--seeds")
        _once([slug(name) for name in self.ways], "the methods")  # the folders of their records

    def _check_deployment(self) -> None:
        alone = self.deploy is not None or (not self.emulate and self.link == "none")
        require(alone, InputError, "--link and --emulate are for real processes; add --deploy processes")
        linked = (self.link != "none") == self.emulate
        require(linked, InputError, "--link and --emulate go together; give both, or neither")
        many = not self.emulate or self.clients <= MOST_EMULATED
        wrong = f"--emulate has room for {MOST_EMULATED} clients, not {self.clients}; give --clients"
        require(many, InputError, wrong)
        from thinwire.links.profile import Profile  # here, because a reader of records needs none of it

        _ = Profile.parse(self.link)

    @property
    def ways(self) -> list[str]:
        """The methods, in the order asked."""
        try:
            return shlex.split(self.methods)
        except ValueError as e:
            wrong = f"the methods {self.methods!r} cannot be read ({e}); write them as on a command line"
            raise InputError(wrong) from e

    @property
    def versions(self) -> int:
        """How many versions there may be."""
        return self.rounds or (ROUNDS if self.budget_seconds is None else MOST_ROUNDS)

    @property
    def budget_seconds(self) -> float | None:
        """Virtual seconds at which a run ends; None where it takes all rounds."""
        if not self.budget:
            return None
        found = _SPAN.fullmatch(self.budget.strip())
        wrong = f"--budget {self.budget} is no time; give seconds, as in 600s, or 10m or 1h"
        if found is None or float(found[1]) <= 0:
            raise InputError(wrong)
        return float(found[1]) * _SECONDS[found[2]]

    @property
    def every_seed(self) -> list[int]:
        """The seeds, in the order asked."""
        words = [word.strip() for word in self.seeds.split(",")]
        wrong = f"--seeds {self.seeds} are no numbers below a billion; give them as in 0,1,2"
        require(all(map(_SEED.fullmatch, words)), InputError, wrong)
        return [int(word) for word in words]

    def rate(self, version: int) -> float:
        """Return the step size of local steps that begin from a version."""
        return self.lr / (1 + self.decay * version)


@dataclass(frozen=True)
class ServeConfig(FederatedConfig):
    """What is learnt on real machines, by one method, and where its server listens."""

    host: str = shared.listen_host(
        "127.0.0.1", MACHINES, "; off loopback it needs a token", variable="THINWIRE_HOST"
    )
    port: int = shared.listen_port(PORT, MACHINES)
    token_file: str | None = shared.token_file(MACHINES)
    gather: float = option(
        300.0,
        MACHINES,
        "Begin after so long with those who are there.",
        metavar="SECONDS",
        above=0,
        free=True,
    )
    deadline: float = option(
        600.0,
        MACHINES,
        "The longest that a round waits for its clients.",
        metavar="SECONDS",
        above=0,
        free=True,
    )
    quorum: float = option(
        1.0,
        MACHINES,
        "Share of a round that is enough: the others have as long again as these took.",
        metavar="SHARE",
        above=0,
        most=1,
        free=True,
    )
    resume: bool = option(False, OUTPUT, "Go on from the last version in OUT.", free=True)

    def validate(self) -> None:
        """Raise ``InputError`` for what cannot be."""
        super().validate()
        check_host(self.host, read_token(self.token_file))
        seeds = len(self.every_seed)
        require(seeds == 1, InputError, f"--seeds {self.seeds} are {seeds}; a server runs one")
        one = len(self.ways) == 1
        require(one, InputError, f"--method {self.methods} are {len(self.ways)}; a server runs one method")
        wrong = f"budget {self.budget} is of a virtual clock, which a server on a port has not"
        require(not self.budget, InputError, f"{wrong}; give rounds, or until")


@dataclass(frozen=True)
class JoinConfig(Options):
    """Where the server is, and what this client trains on."""

    address: str = option("127.0.0.1:7300", MACHINES, "Where the server listens.", metavar="HOST:PORT")
    data: str = option(
        "fashion-mnist", DATA, "fashion-mnist, digits, fsdd, or a file of arrays.", metavar="DATA"
    )
    part: str = option(
        "",
        DATA,
        "Train on part K of N of the data, from 0/N, as the same split deals them; else on all.",
        metavar="K/N",
    )
    split: str = option("iid", DATA, "How --part deals the data; the same at all clients.", metavar="SPLIT")
    model: str = option("", DATA, "The model, where it is one of your own: module:function.", metavar="MODEL")
    client: int = option(
        -1,
        MACHINES,
        "This client's number; by default --part's, or the next that is free.",
        metavar="N",
        least=-1,
    )
    token_file: str | None = shared.token_file(MACHINES)
    patience: float = option(
        300.0, MACHINES, "Give up after so long without a sign of the server.", metavar="SECONDS", above=0
    )
    threads: int = option(0, MACHINES, "Compute threads; 0 takes all cores.", metavar="N", least=0, most=1024)
    device: str = shared.device(MACHINES)
    dtype: str = shared.compute_dtype(MACHINES, "fp32")
    quiet: bool = shared.quiet(OUTPUT, "Say nothing on the way.")

    def validate(self) -> None:
        """Raise ``InputError`` for what cannot be."""
        check_host(self.place[0], read_token(self.token_file))
        from thinwire.uses.federated.run.partitioner import (
            Partitioner,  # which needs torch, as readers of records do not
        )

        _ = self.share, Partitioner.parse(self.split)
        dealt = bool(self.part) or self.split == "iid"
        require(dealt, InputError, f"--split {self.split} says how --part deals the data; give --part too")

    @property
    def place(self) -> Address:
        """Host and port of the server."""
        return Address.parse(self.address, like=PORT)

    @property
    def share(self) -> tuple[int, int] | None:
        """Which part of how many; None for all."""
        if not self.part:
            return None
        found = _PART.fullmatch(self.part.strip())
        good = found is not None and int(found[1]) < int(found[2])
        if found is None or not good:
            raise InputError(f"--part {self.part} is not K/N with K below N; the first of three is 0/3")
        return int(found[1]), int(found[2])


def _once(words: list[str], what: str) -> None:
    for i, word in enumerate(words):
        require(word not in words[:i], InputError, f"{what} name {word} twice; name each one once")
