"""Messages of a device: packets cross once each way, nothing waits in between, a CPU agrees to the bit."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from each import each
from meshes import Mesh, meshes, together
from other_device import DEVICE, Elsewhere, There
from picture_models import flux, flux_inputs
from torch import Tensor, nn

import thinwire
from thinwire.types import DesyncError, InputError, PayloadError
from thinwire.uses.pictures.arrivals import Arrivals
from thinwire.uses.pictures.coding import Endpoints, mask_packet, whole
from thinwire.uses.pictures.context_parallel.recipes import ATTENTION, OUTPUT, parse_diffusion_recipe
from thinwire.uses.pictures.diffusers_names.interfaces import ExpertLayer
from thinwire.uses.pictures.expert_parallel.dispatch import PeerRows, computed
from thinwire.uses.pictures.expert_parallel.pairs import WantedPairs, marked
from thinwire.uses.pictures.expert_parallel.recipes import DISPATCH, parse_experts_recipe
from thinwire.uses.pictures.message_bytes import opened, packing
from thinwire.uses.pictures.messages import ExchangeTally, Posted
from thinwire.uses.pictures.model_calls import CallInputs
from thinwire.uses.pictures.rank_message import Key, RankMessage, TensorKind
from thinwire.uses.pictures.send_lane import SendLane
from thinwire.verdicts import Questions

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
HERE = torch.device("cpu")
KEYS, SHAPE = (1, 2), (2, 12, 64)


def drawn(step: int, dtype: torch.dtype) -> Tensor:
    """Return values that move a little from step to step."""
    first, move = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(3))
    return (first + 0.1 * step * move).to(dtype)


SENT: Any = SimpleNamespace(
    tally=ExchangeTally(), decode=lambda _, ends, rank, *rest: ends.decode(rank, *rest)
)
RECIPES = ("raw", "fp16", "int8", "compact", "compact:bits=2,early=1", "lowrank", "compact-pipe")


@each("recipe, role", [(recipe, role) for recipe in RECIPES for role in (ATTENTION, OUTPUT)])
def test_a_message_crosses_once_each_way(recipe: str, role: str) -> None:
    coding = parse_diffusion_recipe(recipe).schemes[role]
    sender, there, here = (Endpoints(coding, [0]) for _ in range(3))
    questions, arrivals = Questions(), Arrivals(SimpleNamespace(opened_by=lambda opener: None))  # type: ignore[arg-type]
    arrivals.begin(DEVICE)
    alone = Endpoints(coding, [0])  # the same, on the CPU
    with Elsewhere() as seen:
        for step in range(3):
            x = drawn(step, torch.bfloat16)
            given = x.to(DEVICE)
            seen.clear()
            packet, x_hat = sender.encode(given, KEYS, step)
            assert (seen.to_host, seen.to_device, seen.waits) == (0, 0, [])
            body = RankMessage(7, 8, [packet]).pack()
            assert (seen.to_host, seen.to_device, len(seen.waits)) == (1, 0, 1), seen.waits
            assert bytes(body) == RankMessage(7, 8, [alone.encode(x, KEYS, step)[0]]).pack()
            [data] = RankMessage.unpack(body).data
            seen.clear()
            came = arrivals.open(bytes(body))  # as the thread of the link does
            assert (seen.to_host, seen.to_device, seen.waits) == (0, 1, [])
            [found] = arrivals.take(came, DEVICE)
            made = there.decode(0, found, KEYS, [SHAPE], given, questions)
            assert (seen.to_host, seen.to_device, seen.waits) == (0, 1, [])
            [on_cpu] = opened([data], HERE)
            wanted = here.decode(0, on_cpu, KEYS, [SHAPE], x)
            assert isinstance(made, There) and isinstance(x_hat, There)
            assert torch.equal(made.here, wanted) and torch.equal(x_hat.here, wanted)
        seen.clear()
        questions.settle()  # of all steps
        assert seen.to_host == len(seen.waits) <= 1


def test_packets_of_one_message_cross_together_each_way() -> None:
    """Rows that are new, and others: two packets of one message to the ranks of experts."""
    coding = parse_experts_recipe("dice-residual").schemes[DISPATCH]
    here, there = PeerRows(coding, 1, SENT), PeerRows(coding, 1, SENT)
    x = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))
    with Elsewhere() as seen:
        for step, wanted in enumerate(([0, 2, 5], [0, 3, 5])):
            mark = torch.zeros(9, dtype=torch.bool)
            mark[wanted] = True
            [on_cpu], [away] = marked([mark], HERE), marked([mark], DEVICE)
            [first] = [whole(mark[None], [5])]
            alike, _ = here.send((x + step)[wanted], on_cpu, 3, step)
            sent, _ = there.send((x + step)[wanted].to(DEVICE), away, 3, step)
            seen.clear()
            data = packing([first, *sent])()
            assert (seen.to_host, seen.to_device, len(seen.waits)) == (1, 0, 1), seen.waits
            assert [bytes(d) for d in data] == [bytes(d) for d in packing([first, *alike])()]
            assert sum(map(bool, map(len, data))) == 2 + step
            seen.clear()
            back = opened(data[1:], DEVICE)
            assert (seen.to_host, seen.to_device, seen.waits) == (0, 1, [])
            parts = [p for packet in back if packet for s in packet.sections for p in s.payload.parts]
            assert all(isinstance(p, There) for p in parts)


def test_messages_wait_on_the_host_where_too_many_are_on_the_device() -> None:
    """And one that cannot be opened is refused where it is taken, not where it comes."""
    body = bytes(RankMessage(7, 8, [whole(torch.ones(1, 4), [1])]).pack())
    arrivals = Arrivals(SimpleNamespace(opened_by=lambda opener: None), room=2 * len(body))  # type: ignore[arg-type]
    arrivals.begin(HERE)
    came = [arrivals.open(body) for _ in range(3)]
    assert [one.packets is None for one in came] == [False, False, True]
    assert all(arrivals.take(one, HERE)[0] is not None for one in came)
    assert arrivals.open(body).packets is not None
    arrivals.drop(came[0])
    cut = RankMessage(7, 8, [b"TW no packet"]).pack()
    bad = arrivals.open(bytes(cut))
    with pytest.raises(PayloadError, match="wire version"):
        arrivals.take(bad, HERE)
    assert arrivals.open(bytes(RankMessage.stop().pack())).message.stopped


def test_a_wrong_reference_is_found_when_the_device_is_asked() -> None:
    coding = parse_diffusion_recipe("compact").schemes[ATTENTION]
    sender, there, questions = Endpoints(coding, []), Endpoints(coding, [0]), Questions()
    with Elsewhere():
        for step in range(2):
            x = drawn(step, torch.bfloat16).to(DEVICE)
            [found] = opened(packing([sender.encode(x, KEYS, step)[0]])(), DEVICE)
            if step:
                [parts] = (there._receivers[0]._references.store.get(k) for k in KEYS[1:])
                parts[0].add_(1)  # type: ignore[index]
            there.decode(0, found, KEYS, [SHAPE], x, questions)
        with pytest.raises(DesyncError, match="sample 2: the reconstruction differs"):
            questions.settle()
        questions.settle()  # nothing is asked twice


def test_which_tokens_go_to_which_experts_is_read_once_and_rows_cross_once_each_way() -> None:
    coding = parse_experts_recipe("ep-sync").schemes[DISPATCH]
    owned, layer = (
        {0: [0, 2], 1: [1, 3]},
        ExpertLayer(0, "ff", 4, 2, [lambda x, k=k: x + k for k in range(4)]),
    )
    draw = torch.Generator().manual_seed(1)
    x, chosen = torch.randn(9, 8, generator=draw).bfloat16(), torch.rand(9, 4, generator=draw) < 0.4
    here, there = PeerRows(coding, 1, SENT), PeerRows(coding, 0, SENT)
    key, mask = Key(0, 0, TensorKind.TOKENS, 0), Key(0, 0, TensorKind.CHOICES, 0)
    posted = Posted(0, "tokens", key, 0, 3)
    with Elsewhere() as seen:
        there_x, wanted = x.to(DEVICE), chosen.to(DEVICE)
        seen.clear()
        pairs = WantedPairs.of_turn(wanted, owned)
        assert (seen.to_host, seen.to_device, len(seen.waits)) == (1, 1, 1)
        sent, _ = here.send(there_x.index_select(0, pairs.tokens[1].there), pairs.tokens[1], key.pack(), 0)
        seen.clear()
        data = packing([mask_packet(pairs.of(owned[1]), mask.pack()), *sent])()
        assert (seen.to_host, seen.to_device, len(seen.waits)) == (1, 0, 1)
        seen.clear()
        [first], rest = opened(data[:1], HERE), opened(data[1:], DEVICE)
        choices = there.choices(posted, first, 2)
        tokens, outputs = marked([choices.any(1), choices.flatten()], DEVICE)
        rows = there.take(posted, rest, tokens, there_x[:0])
        made = computed(layer, owned[1], rows, choices[tokens.here])
        assert (seen.to_host, seen.waits) == (0, []) and seen.to_device == 3  # rows, and what to do with them
        assert torch.equal(choices, chosen[:, owned[1]]) and len(made) == outputs.many
        wanted_rows = [x[t] + e for t in range(9) for e in owned[1] if chosen[t, e]]
        assert isinstance(made, There) and torch.equal(made.here, torch.stack(wanted_rows))


def test_inputs_are_read_in_one_copy_and_have_one_checksum_on_all_devices() -> None:
    inputs = {
        "hidden_states": torch.randn(1, 33, 7).bfloat16(),
        "ids": [torch.arange(5), torch.ones(3, dtype=torch.bool)],
        "timestep": torch.tensor([0.25, 0.5]),
        "return_dict": False,
    }
    here = CallInputs.of(inputs)
    assert here.time == 0.5
    with Elsewhere() as seen:
        there = {
            name: [y.to(DEVICE) for y in x] if isinstance(x, list) else x.to(DEVICE)
            for name, x in inputs.items()
            if not isinstance(x, bool)
        } | {"return_dict": False}
        seen.clear()
        assert CallInputs.of(there) == here
        assert (seen.to_host, len(seen.waits)) == (1, 1)
    for name in ("hidden_states", "timestep"):
        moved = inputs[name].flip(-1)  # type: ignore[union-attr]
        assert CallInputs.of(inputs | {name: moved}).sums[name] != here.sums[name]


def test_ranks_of_two_types_are_told_so() -> None:
    def rank(peers: Mesh, model: nn.Module) -> None:
        with thinwire.parallel(model, peers, "compact"):
            pass

    models = [nn.Module.to(flux(), dtype) for dtype in (torch.float32, torch.bfloat16)]
    with meshes(2) as two, pytest.raises(InputError, match=r"has the type of its weights 'torch\.\w+', and"):
        together([lambda one=one: rank(*one) for one in zip(two, models, strict=True)])


@cuda
@each("recipe", ["compact", "compact:bits=2", "fp16", "displaced", "ulysses", "compact-pipe", "guidance"])
def test_a_card_and_a_cpu_make_one_picture(recipe: str) -> None:
    def rank(peers: Mesh, device: str) -> list[Tensor]:
        model, made = copy.deepcopy(whole).to(device), []
        with torch.no_grad(), thinwire.parallel(model, peers, recipe) as found:
            for step in range(4):
                x = {
                    n: v.to(device) if n != "return_dict" else v
                    for n, v in flux_inputs(63, 1 - step / 4).items()
                }
                made.append(model(**x)[0].cpu())
            assert found.tally.repairs == 0
        return made

    whole = flux()  # not by each rank: diffusers imports its models at first use, on one thread at a time
    with meshes(2) as two:
        here, there = together([lambda one=one: rank(*one) for one in zip(two, ("cpu", "cuda"), strict=True)])
    assert all(torch.equal(*pair) for pair in zip(here, there, strict=True))


def test_a_job_that_fails_on_its_thread_is_told_and_raised() -> None:
    told = list[BaseException]()
    lane, done = SendLane(told.append), list[int]()
    for k in (1, 2):
        lane.do(torch.device("cuda"), lambda k=k: done.append(k))
    lane.flush()
    lane.do(torch.device("cuda"), lambda: [][5])
    with pytest.raises(IndexError):
        lane.flush()
    with pytest.raises(IndexError):
        lane.do(torch.device("cuda"), lambda: done.append(3))
    lane.renew()  # as the next picture does
    lane.do(torch.device("cuda"), lambda: done.append(4))
    lane.flush()
    lane.close()
    assert done == [1, 2, 4] and len(told) == 1
