"""A member's program: it fetches the model, trains its share, and may vanish at any moment."""

from __future__ import annotations

import itertools
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import nn

from thinwire.files.host_memory import memory_bytes
from thinwire.links.address import Address
from thinwire.links.hub.spoke import Spoke
from thinwire.links.security import read_token
from thinwire.rounds.client import step_seconds
from thinwire.rounds.client_profile import ClientPace
from thinwire.rounds.parameters import Parameters
from thinwire.rounds.remote.control_messages import MOST_NAME, positive, text, whole
from thinwire.rounds.remote.remote_client import RemoteClient
from thinwire.rounds.residuals import ClientResiduals
from thinwire.runs.data.corpus import load_corpus
from thinwire.runs.data.task import pack
from thinwire.runs.machine import devices
from thinwire.runs.machine.compute import Compute
from thinwire.runs.models.encoder import Encoder
from thinwire.runs.models.model_source import ModelSource, resolve_model
from thinwire.types import InputError, LinkError, PayloadError, require
from thinwire.uses.training.swarm.kit import kit_digest, unpack_kit
from thinwire.uses.training.swarm.local_adamw import LocalAdamW
from thinwire.uses.training.swarm.member import Lessons, PrivateBlocks, SharedBlocks, SwarmMember
from thinwire.uses.training.swarm.run.options import SwarmJoinConfig
from thinwire.uses.training.swarm.run.swarm_model import build_whole, kept_kit, trained_in

TURN = 20.0  # seconds without a sign after which another address is tried
COPIES = 8  # of a model, that a member holds as it trains: two moments, and what a federated client holds
OF_ALL = 2  # of these, that are of the whole model also where half of it is trained: versions
MOST_KIT = 1 << 36  # bytes
OTHER_MODEL = "the keeper's model has {} values to train, and {} here; update the older end"
T = TypeVar("T")


def join(
    config: SwarmJoinConfig, noted: Callable[[str], object], kind: type[SwarmMember] = SwarmMember
) -> int:
    """Take part until the keeper says that it is over; return the number of the last round.

    Errors: ``InputError`` where model or data do not fit; ``LinkError`` naming the keeper.
    """
    name = prepared(config)
    member: SwarmMember | None = None
    pace = ClientPace(0.0)

    def serve(remote: RemoteClient, given: dict[str, Any], peer: str) -> int:
        nonlocal member, pace
        terms = SwarmTerms.read(given)
        if member is None:
            member = make_member(config, terms, fetched(remote, terms), kind)
            noted(f"{name} at {peer}: a model of {terms.values:,} trained values")
            pace = ClientPace(step_seconds(member))
            member.moments.forget()  # those of the steps that were timed
        member.id = terms.client
        return remote.serve(member, pace)

    token = read_token(config.token_file)
    return at_any(config.places, token, config.patience, noted, name, serve)


def prepared(config: SwarmJoinConfig) -> str:
    """Take the threads that a configuration asks for; return what the member is called."""
    if config.threads:
        torch.set_num_threads(config.threads)
    return called(config.name)


def called(name: str) -> str:
    """Return what a machine is called in a swarm: ``name``, or as it calls itself."""
    return name or socket.gethostname()[:MOST_NAME]


def at_any(
    places: Sequence[Address],
    token: bytes | None,
    patience: float,
    noted: Callable[[str], object],
    name: str,
    serve: Callable[[RemoteClient, dict[str, Any], str], T],
) -> T:
    """Return what ``serve`` makes of a keeper and its terms, at whichever of ``places`` there is one.

    Errors: ``LinkError`` after ``patience`` seconds without any.
    """
    turns, alone, heard = itertools.cycle(places), len(places) == 1, time.monotonic()
    while True:
        spoke = Spoke.connect(*next(turns), token=token)
        try:
            remote = RemoteClient(spoke, patience if alone else min(TURN, patience), noted, name)
            terms = remote.terms()
            heard = time.monotonic()
            return serve(remote, terms, spoke.peer)
        except LinkError as e:
            if alone or time.monotonic() - heard > patience:
                raise
            noted(f"{e}; trying the next address")
        finally:
            spoke.close()


def fetched(remote: RemoteClient, terms: SwarmTerms) -> ModelSource:
    """Return the source of the keeper's model; its kit comes over the link unless it is kept here.

    Errors: ``InputError`` where there is too little memory to train it, before anything is fetched.
    """
    terms.check_room(terms.values)
    return resolved(remote, terms)


def resolved(remote: RemoteClient, terms: SwarmTerms) -> ModelSource:
    """Return the source of the keeper's model; its kit comes over the link unless it is kept here."""
    folder = kept_kit(terms.kit)
    if not (folder / "config.json").is_file():
        data = remote.kit(terms.kit_nbytes)
        require(kit_digest(data) == terms.kit, PayloadError, "the model's kit came damaged; join again")
        unpack_kit(data, folder)
    return resolve_model(str(folder), None if terms.weights else "random", trial=False)


def make_member(
    config: SwarmJoinConfig, terms: SwarmTerms, source: ModelSource, kind: type[SwarmMember] = SwarmMember
) -> SwarmMember:
    """Return the member that a keeper's terms ask for."""
    compute = Compute.of(devices.own(config.device), config.dtype)
    model = build_whole(source, terms.lora, terms.seed, compute)
    parameters = Parameters(model)
    found = parameters.numel
    require(found == terms.values, InputError, OTHER_MODEL.format(terms.values, found))
    local = LocalAdamW(weight_decay=terms.weight_decay, clip=terms.grad_clip)
    own = lessons(config, terms, source)
    return new_member(terms.client, model, own, local, parameters, compute, terms.seed, kind)


def new_member(
    number: int,
    model: nn.Module,
    lessons: Lessons,
    local: LocalAdamW,
    parameters: Parameters,
    compute: Compute,
    seed: int,
    kind: type[SwarmMember] = SwarmMember,
) -> SwarmMember:
    """Return a member that has no moments yet, and nothing undelivered."""
    moments, how = local.open(), trained_in(compute)
    member = kind(
        number, model, lessons, ClientResiduals(), local=moments, seed=seed, parameters=parameters, **how
    )
    member.moments = moments
    return member


def lessons(config: SwarmJoinConfig, terms: SwarmTerms, source: ModelSource) -> Lessons:
    """Return where the member's batches come from. Errors: ``InputError`` for data that nobody asks for."""
    if not terms.own_data:
        wrong = f"--data {config.data} is not asked for: this keeper hands out the samples; leave it out"
        require(not config.data, InputError, wrong)
        return SharedBlocks(terms.batch, terms.seq, source.config.vocab_size)
    require(bool(config.data), InputError, "this keeper asks for data of your own; give them by --data")
    corpus = load_corpus(config.data, config.text_field, config.prompt_field)
    blocks = pack(Encoder(source.tokenizer, True).tokens(*corpus.train), terms.seq)
    source.check_tokens(blocks)
    many, need = len(blocks), terms.batch
    wrong = f"--data {config.data} has {many} blocks of {terms.seq} tokens, a batch is {need}; give more text"
    require(many >= need, InputError, wrong)
    return PrivateBlocks(blocks, terms.batch, terms.seed + terms.client)


@dataclass(frozen=True)
class SwarmTerms:
    """What a keeper asks for, each in its bounds."""

    client: int
    values: int
    seq: int
    batch: int
    lora: int
    seed: int
    own_data: bool
    weights: bool
    weight_decay: float
    grad_clip: float
    kit: str
    kit_nbytes: int

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Read ``Keeper.terms``. Errors: ``PayloadError`` naming what is out of bounds."""
        values = dict(given)
        require(values.get("swarm") == 1, InputError, "this is no swarm; federate-join takes part there")

        def number(name: str, least: int, most: int) -> int:
            found = whole(values, name)
            wrong = f"the keeper's {name} is {found}, which is not in {least}..{most}"
            require(least <= found <= most, PayloadError, wrong)
            return found

        def share(name: str) -> float:
            found = positive(values, name) if values.get(name) else 0.0
            require(found < math.inf, PayloadError, f"the keeper's {name} is no number")
            return found

        kit = text(values, "kit")
        require(kit.isalnum() and len(kit) == 32, PayloadError, "the keeper names no kit of its model")
        return cls(
            number("client", 0, 1 << 40),
            number("values", 1, 1 << 40),
            number("seq", 2, 1 << 20),
            number("batch", 1, 1 << 16),
            number("lora", 0, 1 << 16),
            number("seed", 0, 10**9),
            values.get("own_data") is True,
            values.get("weights") is True,
            share("weight_decay"),
            share("grad_clip"),
            kit,
            number("kit_nbytes", 1, MOST_KIT),
        )

    def check_room(self, own: int) -> None:
        """Raise ``InputError`` where training ``own`` of the values takes more memory than is free."""
        takes, (total, free) = 4 * (OF_ALL * self.values + (COPIES - OF_ALL) * own), memory_bytes()
        have = free or total or takes
        wrong = f"training {own} values takes {takes / 1e9:.3g} GB here, and {have / 1e9:.3g} are free"
        smaller = "join by --stages 2, as half of a pair, or " if own == self.values else "join "
        require(takes <= have, InputError, f"{wrong}; {smaller}from a larger machine")
