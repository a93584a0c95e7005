"""What a keeper's swarm learns: a language model on texts, or any module that its script brings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from thinwire.rounds.parameters import Parameters
from thinwire.rounds.work import OwnData, WorkSource
from thinwire.runs.machine import devices
from thinwire.runs.machine.compute import ON_CPU, Compute
from thinwire.runs.models.folder import finish_model, save_stage
from thinwire.types import InputError, require
from thinwire.uses.training.run.training_job import read_texts
from thinwire.uses.training.swarm.kit import kit_digest
from thinwire.uses.training.swarm.passed_share import PassedShare
from thinwire.uses.training.swarm.run.options import SwarmConfig
from thinwire.uses.training.swarm.run.swarm_model import Evaluator, build_whole, evaluating, make_kit
from thinwire.uses.training.swarm.work_pool import OwnWork, WorkPool

SCORED = 64  # held-out blocks that updates are scored on, beside those of evaluations
T = TypeVar("T")
Losses = Callable[[Tensor, Tensor], Tensor]  # of weights [1, N] on blocks [n, ...]: one a block


@dataclass(eq=False)
class Taught:
    """A model, and what is known of how good it is. ``heldout``: of weights [1, N]; None: nobody can say.

    ``losses`` and ``scored``: by which updates are scored. ``save`` writes the model into a folder.
    ``terms``: what members are told of it, beside what every swarm says.
    """

    model: nn.Module
    compute: Compute = ON_CPU
    work: WorkSource = field(default_factory=OwnData)
    heldout: Callable[[Tensor], float] | None = None
    losses: Losses | None = None
    scored: Tensor | None = None
    kit: bytes = b""
    terms: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    save: Callable[[Path], object] | None = None

    def __post_init__(self) -> None:
        self.parameters = Parameters(self.model)

    def assigned(self, client: int) -> Tensor | None:
        """Return the blocks that a client was given; None where it has data of its own."""
        return self.work.assigned(client) if isinstance(self.work, (WorkPool, PassedShare)) else None


def of_texts(config: SwarmConfig) -> Taught:
    """Return the language model and the texts of a configuration. Errors: ``InputError``."""
    lesson = read_texts(config, trial=False)
    compute = Compute.of(devices.own(config.device), config.dtype)
    model = build_whole(lesson.source, config.lora, config.seed, compute)
    frozen = bool(config.lora) and lesson.source.weights is not None  # which versions do not bring
    kit = make_kit(lesson.source, frozen)
    taught = Taught(model, compute, kit=kit, notes=lesson.notes)
    evaluator = Evaluator(model, taught.parameters, compute)
    pool = WorkPool(lesson.train, config.batch, config.seed)
    taught.work = OwnWork(config.batch) if config.own_data else pool
    many = config.eval_samples
    taught.heldout = lambda row: evaluator.mean(row, lesson.heldout[:many])
    taught.losses = evaluator.losses
    taught.scored = (
        lesson.heldout[many : many + SCORED] if len(lesson.heldout) > many else lesson.heldout[-SCORED:]
    )
    taught.terms = {
        **{name: getattr(config, name) for name in ("seq", "batch", "lora", "seed", "own_data")},
        **{name: getattr(config, name) for name in ("weight_decay", "grad_clip")},
        "weights": frozen,
        "kit": kit_digest(kit),
        "kit_nbytes": len(kit),
    }

    def save(folder: Path) -> None:
        save_stage(model.cpu(), folder, 0, 1)
        finish_model(folder, lesson.source, 1)

    taught.save = save
    return taught


def of_module(
    model: nn.Module,
    heldout: Callable[[nn.Module], float] | None = None,
    losses: Callable[[nn.Module, Tensor], Tensor] | None = None,
    samples: Tensor | None = None,
    batch: int = 8,
) -> Taught:
    """Return any module, for members that have the same one in a loop of their own.

    ``batch``: how many samples a step of theirs counts for at most.

    Errors: ``InputError`` for losses without samples, or samples without losses.
    """
    both = (losses is None) == (samples is None)
    require(both, InputError, "losses and samples go together: updates are scored by the losses of samples")
    taught = Taught(model, work=OwnWork(batch), scored=samples, terms={"batch": batch})
    device = next(model.parameters()).device

    def worth(row: Tensor, of: Callable[[], T]) -> T:
        with evaluating(model, taught.parameters, row):
            return of()

    if losses is not None and samples is not None:
        taught.losses = lambda row, some: worth(row, lambda: losses(model, some.to(device)).cpu())
        taught.heldout = lambda row: worth(row, lambda: float(losses(model, samples.to(device)).mean()))
    if heldout is not None:
        taught.heldout = lambda row: worth(row, lambda: float(heldout(model)))
    return taught
