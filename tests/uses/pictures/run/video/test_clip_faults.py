"""Clips that do not go as they should: sizes that patches do not divide, ranks that fail, cut lines."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any

import pytest
import torch
from launchers import NEEDS, Command, hosted_store, rank_environment, sentence, warm
from meshes import Mesh
from picture_models import Inputs, on_ranks, one_device
from relayed import Running, mesh
from safetensors.torch import load_file, save_file
from tcp_proxy import TcpProxy
from torch import Tensor, nn

from thinwire.types import InputError, LinkError
from thinwire.uses.pictures.agreement import Parallel
from thinwire.uses.pictures.run.video import wan_fashion
from thinwire.uses.pictures.run.video.clips import Clip, sample_clip

pytest.importorskip("diffusers")

Meshes = dict[int, list[Mesh]]
CLIP = ("--model", "wan-fashion", "--frames", "6", "--canvas", "32x36", "--steps", "6", "--threads", "1")


def calls(frames: int, height: int, width: int) -> list[Inputs]:
    """Three steps of nearly the same time: patches of the step before are as of this one."""
    x = torch.randn(1, 1, frames, height, width, generator=torch.Generator().manual_seed(1))
    given = {"hidden_states": x, "encoder_hidden_states": Clip(2, 32, 32).words(), "return_dict": False}
    return [given | {"timestep": torch.full((1,), 500 - i * 1e-5)} for i in range(3)]


# frames, rows and columns of 2 x 4 x 4 in a token, some of which are left over; then how it is cut
SHAPES = [
    ((7, 36, 36), "patches=2,over=space"),  # 3 frames of 81 tokens, where 4 would be one too many
    ((10, 32, 32), "patches=3"),  # 5 frames of tokens, cut amid frames
    ((6, 34, 38), "patches=5,over=space"),
    ((2, 32, 32), "patches=7"),  # more than frames
]


@pytest.mark.parametrize(("shape", "cut"), SHAPES)
def test_sizes_that_patches_do_not_divide_make_the_video_of_one_device(
    ranks: Meshes, shape: tuple[int, int, int], cut: str
) -> None:
    model, inputs = wan_fashion.build(0), calls(*shape)
    wanted = one_device(model, inputs)
    for made in on_ranks(
        ranks[2], model, f"pipe-fp16:warmup=1,{cut}", lambda own, _: one_device(own, inputs)
    ):
        for x, y in zip(made, wanted, strict=True):
            assert x.shape == y.shape and (x - y).norm() < 1e-3 * y.norm()  # float16 crosses


WRONG = [
    ("pipe-fp16:patches=65,over=space", (4, 32, 32), "65 patches are more than each frame's 64 tokens"),
    ("pipe-fp16:patches=129", (4, 32, 32), "129 patches are more than the picture's 128 tokens"),
    ("latent", (7, 32, 32), "has 7 places along axis 2, no multiple of 2; give another size, or use"),
]


@pytest.mark.parametrize(("recipe", "shape", "told"), WRONG)
def test_what_cannot_be_cut_is_refused(
    ranks: Meshes, recipe: str, shape: tuple[int, int, int], told: str
) -> None:
    model, inputs = wan_fashion.build(0), calls(*shape)[:1]
    with pytest.raises(InputError, match=told):
        on_ranks(ranks[2], model, recipe, lambda own, _: one_device(own, inputs))


@pytest.mark.parametrize("recipe", ["compact-pipe", "compact"])
def test_a_clip_goes_on_over_a_line_that_was_cut(ranks: Meshes, recipe: str) -> None:
    """For a sixth of the deadline, as ten seconds are of what is given unless told."""
    model, clip = wan_fashion.build(0), Clip(6, 32, 36)

    def use(own: nn.Module, found: Parallel, proxy: TcpProxy | None = None) -> Tensor:
        session: Any = found._session

        def step(done: int) -> None:
            if proxy is not None and session._rank == 0 and done == 2:
                proxy.cut()
                Timer(1.0, proxy.restore).start()

        return sample_clip(own, clip, 6, seed=1, on_step=step)

    wanted, _ = on_ranks(ranks[2], model, recipe, use)
    with Running() as relay, TcpProxy(relay.port) as proxy, mesh(proxy) as cut:
        first = proxy.connections
        for made in on_ranks(cut, model, recipe, lambda *given: use(*given, proxy), deadline=6.0):
            assert torch.equal(made, wanted)
        assert proxy.connections > first


@pytest.mark.parametrize("recipe", ["latent", "compact-pipe"])
def test_a_clip_follows_an_interrupted_one(ranks: Meshes, recipe: str) -> None:
    model, clip = wan_fashion.build(0), Clip(6, 32, 36)

    def use(own: Any, found: Parallel, interrupted: bool) -> Tensor:
        session: Any = found._session
        if interrupted and session._rank == 1:
            handle = own.blocks[3].register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                sample_clip(own, clip, 3, seed=1)
            handle.remove()
        elif interrupted:
            with pytest.raises(LinkError, match="rank 1 has left, or ended with an error"):
                sample_clip(own, clip, 3, seed=1)
        return sample_clip(own, clip, 3, seed=2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    wanted, _ = on_ranks(ranks[2], model, recipe, lambda *given: use(*given, False))
    for made in on_ranks(ranks[2], model, recipe, lambda *given: use(*given, True), deadline=600.0):
        assert torch.equal(made, wanted)


DIES = """
import os, signal
from thinwire.uses.pictures.run.generation import ClipsRank
made = ClipsRank.sampled_by
def dying(model, clip, steps, seed, guidance, done):
    def step(n):
        done(n)
        if n == 4:
            os.kill(os.getpid(), signal.SIGKILL)
    return made(model, clip, steps, seed, guidance, step)
ClipsRank.sampled_by = staticmethod(dying)
"""


def test_a_rank_that_is_killed_in_a_clip_ends_all_others_and_is_named(tmp_path: Path) -> None:
    store, more = hosted_store(), ("--ranks", "3", "--deadline", "4")
    ranks = [rank(tmp_path, store, i, DIES if i == 1 else "", *more) for i in range(3)]
    assert ranks[1].wait() == -signal.SIGKILL
    start = monotonic()
    for one in (ranks[0], ranks[2]):
        assert one.wait() == 3 and "rank 1" in sentence(one)
    assert monotonic() - start < 4 + 6
    assert not files(tmp_path / "out")


def files(out: Path) -> list[str]:
    """What a run has left, beside the lock of its folder."""
    return [p.name for p in out.rglob("*") if p.is_file() and p.suffix in (".json", ".png", ".html")]


SMALL = """
from thinwire.uses.pictures.context_parallel.divided import loading
loading.memory_bytes = lambda: (None, 1_000_000)
"""
OTHER = """
from thinwire.uses.pictures.run.video import wan_fashion
wan_fashion.FOLDER = Path("other")
wan_fashion.WEIGHTS = wan_fashion.FOLDER / wan_fashion.WEIGHTS.name
"""
SPOILT = [
    (SMALL, "rank 1 needs 10 MB for blocks 2 to 3 of 4 and what all ranks have, and cpu has 1 MB free"),
    (OTHER, "has its weights (a checksum)"),  # of the whole model, which is measured first
]


@pytest.mark.parametrize(("spoil", "told"), SPOILT, ids=["no memory", "another version"])
def test_a_rank_that_cannot_take_part_is_named_to_all(tmp_path: Path, spoil: str, told: str) -> None:
    """One machine of two, each with its own rank."""
    shutil.copytree(wan_fashion.FOLDER, tmp_path / "other")
    file = tmp_path / "other" / wan_fashion.WEIGHTS.name
    weights = load_file(file)
    weights["blocks.3.ffn.net.2.bias"][-1] += 0.5
    save_file(weights, file)
    store = hosted_store()
    ranks = [rank(tmp_path, store, i, spoil if i else "") for i in range(2)]
    for one in ranks:
        assert one.wait() == 2 and told in sentence(one)
    assert not files(tmp_path / "out")


def rank(place: Path, store: Any, number: int, spoil: str, *more: str) -> Command:
    """Start one rank as torchrun would, once what ``spoil`` says is done in it."""
    code = f"import sys\nfrom pathlib import Path\n{spoil}\nfrom thinwire.cli import main\nmain(sys.argv[1:])"
    asked = ["generate", "compact-pipe", *CLIP, *more, "--quiet", "--out", place / "out"]
    needs = ("thinwire.cli.app", *NEEDS["generate"])
    world = 3 if "--ranks" in more else 2
    given = rank_environment(number, world, store.port)
    return warm().python(place / f"rank-{number}", "-c", code, *asked, needs=needs, cwd=place, **given)
