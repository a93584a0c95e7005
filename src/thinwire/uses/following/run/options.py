"""The configuration of the state demo, from which its options, TOML keys and record follow."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.runs import options as shared
from thinwire.runs.options import option
from thinwire.runs.ranks.run_config import JOB, LINK, MACHINES, RunConfig
from thinwire.types import InputError, require

RECIPE = "cast:dtype=bf16"  # how the weights are published
RATES = (1e-6, 1e-5)  # learning rates, one after the other
TEXTS = "Texts"
EVENTS = "What happens when"


@dataclass(frozen=True)
class StateConfig(RunConfig):
    """What is trained, and when what happens: ``join``, ``cut`` and ``restore`` are shares of all steps."""

    model: str = option("smollm2-135m", JOB, "A preset or a local folder with weights.", metavar="MODEL")
    data: str = option("shakespeare", JOB, "Text to train on: shakespeare, or a file.", metavar="DATA")
    steps: int = option(24, JOB, "Steps at each of the two learning rates.", metavar="N", least=1)
    batch: int = option(4, JOB, "Samples in a batch.", metavar="N", least=1)
    seq: int = option(128, JOB, "Tokens in a sample.", metavar="TOKENS", least=2)
    seed: int = option(
        0, JOB, "Seed of the order of the samples, and of loss and jitter.", metavar="N", least=0, most=10**12
    )
    out: str = option("runs/demo-state", JOB, "Folder of the run, which replaces one there.", metavar="DIR")
    link: str = option("10mbit,30ms", LINK, "Every process's link.", metavar="SHAPE")
    device: str = shared.device(MACHINES)
    emulate: bool = option(True, LINK, "Emulate the network where that is possible.")

    join: float = option(0.3, EVENTS, "When the late follower joins.", least=0, most=1)
    cut: float = option(0.6, EVENTS, "When the other one is cut off.", least=0, most=1)
    restore: float = option(0.8, EVENTS, "When it is back.", least=0, most=1)

    prompt: str = option("ROMEO:\nIf I could follow you from far away,", TEXTS, "What texts begin with.")
    tokens: int = option(24, TEXTS, "Tokens of a text.", metavar="N", least=1)
    every: float = option(20.0, TEXTS, "Seconds between two texts.", metavar="SECONDS", least=0)

    @property
    def ranks(self) -> int:
        """Processes of the demo: a trainer and two followers."""
        return 3

    @property
    def total(self) -> int:
        """Steps at all rates."""
        return self.steps * len(RATES)

    def validate(self) -> None:
        """Raise ``InputError`` for a link that no process of the demo can have."""
        if not self.emulate:
            from thinwire.links.profile import Profile  # here, because a reader of records needs none of it

            line = Profile.parse(self.link)
            simple = not line.jitter and not line.loss and line.trace is None and line.up == line.down
            require(simple, InputError, f"without emulation a link has one rate and a delay, not {self.link}")
        super().validate()
