"""The options of a federation on real machines: of its server, and of its clients."""

from __future__ import annotations

import re
from dataclasses import dataclass

from thinwire.links.address import Address
from thinwire.links.security import check_host, read_token
from thinwire.runs import shared_options as shared
from thinwire.runs.options import Options, option
from thinwire.types import InputError, require
from thinwire.uses.federated.run.options import DATA, OUTPUT, FederatedConfig

MACHINES = "Machines"
PORT = 7300
_PART = re.compile(r"(\d{1,6})/(\d{1,6})")


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
    quiet: bool = shared.quiet(OUTPUT, "Say nothing on the way.")

    def validate(self) -> None:
        """Raise ``InputError`` for what cannot be."""
        check_host(self.place[0], read_token(self.token_file))
        from thinwire.uses.federated.run.splits import (
            Split,  # which needs torch, as readers of records do not
        )

        _ = self.share, Split.parse(self.split)
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
