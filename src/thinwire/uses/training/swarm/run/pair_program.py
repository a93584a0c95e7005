"""The program of a member that is half of one: it waits for another half, and both train as one member."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.links.address import Address, shown
from thinwire.links.mesh import Peer
from thinwire.links.security import read_token
from thinwire.rounds.client import step_seconds
from thinwire.rounds.client_profile import ClientPace
from thinwire.rounds.model_copy import ModelCopy
from thinwire.rounds.parameters import Parameters, Signature
from thinwire.rounds.remote.remote_client import RemoteClient
from thinwire.rounds.residuals import ClientResiduals
from thinwire.runs.data.task import inputs, next_token_loss, targets
from thinwire.runs.machine import devices
from thinwire.runs.machine.compute import Compute
from thinwire.runs.models.cuts import counted_costs, cut_layers
from thinwire.runs.models.families import meta_model
from thinwire.runs.models.lora import add_adapters
from thinwire.runs.models.model_source import ModelSource
from thinwire.runs.models.split import build_stage, tie
from thinwire.runs.models.stage import ModelStage, cut_out
from thinwire.types import InputError, LinkError, require
from thinwire.uses.training.pipeline.recipes import PipelineRecipe, parse_recipe
from thinwire.uses.training.replicas.loop.meeting import meet
from thinwire.uses.training.swarm.local_adamw import LocalAdamW
from thinwire.uses.training.swarm.member import SharedBlocks
from thinwire.uses.training.swarm.pairs.halves import FirstHalf, PartnerLostError, SecondHalf
from thinwire.uses.training.swarm.pairs.model_part import part_of
from thinwire.uses.training.swarm.pairs.pair_crossing import PairCrossing
from thinwire.uses.training.swarm.run.member_program import (
    OTHER_MODEL,
    SwarmTerms,
    at_any,
    prepared,
    resolved,
)
from thinwire.uses.training.swarm.run.options import PORT, SwarmJoinConfig

RECIPE = "thinwire:memory=none"  # of what crosses between the halves: each sample is seen once in a pass
LEAST_HALF = 0.5  # of the values: what the larger half has at least
MEET = 60.0  # seconds from being told of a partner to meeting it
SILENCE = 20.0  # seconds without a sign after which a partner is lost


def join_half(config: SwarmJoinConfig, noted: Callable[[str], object]) -> int:
    """Take part as half of a pair until the keeper says that it is over; return the last round's number.

    A half whose partner is lost waits for another one. Errors: as of ``join``.
    """
    name, token = prepared(config), read_token(config.token_file)
    half = Halving(config, name, noted)
    while True:
        try:
            return at_any(config.places, token, config.patience, noted, name, half.serve)
        except PartnerLostError as e:
            noted(f"{e}; {name} waits for another half")


class Halving:
    """One half, from partner to partner."""

    def __init__(self, config: SwarmJoinConfig, name: str, noted: Callable[[str], object]) -> None:
        self._config, self._name, self._noted = config, name, noted
        self._half: FirstHalf | SecondHalf | None = None

    def serve(self, remote: RemoteClient, given: dict[str, Any], peer: str) -> int:
        """Wait for another half, and train with it. Errors: ``PartnerLostError``."""
        terms, half = SwarmTerms.read(given), self._half
        wrong = "this keeper asks for data of your own, which a pair would share; join without --stages 2"
        require(not terms.own_data, InputError, wrong)
        terms.check_room(int(terms.values * LEAST_HALF))
        source = resolved(remote, terms)
        self._noted(f"{self._name} at {peer} waits for another half of a pair")
        been = None if half is None else int(isinstance(half, SecondHalf))
        found = remote.pair(been, self._config.patience)
        if isinstance(found, int):
            return found
        if half is None or been != found.stage:
            half = self._half = make_half(self._config, terms, source, found.stage)
        half.called, theirs = found.name, Signature.read(given.get("signature"))
        if (
            theirs is not None
        ):  # frozen values are in no half whole: they are the kit's, whose digest is checked
            same = half.part.signature._replace(sizes=theirs.sizes, mix=theirs.mix)
            half.part = replace(half.part, signature=same)
        own = sum(many for _, many in half.part.spans)
        self._noted(f"{found.name} are one member, of which {self._name} trains {own:,} values")
        partner = self._met(Address.parse(peer, like=PORT, port=PORT), found.port, found.place, found.stage)
        try:
            half.meet(partner, terms.client)
            if isinstance(half, FirstHalf):
                return remote.serve(half, ClientPace(step_seconds(half)))
            remote.close()  # the first half speaks for both
            return half.obey(self._config.patience)
        finally:
            half.crossing.close()
            partner.close()

    def _met(self, keeper: Address, port: int, place: str, stage: int) -> Peer:
        relay = f"{shown(keeper.host, port)}/{place}"
        try:
            token = read_token(self._config.token_file)
            peers = meet(relay, stage, 2, token, relay=True, patience=MEET, deadline=SILENCE)
        except LinkError as e:
            raise PartnerLostError(f"the other half did not come to the relay: {e}") from e
        return peers[1 - stage]


def make_half(
    config: SwarmJoinConfig, terms: SwarmTerms, source: ModelSource, stage: int
) -> FirstHalf | SecondHalf:
    """Return the half of the keeper's model that is ``stage`` of two. Errors: ``InputError``."""
    compute = Compute.of(devices.own(config.device), config.dtype)
    cut = cut_layers(counted_costs(source.config), 2)
    model = build_stage(source, cut, stage, terms.seed)
    if terms.lora:
        add_adapters(model, terms.lora, terms.seed)
    whole = _whole(source, terms)
    part = part_of(whole, whole.original_name, model, model.original_name, first=stage == 0)
    require(part.values == terms.values, InputError, OTHER_MODEL.format(terms.values, part.values))
    terms.check_room(sum(many for _, many in part.spans))
    recipe: PipelineRecipe = parse_recipe(RECIPE)
    crossing = PairCrossing(
        stage, half_in(compute), source.config.hidden_size, recipe, terms.grad_clip, compute.loss_scale
    )
    moments = LocalAdamW(weight_decay=terms.weight_decay, clip=0.0).open()  # the norm is of both halves
    kind: type[FirstHalf | SecondHalf] = SecondHalf if stage else FirstHalf
    model = model.to(compute.device)
    half = kind(
        terms.client,
        model,
        SharedBlocks(terms.batch, terms.seq, source.config.vocab_size),
        ClientResiduals(),
        loss=crossing,
        loss_scale=compute.loss_scale,
        local=moments,
        seed=terms.seed,
        parameters=Parameters(model),
        copy=ModelCopy(part.values),
    )
    half.moments, half.part, half.crossing = moments, part, crossing
    return half


def half_in(compute: Compute) -> Callable[[nn.Module, Tensor, Tensor | None], Tensor]:
    """Return what a half does with blocks, and the second with what the first made: see ``PairCrossing``."""

    def run(model: nn.Module, blocks: Tensor, hidden: Tensor | None) -> Tensor:
        with compute.autocast():
            found: Tensor = model(inputs(blocks) if hidden is None else hidden)
            return found.float() if hidden is None else next_token_loss(found, targets(blocks))

    return run


def _whole(source: ModelSource, terms: SwarmTerms) -> ModelStage:
    """Return the whole model, as whole members have it, without values."""
    layers = range(source.config.num_hidden_layers)
    whole = cut_out(meta_model(source.config), layers, first=True, last=True)
    if source.config.tie_word_embeddings:
        tie(whole)
    if terms.lora:
        with torch.device("meta"):
            add_adapters(whole, terms.lora, terms.seed)
    return whole
