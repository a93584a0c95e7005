"""What goes wrong: input that cannot be, lost references, interrupted calls, cut lines, and frozen ranks."""

from __future__ import annotations

import time
from threading import Barrier, Timer
from typing import Any

import pytest
import torch
from expert_models import batch, flux_moe, nucleus, nucleus_inputs, on_ranks, sampled
from meshes import Mesh
from relayed import Running, mesh
from tcp_proxy import TcpProxy
from torch import Tensor, nn
from waiting import LONG

from thinwire.types import InputError, LinkError
from thinwire.uses.pictures.expert_parallel.routing import ExpertParallel, Experts

pytest.importorskip("diffusers")

Meshes = dict[int, list[Mesh]]


@pytest.mark.parametrize(
    ("owners", "words"),
    [
        ([0, 1, 5, 1, 0, 1, 0, 1], r"expert 2 is given to rank 5, which nobody is; give it one of \(0, 1\)"),
        ([0, 1], "owners are given for 2 experts, and a layer has 8; name a rank for each"),
        ("01010101", "owners '01010101' are no ranks; give one for each expert"),
        (7, "owners 7 are no ranks"),
    ],
)
def test_an_expert_that_nobody_owns(ranks: Meshes, owners: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        on_ranks(ranks[2], flux_moe(), "dice", lambda own, *_: None, owners=owners)


def test_a_rank_without_the_weights_of_its_expert(ranks: Meshes) -> None:
    model: Any = flux_moe()
    model.transformer_blocks[1].ff.experts[1].to("meta")
    with pytest.raises(InputError, match=r"rank 1: .* is among what rank 1 computes"):  # on rank 0, at once
        on_ranks(ranks[2], model, "dice", lambda own, *_: None)
    model.transformer_blocks[1].ff.experts[0].to("meta")
    words = r"blocks\.1\.ff\.experts\.0\.w1\.weight is among what rank 0 computes, and it is on no device"
    with pytest.raises(InputError, match=words):
        on_ranks(ranks[2], model, "dice", lambda own, *_: None)
    with pytest.raises(InputError, match="among what each rank computes"):
        on_ranks(ranks[2], model, "batch", lambda own, *_: None)
    packed: Any = nucleus()
    packed.transformer_blocks[1].img_mlp.experts.to("meta")
    with pytest.raises(InputError, match=r"img_mlp\.experts\.\w+ is among what rank 0 computes"):
        on_ranks(ranks[2], packed, "ep-sync", lambda own, *_: None)


@pytest.mark.parametrize("owners", [None, [0] * 8, [1, 0, 0, 0, 0, 0, 0, 0]])
def test_all_tokens_to_one_expert_and_none_to_one(ranks: Meshes, owners: list[int] | None) -> None:
    """Whichever rank has it, and also where a rank has no experts: exact."""
    model: Any = flux_moe()
    for block in model.transformer_blocks:
        block.ff.gate.weight.data.zero_()  # equal scores: all tokens choose the same experts
    wanted = sampled(model, range(3), 3)
    for recipe in ("ep-sync:values=own", "dice:warmup=3,values=own"):
        use = lambda own, _, k: sampled(own, [[0], [1, 2]][k], 3)  # noqa: E731
        found = on_ranks(ranks[2], model, recipe, use, owners=owners)
        assert (torch.cat(found) - wanted).norm() < 5e-7 * wanted.norm()


@pytest.mark.parametrize(
    ("model", "recipe", "words"),
    [
        (lambda: flux_moe(1, 4, 3), "dice", r"ff gives each token 3 experts, and a stride is for 2; use str"),
        (lambda: flux_moe(1, 4, 1), "dice-residual", "ff gives each token 1 experts, and a stride is for 2"),
        (nucleus, "dice:stride=1", "lets experts choose their tokens, which only a synchronous schedule"),
    ],
)
def test_a_layer_that_a_schedule_does_not_serve(ranks: Meshes, model: Any, recipe: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        on_ranks(ranks[2], model(), recipe, lambda own, *_: None)


def test_ranks_that_are_not_alike(ranks: Meshes) -> None:
    """Other weights of an expert, where both have it; another choice; other times; a model in training."""
    model, other, few = flux_moe(), flux_moe(), flux_moe(chosen=3)
    other.get_parameter("transformer_blocks.1.ff.experts.5.w2.weight").data *= 3
    words = {
        r"the weights of \w+\.1\.ff\.experts\.5 .*": other,
        "the choice of experts '3 of 8 in 2": few,
    }
    for word, unlike in words.items():
        with pytest.raises(InputError, match=f"rank 1 has {word}.*make them alike"):
            on_ranks(ranks[2], [model, unlike], "ep-sync", lambda *_: None)

    def late(own: nn.Module, found: Experts, rank: int) -> None:
        own(**batch([rank], 1.0 - rank / 2))

    with pytest.raises(InputError, match="with other inputs; give all ranks one schedule of times"):
        on_ranks(ranks[2], model, "dice", late)

    def training(own: nn.Module, found: Experts, rank: int) -> None:
        own.train()(**batch([rank]))

    with pytest.raises(InputError, match=r"no layer of experts has exchanged anything .* model's eval"):
        on_ranks(ranks[2], model, "dice", training)


@pytest.mark.parametrize(
    ("model", "inputs", "recipe"),
    [(flux_moe, batch, "dice"), (nucleus, nucleus_inputs, "dice-residual:mode=sync,stride=1")],
)
def test_a_batch_of_another_size(ranks: Meshes, model: Any, inputs: Any, recipe: str) -> None:
    """Within a generation: refused by name. Else it is new pictures."""

    def use(own: nn.Module, found: Experts, rank: int) -> None:
        own(**inputs([rank], 1.0))
        found.reset()
        for i in range(2):
            own(**inputs([rank, 2], 1 - i / 4))
        own(**inputs([rank], 0.5))

    with pytest.raises(InputError, match=r"this rank has another number of tokens .* call reset\(\) first"):
        on_ranks(ranks[2], model(), recipe, use)


@pytest.mark.parametrize(
    "recipe", ["dice-residual:mode=sync", "dice-residual", "dice-residual:mode=displaced"]
)
def test_a_lost_reference_is_made_up_for(ranks: Meshes, recipe: str) -> None:
    """By the values themselves, then a keyframe; the others go on as they would."""
    model = flux_moe()

    def use(own: nn.Module, found: Experts, rank: int, damaged: bool) -> tuple[Tensor, int]:
        session: Any = found._session
        x, crossing = batch([rank], 1.0)["hidden_states"], session._experts
        for i in range(6):
            if damaged and rank == 1 and i == 3:
                for line in (crossing._to[0], crossing._back[0]):
                    receiver = line._receivers[0]
                    receiver._versions[next(iter(receiver._versions))] += 1
            x = x - own(**batch([rank], 1 - i / 6) | {"hidden_states": x})[0] / 6
        return x, found.tally.repairs

    whole = on_ranks(ranks[2], model, recipe, lambda o, f, k: use(o, f, k, False))
    found = on_ranks(ranks[2], model, recipe, lambda o, f, k: use(o, f, k, True))
    assert found[0][1] == 0 < found[1][1]
    for (x, _), (y, _) in zip(found, whole, strict=True):
        assert (x - y).norm() < 1e-2 * y.norm()


def test_an_error_between_calls_does_not_wait_for_others(
    ranks: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, leave = dict[int, float](), ExpertParallel.leave

    def timed(session: ExpertParallel, whole: bool) -> None:
        began = time.monotonic()
        leave(session, whole)
        left[session._rank] = time.monotonic() - began

    def use(own: nn.Module, found: Experts, rank: int) -> None:
        own(**batch([rank], 1.0))
        if rank == 1:
            time.sleep(3)  # a call behind
            return
        own(**batch([rank], 0.9))
        raise KeyboardInterrupt

    monkeypatch.setattr(ExpertParallel, "leave", timed)
    with pytest.raises(KeyboardInterrupt):
        on_ranks(ranks[2], flux_moe(), "ep-displaced", use, deadline=30)
    assert left[0] < 2


@pytest.mark.parametrize("recipe", ["ep-sync", "ep-displaced", "dice-residual"])
def test_pictures_follow_interrupted_ones(ranks: Meshes, recipe: str) -> None:
    """A rank that waits for the old ones is told, not left waiting."""
    model = flux_moe()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def use(own: Any, found: Experts, rank: int) -> Tensor:
        if rank == 1:
            sampled_to(own, rank, 2)
            handle = own.transformer_blocks[1].register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                own(**batch([rank], 0.2))
            handle.remove()
        else:
            with pytest.raises(LinkError, match="rank 1 has left, or ended with an error"):
                sampled_to(own, rank, 2)
                for i in range(4):  # stale schedules need what is missing one or two steps later
                    own(**batch([rank], 0.2 - i / 20))
        found.reset()
        return sampled(own, [rank], 3)

    def sampled_to(own: Any, rank: int, steps: int) -> None:
        for i in range(steps):
            own(**batch([rank], 1 - i / 10))

    again = on_ranks(ranks[2], model, recipe, use, deadline=600.0)
    plain = on_ranks(ranks[2], model, recipe, lambda own, _, k: sampled(own, [k], 3))
    assert all(torch.equal(x, y) for x, y in zip(again, plain, strict=True))


@pytest.mark.parametrize("recipe", ["ep-sync", "dice"])
def test_a_frozen_rank_is_named_by_the_deadline(ranks: Meshes, recipe: str) -> None:
    over, model = Barrier(3), flux_moe(1)

    def use(own: nn.Module, found: Experts, rank: int) -> None:
        own(**batch([rank], 1.0))
        if rank < 2:
            start = time.monotonic()
            with pytest.raises(LinkError, match=r"waited 1 s for the \w+ of transformer_bl.* from rank 2 "):
                for i in range(3):
                    own(**batch([rank], 0.5 - i / 10))
            assert time.monotonic() - start < LONG / 2  # not one deadline after another
        over.wait(LONG)

    on_ranks(ranks[3], model, recipe, use, deadline=1.0)


@pytest.mark.parametrize("recipe", ["ep-sync", "dice-residual:synced=none"])
def test_a_line_that_is_cut_for_a_while_changes_nothing(ranks: Meshes, recipe: str) -> None:
    model = flux_moe(1)

    def use(own: nn.Module, found: Experts, rank: int, proxy: TcpProxy | None = None) -> Tensor:
        x = batch([rank], 1.0)["hidden_states"]
        for i in range(4):
            if i == 2 and proxy is not None and rank == 0:
                proxy.cut()
                Timer(0.5, proxy.restore).start()
            x = x - own(**batch([rank], 1 - i / 4) | {"hidden_states": x})[0] / 4
        return x

    wanted = on_ranks(ranks[2], model, recipe, use)
    with Running() as relay, TcpProxy(relay.port) as proxy, mesh(proxy) as cut:
        first = proxy.connections
        found = on_ranks(cut, model, recipe, lambda o, f, k: use(o, f, k, proxy))
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
        assert proxy.connections > first


def test_experts_that_choose_tokens_of_a_rank_with_fewer_pictures(ranks: Meshes) -> None:
    model = nucleus()
    with torch.no_grad():
        wanted = model(**nucleus_inputs([0, 1, 2], 0.5))[0]

    def use(own: nn.Module, found: Experts, rank: int) -> Tensor:
        made: Tensor = own(**nucleus_inputs([[0, 1], [2]][rank], 0.5))[0]
        return made

    found = torch.cat(on_ranks(ranks[2], model, "ep-sync:values=own", use))
    assert (found - wanted).norm() < 5e-7 * wanted.norm()
