"""Every dtype of torch travels, or is refused in a sentence; a dtype is taken by any of its names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from thinwire.codecs.fixpoint import FixedPoint
from thinwire.codecs.raw import Cast
from thinwire.codecs.uniform import Uniform
from thinwire.dtypes import name_of
from thinwire.files.checkpoint import read_checkpoint, write_checkpoint
from thinwire.state.disk.tensor_header import NAMES
from thinwire.state.history import History
from thinwire.state.layout import Layout
from thinwire.state.replica import Replica
from thinwire.types import InputError
from thinwire.uses.following.mirror import Mirror
from thinwire.uses.following.recipes import STATE, cast
from thinwire.uses.training.replicas.exchange_methods import AllReduce
from thinwire.uses.training.run.options import TrainConfig

ALL = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
QUANTIZED = [dtype for dtype in ALL if str(dtype).removeprefix("torch.").startswith(("q", "quint"))]


def made(dtype: torch.dtype, seed: int) -> Tensor:
    """Return any bits [3, 4] as values of ``dtype``."""
    g = torch.Generator().manual_seed(seed)
    most = 2 if dtype is torch.bool else 256
    return torch.randint(0, most, (3, 4 * dtype.itemsize), dtype=torch.uint8, generator=g).view(dtype)


def same(x: Tensor, y: Tensor) -> bool:
    bits = (z.contiguous().reshape(-1).view(torch.uint8) for z in (x, y))
    return (x.dtype, x.shape) == (y.dtype, y.shape) and torch.equal(*bits)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_travels_bit_for_bit_is_saved_and_written(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    assert len(ALL) > 40
    for dtype in [dtype for dtype in ALL if dtype not in QUANTIZED]:
        history, mirror = History(Layout.of({"x": made(dtype, 0)})), Mirror()
        mirror.agree(history.layout, "")
        assert mirror.replica is not None
        for step in (1, 2):
            state = {"x": made(dtype, step)}
            history.publish(state)
            mirror.apply(history.patch(mirror.held.number))
            mirror.replica.swap()
            assert same(mirror.replica.tensors()["x"], state["x"]), dtype
        mirror.replica.save(tmp_path / "saved")
        assert same(Replica.load(tmp_path / "saved").tensors()["x"], state["x"]), dtype
        if name_of(dtype) in NAMES:
            write_checkpoint(tmp_path / "x", state, {})
            assert same(read_checkpoint(tmp_path / "x")["x"], state["x"])
        else:
            with pytest.raises(InputError, match=r"x is .*, which safetensors files do not hold"):
                write_checkpoint(tmp_path / "none", state, {})
    assert not (tmp_path / "none").exists()


def test_a_lazy_conjugate_is_published_as_it_reads_and_quantized_tensors_are_refused() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    state = {"x": x, "conj": x.conj(), "minus": x.conj().imag}
    history = History(Layout.of(state))
    assert not history.layout.aliases
    history.publish(state)
    mirror = Mirror(into := nn.ParameterDict({name: torch.zeros_like(v) for name, v in state.items()}))
    mirror.agree(history.layout, "")
    mirror.apply(history.patch(0))
    assert mirror.replica is not None and mirror.show(mirror.replica, into)
    for name, values in state.items():
        assert torch.equal(into[name], values), name
    with pytest.warns(UserWarning, match="deprecated"):
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(InputError, match="not of a quantized tensor, whose scale is not in it"):
        Layout.of({"q": quantized})


def test_a_dtype_is_taken_by_each_of_its_names() -> None:
    x, all_names = {"w": torch.ones(3)}, ("bf16", "bfloat16", "torch.bfloat16", torch.bfloat16)
    for dtype in all_names:
        for given in (dtype, {"w": dtype}):
            assert Layout.of(x, given).slots[0].dtype is torch.bfloat16
        assert Cast(dtype) == Cast("bfloat16")  # type: ignore[arg-type]
        assert AllReduce(dtype) == AllReduce("bfloat16")  # type: ignore[arg-type]
        assert Uniform(scale_dtype=dtype) == Uniform()  # type: ignore[arg-type]
        assert FixedPoint(scale_dtype=dtype) == FixedPoint(scale_dtype="bfloat16")  # type: ignore[arg-type]
        assert cast(dtype).name == cast().name  # type: ignore[arg-type]
        assert STATE.parse(f"cast:dtype={dtype}") == STATE.parse("cast")
        assert TrainConfig(save_dtype=dtype).save_dtype == "bf16"  # type: ignore[arg-type]
    for wrong in ("int4x", "", "nn", "Tensor"):
        with pytest.raises(InputError, match="is none of torch's; give one like"):
            Layout.of(x, wrong)
        with pytest.raises(InputError, match=r"dtype .* is not one of"):
            Cast(wrong)


class Computed(Mapping[str, Tensor]):
    """Tensors that are made at each access, as views of a sharded or converted model are."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name] + 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def test_ties_are_of_tensors_that_are_there_at_the_same_time() -> None:
    state = {f"layer{i}": torch.full((40, 40), float(i)) for i in range(6)}
    history = History(Layout.of(Computed(state)))
    assert len(history.layout.slots) == 6 and not history.layout.aliases
    history.publish(Computed(state))
    square = torch.arange(9.0).view(3, 3)
    views = {"w": square, "tied": square[:], "turned": square.t(), "part": square[:2], "none": square[:0]}
    layout = Layout.of(views)
    assert layout.aliases == (("tied", "w"),)
    history = History(layout)
    history.publish(views)
    with pytest.raises(InputError, match="tied was tied to w and now differs"):
        history.publish(views | {"tied": square.t()})  # of the same memory, which it reads otherwise
    with pytest.raises(InputError, match="tied: a state is made of dense tensors"):
        history.publish(views | {"tied": square.to("meta")})
