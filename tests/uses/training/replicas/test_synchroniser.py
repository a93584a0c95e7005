"""Replicas stay together, whatever they exchange, and each method does what its reference does."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from post_office import PostOffice, on_each
from torch import Tensor, nn

from thinwire.channels.channel import Scheme
from thinwire.channels.memory import ErrorFeedback
from thinwire.codecs import ChunkTopK, Raw
from thinwire.types import PayloadError
from thinwire.uses.training.replicas import coder
from thinwire.uses.training.replicas.assembly import (
    Adaptation,
    codec_of,
    gradient_synchroniser,
    synchroniser_of,
)
from thinwire.uses.training.replicas.choosing.deco import Deco
from thinwire.uses.training.replicas.choosing.replica_policy import ReplicaChoice, ReplicaSite
from thinwire.uses.training.replicas.coder import Coder
from thinwire.uses.training.replicas.exchange_methods import AllReduce, Differences, Gradients, Method
from thinwire.uses.training.replicas.flat_parameters import FlatParameters
from thinwire.uses.training.replicas.recipes import EXCHANGE, REPLICAS
from thinwire.uses.training.replicas.synchroniser import Synchroniser
from thinwire.uses.training.replicas.transport import Arrived, ReplicaNotFinite, ReplicaTally

RATE = 0.05
torch.manual_seed(0)
START = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 3))
SPARSE = Scheme(ChunkTopK(0.05), ErrorFeedback())


class Student:
    """One replica: a small model, its optimiser and its own samples, the same in every test."""

    def __init__(self, rank: int, momentum: float = 0.0) -> None:
        self.model = copy.deepcopy(START)
        self.optimiser = torch.optim.SGD(self.model.parameters(), RATE, momentum=momentum)
        self.rank, self.steps = rank, 0

    @property
    def parameters(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def backward(self) -> None:
        """Leave the gradient of the next batch in the parameters."""
        draw = torch.Generator().manual_seed(1000 * self.rank + self.steps)
        self.steps += 1
        x = torch.randn(8, 16, generator=draw)
        self.optimiser.zero_grad()
        nn.functional.cross_entropy(self.model(x), x[:, :3].argmax(1)).backward()

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def train(
    method: Method,
    steps: int,
    ranks: int = 2,
    plan: Adaptation | None = None,
    each: Callable[[Student, Synchroniser, int], None] | None = None,
) -> list[Student]:
    """Train replicas on threads; ``each`` is called behind every step."""
    office = PostOffice(ranks)

    def work(rank: int) -> Student:
        student = students[rank]
        synchroniser = synchroniser_of(method, student.parameters, office.network(rank), plan)
        for step in range(steps):
            student.backward()
            synchroniser.step(student.optimiser.step)
            if each is not None:
                each(student, synchroniser, step + 1)
        synchroniser.finish(student.optimiser.step)
        return student

    students = [Student(rank) for rank in range(ranks)]
    return on_each(ranks, work)


def together(students: Sequence[Student]) -> bool:
    return all(torch.equal(s.weights(), students[0].weights()) for s in students)


def averaged(steps: int, ranks: int = 2, late: int = 0) -> Tensor:
    """Return the weights of one model that takes the mean of all gradients, each ``late`` steps later."""
    students = [Student(rank) for rank in range(ranks)]
    waiting: list[list[Tensor]] = []

    def apply(gradients: list[Tensor]) -> None:
        for s in students:
            for p, g in zip(s.model.parameters(), gradients, strict=True):
                p.grad = g.clone()
            s.optimiser.step()

    for _ in range(steps):
        for s in students:
            s.backward()
        grads = [[p.grad for p in s.model.parameters()] for s in students]
        waiting.append([torch.stack(g).sum(0) / ranks for g in zip(*grads, strict=True)])  # type: ignore[arg-type]
        if len(waiting) > late:
            apply(waiting.pop(0))
    while waiting:
        apply(waiting.pop(0))
    return students[0].weights()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("late", [0, 2])
def test_uncoded_gradients_are_averaged_as_one_model_would_average_them(ranks: int, late: int) -> None:
    students = train(Gradients(Scheme(), late), 20, ranks)
    assert together(students) and torch.equal(students[0].weights(), averaged(20, ranks, late))


def test_an_allreduce_averages_them_too() -> None:
    students = train(AllReduce(), 20)
    assert torch.equal(students[0].weights(), averaged(20))
    assert together(train(AllReduce("bfloat16"), 20))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [n for n in REPLICAS.entries if n != "diloco"] + ["diloco:every=4"])
def test_replicas_of_every_recipe_end_with_the_same_bits(name: str, ranks: int) -> None:
    recipe = REPLICAS.parse(name)
    plan = None if recipe.policy is None else Adaptation(recipe.policy, 12)
    students = train(recipe.schemes[EXCHANGE], 12, ranks, plan)
    assert together(students)
    assert not torch.equal(students[0].weights(), Student(0).weights())


@dataclass(frozen=True)
class Wavering:
    """A policy that plans another delay each time, and another ratio for each rank."""

    every: int = 1

    def choose(self, sites: Sequence[ReplicaSite]) -> list[ReplicaChoice]:
        step = sites[0].step
        late = (2, 5, 3, 0, 4)[step % 5]
        return [ReplicaChoice(0.01 * (k + 1 + step % 3), None, late, 1, "") for k in range(len(sites))]


def test_a_plan_that_moves_keeps_replicas_together_and_loses_nothing() -> None:
    """Also where each rank has a ratio of its own."""
    taken = [0, 0]

    def count(student: Student, synchroniser: Synchroniser, step: int) -> None:
        taken[student.rank] = synchroniser.steps

    students = train(Gradients(SPARSE), 300, plan=Adaptation(Wavering()), each=count)
    assert together(students) and taken == [300, 300]


class Shrinking(Wavering):
    def choose(self, sites: Sequence[ReplicaSite]) -> list[ReplicaChoice]:
        late = 0 if sites[0].step < 4 else 4 if sites[0].step < 10 else 1
        return [ReplicaChoice(1.0, None, late, 1, "") for _ in sites]


def applied(method: Gradients, plan: Adaptation | None, rests: bool) -> list[list[float]]:
    """Return what was applied in each of 24 steps, whose gradients are 0.5, 1.5 and so on."""
    office = PostOffice(2)

    def work(rank: int) -> list[list[float]]:
        weight, steps = nn.Parameter(torch.zeros(4)), list[list[float]]()
        synchroniser = synchroniser_of(method, {"w": weight}, office.network(rank), plan)

        def apply() -> None:
            assert weight.grad is not None
            steps[-1].append(round(2 * float(weight.grad[0])) / 2)  # 8 bits

        for step in range(24):
            weight.grad = torch.full((4,), float(step + rank))
            steps.append([])
            synchroniser.step(apply)
            if rests:
                synchroniser.rest(apply)
        return steps

    ours, theirs = on_each(2, work)
    assert ours == theirs
    return ours


def test_a_message_waits_while_the_delay_grows_and_two_are_one_step_when_it_shrinks() -> None:
    found = applied(Gradients(Scheme()), Adaptation(Shrinking()), rests=False)
    assert max(map(len, found)) == 1 and found.count([]) == 4 and found[-1] == [22.5]
    assert sum(x % 1 == 0 for step in found for x in step) == 3  # the mean of two, one step after the other


def test_a_rest_between_steps_applies_nothing() -> None:
    found = applied(Gradients(Scheme(), 2), None, rests=True)
    assert found == [[], [], *([k + 0.5] for k in range(22))]


def reference_rounds(steps: int, method: Differences, ranks: int = 2) -> Tensor:
    """Return the shared weights after rounds of uncoded differences, by torch's own outer optimiser."""
    students = [Student(rank) for rank in range(ranks)]
    shared = nn.Parameter(students[0].weights())
    outer = torch.optim.SGD([shared], method.rate, momentum=method.momentum, nesterov=method.momentum > 0)
    for step in range(1, steps + 1):
        for s in students:
            s.backward()
            s.optimiser.step()
        if step % method.every == 0:
            shared.grad = -torch.stack([s.weights() - shared.detach() for s in students]).mean(0)
            outer.step()
            for s in students:
                nn.utils.vector_to_parameters(shared.detach().clone(), s.model.parameters())
    return shared.detach()


@pytest.mark.parametrize(
    "method", [Differences(every=1), Differences(every=5), Differences(every=4, rate=0.7, momentum=0.9)]
)
def test_local_steps_are_those_of_local_sgd_with_an_outer_optimiser(method: Differences) -> None:
    students = train(method, 20)
    assert together(students)
    torch.testing.assert_close(students[0].weights(), reference_rounds(20, method), rtol=1e-4, atol=1e-6)


def test_what_is_trained_while_an_exchange_is_under_way_is_kept() -> None:
    """With one replica's gradient alone, a late exchange changes nothing but when it is applied."""
    late = train(replace(Differences(every=4), late=3), 20, ranks=2)
    assert together(late)
    at_once = train(Differences(every=4), 20, ranks=2)
    assert torch.dist(late[0].weights(), at_once[0].weights()) < 0.1 * torch.dist(
        at_once[0].weights(), Student(0).weights()
    )


def test_error_feedback_loses_nothing_in_the_end() -> None:
    """Of a constant gradient, what arrived and what is still held are all that was sent."""
    office, scheme = PostOffice(2), Scheme(ChunkTopK(0.02), ErrorFeedback())

    def work(rank: int) -> tuple[Tensor, Tensor]:
        w = nn.Parameter(torch.zeros(8192))
        synchroniser = synchroniser_of(Gradients(scheme), {"w": w}, office.network(rank))
        g = torch.linspace(-1, 1, 8192)
        total = torch.zeros(8192)

        def apply() -> None:
            assert w.grad is not None
            total.add_(w.grad)

        for _ in range(50):
            w.grad = g.clone()
            synchroniser.step(apply)
        return total, synchroniser.state_dict()["residual.w"]

    (total, residual), (other, _) = on_each(2, work)
    assert torch.equal(total, other)
    torch.testing.assert_close(total + residual, 50 * torch.linspace(-1, 1, 8192), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    "method",
    [
        Gradients(SPARSE, 2),
        Gradients(SPARSE, 2, exact=9),
        Gradients(SPARSE, exact=13),
        Differences(SPARSE, every=3, late=2, momentum=0.5),
        REPLICAS.parse("cocktail").schemes[EXCHANGE],
        REPLICAS.parse("streaming:every=6,late=2").schemes[EXCHANGE],
    ],
    ids=["gradients", "coded since", "exact still", "differences", "cocktail", "streaming"],
)
def test_a_run_that_goes_on_from_what_was_saved_ends_with_the_same_bits(method: Method) -> None:
    def run(stop: int | None) -> list[Tensor]:
        offices = PostOffice(2), PostOffice(2)

        def work(rank: int) -> Tensor:
            student = Student(rank, momentum=0.5)
            synchroniser = synchroniser_of(method, student.parameters, offices[0].network(rank))
            for step in range(1, 21):
                student.backward()
                synchroniser.step(student.optimiser.step)
                if step == 10:
                    synchroniser.drain(student.optimiser.step)
                if step == stop:
                    state = {k: x.clone() for k, x in synchroniser.state_dict().items()}
                    synchroniser = synchroniser_of(method, student.parameters, offices[1].network(rank))
                    synchroniser.load_state_dict(state)
            synchroniser.finish(student.optimiser.step)
            return student.weights()

        return on_each(2, work)

    whole, resumed = run(None), run(10)
    assert torch.equal(whole[0], whole[1]) and torch.equal(resumed[0], whole[0])


@pytest.mark.parametrize(
    "method",
    [AllReduce(), Gradients(SPARSE, 1), Gradients(SPARSE, 1, exact=5), Differences(SPARSE, every=2)],
    ids=str,
)
def test_values_that_are_not_finite_end_every_rank_and_stay_out_of_residuals(method: Method) -> None:
    office = PostOffice(2)

    def work(rank: int) -> tuple[str, dict[str, Any]]:
        student = Student(rank)
        synchroniser = synchroniser_of(method, student.parameters, office.network(rank))
        with pytest.raises(ReplicaNotFinite) as error:
            for step in range(6):
                student.backward()
                if step == 2 and rank == 1:
                    student.model[0].weight.grad[0, 0] = float("nan")
                synchroniser.step(student.optimiser.step)
        return str(error.value), synchroniser.state_dict()

    for text, state in on_each(2, work):
        assert "rank 1" in text
        held = [x for name, x in state.items() if "residual" in name]
        assert bool(held) != (method == AllReduce()) and all(x.isfinite().all() for x in held)


def test_a_message_that_lacks_segments_or_has_them_twice_is_refused_by_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However its packets are cut."""
    monkeypatch.setattr(coder, "BLOCK", 1 << 13)
    one, flat = Coder(SPARSE, (4, 1 << 12), ReplicaTally()), torch.randn(4, 1 << 12)
    message = one.encode(flat)
    assert message is not None
    first, last = message.packets
    for packets in ([], [first], [last, first], [last], [first, first], [first, last, last]):
        with pytest.raises(PayloadError, match="rank 1 sent"):
            one.mean(Arrived(0, message.coded, {1: packets}))
    monkeypatch.setattr(coder, "BLOCK", 1 << 12)
    cut = Coder(SPARSE, (4, 1 << 12), ReplicaTally()).encode(flat)
    assert cut is not None and len(cut.packets) == 4
    means = [one.mean(Arrived(0, message.coded, {1: x.packets})) for x in (message, cut)]
    assert torch.equal(*means)


@pytest.mark.parametrize("ratio", [0.01, 0.08])
def test_policies_count_the_bytes_that_are_sent(ratio: float) -> None:
    """They once counted 8 bits a kept value where 32 were sent, and every plan was late."""
    values = torch.randn(7, 61440)
    own = Coder(
        Scheme(codec_of(ReplicaChoice(ratio, None, 0, 1, "")), ErrorFeedback()),
        values.shape,
        ReplicaTally(),
    )
    message = own.encode(values)
    assert message is not None
    sent = sum(map(len, message.packets))
    assert sent == pytest.approx(ReplicaChoice(ratio, None, 0, 1, "").nbytes(values.numel()), rel=0.1)


@pytest.mark.parametrize(("late", "exact"), [(0, 0), (2, 0), (0, 6), (2, 7)])
def test_a_step_that_a_scaler_skips_loses_nothing_of_the_others(late: int, exact: int) -> None:
    """What is applied, kept back and to be sent again is the sum of all finite gradients."""
    office = PostOffice(2)

    def work(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        student = Student(rank)
        table = FlatParameters(student.parameters)
        method = Gradients(SPARSE, late, exact)
        synchroniser = gradient_synchroniser(method, table, office.network(rank), skips=True)
        applied, total = torch.zeros(table.numel), torch.zeros(table.numel)

        def apply() -> None:
            mean = table.gradients().view(-1)[: table.numel]
            if mean.isfinite().all():
                applied.add_(mean)

        for step in range(12):
            student.backward()
            if step == 5 and rank == 1:
                next(student.model.parameters()).grad.fill_(float("inf"))
            flat = table.gradients().view(-1)[: table.numel]
            total += flat if flat.isfinite().all() else 0
            synchroniser.step(apply)
        synchroniser.drain(apply)
        state = synchroniser.state_dict()
        kept = sum(table.flat(state, part) for part in ("residual.", "again.") if f"{part}0.weight" in state)
        return applied, total, kept.view(-1)[: table.numel]

    (applied, *ours), (_, *theirs) = on_each(2, work)
    sums = [total - kept for total, kept in (ours, theirs)]
    torch.testing.assert_close(applied, sum(sums) / 2, atol=1e-5, rtol=1e-4)


def test_replicas_start_from_parameters_in_any_order_and_frozen_ones_stay_out() -> None:
    """A framework may list parameters in another order on another rank: names decide (torchft 206)."""
    office = PostOffice(2)

    def work(rank: int) -> Tensor:
        student = Student(rank)
        named = list(student.parameters.items())
        parameters = dict(reversed(named)) if rank else dict(named)
        synchroniser = synchroniser_of(Gradients(SPARSE), parameters, office.network(rank))
        for _ in range(5):
            student.backward()
            synchroniser.step(student.optimiser.step)
        return student.weights()

    ours, theirs = on_each(2, work)
    assert torch.equal(ours, theirs)


def test_a_silent_replica_is_named() -> None:
    student = Student(0)
    synchroniser = synchroniser_of(
        Gradients(Scheme(Raw())), student.parameters, PostOffice(2).network(0, deadline=0.1)
    )
    student.backward()
    with pytest.raises(Exception, match="rank 1"):
        synchroniser.step(student.optimiser.step)


def test_a_policy_decides_again_when_its_link_has_changed() -> None:
    """Every five steps, by what the link is then: it gets a hundred times slower after the twelfth."""
    office, steps = PostOffice(2), 22

    def work(rank: int) -> list[tuple[int, float | None]]:
        student, rate = Student(rank), [1e5]

        def link() -> tuple[float, float]:
            return rate[0], 0.001

        network = replace(office.network(rank), link=link)
        synchroniser = synchroniser_of(
            Gradients(SPARSE), student.parameters, network, Adaptation(Deco(every=5))
        )
        for step in range(1, steps + 1):
            rate[0] = 1e5 if step <= 12 else 1e3
            student.backward()
            synchroniser.begin()
            time.sleep(0.002)  # compute enough to hide something
            synchroniser.step(student.optimiser.step)
        return [(change.step, change.choice.ratio) for change in synchroniser.changes]

    for changes in on_each(2, work):
        first, *later = changes
        before = [ratio for step, ratio in later if step <= 12]
        after = [ratio for step, ratio in later if step > 12]
        assert first[0] == 0 and before and after and all(step < 5 or step % 5 == 0 for step, _ in later)
        assert after[-1] is not None and before[-1] is not None and after[-1] < before[-1]
