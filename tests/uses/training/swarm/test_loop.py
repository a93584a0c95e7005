"""A swarm in a training loop of one's own: rounds beneath the optimiser's steps, and the same bits at all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from thinwire import swarm
from thinwire.types import InputError, LinkError
from thinwire.uses.training.swarm.run.record import SwarmRecord

DRAW = torch.Generator().manual_seed(3)
X = torch.randn(256, 6, generator=DRAW)
Y = X @ torch.randn(6, 2, generator=DRAW)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def loss(model: nn.Module) -> torch.Tensor:
    return nn.functional.mse_loss(model(X), Y)


class Kept:
    """A keeper on a thread of this process, and the port that it listens at."""

    def __init__(self, out: Path, **options: Any) -> None:
        self.model, self.record, self.error = net(), SwarmRecord(recipe=None), None  # type: ignore[arg-type]
        self._listens, self.port = threading.Event(), 0
        self._thread = threading.Thread(target=self._run, args=(out, options), daemon=True)
        self._thread.start()
        assert self._listens.wait(30) and self.error is None, self.error

    def _run(self, out: Path, options: dict[str, Any]) -> None:
        given = {"lr": 0.02, "local_steps": 5, "listen": "127.0.0.1:0", "eval_every": 1} | options
        try:
            self.record = swarm.keep(
                self.model, self._told, heldout=lambda m: float(loss(m)), out=str(out), **given
            )
        except BaseException as e:
            self.error = e
            self._listens.set()

    def _told(self, port: int) -> None:
        self.port = port
        self._listens.set()

    def join(self) -> SwarmRecord:
        self._thread.join(60)
        assert not self._thread.is_alive() and self.error is None, self.error
        return self.record


def train(port: int, name: str, most: int = 10_000) -> tuple[nn.Module, int]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    steps = 0
    with swarm.join(model, optimizer, f"127.0.0.1:{port}", name=name, samples=4, patience=30) as joined:
        while not joined.over and steps < most:
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
            steps += 1
    return model, steps


def test_loops_train_one_model_and_one_may_leave(tmp_path: Path) -> None:
    kept = Kept(tmp_path, rounds=6, members=2)
    ended: dict[str, tuple[nn.Module, int]] = {}

    def work(name: str, most: int) -> None:
        ended[name] = train(kept.port, name, most)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in (("a", 10_000), ("b", 12))]
    for thread in threads:
        thread.start()
    record = kept.join()
    for thread in threads:
        thread.join(30)
    first, last = record.loss.eval_first, record.loss.eval_final
    assert first is not None and last is not None and last < 0.7 * first
    a, b = ({m.name: m for m in record.members}[name] for name in "ab")
    assert a.rounds == 6 and a.left_s is None and a.samples == 4 * ended["a"][1]
    assert 1 <= b.rounds < 6 and b.left_s is not None and b.samples <= 4 * ended["b"][1]
    assert record.totals["samples"] == a.samples + b.samples and list(record.equal) == ["a"]
    assert record.rounds[0].counted == 2 and record.rounds[-1].counted == 1
    assert record.status == "done" and record.totals["rounds"] == 6
    assert loss(kept.model).item() == pytest.approx(last)


def test_who_claims_more_samples_than_its_steps_have_is_refused_by_name(tmp_path: Path) -> None:
    kept = Kept(tmp_path, rounds=4, members=2)
    honest = threading.Thread(target=train, args=(kept.port, "a"), daemon=True)
    honest.start()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    with pytest.raises(InputError, match="samples=9, and the keeper counts 8 a step at most"):
        swarm.join(model, optimizer, f"127.0.0.1:{kept.port}", samples=9, patience=30)
    with swarm.join(model, optimizer, f"127.0.0.1:{kept.port}", name="liar", patience=30) as joined:
        joined._data._each = 10**6  # from its next round on
        while not joined.over:
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    record = kept.join()
    honest.join(30)
    by_name = {m.name: m for m in record.members}
    reason = by_name["liar"].refused[0]
    assert "it says that it was trained on" in reason and "000000 samples, and was given" in reason
    assert by_name["a"].rounds == 4 and not by_name["a"].refused and by_name["liar"].samples < 1000


def test_another_model_is_refused_and_a_silent_keeper_named(tmp_path: Path) -> None:
    kept = Kept(tmp_path, rounds=1)
    other = nn.Linear(6, 2)
    with pytest.raises(InputError, match="other parameters by name, shape, type or order"):
        swarm.join(other, torch.optim.SGD(other.parameters()), f"127.0.0.1:{kept.port}", patience=20)
    train(kept.port, "a")
    kept.join()
    with pytest.raises(LinkError, match=f"no sign of 127.0.0.1:{kept.port}"):
        swarm.join(other, torch.optim.SGD(other.parameters()), f"127.0.0.1:{kept.port}", patience=1)
