"""Behind a step: the exchange with other sites, or what the first process of this site tells of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn

from thinwire.uses.training.replicas.local_steps import LocalSteps, nothing
from thinwire.uses.training.replicas.loop.course import Course
from thinwire.uses.training.replicas.loop.inside_site import ENDED, MOVED, STAYED, InsideSite
from thinwire.uses.training.replicas.loop.shared_buffers import SharedBuffers, buffers_of


class Between(Protocol):
    """A process's part in the exchange of its site with the others."""

    @property
    def is_due(self) -> bool:
        """Whether something is sent behind the next step."""
        ...

    def step(self) -> None:
        """Do what is due behind a local step."""
        ...

    def gather(self) -> None:
        """Exchange all that was trained, and leave the same bits in all models, buffers included."""
        ...

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Have in the model what was last exchanged."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return what it goes on from."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state_dict`` returned."""
        ...

    def close(self) -> None:
        """Exchange nothing more."""
        ...


class Exchanging:
    """The process that exchanges with other sites, for all of its own site where there is a ``site``."""

    def __init__(
        self,
        synchroniser: LocalSteps,
        buffers: SharedBuffers,
        course: Course,
        held: list[Tensor],
        site: InsideSite | None,
    ) -> None:
        self._synchroniser, self._buffers, self._held, self._site = synchroniser, buffers, held, site
        self._course = course
        self._told = 0  # how often parameters had moved when the site heard

    @property
    def is_due(self) -> bool:
        return self._synchroniser.is_due

    def step(self) -> None:
        with self._telling(self._held):
            self._course.begin(self._synchroniser.steps)
            if self.is_due:
                self._course.hear()
            self._synchroniser.step(nothing)

    def gather(self) -> None:
        with self._telling([*self._held, *buffers_of(self._buffers.model)]):
            self._course.begin(self._synchroniser.steps)
            self._course.hear()
            self._course.say(self._synchroniser.steps)
            self._synchroniser.gather()
            self._course.hear()
            self._buffers.share()

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._synchroniser.shared():
            self._tell(MOVED, self._held)
            yield
        self._tell(MOVED, self._held)

    def state_dict(self) -> dict[str, Tensor]:
        with self._telling(self._held):
            self._synchroniser.drain(nothing)
        return self._synchroniser.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._synchroniser.load_state_dict(state)

    def close(self) -> None:
        for one in (self._synchroniser, self._buffers, self._course):
            one.close()

    @contextmanager
    def _telling(self, tensors: list[Tensor]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._tell(ENDED, [])
            raise
        moved = self._synchroniser.moved
        self._tell(STAYED if moved == self._told else MOVED, tensors)
        self._told = moved

    def _tell(self, what: int, tensors: list[Tensor]) -> None:
        if self._site is not None:
            self._site.tell(what, tensors)


class Led:
    """Any other process of a site: it steps as the first one does, and takes what came of its exchange."""

    is_due = False

    def __init__(self, site: InsideSite, model: nn.Module, held: list[Tensor]) -> None:
        self._site, self._model, self._held = site, model, held

    def step(self) -> None:
        self._site.hear(self._held)

    def gather(self) -> None:
        self._site.hear([*self._held, *buffers_of(self._model)])

    @contextmanager
    def shared(self) -> Iterator[None]:
        self._site.hear(self._held)
        yield
        self._site.hear(self._held)

    def state_dict(self) -> dict[str, Tensor]:
        self._site.hear(self._held)
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pass

    def close(self) -> None:
        pass
