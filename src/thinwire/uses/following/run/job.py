"""What the state demo is about: a small language model from a bf16 base, fine-tuned in fp32, written with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.runs.data.batches import Batches
from thinwire.runs.data.corpus import load_corpus
from thinwire.runs.data.loss import next_token_loss
from thinwire.runs.data.packing import pack
from thinwire.runs.models.families import import_transformers
from thinwire.runs.models.source import ModelSource
from thinwire.runs.models.tokenizer import tokenise
from thinwire.types import InputError, require

SEED, TEMPERATURE = 0, 0.8  # of what is written
ENOUGH = 4  # tokens that are prepared, in tokens that are trained on


def base_model(source: ModelSource, dtype: torch.dtype) -> Any:
    """Return the model with weights cast to bfloat16, held as ``dtype``: the same values on every machine.

    Buffers stay float32: they are no weights. Errors: ``InputError`` for a model without weights.
    """
    require(source.weights is not None, InputError, f"{source.name} has no weights; name a pretrained model")
    transformers = import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(source.weights, dtype=torch.float32)
    for x in model.parameters():
        x.data = x.data.to(torch.bfloat16).to(dtype)
    return model.eval()


class Tuning:
    """AdamW over float32 weights that begin at bfloat16 values; ``step`` is one optimiser step.

    ``rate`` may be set between two steps. Errors: ``InputError`` where the text is too short.
    """

    def __init__(
        self, source: ModelSource, data: str, rate: float, steps: int, batch: int, seq: int, seed: int
    ) -> None:
        self.model = base_model(source, torch.float32)
        wanted = ENOUGH * steps * batch * seq
        self._blocks = pack(tokenise(source.tokenizer, *load_corpus(data).train, limit=wanted), seq)
        source.check_tokens(self._blocks)
        self._order = iter(Batches(len(self._blocks), batch, steps=steps, seed=seed, seq=seq))
        self._optimiser = torch.optim.AdamW(self.model.parameters(), lr=rate)

    @property
    def rate(self) -> float:
        return float(self._optimiser.param_groups[0]["lr"])

    @rate.setter
    def rate(self, rate: float) -> None:
        for group in self._optimiser.param_groups:
            group["lr"] = rate

    def step(self) -> float:
        """Train on the next batch and return its loss in nats a token."""
        ids = self._blocks[next(self._order)]
        loss = next_token_loss(self.model(ids[:, :-1]).logits, ids[:, 1:])
        loss.backward()
        self._optimiser.step()
        self._optimiser.zero_grad()
        return float(loss.detach())


def write_on(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """Return what ``model`` writes after ``prompt``, drawn with a seed of its own: equal weights agree.

    Drawn, since the likeliest tokens of a model hardly change over some steps of training.
    """
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=True,
            temperature=TEMPERATURE,
            pad_token_id=0,
        )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the bits of all tensors as bfloat16, by name: equal where every bit is.

    >>> digest({"a": torch.ones(2), "b": torch.zeros(1)})[:8]
    '3c592610'
    """
    found = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].detach().to("cpu", torch.bfloat16).contiguous()
        found.update(f"{name} {tuple(x.shape)}\n".encode())
        found.update(x.reshape(-1).view(torch.int16).numpy().data)
    return found.hexdigest()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model by name, tied ones once; not copied."""
    return {name: x.detach() for name, x in model.named_parameters()}
