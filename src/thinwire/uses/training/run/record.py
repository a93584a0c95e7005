"""The record of a training run: losses, what policies chose, bytes by boundary, and one line a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.links.shape import LinkShape
from thinwire.runs.options import Options
from thinwire.runs.records.run_record import LinkMetrics, RunRecord, UnitMetrics, about
from thinwire.types import InputError
from thinwire.uses.training.run.learning_rates import learning_rate, warmup_steps
from thinwire.uses.training.run.options import TrainConfig

PARTS = ("compute", "encode", "decode", "wait")  # of a step, as ranks time them


@dataclass
class BoundaryBytes:
    """Bytes sent over one stage boundary in one direction."""

    boundary: str = about(
        "the two processes at its ends, lower rank first: `0-1`; with one stage a process these are the "
        "stages"
    )
    direction: str = about("`forward` or `backward`")
    bytes: int = about("bytes sent there")


@dataclass
class Decision:
    """What a policy chose for one direction of one boundary after a step, and why."""

    step: int = about("the step after which it was decided; 0: before the first")
    boundary: str = about("the two stages at its ends: `0-1`; `replicas` between replicas")
    direction: str = about("`forward`, `backward` or `exchange`")
    choice: str = about("the codecs, in short")
    bits: float = about("bits a value that it is expected to take")
    reason: str = about("why, with the numbers it came from")
    rate_bytes_s: float | None = about("the link's rate as estimated then, bytes/s", None)
    rtt_s: float | None = about("the link's round trip as estimated then, seconds", None)
    ratio: float | None = about("between replicas: the share of the values that is sent", None)
    staleness: int | None = about("between replicas: how many steps later it is applied", None)
    local_steps: int | None = about("between replicas: steps from one exchange to the next", None)
    predicted_s: float | None = about("between replicas: seconds that a step was to take under it", None)
    outcome_s: float | None = about("between replicas: mean seconds of a step until the next decision", None)


@dataclass
class Evaluation:
    """An uncompressed evaluation on the way, after ``step`` steps."""

    step: int = about("optimiser steps done by then")
    heldout: float | None = about("loss on held-out text, uncompressed", None)
    train: float | None = about("loss on the fixed slice of the training text, uncompressed", None)
    accuracy: float | None = about(
        "share of the held-out images whose class has the largest logit; null for texts", None
    )
    seconds: float | None = about("seconds of training until then; between replicas alone", None)


@dataclass
class Loss:
    """Mean cross-entropy in nats a token; ``train`` by step, the rest by uncompressed evaluation passes."""

    train: list[float] = about("training loss by step, as seen through the coded forward pass", make=list)
    eval_first: float | None = about(
        "loss on held-out text before the first step, by an uncompressed pass", None
    )
    eval_final: float | None = about("the same after the last step", None)
    train_eval_first: float | None = about(
        "loss on a fixed slice of the training text before the first step, uncompressed", None
    )
    train_eval_final: float | None = about("the same after the last step", None)
    accuracy_first: float | None = about(
        "share of the held-out images whose class has the largest logit, before the first step", None
    )
    accuracy_final: float | None = about("the same after the last step", None)
    evaluations: list[Evaluation] = about(
        "the evaluations on the way (`--eval-every`), one object each", make=list
    )


@dataclass(kw_only=True)
class StepMetrics(UnitMetrics):
    """One optimiser step: bytes and seconds (``*_s``: means over ranks)."""

    step: int = about("number of the optimiser step, from 1")
    loss: float = about("training loss of the step, nats a token")
    compute_s: float = about("seconds in forward and backward passes")
    encode_s: float = about("seconds in encoding activations and gradients")
    decode_s: float = about("seconds in decoding them")
    wait_s: float = about("seconds in waiting for another rank's data")
    lr: float | None = about("learning rate of the step; left out where not recorded", None)
    ranks: list[dict[str, float]] | None = about("the times above by rank; left out where not recorded", None)
    links: list[LinkMetrics] | None = about(
        "one object a direction between two ranks; left out where not recorded", None
    )

    @property
    def number(self) -> int:
        """Number of the step, from 1."""
        return self.step

    def scalars(self) -> dict[str, float | None]:
        """Return the step's numbers by the names that they have in TensorBoard's event files."""
        values = {"loss/train": self.loss, "optimiser/learning_rate": self.lr, "seconds/step": self.seconds}
        values |= {f"seconds/{part}": getattr(self, f"{part}_s") for part in PARTS}
        return values | {f"bytes/{stream}": float(n) for stream, n in self.bytes.items()}


@dataclass
class TrainRecord(RunRecord):
    """The record of a training run.

    Its streams are ``forward`` (activations) and ``backward`` (gradients); ``bytes`` has ``control`` too,
    whatever else training sent, and ``evaluation`` and ``saving``, which are in no other figure.
    """

    METRICS: ClassVar[type[UnitMetrics]] = StepMetrics
    CONFIG: ClassVar[type[Options]] = TrainConfig
    STREAMS: ClassVar[tuple[str, ...]] = ("forward", "backward")
    KEYS: ClassVar[dict[str, str]] = {
        "totals.seconds": "wall-clock seconds of all steps; loading, evaluation and saving are left out",
        "totals.steps": "optimiser steps done",
        "totals.tokens": "tokens trained on: steps x batch x seq; an image counts as one",
        "bytes.forward": "bytes of activations sent on all links",
        "bytes.backward": "bytes of gradients sent on all links",
        "bytes.control": "everything else that training sent: acknowledgements, heartbeats, resends, sums "
        "over ranks",
        "bytes.evaluation": "bytes of evaluation passes, which are uncompressed and unshaped (over an "
        "emulated network TCP [connects anew](log.md#a-link-without-its-delay) after them); in no other "
        "figure",
        "bytes.saving": "bytes that brought the other machines' parts of the trained model to rank 0, each "
        "time it was saved; none where all share a file system; in no other figure",
        "bytes.raw_forward": "what the activations would have been as plain fp32 tensors",
        "bytes.raw_backward": "what the gradients would have been as plain fp32 tensors",
        "bytes.first_pass": "bytes of activations and gradients that the first pass over the samples sent; "
        "there where more follow, and `--steps` and `--epochs` say how many",
        "bits_per_value.forward": "bits sent for each activation value",
        "bits_per_value.backward": "bits sent for each gradient value",
    }
    FREE: ClassVar[frozenset[str]] = RunRecord.FREE | {
        *("resume", "auto_resume", "save_model", "save_dtype", "tensorboard"),
        *("eval_every", "checkpoint_every", "save_every", "replica_recipe", "until_loss", "until_sample"),
    }

    kind: str = about("`pipeline`", "pipeline")
    unit: str = about("`step`: an optimiser step", "step")
    loss: Loss = about("losses: mean cross-entropies in nats a token", make=Loss)
    boundaries: list[BoundaryBytes] = about("one object a stage boundary and direction", make=list)
    decisions: list[Decision] = about("what a policy (`auto`) chose, one object a change", make=list)

    def __post_init__(self) -> None:
        for name in ("control", "evaluation", "saving"):
            self.bytes.setdefault(name, 0)
        for stream in self.STREAMS:
            if stream not in self.bytes:
                self.sent(stream, 0, 0)
        for name in ("steps", "tokens"):
            self.totals.setdefault(name, 0)

    @property
    def streams(self) -> list[str]:
        """The streams of the run, those that sent nothing too."""
        return [name.removeprefix("raw_") for name in self.bytes if name.startswith("raw_")]

    def count(self, done: UnitMetrics) -> None:
        """Add a step that is done."""
        super().count(done)
        if isinstance(done, StepMetrics):
            if done.step <= self._first_steps:
                self.bytes["first_pass"] = self.bytes.get("first_pass", 0) + sum(done.bytes.values())
            self.loss.train.append(done.loss)
            images = self.config.get("model") == "cnn-fashion"
            each = 1 if images else int(self.config.get("seq", 0))
            self.totals["tokens"] = done.step * int(self.config.get("batch", 0)) * each

    @property
    def _first_steps(self) -> int:
        """Steps of the first pass where others follow, else 0."""
        steps, passes = self.config.get("steps") or 0, self.config.get("epochs") or 1
        return steps // passes if passes > 1 else 0

    def times_bf16(self) -> tuple[float | None, float | None]:
        """Return how many times fewer bytes were sent than as bfloat16: in all, and by the first pass.

        Two bytes a value are taken for bfloat16, without headers. ``None`` where nothing is known.
        """
        streams = self.streams
        values = sum(self.bytes[f"raw_{name}"] for name in streams) / 4
        sent = sum(self.bytes[name] for name in (*streams, "control"))
        first, steps = self.bytes.get("first_pass", 0), self.totals["steps"]
        early = self._first_steps / steps * values if first and steps >= self._first_steps else 0
        return (2 * values / sent if sent and values else None), (2 * early / first if early else None)

    def recount(self, done: Any) -> None:
        """Set counts and training losses to those of the steps that are done."""
        self.loss.train = []
        self.bytes.pop("first_pass", None)
        super().recount(done)

    def conditions(self) -> dict[str, str]:
        """Return what must be the same; the same value in the same words, however it was asked for."""
        said = super().conditions()
        if "lr" in said:
            own = self.config.get("lr") is None and self.config.get("replicas", 1) > 1
            said["lr"] = "by recipe" if own else str(learning_rate(self.config))
        if "warmup" in said:
            said["warmup"] = str(warmup_steps(self.config))
        try:
            said |= {"link": str(LinkShape.parse(said["link"]))} if "link" in said else {}
        except InputError:  # one of an emulated network: two traces of one name need not be the same
            pass
        return said


@dataclass
class Replicas:
    """The replicas of a run, and what they exchanged."""

    count: int = about("how many there were", 0)
    recipe: str = about("what they exchanged, as asked for", "")
    equal: bool | None = about("whether all held the same bits at the end; null before it", None)
    exchanges: int = about("exchanges that were begun", 0)


@dataclass
class ReplicasRecord(TrainRecord):
    """The record of a training run of several replicas, each perhaps a pipeline.

    Its stream is ``exchange``; those between stages are there where there are stages.
    """

    KEYS: ClassVar[dict[str, str]] = TrainRecord.KEYS | {
        "bytes.exchange": "bytes of gradients or differences that replicas sent, on all links",
        "bytes.raw_exchange": "what an all-reduce of fp32 gradients at each step would have sent",
        "bits_per_value.exchange": "bits sent for each value of such an all-reduce",
    }
    STREAMS: ClassVar[tuple[str, ...]] = ("exchange",)

    kind: str = about("`replicas`", "replicas")
    replicas: Replicas = about("the replicas", make=Replicas)
