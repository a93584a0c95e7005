"""One script and workers: the picture of one device, and what becomes of interrupts and wrong input."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crews import ThreadWorker, crew
from picture_models import flux, flux_inputs, one_device, sample, wan
from picture_pipelines import drawn, flux_pipeline, wan_pipeline
from torch import Tensor, nn
from waiting import free_port, until

import thinwire
from thinwire.links.hub.spoke import Spoke
from thinwire.types import AuthError, InputError, LinkError
from thinwire.uses.pictures.context_parallel import parallel
from thinwire.uses.pictures.weight_checksums import WatchedWeights
from thinwire.uses.pictures.workers.worker_words import WorkerJob

pytest.importorskip("diffusers")

Pipeline = Callable[[nn.Module, int], Tensor]


def addresses(workers: list[ThreadWorker]) -> list[str]:
    return [worker.address for worker in workers]


def begin(transformer: nn.Module, workers: list[str], recipe: str = "raw", **given: Any) -> None:
    """Begin and end, without a picture."""
    with thinwire.over_workers(transformer, workers, recipe, **given):
        pass


def guided(model: nn.Module, height: int) -> Tensor:
    return flux_pipeline(model, height, guidance=2.0)


MADE = [
    ("flux", flux, flux_pipeline, "raw", 2),
    ("flux", flux, guided, "guidance", 1),
    ("wan", wan, wan_pipeline, "raw", 1),
]


@pytest.mark.parametrize(("name", "make", "pipeline", "recipe", "n"), MADE)
def test_a_pipeline_makes_the_picture_of_one_device(
    models: Path, name: str, make: Callable[[], nn.Module], pipeline: Pipeline, recipe: str, n: int
) -> None:
    """Twice: the workers wait for the next host, and have the model already."""
    model, kept = make(), list[nn.Module]()
    with crew(models, n) as workers:
        for height in (96, 80):
            wanted = pipeline(model, height)
            with thinwire.over_workers(model, addresses(workers), recipe, model=name) as found:
                made = pipeline(model, height)
            assert (made - wanted).norm() <= 1e-5 * wanted.norm()
            assert 0 < found.input_nbytes < found.tally.nbytes
            kept.append(workers[0].model)
        for worker in workers:
            until(lambda worker=worker: worker.ended() == 2, worker.said)
    assert kept[0] is kept[1]
    assert torch.equal(pipeline(model, 80), wanted)  # the model is as it was


def test_of_a_divided_model_each_machine_loads_its_blocks_alone(models: Path) -> None:
    """The host has one of two blocks, and the worker loads the other: the picture is that of whole models."""
    from diffusers import WanTransformer3DModel

    model, pipe = wan(), "compact-pipe:patches=2"
    part = thinwire.load_part(WanTransformer3DModel, models / "wan" / "transformer", 1).eval()
    with crew(models) as workers:
        with thinwire.over_workers(part, addresses(workers), pipe, model="wan") as one:
            made = wan_pipeline(part, 96)
        own = [absent_block(workers[0].model.blocks[i]) for i in range(2)]
        with thinwire.over_workers(model, addresses(workers), pipe, model="wan") as other:
            wanted = wan_pipeline(model, 96)
    repairs = [one.tally.repairs, other.tally.repairs]
    assert own == [True, False] and absent_block(part.blocks[1])
    distance = float((made - wanted).norm() / wanted.norm())
    assert torch.equal(made, wanted), f"{distance:.2g} of the norm apart, repairs {repairs}"


def absent_block(block: nn.Module) -> bool:
    return not list(block.parameters())


def test_a_prompt_is_sent_once(models: Path) -> None:
    """Its embeddings are larger than all else here: 2 passes a step, of two prompts, are 16 passes."""
    model = wan()
    long, other = drawn(1, 512, 16), drawn(1, 512, 16, seed=2)
    with (
        torch.no_grad(),
        crew(models) as workers,
        thinwire.over_workers(model, addresses(workers), "fp16", model="wan") as found,
    ):
        for i in range(8):
            for stream, text in (("cond", long), ("uncond", other)):
                time, picture = torch.tensor([1 - i / 8]), drawn(1, 4, 1, 16, 16, seed=i)
                with model.cache_context(stream):  # type: ignore[operator]
                    model(picture, time, text, return_dict=False)
        sent = found.input_nbytes
    once, pictures = 2 * 4 * long.numel(), 8 * 4 * picture.numel()
    assert once + pictures <= sent <= once + pictures + 16 * 1000


@pytest.mark.parametrize("where", ["between two calls", "in a call"])
def test_an_interrupt_leaves_the_workers_ready(models: Path, where: str) -> None:
    model, calls = flux(), list[int]()
    wanted = flux_pipeline(model, 96)

    def interrupt(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    place = model if where == "between two calls" else model.single_transformer_blocks[1]
    with crew(models) as workers:
        handle = place.register_forward_hook(interrupt)  # type: ignore[union-attr]
        with (
            pytest.raises(KeyboardInterrupt),
            thinwire.over_workers(model, addresses(workers), "raw", model="flux"),
        ):
            flux_pipeline(model, 96)
        handle.remove()
        with thinwire.over_workers(model, addresses(workers), "raw", model="flux"):
            made = flux_pipeline(model, 96)
    assert (made - wanted).norm() <= 1e-5 * wanted.norm()


def test_a_call_that_fails_at_a_worker_is_told_and_the_next_picture_is_right(models: Path) -> None:
    model, failures = flux(), [RuntimeError("the card is full")] * 2
    wanted = sample(model, flux_inputs(), 3)

    def fail(*_: object) -> None:
        if failures:
            raise failures.pop()

    with crew(models) as workers:
        told = re.escape(f"the worker {workers[0].address} said: RuntimeError: the card is full")
        with (
            pytest.raises(LinkError, match=told),
            thinwire.over_workers(model, addresses(workers), "raw", model="flux"),
        ):
            workers[0].model.single_transformer_blocks[0].register_forward_hook(fail)
            sample(model, flux_inputs(), 3)
        with thinwire.over_workers(model, addresses(workers), "raw", model="flux") as found:
            with pytest.raises(LinkError, match="rank 1 has left, or ended with an error"):
                sample(model, flux_inputs(), 3)
            found.reset()
            made = sample(model, flux_inputs(), 3)
    assert (made - wanted).norm() <= 1e-5 * wanted.norm()
    assert any("RuntimeError: the card is full" in line for line in workers[0].said)


def test_the_last_of_a_worker_s_failures_is_told(models: Path) -> None:
    model, failures = flux(), [RuntimeError("the first"), RuntimeError("the second")]

    def fail(*_: object) -> None:
        if failures:
            raise failures.pop(0)

    with (
        crew(models) as workers,
        pytest.raises(LinkError, match="said: RuntimeError: the second"),
        thinwire.over_workers(model, addresses(workers), "raw", model="flux") as found,
    ):
        workers[0].model.single_transformer_blocks[0].register_forward_hook(fail)
        with pytest.raises(LinkError):
            sample(model, flux_inputs(), 1)
        found.reset()
        sample(model, flux_inputs(), 1)


def test_a_worker_that_has_no_memory_for_a_picture_tells_why_and_waits_for_the_next(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [torch.OutOfMemoryError("the card is full")]

    class Watched(WatchedWeights):
        def __init__(self, model: nn.Module, *but: Any) -> None:
            if full and model is workers[0].model:
                raise full.pop()
            super().__init__(model, *but)

    monkeypatch.setattr(parallel, "WatchedWeights", Watched)
    with crew(models) as workers:
        with pytest.raises(LinkError, match="cannot begin: OutOfMemoryError: the card is full"):
            begin(flux(), addresses(workers), model="flux")
        begin(flux(), addresses(workers), model="flux")


def test_other_weights_are_refused_by_the_worker_s_name(models: Path) -> None:
    model = flux()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with crew(models) as workers:
        named = re.escape(f"rank 1 is the worker {workers[0].address}; LoRAs and other patches of this")
        with pytest.raises(InputError, match=f"its weights .*{named}"):
            begin(model, addresses(workers), model="flux")
        begin(flux(), addresses(workers), model="flux")  # it waits for the next host


WRONG = [
    ({"model": "flux-2"}, "has no model 'flux-2', but flux, wan"),
    ({"model": "../models"}, "'../models' is not below the worker's folder"),
    ({"model": "wan"}, "WanTransformer3DModel, and the host's model a FluxTransformer2DModel"),
    ({"model": " "}, "is no name"),
    ({"recipe": "teleport"}, "teleport"),
    ({"recipe": "batch"}, "in mode batch workers have nothing to do"),
    ({"mode": "one"}, "in mode one workers have nothing to do"),
    ({"workers": []}, "0 workers are given; give 1 to 63 addresses"),
    ({"workers": "127.0.0.1:1"}, "is no list of addresses"),
    ({"workers": ["127.0.0.1:many"]}, "the address '127.0.0.1:many' is not HOST or HOST:PORT"),
    ({"workers": ["192.0.2.2", "192.0.2.2:29600"]}, "192.0.2.2:29600 is given twice"),
    ({"workers": ["192.0.2.2"]}, "needs a shared token"),
    ({"deadline": 0}, "a deadline of 0 is no number of seconds"),
]


@pytest.mark.parametrize(("given", "told"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_input_is_refused_in_a_sentence(models: Path, given: dict[str, Any], told: str) -> None:
    with crew(models) as workers:
        options: dict[str, Any] = {"workers": addresses(workers), "model": "flux"} | given
        with pytest.raises(InputError, match=re.escape(told)) as refused:
            begin(flux(), **options)
    assert "\n" not in str(refused.value) and ". " not in str(refused.value).replace("... ", "")


def test_an_input_that_cannot_be_sent_is_refused_by_name(models: Path) -> None:
    model, picture = flux(), flux_inputs()
    wanted = one_device(model, [picture])
    with crew(models) as workers, thinwire.over_workers(model, addresses(workers), "raw", model="flux"):
        with pytest.raises(
            InputError, match=r"joint_attention_kwargs\.draw is of type function, which cannot be sent"
        ):
            one_device(model, [picture | {"joint_attention_kwargs": {"draw": drawn}}])
        assert torch.allclose(one_device(model, [picture])[0], wanted[0], atol=1e-5)


def test_who_is_not_there_or_busy_or_has_another_token_is_named(models: Path) -> None:
    model, nobody, token = flux(), f"127.0.0.1:{free_port()}", b"a long enough token"
    with pytest.raises(LinkError, match=f"waited 1 s for the worker {nobody}; start thinwire worker there"):
        begin(model, [nobody], model="flux", deadline=1.0)
    with crew(models, token=token) as (worker,):
        given: dict[str, Any] = {"model": "flux", "token": token}
        with (
            thinwire.over_workers(model, [worker.address], "raw", **given),
            pytest.raises(LinkError, match=f"the worker {worker.address}: it is busy for the host "),
        ):
            begin(flux(), [worker.address], **given)
        with pytest.raises(AuthError, match="refused this token"):
            begin(model, [worker.address], model="flux", token=b"another token")


def test_two_transformers_of_one_pipeline_have_a_worker_each(models: Path) -> None:
    first, second = flux(), flux()
    wanted = one_device(first, [flux_inputs()])[0]
    with (
        crew(models, 2) as (one, other),
        thinwire.over_workers(first, [one.address], "raw", model="flux"),
        thinwire.over_workers(second, [other.address], "raw", model="flux"),
    ):
        made = [one_device(each, [flux_inputs()])[0] for each in (first, second, first)]
    assert all(torch.allclose(x, wanted, atol=1e-5) for x in made)


def test_a_host_that_makes_no_call_is_let_go(models: Path) -> None:
    model = flux()
    with (
        pytest.raises(LinkError, match="rank 1 is the worker 127"),
        crew(models, idle=0.3) as (worker,),
        thinwire.over_workers(model, [worker.address], "raw", model="flux", deadline=3.0),
    ):
        until(lambda: any("waited 0.3 s for the next call" in line for line in worker.said), worker.said)
        begin(flux(), [worker.address], model="flux")  # meanwhile another
        one_device(model, [flux_inputs()])


def test_a_worker_whose_port_is_taken_says_so_at_once(models: Path) -> None:
    with crew(models) as (worker,), socket.create_server(("127.0.0.1", worker.hub.port + 1)):
        said = f"the worker {worker.address} cannot begin: .*{worker.hub.port + 1}"
        with (
            pytest.raises(LinkError, match=said),
            thinwire.over_workers(flux(), [worker.address], "raw", model="flux"),
        ):
            pass


def test_a_host_that_vanishes_is_followed_by_the_next(models: Path) -> None:
    model = flux()
    with crew(models) as (worker,):
        gone = Spoke.connect("127.0.0.1", worker.hub.port)
        until(lambda: gone.joined)
        job = WorkerJob("flux", type(model).__name__, "float32", "raw", None, 1, 2, "127.0.0.1")
        assert gone.send(job.pack())
        until(lambda: worker.model is not None)
        gone.close()  # as its process would where it is killed
        with thinwire.over_workers(model, [worker.address], "raw", model="flux"):
            made = sample(model, flux_inputs(), 2)
    wanted = sample(model, flux_inputs(), 2)
    assert (made - wanted).norm() <= 1e-5 * wanted.norm()
    assert any("has left: it left" in line for line in worker.said), worker.said
