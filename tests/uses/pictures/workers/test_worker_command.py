"""``thinwire worker`` as a process: a picture with it, its end, and its death in the midst of a picture."""

from __future__ import annotations

import signal
from pathlib import Path
from time import monotonic

import pytest
from launchers import Command, until, warm
from picture_models import flux, flux_inputs, sample
from typer.testing import CliRunner
from waiting import two_free_ports

import thinwire
from thinwire.cli.app import app
from thinwire.types import LinkError

pytest.importorskip("diffusers")


def started(place: Path, models: Path) -> tuple[Command, str]:
    address = f"127.0.0.1:{two_free_ports()}"
    worker = warm().start(place, "worker", "--listen", address, "--models", models, "--device", "cpu")
    until(lambda: "worker waits at port" in worker.err, f"it to listen: {worker.err}")
    return worker, address


def test_it_helps_and_ends_with_a_signal(tmp_path: Path, models: Path) -> None:
    worker, address = started(tmp_path / "one", models)
    model = flux()
    wanted = sample(model, flux_inputs(), 2)
    with thinwire.over_workers(model, [address], "raw", model="flux"):
        made = sample(model, flux_inputs(), 2)
    assert (made - wanted).norm() <= 1e-5 * wanted.norm()
    until(lambda: "has ended: 2 calls" in worker.err, "it to say so")
    assert worker.end(signal.SIGTERM) == 0
    assert "flux by raw, rank 1 of 2" in worker.err
    assert "Traceback" not in worker.err


def test_one_that_is_killed_is_named_within_the_deadline(tmp_path: Path, models: Path) -> None:
    worker, address = started(tmp_path / "one", models)
    model, killed = flux(), list[float]()

    def kill(*_: object) -> None:
        if not killed:
            killed.append(monotonic())
            worker.signal(signal.SIGKILL)

    model.transformer_blocks[0].register_forward_pre_hook(kill)  # type: ignore[index, union-attr, operator]
    with (
        pytest.raises(LinkError, match=f"rank 1 .*rank 1 is the worker {address}"),
        thinwire.over_workers(model, [address], "raw", model="flux", deadline=3.0),
    ):
        sample(model, flux_inputs(), 2)
    assert monotonic() - killed[0] < 3.0 + 6.0


WRONG = [
    (["--listen", "0.0.0.0:29600"], "a link at 0.0.0.0 leaves this machine and needs a shared token"),
    (["--listen", "here:port"], "here:port"),
    (["--models", "nowhere"], "--models nowhere is no folder"),
    (["--device", "abacus"], "--device 'abacus' is unknown"),
    (["--idle", "0"], "--idle is 0"),
]


@pytest.mark.parametrize(("arguments", "told"), WRONG)
def test_wrong_options_are_refused_in_a_sentence(arguments: list[str], told: str) -> None:
    result = CliRunner(env={"THINWIRE_TOKEN": None}).invoke(app, ["worker", *arguments])
    assert result.exit_code == 2 and told in result.stderr and len(result.stderr.splitlines()) == 1
