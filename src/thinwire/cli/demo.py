"""``thinwire demo`` and its commands: what thinwire is for, shown in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.compare import configs_of, run_all
from thinwire.cli.terminal.needs import fetch_needs
from thinwire.cli.terminal.options import with_config
from thinwire.cli.terminal.output import print_json, tell
from thinwire.lab.federated.options import FederatedConfig
from thinwire.lab.following.config import StateConfig
from thinwire.lab.pictures.options import PicturesConfig
from thinwire.lab.records.writer import REPORT, forget
from thinwire.lab.scenes.options import ScenesConfig
from thinwire.lab.train.config import TrainConfig
from thinwire.links.shape import LinkShape
from thinwire.types import ThinwireError

RECIPES = ["fp32", "step-delta", "thinwire"]
DEMO: dict[str, Any] = {
    "model": "smollm2-135m",
    "data": "shakespeare",
    "link": "10mbit,30ms",
    "steps": 18,
    "epochs": 3,
    "batch": 4,
    "microbatches": 4,
    "seq": 128,
    "eval_samples": 8,
    "out": "runs/demo",
}
SHOWN = ("model", "data", "link", "steps", "epochs", "seed", "out", "json", "quiet")
HELPS = {
    "out": "Folder of the three runs and of their report; those there are replaced.",
    "link": "Rate per direction and one-way delay, as in 10mbit,30ms[,jitter=2ms][,loss=0.1%].",
    "steps": "Optimiser steps of each run.",
    "json": "Print the comparison, and nothing else, on stdout.",
}
STATE_SHOWN = ("model", "data", "link", "steps", "seed", "emulate", "out", "json", "quiet")

REPLICA_RECIPES = ["allreduce", "cocktail", "deco", "auto"]
REPLICA_DEMO: dict[str, Any] = {
    "model": "gpt2-lab",
    "data": "shakespeare",
    "replicas": 2,
    "link": "40mbit,50ms",
    "steps": 30,
    "batch": 8,
    "seq": 64,
    "eval_every": 2,
    "save_model": False,
    "out": "runs/demo-replicas",
}
PICTURES_SHOWN = ("sheet", "classes", "steps", "link", "seed", "psnr", "out", "json", "quiet")
PICTURES_DEMO: dict[str, Any] = {"link": "100mbit,5ms", "out": "runs/demo-pictures"}
WAYS = ("one", "fp16", "displaced", "pipe-fp16", "compact", "compact:bits=2", "compact-pipe")
FEDERATED_SHOWN = ("until", "budget", "seeds", "workers", "out", "json", "quiet")
FEDERATED_DEMO: dict[str, Any] = {
    "methods": "fedavg fedbuff fedluck thinwire",
    "data": "fashion-mnist",
    "split": "dirichlet:1.0",
    "devices": "ten-one-straggler",
    "clients": 10,
    "until": 0.78,
    "budget": "1h",
    "rounds": 2400,
    "eval_every": 2,
    "steps": 20,
    "lr": 0.1,
    "out": "runs/demo-federated",
}
SCENES_SHOWN = ("scene", "credit", "seconds", "link", "out", "json", "quiet")
SCENES_DEMO: dict[str, Any] = {"link": "1mbit", "out": "runs/demo-scenes"}
SCENES_HELPS = {
    "link": "The link's rate and one-way delay, as in 1mbit,30ms[,jitter=2ms][,loss=0.1%].",
    "out": "Folder of the record, the packed scene, the pictures and the report; those there are replaced.",
}
REAL, REAL_ROUNDS = "thinwire", 5  # what real processes run too, and how many versions
REACH = 75  # steps at most, to the loss that the first recipe ends with
ModelsOut = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder of the packed model and its record.")
]
ModelsLink = Annotated[str, typer.Option("--link", help="The link that downloads are timed for.")]
Json = Annotated[bool, typer.Option("--json", help="Print the record, and nothing else, on stdout.")]

demo = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")


@demo.callback()
@with_config(TrainConfig, defaults=DEMO, only=SHOWN, helps=HELPS)
def training(ctx: typer.Context, given: dict[str, Any]) -> None:
    """Show a use in a few minutes; without a name: fine-tune SmolLM2-135M over a home uplink.

    Three runs of 18 steps on Shakespeare: fp32, a published recipe and ours. Two processes on this machine,
    over a link shaped to 10 Mbit/s and 30 ms; about five minutes on two cores. Ends with a table and
    OUT/report.html.
    """
    if ctx.invoked_subcommand is not None:
        return
    *others, ours = configs_of(RECIPES, given)
    configs = [*(c.replace(save_model=False) for c in others), ours]
    if not given.get("json"):
        tell(f"three runs of {given['steps']} steps over a link of {given['link']}, one after another")
    run_all(configs, Path(given["out"]))


def _network() -> tuple[bool, str]:
    """Return whether a demo's link can be emulated here, and in words how it is made."""
    from thinwire.lab.doctor.diagnosis import OK, emulation

    found = emulation()
    emulated = found.status == OK
    return emulated, "emulated" if emulated else f"shaped in the processes, without TCP ({found.finding})"


@demo.command()
@with_config(TrainConfig, defaults=REPLICA_DEMO, only=SHOWN, helps=HELPS)
def replicas(given: dict[str, Any]) -> None:
    """Train a small GPT-2 on two replicas over 40 Mbit/s and 50 ms: all-reduce, two published ways, auto.

    The first takes 30 steps; the others run until their held-out loss is where it ended. The link is emulated
    below the kernel's TCP where this machine can, else shaped in the processes. About five minutes on two
    cores. Ends with seconds and bytes to that loss, and OUT/report.html.
    """
    emulate, how = _network()
    configs = configs_of(REPLICA_RECIPES, given | {"emulate": emulate})
    if not given.get("json"):
        tell(f"four recipes over a link of {given['link']}, {how}")
    run_all(configs, Path(given["out"]), REACH)


@demo.command()
@with_config(PicturesConfig, defaults=PICTURES_DEMO, only=PICTURES_SHOWN)
def pictures(given: dict[str, Any]) -> None:
    """Make one sheet of 32 garments on two machines over 100 Mbit/s and 5 ms, in several ways.

    One machine alone, float16, two published ways that use values of the last step, and ours. The link is
    emulated below the kernel's TCP where this machine can, else shaped in the processes. About four minutes
    on two cores. Ends with a table and OUT/report.html: the sheets side by side, and how they differ.
    """
    from thinwire.cli.generate import run_all as generate_all

    emulate, how = _network()
    config = PicturesConfig.from_dict(given | {"recipes": " ".join(WAYS), "emulate": emulate})
    if not config.json:
        tell(f"{len(WAYS)} ways to make one sheet over a link of {config.link}, {how}")
    generate_all(config)


@demo.command()
@with_config(FederatedConfig, defaults=FEDERATED_DEMO, only=FEDERATED_SHOWN)
def federated(given: dict[str, Any]) -> None:
    """Let ten devices on slow links learn Fashion-MNIST, by three published methods and ours.

    Each holds its own share of the images, and one is far slower than the others. Each method runs to 78 % or
    a virtual hour. Then real processes make five versions by thinwire, which must come to the bits of one
    process. About two minutes on two cores. Ends with the bytes and the virtual time that each took, and
    OUT/report.html.
    """
    from thinwire.cli.federate import run as federate_all

    config = FederatedConfig.from_dict(given)
    if not config.json:
        links = "20 to 60 kbit/s up and four times that down, one straggles"
        tell(f"{len(config.ways)} methods for {config.clients} devices: {links}")
    federate_all(config, REAL, REAL_ROUNDS)


@demo.command()
@with_config(ScenesConfig, defaults=SCENES_DEMO, only=SCENES_SHOWN, helps=SCENES_HELPS)
def scenes(given: dict[str, Any]) -> None:
    """Pack a scene of 3D Gaussians for three seconds of 1 Mbit/s, and send it layer by layer over that link.

    Another process receives and decodes it, then the same scene as SPZ in one piece. The link is shaped in
    the sender. About half a minute on two cores. Ends with what was seen after how many seconds, and
    OUT/report.html: pictures side by side, how they differ, and PSNR over seconds. OUT/scene.tw is the packed
    scene.
    """
    config = ScenesConfig.from_dict(given)
    from thinwire.cli.terminal.doing import Doing
    from thinwire.lab.records.holding import holding
    from thinwire.lab.scenes import cards
    from thinwire.lab.scenes.demo import run

    with holding(config.out), Doing(config.quiet or config.json, lines=True) as doing:
        record, report = run(config, doing.tell)
    if config.json:
        print_json(record.to_dict())
    else:
        tell("\n".join([*cards.story(record), f"report: {report}"]))


@demo.command()
@with_config(StateConfig, without=tuple(n for n in StateConfig.names() if n not in STATE_SHOWN))
def state(given: dict[str, Any]) -> None:
    """Train SmolLM2-135M at 1e-6 and 1e-5 while two processes follow its weights over 10 Mbit/s.

    One follower writes text from the newest weights and is cut off for a while, the other joins late; both
    must end with the trainer's bits. About four minutes on two cores. Ends with a table and OUT/report.html.
    """
    config = StateConfig.from_dict(given)
    from thinwire.lab.following import cards
    from thinwire.lab.following.board import Board
    from thinwire.lab.following.demo import run
    from thinwire.lab.records.holding import holding
    from thinwire.lab.report.page import write_report

    fetch_needs(config.model, config.data, quiet=config.quiet or config.json)
    out = Path(config.out)
    with holding(out):
        forget(out, REPORT)
        board = Board(config.quiet or config.json)
        try:
            played = run(config, board.update)
        finally:
            board.close()
        report = write_report([played], out / REPORT, cards)
    if config.json:
        print_json(played.record.to_dict())
    else:
        tell(f"{cards.headline([played])}\nreport: {report}")
    if not played.record.identical:
        raise ThinwireError("a follower did not end with the publisher's bits; see the report")


@demo.command()
def models(
    out: ModelsOut = Path("runs/demo-models"), link: ModelsLink = "10mbit,30ms", json: Json = False
) -> None:
    """Pack SmolLM2-135M to 3 bits a weight, by what Shakespeare says of its weights.

    Ends with bytes, seconds over the link, perplexity and a sentence of the source, of ours, and of weights
    rounded to the nearest 3 bits. A minute and a half on two cores. OUT has model.tw, run.json, report.html.
    """
    shape = LinkShape.parse(link)
    from thinwire.lab.records.holding import holding
    from thinwire.lab.weights.demo import Demo, run

    wanted = Demo(out, shape)
    fetch_needs(wanted.model, wanted.text, quiet=json)
    with holding(out):
        record = run(wanted, (lambda _: None) if json else tell)
    if json:
        print_json(record.to_dict())
    else:
        tell(f"{out}: model.tw, which thinwire unpack makes a folder for transformers, and report.html")
