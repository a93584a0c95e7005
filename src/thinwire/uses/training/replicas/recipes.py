"""Recipes of replicas: what they exchange and when, one short function per published system, and ours.

In docstrings [quoted] is what the named paper says, [source] what was read in its code, [second-hand]
somebody else's notes on a paper, [memory] what we recall of it, [derived] our reading or arithmetic.

>>> parse_replica_recipe("allreduce").spec
'exchange=AllReduce()'
"""

from __future__ import annotations

from typing import Annotated

from thinwire.channels.channel import Scheme
from thinwire.channels.memory import ErrorFeedback
from thinwire.choosing.registry import Parameter, Recipe, Registry
from thinwire.codecs import ChunkTopK, Codec, DeadZone, Entropy, Factors, HardThreshold, InTurn, TopK, Uniform
from thinwire.codecs.deadzone import step_for
from thinwire.uses.training.replicas.choosing.auto import Auto
from thinwire.uses.training.replicas.choosing.deco import Deco
from thinwire.uses.training.replicas.choosing.replica_policy import ReplicaPolicy
from thinwire.uses.training.replicas.exchange_methods import (
    MAX_STALENESS,
    AllReduce,
    Differences,
    Gradients,
    Method,
    largest,
)

EXCHANGE = "exchange"  # the one role
ReplicaRecipe = Recipe[Method, ReplicaPolicy]
Made = dict[str, Method]


METHODS = (Gradients, AllReduce, Differences)
REPLICAS = Registry[Method, ReplicaPolicy]("replicas", (EXCHANGE,), METHODS)
parse_replica_recipe = REPLICAS.parse

RATIO = Parameter("the share of the values that are sent", 1e-5, 1, whole=False)
BITS = Parameter("the bits of a value that is sent", 1, 8)
STALENESS = Parameter("how many steps later a gradient is applied", 0, MAX_STALENESS)
EVERY = Parameter("how many steps lie between two exchanges", 1, 10_000)
LATE = Parameter("behind how many steps an exchange hides", 0, 10_000)
RATE = Parameter("the rate of the outer optimiser", 0.01, 10, whole=False)
MOMENTUM = Parameter("the momentum of the outer optimiser", 0, 0.999, whole=False)
DECAY = Parameter("how much of what was dropped is kept for later", 0, 1, whole=False)
ACCURACY = Parameter("the accuracy of a difference, in bits of a direct code", 0.5, 8, whole=False)
SMALLEST = 1e-45  # the least magnitude of float32 above zero
PERIOD = Parameter("how many steps lie between two decisions", 1, 10_000)


def _fed_back(codec: Codec, decay: float = 1.0) -> Scheme:
    return Scheme(codec, ErrorFeedback(decay=decay))


@REPLICAS.register("allreduce", "Gradients averaged as they are, each step: the baseline.", "none")
def allreduce() -> Made:
    """Average fp32 gradients at each step, as DistributedDataParallel does."""
    return {EXCHANGE: AllReduce()}


@REPLICAS.register("allreduce-bf16", "Gradients averaged in bfloat16, each step.", "common practice")
def allreduce_bf16() -> Made:
    """Average gradients at each step, cast to bfloat16 on the way."""
    return {EXCHANGE: AllReduce("bfloat16")}


@REPLICAS.register(
    "topk", "The largest of each gradient, what was dropped sent later.", "Aji and Heafield 2017"
)
def topk(ratio: Annotated[float, RATIO] = 0.01) -> Made:
    """Send the largest values of each step's gradient, by chunks, in 8 bits, with error feedback."""
    return {EXCHANGE: Gradients(_fed_back(largest(ratio)))}


@REPLICAS.register(
    "dd-ef-sgd", "As topk, and applied some steps later.", "DeCo-SGD's base algorithm, arXiv 2507.17346"
)
def dd_ef_sgd(ratio: Annotated[float, RATIO] = 0.01, staleness: Annotated[int, STALENESS] = 2) -> Made:
    """Send the largest values of each step's gradient and apply them ``staleness`` steps later.

    Source: DD-EF-SGD as DeCo-SGD describes it [second-hand]; selection by chunks and 8 bits are ours.
    """
    return {EXCHANGE: Gradients(_fed_back(largest(ratio)), staleness)}


@REPLICAS.register("deco", "Ratio and staleness from the live link.", "DeCo-SGD, arXiv 2507.17346")
def deco(every: Annotated[int, PERIOD] = 20) -> tuple[Made, ReplicaPolicy]:
    """Choose ratio and staleness every so many steps, so that no step waits for the network.

    Source: the time model is derived and was checked; the noise factor is the paper's by two second-hand
    sources. Selection by chunks and 8 bits a kept value are ours.
    """
    return {EXCHANGE: Gradients(_fed_back(largest(0.01)))}, Deco(every=every)


@REPLICAS.register(
    "cocktail",
    "A tenth of the parameters in turn, of these the largest fifth in 4 bits, a step late.",
    "CocktailSGD, ICML 2023",
)
def cocktail(
    every: Annotated[int, Parameter("one value in so many has its turn", 1, 1000)] = 10,
    ratio: Annotated[float, RATIO] = 0.2,
    bits: Annotated[int, BITS] = 4,
) -> Made:
    """Send differences of parameters at each step: of those in turn, the largest, one step late.

    Source: DS3Lab/CocktailSGD at 4819ed7 [source]: 10 % in turn, 20 % of these, 4 bits, a scale for 128
    values. Sent straight to each replica instead of by an owner a shard [ours].
    """
    codec = InTurn(every, values=TopK(ratio, Uniform(bits, group=128)))
    return {EXCHANGE: Differences(Scheme(codec), every=1, late=1, keep=True)}


@REPLICAS.register("diloco", "Parameters averaged now and then, as they are.", "DiLoCo, arXiv 2311.08105")
def diloco(
    every: Annotated[int, EVERY] = 500,
    rate: Annotated[float, RATE] = 0.7,
    momentum: Annotated[float, MOMENTUM] = 0.9,
) -> Made:
    """Average fp32 differences every so many steps, by an outer optimiser with Nesterov's momentum.

    Source: 500 steps [second-hand]; rate and momentum [memory].
    """
    return {EXCHANGE: Differences(Scheme(), every, rate=rate, momentum=momentum)}


@REPLICAS.register("sparseloco", "As diloco, the largest 2 % in 2 bits.", "SparseLoCo, arXiv 2508.15706")
def sparseloco(
    every: Annotated[int, EVERY] = 30,
    ratio: Annotated[float, RATIO] = 0.02,
    bits: Annotated[int, BITS] = 2,
    decay: Annotated[float, DECAY] = 0.95,
    rate: Annotated[float, RATE] = 1.0,
) -> Made:
    """Send the largest differences of each chunk in few bits; error feedback replaces the outer momentum.

    Source: 1 to 3 %, 2 bits, chunks, decayed error feedback [quoted]; decay .95 and 30 steps [memory].
    """
    codec = ChunkTopK(ratio, values=Uniform(bits, group=32))
    return {EXCHANGE: Differences(_fed_back(codec, decay), every, rate=rate)}


@REPLICAS.register(
    "pulseloco", "As diloco, what bfloat16 sees of the differences.", "PULSELoCo, arXiv 2602.03839"
)
def pulseloco(
    every: Annotated[int, EVERY] = 30,
    rate: Annotated[float, RATE] = 0.7,
    momentum: Annotated[float, MOMENTUM] = 0.9,
) -> Made:
    """Send the differences that change the parameters in bfloat16, in fp32; the rest goes with later ones.

    Source: what the forward pass does not see is kept in error feedback, on DiLoCo's differences in fp32
    [quoted: abstract]. Rate and momentum are DiLoCo's [memory], 30 steps and the coding of positions ours.
    """
    scheme = Scheme(Entropy(HardThreshold(SMALLEST)))
    return {EXCHANGE: Differences(scheme, every, rate=rate, momentum=momentum, visible="bfloat16")}


@REPLICAS.register(
    "streaming",
    "As diloco, in fragments, in 4 bits, beside the next steps.",
    "Streaming DiLoCo, arXiv 2501.18512",
)
def streaming(
    every: Annotated[int, EVERY] = 30,
    fragments: Annotated[int, Parameter("the parts that are exchanged in turn", 1, 64)] = 3,
    late: Annotated[int, LATE] = 5,
    rate: Annotated[float, RATE] = 0.7,
    momentum: Annotated[float, MOMENTUM] = 0.9,
    alpha: Annotated[float, Parameter("the share of a replica's own parameters", 0, 1, whole=False)] = 0.5,
) -> Made:
    """Exchange fragments of layers in turn, in 4 bits, merged with what was trained meanwhile.

    Source: fragments, overlap and 4 bits [second-hand]; 5 steps and a share of one half [memory]. Fragments
    are of neighbouring layers, and bits are integers with a scale for 64 values, not 4-bit floats [ours].
    """
    scheme = Scheme(Uniform(4, group=64))
    return {
        EXCHANGE: Differences(scheme, every, min(late, every), rate, momentum, alpha, fragments=fragments)
    }


@REPLICAS.register(
    "thinwire",
    "Ours: all differences now and then, at about a bit each, beside the next steps.",
    "docs/replicas.md",
)
def thinwire(
    bits: Annotated[float, ACCURACY] = 1.2,
    every: Annotated[int, EVERY] = 10,
    late: Annotated[int, LATE] = 2,
) -> Made:
    """Send all differences by a dead zone under an entropy coder, hidden by compute.

    What the dead zone drops stays in the replica's own parameters: error feedback in their place lost more
    [measured].
    """
    scheme = Scheme(Entropy(DeadZone(step_for(bits))))
    return {EXCHANGE: Differences(scheme, every, min(late, every), keep=True)}


@REPLICAS.register(
    "factors", "Ours: differences as the strongest directions of each matrix.", "docs/replicas.md"
)
def factors(
    rank: Annotated[int, Parameter("the directions that are sent of each matrix", 1, 1024)] = 8,
    every: Annotated[int, EVERY] = 10,
    late: Annotated[int, LATE] = 0,
) -> Made:
    """Send what some steps moved in each matrix as a product of two thin ones, entropy-coded.

    Source: low rank as PowerSGD (arXiv 1905.13727) has it of gradients, here of differences [ours]. What the
    factors do not say stays in the replica's own parameters.
    """
    return {EXCHANGE: Differences(Scheme(Entropy(Factors(rank))), every, min(late, every), keep=True)}


@REPLICAS.register("auto", "Ours: how often and how small from the live link.", "docs/replicas.md")
def auto(
    every: Annotated[int, PERIOD] = 10,
    exchange: Annotated[
        str | None,
        Parameter(
            "what is exchanged; by itself, what the optimiser allows", choices=("differences", "gradients")
        ),
    ] = None,
) -> tuple[Made, ReplicaPolicy]:
    """Choose code, local steps and delay so that no step waits for the network, and nothing more is lost.

    Differences of parameters under any optimiser; gradients only under plain SGD.
    """
    if exchange == "gradients":
        return {EXCHANGE: Gradients(_fed_back(largest(0.01)))}, Auto(every=every, gradients=True)
    scheme = Scheme(Entropy(DeadZone(step_for(1.2))))
    return {EXCHANGE: Differences(scheme, every=10, keep=True)}, Auto(every=every)
