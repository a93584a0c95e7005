"""Recipes of federated learning: who takes how many steps, what is sent, and when a version is made of it.

In docstrings [quoted] is what the named paper says, [source] what was read in its code, [from memory] what
we recall of it, [derived] our reading, [measured] what we measured. Downloads are whole unless it says
otherwise, as published methods have them.

>>> parse_federated_recipe("fedavg").spec
'method=Method()'
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from thinwire.channels.memory import ErrorFeedback, Memory, NoMemory
from thinwire.choosing.registry import Parameter, Registry
from thinwire.codecs import Codec, HardThreshold, Raw, TopK, Uniform
from thinwire.rounds.aggregation import FedAsync, FedBuff, Periodic, Rule, Synchronous
from thinwire.rounds.client_profile import FederatedPolicy, Fixed
from thinwire.rounds.download import DeltaDownload, Download, FullDownload
from thinwire.spec import Spec
from thinwire.types import InputError, require
from thinwire.uses.federated.choosing.accordion import Accordion
from thinwire.uses.federated.choosing.dagc import EXPONENT, DagcA, DagcR
from thinwire.uses.federated.choosing.fedluck import FedLuck
from thinwire.uses.federated.choosing.gamma import GammaFedHT
from thinwire.uses.federated.choosing.true_cost import Thinwire


@dataclass(frozen=True, repr=False)
class Method(Spec):
    """Make versions by ``rule``, send them by ``download``; with ``feedback`` nothing is dropped for good.

    >>> Method().memory
    NoMemory()
    """

    rule: Rule = field(default_factory=Synchronous)
    download: Download = field(default_factory=FullDownload)
    feedback: bool = False

    @property
    def memory(self) -> Memory:
        """What a client keeps of what it could not send."""
        return ErrorFeedback() if self.feedback else NoMemory()


METHOD = "method"  # the one role
FINE: Codec = Uniform(4, group=64)
PARTS = (Synchronous, FedAsync, FedBuff, Periodic, FullDownload, DeltaDownload)

Made = tuple[dict[str, Method], FederatedPolicy]

FEDERATED = Registry[Method, FederatedPolicy]("federated", (METHOD,), (Method,), PARTS)
parse_federated_recipe = FEDERATED.parse

DOWN = Parameter("the share of the values of a version that is sent; 1 sends all", 1e-6, 1, whole=False)
STEPS = Parameter("local steps of a turn; --steps unless given", 1, 10_000)
RATIO = Parameter("the share of the values that is sent", 1e-6, 1, whole=False)
THRESHOLD = Parameter("the least magnitude that is sent, at first", 0, 1e6, whole=False)
FEEDBACK = Parameter("whether what was not sent goes with the next update", 0, 1)
PERIOD = Parameter("seconds from one version to the next", 1e-3, 1e6, whole=False)
SIZE = Parameter("updates of a version", 1, 100_000)
SAMPLES = Parameter("the least number of a client, for each local step; 0: no limit", 0, 1000, whole=False)
SERVER_RATE = Parameter("the server's step size", 1e-6, 100, whole=False)
ALPHA = Parameter("how the threshold goes with the step size", 0.1, 10, whole=False)
BITS = Parameter("the bits of a value", 1, 8)
SCALING = Parameter(
    "whether rounds weigh by those who answered, or by all", choices=("answered", "participants")
)


@FEDERATED.register("fedavg", "Rounds; the mean of all models, whole.", "FedAvg, arXiv 1602.05629")
def fedavg(steps: Annotated[int, STEPS] = 5, scaling: Annotated[str, SCALING] = "answered") -> Made:
    """Send updates and versions as they are."""
    return {METHOD: Method(Synchronous(scaling))}, Fixed(steps, Raw())


@FEDERATED.register("fedavg-topk", "Rounds; the largest values of each update.", "common practice")
def fedavg_topk(
    ratio: Annotated[float, RATIO] = 0.05,
    steps: Annotated[int, STEPS] = 5,
    feedback: Annotated[int, FEEDBACK] = 1,
) -> Made:
    """Send the largest values in full, with error feedback."""
    return {METHOD: Method(feedback=bool(feedback))}, Fixed(steps, TopK(ratio))


@FEDERATED.register(
    "fixed-threshold", "Rounds; all values above one threshold.", "Sahu et al. 2021, arXiv 2108.00951"
)
def fixed_threshold(threshold: Annotated[float, THRESHOLD] = 0.005, steps: Annotated[int, STEPS] = 5) -> Made:
    """Send what is above the threshold in full, with error feedback."""
    return {METHOD: Method(feedback=True)}, Fixed(steps, HardThreshold(threshold))


@FEDERATED.register(
    "gamma-fedht", "Rounds; a threshold that goes with the step size.", "gamma-FedHT, arXiv 2505.12479"
)
def gamma_fedht(
    threshold: Annotated[float, THRESHOLD] = 0.007,
    alpha: Annotated[float, ALPHA] = 2.0,
    rule: Annotated[
        str, Parameter("the paper's rule, or a linear one", choices=("paper", "linear"))
    ] = "paper",
    steps: Annotated[int, STEPS] = 5,
) -> Made:
    """Send what is above Algorithm 1's threshold [quoted]; alpha 2 is derived, the paper's is not known."""
    method = Method(Synchronous("participants"), feedback=True)
    return {METHOD: method}, GammaFedHT(threshold, alpha, rule, steps)


@FEDERATED.register("dagc-r", "Rounds; who has more data sends a larger share.", "DAGC-R, arXiv 2311.07324")
def dagc_r(
    ratio: Annotated[float, RATIO] = 0.01,
    steps: Annotated[int, STEPS] = 10,
    power: Annotated[float, Parameter("of the share of the data", 0, 3, whole=False)] = EXPONENT,
) -> Made:
    """Send the share of Theorem 4, of this mean, with error feedback [quoted]; steps as its code has."""
    return {METHOD: Method(feedback=True)}, DagcR(ratio, steps, power=power)


@FEDERATED.register(
    "dagc-a", "Rounds; who has more data sends above a lower threshold.", "DAGC-A, arXiv 2311.07324"
)
def dagc_a(threshold: Annotated[float, THRESHOLD] = 0.005, steps: Annotated[int, STEPS] = 10) -> Made:
    """Send above the threshold of Theorem 8, of this mean, with error feedback [quoted]."""
    return {METHOD: Method(feedback=True)}, DagcA(threshold, steps)


@FEDERATED.register(
    "accordion", "Rounds; a larger share while the model changes fast.", "ACCORDION, MLSys 2021"
)
def accordion(
    low: Annotated[float, RATIO] = 0.01,
    high: Annotated[float, RATIO] = 0.1,
    steps: Annotated[int, STEPS] = 10,
) -> Made:
    """Send one of two shares, with error feedback; DAGC's baseline [from memory]."""
    return {METHOD: Method(feedback=True)}, Accordion(low, high, steps=steps)


@FEDERATED.register(
    "fedluck", "Periods; steps and share by each device's speed.", "FedLuck, arXiv 2407.05125"
)
def fedluck(
    period: Annotated[float, PERIOD] = 1.5,
    rate: Annotated[float, SERVER_RATE] = 0.7,
    feedback: Annotated[int, FEEDBACK] = 0,
    steps: Annotated[int, Parameter("local steps of every device; 0 chooses", 0, 10_000)] = 0,
    ratio: Annotated[float, Parameter("the share that every device sends; 0 chooses", 0, 1, whole=False)] = 0,
) -> Made:
    """Choose as the released code does, without error feedback, at its rate for Fashion-MNIST [source].

    With both ``steps`` and ``ratio`` nothing is chosen: its baseline of one pair for all.
    """
    method = Method(Periodic(period, rate=rate), feedback=bool(feedback))
    both = bool(steps) == bool(ratio)
    wrong = f"steps={steps} and ratio={ratio:g} go together; give both, or neither"
    require(both, InputError, wrong)
    return {METHOD: method}, Fixed(steps, TopK(ratio)) if steps else FedLuck(period)


@FEDERATED.register("fedasync", "A version an update.", "FedAsync, arXiv 1903.03934")
def fedasync(
    alpha: Annotated[float, Parameter("the share of an update that is not late", 1e-3, 1, whole=False)] = 0.6,
    a: Annotated[float, Parameter("how fast it falls with versions late", 0, 10, whole=False)] = 0.5,
    steps: Annotated[int, STEPS] = 5,
) -> Made:
    """Mix each model in as it comes, less where it is late."""
    return {METHOD: Method(FedAsync(alpha, a))}, Fixed(steps, Raw())


@FEDERATED.register("fedbuff", "A version of every few updates.", "FedBuff, arXiv 2106.06639")
def fedbuff(
    size: Annotated[int, SIZE] = 5,
    rate: Annotated[float, SERVER_RATE] = 1.0,
    steps: Annotated[int, STEPS] = 5,
) -> Made:
    """Average what fills a buffer, less where it is late."""
    return {METHOD: Method(FedBuff(size, rate=rate))}, Fixed(steps, Raw())


@FEDERATED.register(
    "qafel", "FedBuff, quantised both ways by a shared hidden state.", "QAFeL, arXiv 2410.00242"
)
def qafel(
    bits: Annotated[int, BITS] = 4,
    size: Annotated[int, SIZE] = 5,
    rate: Annotated[float, SERVER_RATE] = 1.0,
    steps: Annotated[int, STEPS] = 5,
) -> Made:
    """Send all values in a few bits [quoted]; the quantiser by groups of 64 is ours."""
    codec = Uniform(bits, group=64)
    return {METHOD: Method(FedBuff(size, rate=rate), DeltaDownload(codec))}, Fixed(steps, codec)


@FEDERATED.register("thinwire", "Periods; steps and share from the true cost, deltas both ways.", "ours")
def thinwire(
    period: Annotated[float, PERIOD] = 6.0,
    rate: Annotated[float, SERVER_RATE] = 0.7,
    down: Annotated[float, DOWN] = 0.02,
    up: Annotated[float, Parameter("of an update, sent up at most", 0.001, 1, whole=False)] = 0.03,
    discount: Annotated[float, Parameter("how fast late updates count less", 0, 10, whole=False)] = 0.5,
    feedback: Annotated[int, FEEDBACK] = 1,
    by_data: Annotated[int, Parameter("whether who has more data sends more", 0, 1)] = 1,
    samples: Annotated[float, SAMPLES] = 5.0,
) -> Made:
    """Send 4-bit values both ways, with error feedback; ``choosing/thinwire.py`` says how much."""
    given = DeltaDownload(TopK(down, FINE)) if down < 1 else FullDownload()
    method = Method(Periodic(period, rate=rate, a=discount), given, bool(feedback))
    power = EXPONENT if by_data else 0.0
    policy = Thinwire(period, FINE, down_ratio=down, data_power=power, samples_a_step=samples, most_ratio=up)
    return {METHOD: method}, policy
