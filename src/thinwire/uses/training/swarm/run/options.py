"""The options of a swarm's keeper, and of those who join it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.links.address import Address
from thinwire.links.security import check_host, read_token
from thinwire.rounds.remote.control_messages import MOST_NAME
from thinwire.runs import options as shared
from thinwire.runs.options import COUNTED, TEXTS, Options, option
from thinwire.types import InputError, require
from thinwire.uses.training.run.learning_rates import learning_rate

PORT = 7300
MODEL, ROUNDS, MEMBERS, EVALUATION, OUTPUT = "Model and data", "Rounds", "Members", "Evaluation", "Output"


@dataclass(frozen=True)
class SwarmConfig(Options):
    """What a swarm trains, how, and who may take part."""

    model: str = option(
        "smollm2-135m",
        MODEL,
        "A name that `train` knows, a Hugging Face folder or a hub name.",
        metavar="MODEL",
    )
    init: str | None = option(
        None,
        MODEL,
        "'random' starts from random weights; never done silently.",
        metavar="random",
        choices=("random",),
    )
    data: str = option(
        "shakespeare",
        MODEL,
        "shakespeare, wikitext-2, a text file, one of JSON lines, or a folder of them; members get it.",
        metavar="DATA",
    )
    own_data: bool = option(
        False, MODEL, "Members train on data of their own; --data is only held out, to score and to evaluate."
    )
    text_field: str = option("text", MODEL, "Where in a JSON line its text is.", metavar="NAME")
    prompt_field: str = option(
        "", MODEL, "Where in a JSON line is what stands before its text and is not learnt.", metavar="NAME"
    )
    seq: int = option(128, MODEL, "Tokens in a sample.", metavar="TOKENS", least=2)
    batch: int = option(8, MODEL, "Samples in a local step of a member.", metavar="SAMPLES", least=1)
    lora: int = option(
        0,
        MODEL,
        "Train low-rank adapters of this rank instead of all weights; 0 is off.",
        metavar="RANK",
        least=0,
    )
    seed: int = option(
        0, MODEL, "Seed of weights and of the order of samples.", metavar="N", least=0, most=10**9
    )

    rounds: int = option(100, ROUNDS, "Rounds at most.", metavar="N", least=1, most=COUNTED)
    local_steps: int = option(
        10, ROUNDS, "Local steps of a round for the median member; others by their speed.", metavar="N",
        least=1, most=50,
    )  # fmt: skip
    lr: float | None = option(
        None,
        ROUNDS,
        "Peak learning rate (default 2e-5; with --lora 2e-4; from random weights 1e-3).",
        metavar="RATE",
        above=0,
    )
    lr_schedule: str = option(
        "constant",
        ROUNDS,
        "constant, linear (to zero) or cosine (to zero), over --rounds.",
        metavar="NAME",
        choices=("constant", "linear", "cosine"),
    )
    warmup: int = option(0, ROUNDS, "Rounds of linear warm-up.", metavar="ROUNDS", least=0, most=COUNTED)
    weight_decay: float = option(0.0, ROUNDS, "AdamW's weight decay.", metavar="X", least=0)
    grad_clip: float = option(1.0, ROUNDS, "Largest gradient norm; 0 is off.", metavar="NORM", least=0)

    listen: str = option(
        f"127.0.0.1:{PORT}",
        MEMBERS,
        "Where members come; off loopback it needs a token.",
        metavar="HOST:PORT",
        free=True,
    )
    token_file: str | None = shared.token_file(MEMBERS, "File with the token that all members share")
    relay_port: int = option(
        0,
        MEMBERS,
        "Where members meet that are half of one each; 0: the port after --listen's, any if that is 0.",
        metavar="PORT",
        least=0,
        most=65535,
        free=True,
    )
    members: int = option(
        1, MEMBERS, "Begin once so many are there.", metavar="N", least=1, most=4096, free=True
    )
    gather: float = option(
        300.0, MEMBERS, "Begin after so long with those who are there.", metavar="SECONDS", above=0, free=True
    )
    patience: float = option(
        3600.0, MEMBERS, "End after so long without any member.", metavar="SECONDS", above=0, free=True
    )
    ban: TEXTS = option(  # noqa: RUF009 -- a field
        (),
        MEMBERS,
        "The name of a member that may not take part; may be given again.",
        metavar="NAME",
        free=True,
    )
    standby: str = option(
        "",
        MEMBERS,
        "Stand ready for the keeper at this address: keep in OUT what it keeps, for --resume to take over.",
        metavar="HOST:PORT",
        free=True,
    )
    under: str = option(
        "",
        MEMBERS,
        "Be a branch: members come here, and to the keeper at this address all of them are one.",
        metavar="HOST:PORT[,HOST:PORT]",
        free=True,
    )
    name: str = option(
        "", MEMBERS, "What a branch is called (default: this machine's name).", metavar="NAME", free=True
    )
    judge: bool = option(True, MEMBERS, "Check and score members' updates; those that harm do not count.")

    eval_every: int = option(
        5,
        EVALUATION,
        "Evaluate every so many rounds; 0: at the end alone.",
        metavar="ROUNDS",
        least=0,
        free=True,
    )
    eval_samples: int = option(
        64, EVALUATION, "Held-out samples of an evaluation.", metavar="N", least=1, most=COUNTED, free=True
    )
    until_loss: float | None = option(
        None,
        EVALUATION,
        "End at the first evaluation with a loss at or under this.",
        metavar="NATS",
        free=True,
    )

    device: str = shared.device(OUTPUT)
    dtype: str = shared.compute_dtype(OUTPUT)
    out: str = option("runs/swarm", OUTPUT, "Folder of the run.", metavar="DIR", free=True)
    resume: bool = option(False, OUTPUT, "Go on from the last round in OUT.", free=True)
    save_model: bool = option(True, OUTPUT, "Write OUT/model/, which from_pretrained loads.", free=True)
    quiet: bool = shared.quiet(OUTPUT)
    json: bool = shared.printed("the run record as JSON", OUTPUT)

    bos: ClassVar[bool] = True  # the model is whole at each member, without dropout
    dropout: ClassVar[float] = 0.0
    stages: ClassVar[int] = 1
    cut: ClassVar[str | None] = None
    processes: ClassVar[int] = 1

    def validate(self) -> None:
        """Raise ``InputError`` for what cannot be."""
        from thinwire.runs.models.cnn import CNN  # which needs torch, as readers of records do not

        require(
            self.model != CNN, InputError, f"{CNN} is no language model; federate trains models of images"
        )
        check_host(self.place.host, read_token(self.token_file))
        for place in self.above:
            check_host(place.host, read_token(self.token_file))
        one = not (self.under and (self.standby or self.resume))
        wrong = "--under goes without --standby and --resume: what a branch knows is at the keeper above it"
        require(one, InputError, wrong)
        check_name(self.name)

    @property
    def above(self) -> list[Address]:
        """Hosts and ports of the keeper above a branch, and of those who may take over; none for a keeper."""
        return addresses(self.under) if self.under else []

    @property
    def place(self) -> Address:
        """Where the keeper listens; port 0 takes a free one."""
        free = self.listen.removesuffix(":0")
        found = Address.parse(free, like=PORT, port=PORT)
        return found._replace(port=0) if free != self.listen else found

    def warnings(self) -> list[str]:
        """Return what the user should know of these options: nothing so far."""
        return []

    @property
    def peak(self) -> float:
        """The peak learning rate, the default resolved."""
        options = {"optimizer": "adamw", "lr": self.lr, "lora": self.lora}
        return learning_rate(options | {"model": self.model, "init": self.init})


@dataclass(frozen=True)
class SwarmJoinConfig(Options):
    """Where the keeper is, and what this member brings."""

    address: str = option(
        f"127.0.0.1:{PORT}",
        MEMBERS,
        "Where the keeper listens, and after a comma where others may take over.",
        metavar="HOST:PORT[,HOST:PORT]",
    )
    name: str = option(
        "", MEMBERS, "What this member is called, also when it comes back (default: this machine's name).",
        metavar="NAME",
    )  # fmt: skip
    data: str = option(
        "", MODEL, "Texts of your own, which never leave this machine; where the keeper asks for them.",
        metavar="DATA",
    )  # fmt: skip
    text_field: str = option("text", MODEL, "Where in a JSON line its text is.", metavar="NAME")
    prompt_field: str = option(
        "", MODEL, "Where in a JSON line is what stands before its text and is not learnt.", metavar="NAME"
    )
    token_file: str | None = shared.token_file(MEMBERS, "File with the token that all members share")
    stages: int = option(
        1, MEMBERS, "2: train half of the layers, with another member that asks for that too.", metavar="N"
    )
    patience: float = option(
        600.0, MEMBERS, "Give up after so long without a sign of the keeper.", metavar="SECONDS", above=0
    )
    threads: int = option(0, MEMBERS, "Compute threads; 0 takes all cores.", metavar="N", least=0, most=1024)
    device: str = shared.device(OUTPUT)
    dtype: str = shared.compute_dtype(OUTPUT)
    quiet: bool = shared.quiet(OUTPUT, "Say nothing on the way.")

    def validate(self) -> None:
        """Raise ``InputError`` for what cannot be."""
        for place in self.places:
            check_host(place.host, read_token(self.token_file))
        check_name(self.name)
        wrong = f"--stages {self.stages} is neither 1, the whole model, nor 2, half of it; give one of them"
        require(self.stages in (1, 2), InputError, wrong)
        if self.stages == 2:
            wrong = f"--data {self.data} would leave this machine: a pair shares them; leave --stages out"
            require(not self.data, InputError, wrong)
            met = read_token(self.token_file) is not None
            require(met, InputError, "--stages 2 needs the token: a pair meets at a relay; give --token-file")

    @property
    def places(self) -> list[Address]:
        """Hosts and ports of the keeper, and of those who may take over."""
        return addresses(self.address)


def addresses(text: str) -> list[Address]:
    """Return the hosts and ports between commas. Errors: ``InputError``."""
    return [Address.parse(each, like=PORT, port=PORT) for each in text.split(",")]


def check_name(name: str) -> None:
    """Raise ``InputError`` for a name that nobody can be called."""
    wrong = f"--name {name[:80]!r} is longer than {MOST_NAME} characters; give a shorter one"
    require(len(name) <= MOST_NAME, InputError, wrong)
    wrong = f"--name {name!r} has characters that cannot be printed; give a plain one"
    require(name.isprintable(), InputError, wrong)
