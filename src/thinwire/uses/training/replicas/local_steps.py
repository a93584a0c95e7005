"""Train alone for some steps, then exchange the difference of the parameters to the shared ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.channels.references import under
from thinwire.types import InputError, require
from thinwire.uses.training.replicas.coder import Coder
from thinwire.uses.training.replicas.exchange_methods import Differences
from thinwire.uses.training.replicas.flat_parameters import FlatParameters
from thinwire.uses.training.replicas.synchroniser import Apply, Synchroniser
from thinwire.uses.training.replicas.transport import Arrived, CodedMessage, Transport


class Fragment:
    """A part of the parameters, its shared values, and when these are exchanged next.

    ``first``: the step after which it is exchanged for the first time.
    """

    def __init__(
        self, flat: FlatParameters, coder: Coder, transport: Transport, method: Differences, first: int
    ) -> None:
        self.flat, self.transport, self.controller = flat, transport, transport.controller
        self._coder, self._method, self._next = coder, method, first
        self._shared = flat.parameters()
        self._sent: Tensor | None = None  # this replica's parameters when it sent, while that is under way
        self._owed: Tensor | None = None  # what this replica trained beside what its parameters show
        self._momentum: Tensor | None = None
        self._due = 0  # the step after which what is under way is applied
        self._last = 0  # the step after which was sent
        self._apart = False  # some ranks drained in the last exchange, and others did not
        self.drained = False  # all did
        self.moved = 0  # how often the parameters were written

    def exchange(self, step: int) -> None:
        """Apply what is due after ``step`` local steps, and send what is due."""
        if step >= self._due:
            self.land()
        if step >= self._next:
            self.send(step)
            if step >= self._due:
                self.land()

    def send(self, step: int, drains: bool = False) -> None:
        """Send how far the parameters are from the shared ones."""
        own = self.flat.parameters()
        difference = self._trained(own) - self._shared
        if not self._method.keep:  # what is dropped is kept by the coder, or here
            difference, self._owed = self._shown(difference)
        self.transport.post(self._coder.encode(difference, self.controller.codec), drains=drains)
        self._sent, self._last = own, step
        self._due = step + min(self.controller.staleness, self.controller.local_steps)
        self._next = step + self.controller.local_steps

    def _shown(self, difference: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what of a difference is sent, and what is left."""
        if self._method.visible is None:
            return difference, None
        low = getattr(torch, self._method.visible)
        left = (self._shared + difference).to(low) == self._shared.to(low)
        return difference.masked_fill(left, 0.0), difference * left

    def land(self) -> None:
        """Move the shared parameters by what is under way, if anything is, and go on from them.

        The plan that comes with it may bring the next exchange forward, or put it off.
        """
        sent = self._sent
        if sent is None:
            return
        before = self.controller.local_steps
        arrived = self.transport.oldest()
        self._check_together(arrived)
        self._next = max(self._next + self.controller.local_steps - before, self._due)
        if not arrived.senders:
            self._sent = None
            return
        mean, said = self._coder.mean_and_own(arrived, self._method.keep)
        step = self._method.rate * self._outer(mean)
        self._shared.add_(step)
        onward = self._onward(step, sent, said)
        self._put(onward, onward if self._method.keep else self._trained(onward))
        self._sent = None

    def _onward(self, step: Tensor, sent: Tensor, said: Tensor) -> Tensor:
        """Return the parameters from which this replica goes on, the shared ones having moved by ``step``."""
        own, method = self.flat.parameters(), self._method
        if method.keep:
            return self._trained(own) + (step - said)
        if method.alpha is not None:
            return torch.lerp(self._shared, own, method.alpha)
        return self._shared + (own - sent)

    def _outer(self, mean: Tensor) -> Tensor:
        """Return the step of the outer optimiser along ``mean``, by Nesterov's momentum."""
        mu = self._method.momentum
        if not mu:
            return mean
        self._momentum = mean.clone() if self._momentum is None else self._momentum.mul_(mu).add_(mean)
        return mean + mu * self._momentum

    def _check_together(self, arrived: Arrived) -> None:
        """Raise ``InputError``, on all ranks, where some drain and others go on for longer than an exchange.

        Steps that a gradient scaler leaves out at one rank move an exchange to the other side of a drain.
        """
        draining, ranks = arrived.draining, arrived.ranks
        apart = 0 < len(draining) < len(ranks)
        waits, goes = (" and ".join(map(str, x)) for x in (draining, [r for r in ranks if r not in draining]))
        text = f"rank {waits} drains and rank {goes} goes on (this is rank {arrived.rank}, which sent after "
        text += f"step {self._last}); have all replicas take as many steps, and drain at the same one"
        require(not (apart and self._apart), InputError, text)
        self._apart, self.drained = apart, len(draining) == len(ranks)

    def flush(self, step: int, drains: bool = False) -> None:
        """Send what was trained since the last exchange, if anything was; ``drains``: or that nothing was."""
        if step > self._last:
            self.send(step, drains)
        elif drains:
            self.transport.post(CodedMessage((), ()), drains=True)
            self._sent = self.flat.parameters()

    def is_due(self, step: int) -> bool:
        """Say whether ``step`` local steps are followed by a message."""
        return step >= self._next

    def settle(self) -> None:
        """Leave the shared parameters in the model, and owe the others what it had beside them."""
        self._put(self._shared, onward=self._trained(self.flat.parameters()))

    def _trained(self, own: Tensor) -> Tensor:
        """Return what this replica has trained, whose parameters are ``own``, with what these do not show."""
        return own if self._owed is None else own + self._owed

    def _put(self, flat: Tensor, onward: Tensor) -> None:
        """Write ``flat`` into the parameters, of a replica that goes on from ``onward``."""
        self.flat.put_parameters(flat)
        self.moved += 1
        if onward is flat and self.flat.is_exact:
            self._owed = None
        else:
            self._owed = onward - self.flat.parameters()

    def swap(self) -> Tensor:
        """Put the shared parameters into the model; return what was there."""
        own = self.flat.parameters()
        self.flat.put_parameters(self._shared)
        return own

    def state_dict(self) -> dict[str, Tensor]:
        """Return shared parameters, momentum and residuals by parameter, and where the counts are."""
        counts = [self.transport.number, self._next, self._last]
        state = {"counts": torch.tensor(counts, device="cpu")}
        state |= self.flat.named(self._shared, "shared.")
        if self._momentum is not None:
            state |= self.flat.named(self._momentum, "momentum.")
        if self._owed is not None:
            state |= self.flat.named(self._owed, "owed.")
        return state | self._coder.state_dict(self.flat)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned."""
        self.transport.number, self._next, self._last = state["counts"].tolist()
        self._shared = self.flat.saved(state, "shared.")
        if any(name.startswith("momentum.") for name in state):
            self._momentum = self.flat.saved(state, "momentum.")
        if any(name.startswith("owed.") for name in state):
            self._owed = self.flat.saved(state, "owed.")
        self._coder.load_state_dict(self.flat, state)


class LocalSteps(Synchroniser):
    """Take every step at once, with this replica's gradient, and exchange the fragments in turn."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        super().__init__(fragments[0].transport.tally, [fragment.transport for fragment in fragments])
        self._fragments = fragments

    def step(self, apply: Apply) -> None:
        with self._timed():
            self._apply(apply)
            self._steps += 1
            for fragment in self._fragments:
                fragment.exchange(self._steps)

    def drain(self, apply: Apply) -> None:
        for fragment in self._fragments:
            fragment.land()
        self._pause()

    def finish(self, apply: Apply) -> None:
        self._flush()
        self.settle()

    def settle(self) -> None:
        for fragment in self._fragments:
            fragment.swap()

    @property
    def is_due(self) -> bool:
        """Whether the next step is followed by a message."""
        return any(fragment.is_due(self._steps + 1) for fragment in self._fragments)

    @property
    def moved(self) -> int:
        """How often exchanges have moved parameters."""
        return sum(fragment.moved for fragment in self._fragments)

    def gather(self) -> None:
        """Exchange all that was trained, and leave the shared parameters in the model to go on from.

        Errors: ``InputError``, on all ranks, where another one goes on stepping instead.
        """
        self.drain(nothing)
        waiting = list(self._fragments)
        while waiting:
            for fragment in waiting:
                fragment.flush(self._steps, drains=True)
            for fragment in waiting:
                fragment.land()
            waiting = [fragment for fragment in waiting if not fragment.drained]
        for fragment in self._fragments:
            fragment.settle()

    def _flush(self) -> None:
        """Exchange what is under way, and then all that was trained since."""
        self.drain(nothing)
        for fragment in self._fragments:
            fragment.flush(self._steps)
        for fragment in self._fragments:
            fragment.land()

    @contextmanager
    def shared(self) -> Iterator[None]:
        own = [fragment.swap() for fragment in self._fragments]
        yield
        for fragment, flat in zip(self._fragments, own, strict=True):
            fragment.flat.put_parameters(flat)

    def state_dict(self) -> dict[str, Tensor]:
        state = {"steps": torch.tensor(self._steps, device="cpu")}
        for k, fragment in enumerate(self._fragments):
            state |= {f"{k}.{name}": x for name, x in fragment.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._steps = int(state["steps"])
        for k, fragment in enumerate(self._fragments):
            fragment.load_state_dict(under(state, f"{k}."))


def nothing() -> None:
    """Apply nothing: a local step is taken at once, and leaves nothing to apply."""
