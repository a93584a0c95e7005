"""What must not end a training: a publisher that fails at its end, odd losses; sharded models are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from following import small
from torch import nn

from thinwire.types import InputError, LinkError
from thinwire.uses.following.callback import publish_callback
from thinwire.uses.following.push.publisher import Publisher


class Flushed:
    """What a callback publishes to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[int | None, dict[str, str | int | float]]] = []
        self.flushed, self.error = 0.0, error

    def publish(self, step: int | None = None, **meta: str | int | float) -> None:
        self.calls.append((step, meta))

    def flush(self, timeout: float = 0.0) -> None:
        self.flushed = timeout
        if self.error is not None:
            raise self.error


def end_of_training(recorder: Flushed, step: int = 1, **logged: object) -> None:
    pytest.importorskip("transformers")
    state = SimpleNamespace(global_step=step, is_world_process_zero=True, log_history=[logged])
    callback = publish_callback(recorder, timeout=7.0)
    callback.on_train_end(None, state, None)  # type: ignore[arg-type]


def test_the_end_of_training_lets_the_last_version_arrive_and_never_fails_for_it() -> None:
    end_of_training(recorder := Flushed())
    assert recorder.flushed == 7.0 and len(recorder.calls) == 1
    with pytest.warns(UserWarning, match="follower 7f3a"):
        end_of_training(Flushed(LinkError("follower 7f3a is away")))


@pytest.mark.parametrize(
    "loss", [float("nan"), float("inf"), "low", None, torch.ones(2), torch.tensor(torch.nan)]
)
def test_a_loss_that_is_no_number_does_not_end_the_training(loss: object) -> None:
    end_of_training(recorder := Flushed(), 3, loss=loss)
    assert recorder.calls == [(3, {})]


@pytest.mark.parametrize("loss", [0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5), np.array(0.5)])
def test_scalars_of_any_kind_are_numbers(loss: object) -> None:
    end_of_training(recorder := Flushed(), 3, loss=loss)
    assert recorder.calls == [(3, {"loss": 0.5})]
    with Publisher(small()) as p:
        version = p.publish(np.int64(3), loss=loss, many=torch.tensor(7))  # type: ignore[arg-type]
        assert version.meta == {"step": 3, "loss": 0.5, "many": 7}
        with pytest.raises(InputError, match="loss"):
            p.publish(4, loss=torch.ones(2))  # type: ignore[arg-type]


class FullyShardedDataParallel(nn.Module):
    """Called like torch's."""


class Sharded(nn.Module):
    """One layer of which is wrapped, or whose parameters are like DeepSpeed's."""

    def __init__(self, zero: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2) if zero else FullyShardedDataParallel()
        for x in self.layer.parameters():
            x.ds_id = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("main", [True, False])
@pytest.mark.parametrize("zero", [True, False])
def test_a_sharded_model_is_refused_on_every_process(zero: bool, main: bool) -> None:
    pytest.importorskip("transformers")
    state = SimpleNamespace(global_step=0, is_world_process_zero=main, log_history=[])
    callback: Any = publish_callback(Flushed())
    callback.on_train_begin(None, state, None, model=nn.Linear(2, 2))
    callback.on_train_begin(SimpleNamespace(fsdp=[], world_size=2), state, None, model=nn.Linear(2, 2))
    with pytest.raises(InputError, match="sharded"):
        callback.on_train_begin(None, state, None, model=Sharded(zero))
    with pytest.raises(InputError, match="sharded"):
        callback.on_train_begin(SimpleNamespace(fsdp=["full_shard"], world_size=2), state, None)
