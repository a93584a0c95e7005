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
        self._under_way = False
        self._level = False  # the parameters are the shared ones, as far as they hold these
        self._rounded = False  # what is owed is what they do not hold of these
        self._sent: Tensor | None = None  # this replica's parameters when it sent, where that is asked later
        self._owed: Tensor | None = None  # what this replica trained beside what its parameters show
        self._momentum: Tensor | None = None
        self._due = 0  # the step after which what is under way is applied
        self._last = 0  # the step after which was sent
        self._apart = False  # some ranks drained in the last exchange, and others did not
        self.drained = False  # all did
        self.moved = 0  # how often the parameters were written

    def exchange(self, step: int) -> None:
        """Apply what is due after ``step`` local steps, and send what is due."""
        self._level = False
        if step >= self._due:
            self.land()
        if step >= self._next:
            late = min(self.controller.staleness, self.controller.local_steps)
            self.send(step, late)
            if not late:
                self.land()

    def send(self, step: int, late: int = 0, drains: bool = False) -> None:
        """Send how far the parameters are from the shared ones; ``late``: steps until that is applied."""
        asked = late > 0 and not self._method.keep and self._method.alpha is None
        self._sent = torch.empty_like(self._shared) if asked else None
        if self._method.visible is not None and self._owed is None:
            self._owed = self._nothing()
        message = self._coder.encode(self._difference, self.controller.codec)
        self.transport.post(message, drains=drains)
        if not self._method.keep and self._method.visible is None:
            self._owed, self._rounded = None, False  # all is sent, and what is dropped is kept by the coder
        self._under_way, self._last, self._due = True, step, step + late
        self._next = step + self.controller.local_steps

    def _difference(self, rows: slice) -> Tensor:
        """Return what is to be sent of some segments, and keep what is not."""
        own = self.flat.read(rows)
        if self._sent is not None:
            self._sent[rows] = own
        difference = self._trained(rows, own).sub_(self._shared[rows])
        if self._method.visible is not None and self._owed is not None:
            shared, low = self._shared[rows], getattr(torch, self._method.visible)
            left = (shared + difference).to(low) == shared.to(low)
            torch.mul(difference, left, out=self._owed[rows])
            difference.masked_fill_(left, 0.0)
        return difference

    def land(self) -> None:
        """Move the shared parameters by what is under way, if anything is, and go on from them.

        The plan that comes with it may bring the next exchange forward, or put it off. A packet that does not
        decode ends the training: segments before it have moved.
        """
        if not self._under_way:
            return
        before = self.controller.local_steps
        arrived = self.transport.oldest()
        self._check_together(arrived)
        self._next = max(self._next + self.controller.local_steps - before, self._due)
        if not arrived.senders:
            self._under_way = False
            return
        level = not self._method.keep and self._method.alpha is None and self._sent is self._owed is None
        for rows, mean, said in self._coder.means(arrived):
            step = self._outer(rows, mean)
            self._shared[rows].add_(step)
            if level:
                self.flat.write(rows, self._shared[rows] + 0.0)
            else:
                self._go_on(rows, step, said)
        if self._method.keep and self.flat.is_exact:
            self._owed = None
        self._level, self._rounded = level, level and not self.flat.is_exact
        self._under_way, self._sent = False, None
        self.moved += 1

    def _go_on(self, rows: slice, step: Tensor, said: Tensor) -> None:
        """Let some segments of this replica go on, the shared ones having moved by ``step``."""
        shared, method = self._shared[rows], self._method
        if method.keep:
            own = self._trained(rows, self.flat.read(rows)).add_(step.sub_(said))
            self._put(rows, own, own)
            return
        if method.alpha is not None:
            own = torch.lerp(shared, self.flat.read(rows), method.alpha)
        else:
            moved = 0.0 if self._sent is None else self.flat.read(rows).sub_(self._sent[rows])
            own = shared + moved
        self._put(rows, own, own if self._owed is None else own + self._owed[rows])

    def _outer(self, rows: slice, mean: Tensor) -> Tensor:
        """Return the step of the outer optimiser along ``mean``, by Nesterov's momentum."""
        mu = self._method.momentum
        if mu:
            if self._momentum is None:
                self._momentum = self._nothing()
            momentum = self._momentum[rows].mul_(mu).add_(mean)
            mean.add_(mu * momentum)
        return mean.mul_(self._method.rate)

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
            self.send(step, drains=drains)
        elif drains:
            if self._rounded and not self.flat.is_exact:
                self._owed = self._all_lost()
            self._rounded = self._level = False
            self.transport.post(CodedMessage((), ()), drains=True)
            self._under_way = True

    def is_due(self, step: int) -> bool:
        """Say whether ``step`` local steps are followed by a message."""
        return step >= self._next

    def settle(self) -> None:
        """Leave the shared parameters in the model, and owe the others what it had beside them."""
        self.moved += 1
        if self._level:
            self.put_shared()
            self._rounded = True
            return
        for rows in self._coder.blocks:
            self._put(rows, self._shared[rows], self._trained(rows, self.flat.read(rows)))

    def _trained(self, rows: slice, own: Tensor) -> Tensor:
        """Return what this replica has trained, whose parameters are ``own``, with what these do not show."""
        if self._rounded:
            return own.add_(self.flat.lost(rows, self._shared[rows] + 0.0))
        return own if self._owed is None else own.add_(self._owed[rows])

    def _all_lost(self) -> Tensor:
        return self.flat.lost(slice(0, len(self._shared)), self._shared + 0.0)

    def _put(self, rows: slice, values: Tensor, onward: Tensor) -> None:
        """Write segments into the parameters, of a replica that goes on from ``onward``."""
        self.flat.write(rows, values)
        if onward is values and self.flat.is_exact:
            return
        if self._owed is None:
            self._owed = self._nothing()
        self._owed[rows] = onward.sub_(self.flat.read(rows))

    def _nothing(self) -> Tensor:
        """Return a place for values, to which these can be added before: x + -0.0 is x, also for -0.0."""
        return torch.full_like(self._shared, -0.0)

    def swap(self) -> Tensor:
        """Put the shared parameters into the model; return what was there."""
        own = self.flat.parameters()
        self.put_shared()
        return own

    def put_shared(self) -> None:
        """Leave the shared parameters in the model, and forget what was there."""
        self.flat.put_parameters(self._shared)

    def state_dict(self) -> dict[str, Tensor]:
        """Return shared parameters, momentum and residuals by parameter, and where the counts are."""
        counts = [self.transport.number, self._next, self._last]
        state = {"counts": torch.tensor(counts, device="cpu")}
        state |= self.flat.named(self._shared, "shared.")
        if self._momentum is not None:
            state |= self.flat.named(self._momentum, "momentum.")
        if self._rounded:
            state |= self.flat.named(self._all_lost(), "owed.")
        if self._owed is not None:
            state |= self.flat.named(self._owed, "owed.")
        return state | self._coder.state_dict(self.flat)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned."""
        self.transport.number, self._next, self._last = state["counts"].tolist()
        self._shared = self.flat.saved(state, "shared.")
        self._level = self._rounded = False
        if any(name.startswith("momentum.") for name in state):
            self._momentum = self.flat.saved(state, "momentum.")
        if any(name.startswith("owed.") for name in state):
            self._owed = self.flat.saved(state, "owed.")
        self._coder.load_state_dict(self.flat, state)


class LocalSteps(Synchroniser):
    """Take every step at once, with this replica's gradient, and exchange the fragments in turn."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        super().__init__(fragments[0].transport.tally, [fragment.transport for fragment in fragments])
        self.fragments = fragments

    def step(self, apply: Apply) -> None:
        with self._timed():
            self._apply(apply)
            self._steps += 1
            for fragment in self.fragments:
                fragment.exchange(self._steps)

    def drain(self, apply: Apply) -> None:
        for fragment in self.fragments:
            fragment.land()
        self._pause()

    def finish(self, apply: Apply) -> None:
        self._flush()
        self.settle()

    def settle(self) -> None:
        for fragment in self.fragments:
            fragment.put_shared()

    @property
    def is_due(self) -> bool:
        """Whether the next step is followed by a message."""
        return any(fragment.is_due(self._steps + 1) for fragment in self.fragments)

    @property
    def moved(self) -> int:
        """How often exchanges have moved parameters."""
        return sum(fragment.moved for fragment in self.fragments)

    def gather(self) -> None:
        """Exchange all that was trained, and leave the shared parameters in the model to go on from.

        Errors: ``InputError``, on all ranks, where another one goes on stepping instead.
        """
        self.drain(nothing)
        waiting = list(self.fragments)
        while waiting:
            for fragment in waiting:
                fragment.flush(self._steps, drains=True)
            for fragment in waiting:
                fragment.land()
            waiting = [fragment for fragment in waiting if not fragment.drained]
        for fragment in self.fragments:
            fragment.settle()

    def _flush(self) -> None:
        """Exchange what is under way, and then all that was trained since."""
        self.drain(nothing)
        for fragment in self.fragments:
            fragment.flush(self._steps)
        for fragment in self.fragments:
            fragment.land()

    @contextmanager
    def shared(self) -> Iterator[None]:
        own = [fragment.swap() for fragment in self.fragments]
        yield
        for fragment, flat in zip(self.fragments, own, strict=True):
            fragment.flat.put_parameters(flat)

    def state_dict(self) -> dict[str, Tensor]:
        state = {"steps": torch.tensor(self._steps, device="cpu")}
        for k, fragment in enumerate(self.fragments):
            state |= {f"{k}.{name}": x for name, x in fragment.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._steps = int(state["steps"])
        for k, fragment in enumerate(self.fragments):
            fragment.load_state_dict(under(state, f"{k}."))


def nothing() -> None:
    """Apply nothing: a local step is taken at once, and leaves nothing to apply."""
