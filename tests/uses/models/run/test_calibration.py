"""Moments that come layer by layer are those of one pass back, and memory does not hold all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from other_device import DEVICE, Elsewhere
from packed_models import CONFIGS
from torch import Tensor, nn

from thinwire.uses.models.moments import Moments
from thinwire.uses.models.run import layerwise
from thinwire.uses.models.run.calibration import Calibration, is_linear
from thinwire.uses.models.run.layerwise import compute_wide, losses

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.randint(0, 300, (3, 24), generator=torch.Generator().manual_seed(1))


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


def expected(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return squared gradients of rows and second moments of columns by one pass back a window."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, list[Tensor]] = {}

    def see(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        name, x = names[id(module.weight)], inputs[0].detach().reshape(-1, inputs[0].shape[-1])

        def add(g: Tensor) -> None:
            g = g.reshape(-1, g.shape[-1])
            own = g.square().sum(0), (x.t() * g.square().sum(1)) @ x
            found[name] = [a + b for a, b in zip(found.get(name, (0, 0)), own, strict=True)]

        output.register_hook(add)

    handles = [m.register_forward_hook(see) for m in model.modules() if is_linear(m)]
    for window in IDS:
        logits = model(input_ids=window[None], use_cache=False).logits[0, :-1]
        nn.functional.cross_entropy(logits, window[1:], reduction="sum").backward()
    for handle in handles:
        handle.remove()
    return {n: (r / r.sum(), c / (IDS.numel() - len(IDS))) for n, (r, c) in found.items()}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_layer_by_layer_is_one_pass_back(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(layerwise, "PART", 10)  # of the 23 tokens that are told
    model = made(kind)
    embedding = model.get_input_embeddings().weight
    wanted, calibration = expected(model), Calibration(model)
    held = list[int]()
    every = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    for layer in every:
        layer.register_full_backward_hook(lambda *_: held.append(len(calibration._sums)))
    calibration.read(IDS)
    found = calibration.moments()
    assert all(p.grad is None or p.requires_grad for p in model.parameters())
    for name, (rows, columns) in wanted.items():
        if model.get_parameter(name) is not embedding:  # the lookups of that count too
            assert torch.allclose(found[name].rows, rows, rtol=1e-3, atol=1e-6), name
            assert torch.allclose(found[name].columns, columns, rtol=1e-3, atol=1e-6 * columns.abs().max()), (
                name
            )
    own = max(sum(is_linear(m) for m in layer.modules()) for layer in every)
    assert held and max(held) <= own + 3, "sums of more than one layer, of the head and of the embeddings"
    assert not list(tmp_path.iterdir()), "a file that stays behind"


def test_a_model_of_16_bits_computes_in_32_and_stays_as_small() -> None:
    for kind in ("llama", "gpt2"):
        small = made(kind).to(torch.bfloat16)
        wide = made(kind)
        wide.load_state_dict(small.state_dict())
        compute_wide(small)
        assert torch.allclose(losses(small, IDS), losses(wide, IDS), rtol=1e-5)
        kept = [p for n, p in small.named_parameters() if ".layers." in n or ".h." in n]
        assert kept and all(p.dtype == torch.bfloat16 for p in kept)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_on_a_device_of_its_own_says_the_same(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor of the processor meets the model's; moments come back to the processor."""
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path))

    def said(device: torch.device) -> tuple[dict[str, Moments], Tensor]:
        model = made(kind).to(device)
        model.tie_weights()  # a real device keeps them tied
        compute_wide(model)
        calibration = Calibration(model)
        calibration.read(IDS)
        return dict(calibration.moments()), losses(model, IDS).cpu()

    wanted, loss = said(torch.device("cpu"))
    with Elsewhere():
        found, there = said(DEVICE)
    torch.testing.assert_close(there, loss)  # attention takes another of torch's ways there
    assert found.keys() == wanted.keys()
    for name, own in wanted.items():
        torch.testing.assert_close(found[name].rows, own.rows, rtol=1e-3, atol=1e-6)
        top = float(own.columns.abs().max())
        torch.testing.assert_close(found[name].columns, own.columns, rtol=1e-3, atol=1e-5 * top)
