"""What goes wrong on the way: lost references, interrupted pictures, cut lines, and frozen ranks."""

from __future__ import annotations

from threading import Barrier, Timer
from typing import Any

import pytest
import torch
from meshes import Mesh
from picture_models import flux, flux_inputs, on_ranks, one_device, qwen, qwen_inputs
from relayed import Running, mesh
from tcp_proxy import TcpProxy
from torch import Tensor, nn
from waiting import LONG

from thinwire.types import LinkError
from thinwire.uses.pictures.agreement import Parallel
from thinwire.uses.pictures.rank_message import TensorKind

pytest.importorskip("diffusers")

Meshes = dict[int, list[Mesh]]


# mode, ranks, and the kind of which a reference is lost: queries or keys, or the output
LOSSES = [
    ("gather", 3, TensorKind.KEYS),
    ("gather", 2, TensorKind.OUTPUT),
    ("ulysses", 2, TensorKind.QUERIES),
    ("guidance", 2, TensorKind.OUTPUT),
    ("pipe", 3, TensorKind.HIDDEN),
]


@pytest.mark.parametrize(("mode", "world", "kind"), LOSSES)
@pytest.mark.parametrize("step", [1, 3])  # in the last one its sender may have left
def test_a_lost_reference_is_made_up_for(
    ranks: Meshes, mode: str, world: int, kind: TensorKind, step: int
) -> None:
    """By the values themselves, then a keyframe: all ranks go on with the same bits, near to those else."""
    model, passes = flux(), 2 if mode == "guidance" else 1

    def use(own: nn.Module, found: Parallel, damaged: bool) -> tuple[list[Tensor], int]:
        session, made = found._session, []
        for i in range(4):
            if damaged and session._rank == 1 and step == i:
                damage(session, kind)
            made += [own(**flux_inputs(63, 1 - i / 4, seed))[0] for seed in range(passes)]
        return made, found.tally.repairs

    whole, _ = on_ranks(ranks[world], model, "compact", lambda *a: use(*a, False), mode=mode)[0]
    ranks_made = on_ranks(ranks[world], model, "compact", lambda *a: use(*a, True), mode=mode)
    assert [repairs for _, repairs in ranks_made] == [0, 1, 0][:world]
    for made, _ in ranks_made:
        assert all(torch.equal(x, y) for x, y in zip(made, ranks_made[0][0], strict=True))
        assert all((x - y).norm() < 1e-2 * y.norm() for x, y in zip(made, whole, strict=True))


def damage(session: Any, kind: TensorKind) -> None:
    """Lose the count of a reference that this rank holds of what rank 0 has sent."""
    found = session._pairs[0] if kind == TensorKind.QUERIES else session._ends
    receiver = (found[kind] if isinstance(found, dict) else found)._receivers[0]
    receiver._versions[next(iter(receiver._versions))] += 1


@pytest.mark.parametrize("mode", ["gather", "displaced", "guidance", "pipe"])
def test_a_picture_follows_an_interrupted_one(ranks: Meshes, mode: str) -> None:
    """Also where it begins at the same time: a rank that waits for the old one is told, not left waiting."""
    model, passes = flux(), 2 if mode == "guidance" else 1

    def use(own: nn.Module, found: Parallel) -> tuple[list[Tensor], int]:
        session: Any = found._session
        if session._rank == 1:
            handle = own.single_transformer_blocks[1].register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                own(**flux_inputs(time=1.0, seed=7))
            handle.remove()
        else:
            with pytest.raises(LinkError, match="rank 1 has left, or ended with an error"):
                for seed in range(7, 7 + passes):
                    own(**flux_inputs(time=1.0, seed=seed))
        return picture(own), found.generation

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def picture(own: nn.Module) -> list[Tensor]:
        calls = [flux_inputs(time=time, seed=i) for time in (1.0, 0.5) for i in range(passes)]
        return one_device(own, calls)

    (x, first), (y, second) = on_ranks(ranks[2], model, "raw", use, mode=mode, deadline=600.0)
    assert all(torch.equal(*pair) for pair in zip(x, y, strict=True))
    assert first == second == 2
    wanted = picture(model)
    exact = all(torch.allclose(*pair, atol=1e-5) for pair in zip(x, wanted, strict=True))
    assert exact or mode in ("displaced", "pipe")


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_a_frozen_rank_is_named_by_the_deadline(ranks: Meshes, mode: str) -> None:
    over, model = Barrier(3), qwen()

    def use(own: nn.Module, found: Parallel) -> None:
        session: Any = found._session
        one_device(own, [qwen_inputs(63, 1.0)])
        if session._rank < 2:
            with pytest.raises(LinkError, match=r"waited 3 s for .*transformer_blocks.* from rank 2 "):
                one_device(own, [qwen_inputs(63, 0.5)])
        over.wait(LONG)

    on_ranks(ranks[3], model, "fp16", use, mode=mode, deadline=3.0)


def test_in_a_pipe_too_where_others_wait_for_it_in_turn(ranks: Meshes) -> None:
    over, model = Barrier(3), flux()

    def use(own: nn.Module, found: Parallel) -> None:
        session: Any = found._session
        one_device(own, [flux_inputs(time=1.0)])
        if session._rank != 1:
            with pytest.raises(LinkError, match=r"from rank 1 |for rank 1\b"):
                one_device(own, [flux_inputs(time=0.5)])
        over.wait(LONG)

    on_ranks(ranks[3], model, "pipe-fp16", use, deadline=2.0)


@pytest.mark.parametrize("recipe", ["compact", "displaced", "compact-pipe"])
def test_a_line_that_is_cut_for_a_while_changes_nothing(ranks: Meshes, recipe: str) -> None:
    model = flux()

    def use(own: nn.Module, found: Parallel, proxy: TcpProxy | None = None) -> Tensor:
        inputs, made = flux_inputs(63), []
        for i in range(4):
            if i == 2 and proxy is not None and found._session._rank == 0:
                proxy.cut()
                Timer(0.5, proxy.restore).start()
            inputs["timestep"] = torch.full((2,), 1 - i / 4)
            made.append(own(**inputs)[0])
        return torch.stack(made)

    wanted = on_ranks(ranks[2], model, recipe, use)[0]
    with Running() as relay, TcpProxy(relay.port) as proxy, mesh(proxy) as cut:
        first = proxy.connections
        for made in on_ranks(cut, model, recipe, lambda *a: use(*a, proxy)):
            assert torch.equal(made, wanted)
        assert proxy.connections > first
